"""One message as data sets write it -> a `Message`, and what must hold between the messages of a row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_protrain.data.conversations import ROLES, MalformedRow, Message, text_of

# Customary names of roles, in lower case. A role "function_call" (ShareGPT) makes its value a call.
ROLE_NAMES = {
    **{name: name for name in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "model", "ai", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(
        ("function", "function_response", "observation", "tool_response", "tool_result", "ipython"), "tool"
    ),
}
_CALL_ROLES = ("function_call", "tool_call")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_IMAGE_KEYS = ("image", "image_url", "path", "url", "bytes")


def parse_message(entry: Any, where: str, roles: Mapping[str, str]) -> Message:
    """Reads one message with the keys `role` and `content`; keys that are null count as absent, others are left out.

    Args:
        entry: What the row holds.
        where: Names the message in errors.
        roles: Names of roles beside `ROLE_NAMES`, which they overrule, to ours.

    Raises:
        MalformedRow: No such message.
    """
    if not isinstance(entry, Mapping):
        raise MalformedRow(f"{where} is {kind_of(entry)}. Give an object with `role` and `content`.")
    entry = {key: value for key, value in entry.items() if value is not None}
    said = entry.get("role")
    role = _role(said, where, roles)
    calls = _tool_calls(entry, where)
    content = entry.get("content")
    if isinstance(said, str) and said.strip().lower() in _CALL_ROLES and not calls:
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
    if role == "assistant" and not calls and not _says_something(message):
        raise MalformedRow(f"{where}: the assistant's content is empty and it calls no tool. Remove the row.")
    return message


def _role(role: Any, where: str, roles: Mapping[str, str]) -> str:
    if isinstance(role, str):
        known = roles.get(role) or ROLE_NAMES.get(role.strip().lower())
        if known:
            return known
    names = ", ".join(dict.fromkeys((*ROLES, *roles.values())))
    raise MalformedRow(f"{where}: the role is {role!r}. Use one of {names}, or map it to one with `roles`.")


def _says_something(message: Message) -> bool:
    return bool(text_of(message).strip()) or not isinstance(message["content"], str)


def _content(content: Any, where: str, *, required: bool) -> tuple[str, str | list[dict[str, Any]]]:
    """Reasoning that stands in the content, and the content: text, or parts where at least one is an image."""
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
            raise MalformedRow(f"{where}, part {number}: reasoning behind other content. Put it first.")
        else:
            thoughts += parsed["text"]
    if all(part["type"] == "text" for part in parts):
        return thoughts, "".join(part["text"] for part in parts)
    return thoughts, [part for part in parts if part["type"] == "image" or part["text"]]


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise MalformedRow(f'{where} is {kind_of(part)}. Give text, or an object with a `type` "text" or "image".')
    kind = part.get("type")
    if kind in ("text", "thinking"):
        text = part.get("text") if kind == "text" else part.get("thinking", part.get("text"))
        if not isinstance(text, str):
            raise MalformedRow(f"{where}: the {kind} is {kind_of(text)}. Give text.")
        return {"type": kind, "text": text}
    if kind in ("image", "image_url"):
        return _image_part(part, where)
    raise MalformedRow(f'{where}: the type is {kind!r}. Parts of the types "text" and "image" are read.')


def _image_part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An image part, with what it refers to under "image" or "index"; `image_parts` takes these two away."""
    given = {key: part[key] for key in _IMAGE_KEYS if part.get(key) is not None}
    index = part.get("index")
    if given:
        # Several only where they are the fields of one struct of `datasets`.
        if len(given) > 1 and not set(given) <= {"path", "bytes"}:
            raise MalformedRow(f"{where}: an image under each of {', '.join(given)}. Give one.")
        return {"type": "image", "image": given if set(given) <= {"path", "bytes"} else next(iter(given.values()))}
    if index is None:
        return {"type": "image"}
    if isinstance(index, bool) or not isinstance(index, int):
        raise MalformedRow(f"{where}: the index of the image is {index!r}. Give a whole number, from 0.")
    return {"type": "image", "index": index}


def _reasoning(entry: Mapping[str, Any], where: str) -> str:
    given = {key: entry[key] for key in _REASONING_KEYS if entry.get(key)}
    for key, value in given.items():
        if not isinstance(value, str):
            raise MalformedRow(f"{where}: `{key}` is {kind_of(value)}. Give text.")
    if len(set(given.values())) > 1:
        raise MalformedRow(f"{where}: {' and '.join(given)} differ. Keep one of them.")
    return next(iter(given.values()), "")


def _loss_flags(entry: Mapping[str, Any], message: Message, where: str) -> None:
    train = entry.get("train", entry.get("training"))
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
    """Tool calls as a list, an object, or JSON text of either, in the form of `Message.tool_calls`.

    Raises:
        MalformedRow: No call, a call without a name, or arguments that are no object.
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
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        # Templates write arguments with `tojson`: of JSON text they would make a string in quotes.
        arguments = parse_json(arguments, f"{where}: the arguments are")
    if not isinstance(arguments or {}, Mapping):
        raise MalformedRow(f"{where}: the arguments are {kind_of(arguments)}. Give an object.")
    parsed: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": dict(arguments or {})}}
    if call.get("id"):
        parsed["id"] = str(call["id"])
    return parsed


def parse_json(text: str, what: str) -> Any:
    """JSON text -> its value; `what` begins the error, which says that it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedRow(f"{what} no valid JSON ({error}): {text[:60]!r}. Correct the text.") from error


def kind_of(value: Any) -> str:
    """How an error names the kind of a value."""
    if value is None:
        return "null"
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", dict: "an object", list: "a list"}
    return names.get(type(value), f"a {type(value).__name__}")


def check_order(messages: Sequence[Message], where: str, trained_roles: Sequence[str] | None) -> None:
    """Refuses what no template takes: a tool's turn without a call before it; and rows with nothing to learn.

    Args:
        messages: All of a row.
        where: Names the row in errors.
        trained_roles: The row must have a turn of one of them; None: of any role.

    Raises:
        MalformedRow: One of these.
    """
    caller: Message | None = None
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            caller = message
        elif message["role"] != "tool":
            caller = None
        elif caller is None:
            raise MalformedRow(
                f"{where}, message {number}: a tool's turn without a turn of the assistant that calls it right before. "
                "Put the call there, or remove the row."
            )
        else:
            _check_call_id(message, caller, f"{where}, message {number}")
    if trained_roles is not None and not any(message["role"] in trained_roles for message in messages):
        names = " or the ".join(trained_roles)
        raise MalformedRow(f"{where}: no message of the {names}, so nothing to learn. Remove the row.")


def _check_call_id(message: Message, caller: Message, where: str) -> None:
    ids = [call.get("id") for call in caller.get("tool_calls", [])]
    given = message.get("tool_call_id")
    if given and ids and None not in ids and given not in ids:
        raise MalformedRow(f"{where}: no call has the id {given!r}; there are {', '.join(map(repr, ids))}. Correct it.")
