"""Converts rows of common data set formats into `Conversation`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_protrain.data.conversation import ROLES, Conversation, MalformedRow, Media, MediaKind, Message, text_of
from lightning_protrain.data.sources.media import MEDIA_KINDS, media_source, named_media, place_media
from lightning_protrain.data.sources.spec import MESSAGE_FIELDS, ROW_FIELDS

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
        text = part.get("text") if kind == "text" else part.get("thinking", part.get("text"))
        if not isinstance(text, str):
            raise MalformedRow(f"{where}: the {kind} is {kind_of(text)}. Give text.")
        return {"type": kind, "text": text}
    if kind in _MEDIA_TYPES:
        return _media_part(_MEDIA_TYPES[kind], part, where)
    raise MalformedRow(f"{where}: the type is {kind!r}. Parts of the types {_TYPES} are read.")


def _media_part(kind: MediaKind, part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a content part with its medium under its kind, or its number under "index", for `place_media`."""
    keys = (*(name for name, other in _MEDIA_TYPES.items() if other == kind), *_SOURCE_KEYS)
    given = {key: part[key] for key in keys if part.get(key) is not None}
    index = part.get("index")
    if given:
        # Only `path` and `bytes` may occur together, as in an image of Hugging Face `datasets`.
        if len(given) > 1 and not set(given) <= {"path", "bytes"}:
            raise MalformedRow(f"{where}: {_article(kind)} {kind} under each of {', '.join(given)}. Give one.")
        if "base64" in given:
            given = {"data": {"data": given["base64"]}}
        return {"type": kind, kind: given if set(given) <= {"path", "bytes"} else next(iter(given.values()))}
    if index is None:
        return {"type": kind}
    if isinstance(index, bool) or not isinstance(index, int):
        raise MalformedRow(f"{where}: the index of the {kind} is {index!r}. Give a whole number, from 0.")
    return {"type": kind, "index": index}


def _article(kind: MediaKind) -> str:
    return "a" if kind == "video" else "an"


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
    arguments = function.get("arguments", function.get("parameters"))
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
    given = message.get("tool_call_id")
    if given and ids and None not in ids and given not in ids:
        raise MalformedRow(f"{where}: no call has the id {given!r}; there are {', '.join(map(repr, ids))}. Correct it.")


Format = Literal["auto", "messages", "sharegpt", "prompt_response"]
# Common column names: a row with one of PROMPTS and one of RESPONSES is a prompt with its response.
PROMPTS = ("prompt", "instruction", "question", "query")
RESPONSES = ("response", "completion", "output", "answer")
CONTEXTS = ("input", "context")
# Maps from a column, and from a key of a message, to the format that it indicates.
_LISTS = {"messages": "messages", "conversations": "sharegpt"}
_SIGNS = {"role": "messages", "from": "sharegpt", "value": "sharegpt"}


@dataclass(frozen=True)
class RowFormat:
    """Converts the rows of a data set into conversations.

    Attributes:
        format: Format of the rows; "auto" detects it for each row from the columns, and refuses ambiguous rows.
        fields: Map from standard names (`ROW_FIELDS`, `MESSAGE_FIELDS`) to the names of columns and message keys in
            the data.
        roles: Map from role names in the data to standard roles; it takes precedence over `ROLE_NAMES`.
        trained_roles: Roles that are trained: a row without a turn of these roles is malformed. None accepts every
            row.
    """

    format: Format = "auto"
    fields: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    trained_roles: tuple[str, ...] | None = ("assistant",)

    def parse(self, row: Any, where: str, folder: Path) -> Conversation:
        """Parse one row.

        Args:
            row: Row of the data set; null columns count as absent.
            where: Name of the row, for errors.
            folder: Folder to which relative paths of media refer.

        Raises:
            MalformedRow: If the row is not a valid conversation, or its format is ambiguous.
        """
        if not isinstance(row, Mapping):
            raise MalformedRow(f"{where}: the row is {kind_of(row)}. Give an object with a `messages` list.")
        row = self._renamed(row, ROW_FIELDS)
        kind = self._detect(row, where) if self.format == "auto" else self.format
        entries = _PARSERS[kind](self, row, where)
        messages = [
            parse_message(entry, f"{where}, message {number}", self.roles) for number, entry in enumerate(entries)
        ]
        _add_system(messages, row.get("system", row.get("system_prompt")), where)
        check_order(messages, where, self.trained_roles)
        conversation: Conversation = {"messages": messages}
        tools = _tools(row.get("tools"), where)
        if tools:
            conversation["tools"] = tools
        columns = {kind: _column(row, kind, where) for kind in MEDIA_KINDS}
        media = [Media(kind, value) for kind, value in place_media(messages, columns, where)]
        if media:
            conversation["media"] = [
                Media(one.kind, media_source(one.kind, one.source, folder, name))
                for one, name in named_media(media, where)
            ]
        return conversation

    def entry(self, entry: Any) -> Any:
        """Rename the keys of a message to standard names, as `fields` says."""
        return self._renamed(entry, MESSAGE_FIELDS) if isinstance(entry, Mapping) else entry

    def _detect(self, row: Mapping[str, Any], where: str) -> str:
        """Return the format of a row: from the columns named in `fields`, or else from its non-null columns."""
        lists = _given(row, tuple(_LISTS))
        prompts, responses = _given(row, PROMPTS), _given(row, RESPONSES)
        pair = [*prompts, *responses] if responses and (prompts or row.get("input") is not None) else []
        if any(name in self.fields for name in lists):
            lists, pair = [name for name in lists if name in self.fields], []
        elif pair and ("prompt" in self.fields or "response" in self.fields):
            return "prompt_response"
        if len(lists) + bool(pair) > 1:
            raise MalformedRow(
                f"{where}: several columns may hold the conversation: {', '.join([*lists, *pair])}. "
                "Choose with `format` or `fields`, or remove columns."
            )
        if lists:
            entries = _listed(row[lists[0]])
            return _style(list(map(self.entry, entries)) if isinstance(entries, list) else None, lists[0], where)
        if pair:
            return "prompt_response"
        null = [name for name in (*_LISTS, *PROMPTS, *RESPONSES) if name in row and row[name] is None]
        if null:
            what = "a list of messages" if null[0] in _LISTS else "text"
            raise MalformedRow(f"{where}: `{null[0]}` is null. Give {what}, or remove the row.")
        raise MalformedRow(
            f"{where}: no `messages` list, no `conversations`, and no prompt with its response; the columns are "
            f"{_names(row)}. Name the right ones with `fields`."
        )

    def _renamed(self, row: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
        if not self.fields:
            return row
        renamed = {ours: theirs for ours, theirs in self.fields.items() if ours in names and theirs in row}
        if not renamed:
            return row
        rest = {key: value for key, value in row.items() if key not in renamed.values()}
        return {**rest, **{ours: row[theirs] for ours, theirs in renamed.items()}}


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "none"


def _given(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [name for name in names if row.get(name) is not None]


def _style(entries: Any, column: str, where: str) -> str:
    """Return the format of messages from their keys, or from the name of their column if the keys do not tell.

    Args:
        entries: Messages; None skips the keys.
        column: Name of the column of the messages.
        where: Name of the row, for errors.
    """
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        return _LISTS[column]
    styles = {style for entry in entries for key, style in _SIGNS.items() if entry.get(key) is not None}
    if len(styles) > 1:
        raise MalformedRow(f"{where}: keys of several formats in `{column}`. Use role and content, or from and value.")
    return styles.pop() if styles else _LISTS[column]


def _listed(entries: Any) -> Any:
    """Return messages as a list of objects; old versions of `datasets` store them as an object of lists."""
    if not isinstance(entries, Mapping) or not all(isinstance(column, list) for column in entries.values()):
        return entries
    lengths = {len(column) for column in entries.values()}
    if len(lengths) != 1:
        return entries
    return [dict(zip(entries, values, strict=True)) for values in zip(*entries.values(), strict=True)]


def _message_list(row_format: RowFormat, row: Mapping[str, Any], where: str, column: str) -> list[Any]:
    other = next(name for name in _LISTS if name != column)
    name = column if row.get(column) is not None or row.get(other) is None else other
    entries = _listed(row.get(name))
    if not isinstance(entries, list) or not entries:
        what = "an empty list" if entries == [] else kind_of(entries)
        what = what if name in row else f"absent; the columns are {_names(row)}"
        raise MalformedRow(f"{where}: no `{name}` list with at least one message: it is {what}. Each row needs one.")
    return [row_format.entry(entry) for entry in entries]


def _parse_messages(row_format: RowFormat, row: Mapping[str, Any], where: str) -> list[Any]:
    return _message_list(row_format, row, where, "messages")


def _parse_sharegpt(row_format: RowFormat, row: Mapping[str, Any], where: str) -> list[Any]:
    entries = _message_list(row_format, row, where, "conversations")
    return [
        {**entry, "role": entry.get("from"), "content": entry.get("value")} if isinstance(entry, Mapping) else entry
        for entry in entries
    ]


def _one(row: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[str, Any]:
    given = _given(row, names)
    if len(given) == 1:
        return given[0], row[given[0]]
    wanted = "prompt" if names[0] == PROMPTS[0] else "response"
    if not given:
        raise MalformedRow(
            f"{where}: no {wanted}: none of {', '.join(names)} among the columns {_names(row)}. "
            f'Name it with `fields`: {{"{wanted}": ...}}.'
        )
    raise MalformedRow(
        f"{where}: several columns may be the {wanted}: {', '.join(given)}. Name the right one with `fields`: "
        f'{{"{wanted}": ...}}.'
    )


def _parse_pair(row_format: RowFormat, row: Mapping[str, Any], where: str) -> list[Any]:
    """Return the messages of a row with a prompt and a response.

    Messages of a prompt that is a list are not trained, unless they set `train` or `weight`.
    """
    # A column named in `fields` takes precedence over columns with common names.
    prompts = ("prompt",) if "prompt" in row_format.fields else PROMPTS
    responses = ("response",) if "response" in row_format.fields else RESPONSES
    if not _given(row, prompts) and isinstance(row.get("input"), str):
        row = {**{key: value for key, value in row.items() if key != "input"}, "prompt": row["input"]}
    name, prompt = _one(row, prompts, where)
    answer, response = _one(row, responses, where)
    context = [row[key] for key in CONTEXTS if row.get(key)]
    if context and isinstance(prompt, str):
        if len(context) > 1 or not isinstance(context[0], str):
            raise MalformedRow(f"{where}: the input beside `{name}` is not one text. Give one text in `input`.")
        prompt = f"{prompt}\n\n{context[0]}"
    entries = _history(row.get("history"), where)
    if isinstance(prompt, str):
        entries.append({"role": "user", "content": _with_places(prompt, entries, row, where)})
    else:
        entries += [_untrained(entry) for entry in _turns(row_format, prompt, f"{where}: the {name}")]
    if isinstance(response, str):
        return [*entries, {"role": "assistant", "content": response}]
    return [*entries, *_turns(row_format, response, f"{where}: the {answer}")]


_PARSERS = {"messages": _parse_messages, "sharegpt": _parse_sharegpt, "prompt_response": _parse_pair}


def _turns(row_format: RowFormat, entries: Any, what: str) -> list[Any]:
    entries = _listed(entries)
    if not isinstance(entries, list):
        raise MalformedRow(f"{what} is {kind_of(entries)}. Give text, or a list of messages.")
    return [row_format.entry(entry) for entry in entries]


def _untrained(entry: Any) -> Any:
    said = isinstance(entry, Mapping) and any(entry.get(key) is not None for key in ("train", "training", "weight"))
    return entry if said or not isinstance(entry, Mapping) else {**entry, "train": False}


def _history(history: Any, where: str) -> list[Any]:
    """Convert a `history` column, a list of pairs of question and answer, into messages."""
    if history is not None and not isinstance(history, list):
        raise MalformedRow(f"{where}: `history` is {kind_of(history)}. Give pairs of question and answer.")
    entries = []
    for pair in history or ():
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise MalformedRow(f"{where}: `history` holds {kind_of(pair)}. Give pairs of question and answer.")
        entries += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return entries


def _with_places(prompt: str, earlier: Sequence[Any], row: Mapping[str, Any], where: str) -> Any:
    """Return the prompt with a part for each medium of the row before it, unless it has placeholders for them."""
    media = [kind for kind in MEDIA_KINDS for _ in _column(row, kind, where) or ()]
    texts = [prompt, *(entry["content"] for entry in earlier if isinstance(entry["content"], str))]
    if not media or any(f"<{kind}>" in text for text in texts for kind in set(media)):
        return prompt
    return [*({"type": kind} for kind in media), {"type": "text", "text": prompt}]


def _add_system(messages: list[Message], system: Any, where: str) -> None:
    if system is None or system == "":
        return
    if not isinstance(system, str):
        raise MalformedRow(f"{where}: the system prompt is {kind_of(system)}. Give text.")
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    elif messages[0]["content"] != system:
        raise MalformedRow(f"{where}: a system prompt in a column and another in the first message. Keep one of them.")


def _tools(tools: Any, where: str) -> list[dict[str, Any]]:
    """Convert the `tools` column, a list or JSON text, into a list of `{"type": "function", "function": schema}`."""
    if isinstance(tools, str):
        tools = parse_json(tools, f"{where}: `tools` is") if tools.strip() else None
    if not tools:
        return []
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, list):
        raise MalformedRow(f"{where}: `tools` is {kind_of(tools)}. Give a list of schemas.")
    return [_tool(tool, f"{where}, tool {number}") for number, tool in enumerate(tools)]


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


def _column(row: Mapping[str, Any], kind: MediaKind, where: str) -> list[Any] | None:
    """Return the media of a kind in the columns of a row; None if the row has no column for that kind."""
    names = (f"{kind}s", kind)
    given = _given(row, names)
    if len(given) > 1:
        raise MalformedRow(f"{where}: columns `{kind}` and `{kind}s`. Keep one of them, or rename it with `fields`.")
    if not given:
        return [] if any(name in row for name in names) else None
    media = row[given[0]]
    return list(media) if isinstance(media, list | tuple) else [media]
