"""Parses the messages and tools of rows into `Message` and JSON schemas."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_protrain.data.conversation import NO_VARIABLES, ROLES, MalformedRow, MediaKind, Message
from lightning_protrain.data.sources.media import MEDIA_KINDS

# Map from common role names, in lower case, to standard roles.
ROLE_NAMES = {
    **{name: name for name in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "model", "ai", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(
        ("function", "function_response", "observation", "tool_response", "tool_result", "ipython"), "tool"
    ),
}
# Roles of ShareGPT whose content is a tool call.
_CALL_ROLES = ("function_call", "tool_call")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Map from the `type` of a content part to the kind of its medium.
_MEDIA_TYPES: dict[str, MediaKind] = {kind: kind for kind in MEDIA_KINDS}
_MEDIA_TYPES |= {"image_url": "image", "audio_url": "audio", "input_audio": "audio", "video_url": "video"}
_TYPES = '"text", "image", "audio" and "video"'
_SOURCE_KEYS = ("path", "url", "bytes", "base64")


def parse_message(entry: Any, where: str, roles: Mapping[str, str]) -> Message:
    """Parse a message with the keys `role` and `content`; null values count as absent, unknown keys are ignored.

    Args:
        entry: The message as the row has it.
        where: Name of the message, for errors.
        roles: Map from role names in the data to standard roles; it takes precedence over `ROLE_NAMES`.

    Raises:
        MalformedRow: If `entry` is not a message with a known role and content.
    """
    if not isinstance(entry, Mapping):
        raise MalformedRow(f"{where} is {kind_of(entry)}. Give an object with `role` and `content`.")
    entry = {key: value for key, value in entry.items() if value is not None}
    name = entry.get("role")
    role = _role(name, where, roles)
    calls = _tool_calls(entry, where)
    content = entry.get("content")
    if isinstance(name, str) and name.strip().lower() in _CALL_ROLES and not calls:
        calls, content = parse_calls(content, where), ""
    thoughts, content = _content(content, where, required=not calls)
    message: Message = {"role": role, "content": content}
    reasoning = _reasoning(entry, where) or thoughts
    if (reasoning or calls) and role != "assistant":
        what = "tool calls" if calls else "reasoning"
        raise MalformedRow(f"{where}: {what} in a turn of the {role}. Only the assistant's turns have them.")
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if entry.get(key):
            message[key] = str(entry[key])
    _loss_flags(entry, message, where)
    is_blank = isinstance(content, str) and not content.strip()
    if role == "assistant" and not calls and is_blank:
        raise MalformedRow(f"{where}: the assistant's content is empty and it calls no tool. Remove the row.")
    return message


def role_of(role: str, roles: Mapping[str, str]) -> str | None:
    """Return the standard role for a name in the data, of which `roles` maps some; None if it is unknown."""
    return roles.get(role) or ROLE_NAMES.get(role.strip().lower())


def _role(role: Any, where: str, roles: Mapping[str, str]) -> str:
    if isinstance(role, str) and (known := role_of(role, roles)):
        return known
    names = ", ".join(dict.fromkeys((*ROLES, *roles.values())))
    raise MalformedRow(f"{where}: the role is {role!r}. Use one of {names}, or map it to one with `roles`.")


def _content(content: Any, where: str, *, required: bool) -> tuple[str, str | list[dict[str, Any]]]:
    """Return the reasoning in a message's content, and the rest: a string, or a list of parts if there are media."""
    if isinstance(content, str):
        return "", content
    if content is None and not required:
        return "", ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise MalformedRow(f"{where}: the content is {kind_of(content)}. Give text, or a list of parts.")
    parts: list[dict[str, Any]] = []
    thoughts = ""
    for number, part in enumerate(content):
        parsed = _part(part, f"{where}, part {number}")
        if parsed["type"] != "thinking":
            parts.append(parsed)
        elif parts:
            raise MalformedRow(f"{where}, part {number}: reasoning after other content. Put it first.")
        else:
            thoughts += parsed["text"]
    if all(part["type"] == "text" for part in parts):
        return thoughts, "".join(part["text"] for part in parts)
    return thoughts, [part for part in parts if part["type"] != "text" or part["text"]]


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise MalformedRow(f"{where} is {kind_of(part)}. Give text, or an object with one of the types {_TYPES}.")
    kind = part.get("type")
    if kind in ("text", "thinking"):
        text = part.get("text" if kind == "text" or part.get("thinking") is None else "thinking")
        if not isinstance(text, str):
            raise MalformedRow(f"{where}: the {kind} is {kind_of(text)}. Give text.")
        return {"type": kind, "text": text}
    if isinstance(kind, str) and kind in _MEDIA_TYPES:
        return _media_part(_MEDIA_TYPES[kind], part, where)
    raise MalformedRow(f"{where}: the type is {kind!r}. Parts of the types {_TYPES} are read.")


def _media_part(kind: MediaKind, part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a content part with its medium under its kind, or its number under "index", for `place_media`."""
    keys = (*(name for name, other in _MEDIA_TYPES.items() if other == kind), *_SOURCE_KEYS)
    sources = {key: part[key] for key in keys if part.get(key) is not None}
    index = part.get("index")
    if sources:
        # Only `path` and `bytes` may occur together, as in an image of Hugging Face `datasets`.
        if len(sources) > 1 and not set(sources) <= {"path", "bytes"}:
            article = "a" if kind == "video" else "an"
            raise MalformedRow(f"{where}: {article} {kind} under each of {', '.join(sources)}. Give one.")
        if "base64" in sources:
            sources = {"data": {"data": sources["base64"]}}
        return {"type": kind, kind: sources if set(sources) <= {"path", "bytes"} else next(iter(sources.values()))}
    if index is None:
        return {"type": kind}
    if isinstance(index, bool) or not isinstance(index, int):
        raise MalformedRow(f"{where}: the index of the {kind} is {index!r}. Give a whole number, from 0.")
    return {"type": kind, "index": index}


def _reasoning(entry: Mapping[str, Any], where: str) -> str:
    texts = {key: entry[key] for key in _REASONING_KEYS if entry.get(key)}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise MalformedRow(f"{where}: `{key}` is {kind_of(value)}. Give text.")
    if len(set(texts.values())) > 1:
        raise MalformedRow(f"{where}: {' and '.join(texts)} differ. Keep one of them.")
    return next(iter(texts.values()), "")


def _loss_flags(entry: Mapping[str, Any], message: Message, where: str) -> None:
    if entry.get("train_detail"):
        raise MalformedRow(
            f"{where}: `train_detail` trains parts of a message, which is not supported. Remove it; `train: false` in "
            "its place leaves the whole message out."
        )
    loss = entry.get("loss")
    train = entry.get("train", entry.get("training", loss if isinstance(loss, bool) else None))
    if train is not None:
        if train not in (0, 1):
            raise MalformedRow(f"{where}: `train` is {train!r}. Give true or false.")
        message["train"] = bool(train)
    weight = entry.get("weight")
    if weight is not None:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise MalformedRow(f"{where}: `weight` is {weight!r}. Give a finite number that is not negative.")
        message["weight"] = float(weight)


def _tool_calls(entry: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    if entry.get("tool_calls"):
        return parse_calls(entry["tool_calls"], where)
    if isinstance(entry.get("function_call"), Mapping) and entry["function_call"]:
        return parse_calls([entry["function_call"]], where)
    return []


def parse_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Convert tool calls (a list, one call, or JSON text of either) into the form of `Message.tool_calls`.

    Raises:
        MalformedRow: If there is no call, a call has no name, or its arguments are not an object.
    """
    calls = parse_json(calls, f"{where}: the tool calls are") if isinstance(calls, str) else calls
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list) or not calls:
        raise MalformedRow(f"{where}: the tool calls are {kind_of(calls)}. Give a list of calls.")
    return [_call(call, f"{where}, tool call {number}") for number, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = parse_json(call, f"{where} is")
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise MalformedRow(f"{where} has no name. Give `name` and `arguments`.")
    arguments = function.get("parameters") if function.get("arguments") is None else function["arguments"]
    if isinstance(arguments, str) and arguments.strip():
        # Chat templates apply `tojson` to arguments, which would encode JSON text a second time.
        arguments = parse_json(arguments, f"{where}: the arguments are")
    if not isinstance(arguments or {}, Mapping):
        raise MalformedRow(f"{where}: the arguments are {kind_of(arguments)}. Give an object.")
    parsed: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": dict(arguments or {})}}
    if call.get("id"):
        parsed["id"] = str(call["id"])
    return parsed


def parse_json(text: str, what: str) -> Any:
    """Parse JSON text; `what` begins the error message, such as "row 3: the tool calls are"."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedRow(f"{what} not valid JSON ({error}): {text[:60]!r}. Correct the text.") from error


def kind_of(value: Any) -> str:
    """Return the type of a value in words, such as "a list", for errors."""
    if value is None:
        return "null"
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", dict: "an object", list: "a list"}
    return names.get(type(value), f"a {type(value).__name__}")


def check_order(messages: Sequence[Message], where: str, trained_roles: Sequence[str] | None) -> None:
    """Check that each tool message follows its call, and that the row has a message to train.

    Args:
        messages: All messages of a row.
        where: Name of the row, for errors.
        trained_roles: Roles that are trained; None accepts rows without a trained role.

    Raises:
        MalformedRow: If no message has a trained role, or a tool message does not follow its call.
    """
    caller: Message | None = None
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            caller = message
        elif message["role"] != "tool":
            caller = None
        elif caller is None:
            raise MalformedRow(
                f"{where}, message {number}: a tool message that does not follow an assistant message. Put the call "
                "before it, or remove the row."
            )
        else:
            _check_call_id(message, caller, f"{where}, message {number}")
    if trained_roles is not None and not any(message["role"] in trained_roles for message in messages):
        names = " or the ".join(trained_roles)
        raise MalformedRow(f"{where}: no message of the {names}, so nothing to learn. Remove the row.")


def _check_call_id(message: Message, caller: Message, where: str) -> None:
    ids = [call.get("id") for call in caller.get("tool_calls", [])]
    call_id = message.get("tool_call_id")
    if call_id and ids and None not in ids and call_id not in ids:
        raise MalformedRow(
            f"{where}: no call has the id {call_id!r}; there are {', '.join(map(repr, ids))}. Correct it."
        )


def parse_tools(tools: Any, where: str) -> list[dict[str, Any]]:
    """Convert the `tools` column, a list or JSON text, into a list of `{"type": "function", "function": schema}`.

    Raises:
        MalformedRow: If the column holds something else, or a tool has no name.
    """
    if isinstance(tools, str):
        tools = parse_json(tools, f"{where}: `tools` is") if tools.strip() else None
    if not tools:
        return []
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, list):
        raise MalformedRow(f"{where}: `tools` is {kind_of(tools)}. Give a list of schemas.")
    return [_tool(tool, f"{where}, tool {number}") for number, tool in enumerate(tools)]


def parse_variables(variables: Any, where: str) -> dict[str, Any]:
    """Convert the column `chat_template_kwargs`, an object or JSON text, into variables of the chat template.

    Raises:
        MalformedRow: If the column holds something else, or names an argument of `apply_chat_template`.
    """
    if isinstance(variables, str):
        variables = parse_json(variables, f"{where}: `chat_template_kwargs` is") if variables.strip() else None
    if not isinstance(variables or {}, Mapping):
        raise MalformedRow(f"{where}: `chat_template_kwargs` is {kind_of(variables)}. Give an object.")
    for name in variables or {}:
        if name in NO_VARIABLES:
            raise MalformedRow(
                f"{where}: `chat_template_kwargs` names {name!r}, which is not a variable of a chat template. "
                f"{NO_VARIABLES[name]}"
            )
    return dict(variables or {})


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = parse_json(tool, f"{where} is")
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MalformedRow(f"{where} has no name. Give its JSON schema with `name`, `description` and `parameters`.")
    function = dict(function)
    if isinstance(function.get("parameters"), str):
        function["parameters"] = parse_json(function["parameters"], f"{where}: the parameters are")
    return {"type": "function", "function": function}
