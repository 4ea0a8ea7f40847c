"""Converts rows of common data set formats into `Conversation`; `KINDS` has the kinds of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from lightning_protrain.data.conversation import Conversation, MalformedRow, Media, MediaKind, Message
from lightning_protrain.data.sources.media import MEDIA_KINDS, media_source, named_media, place_media
from lightning_protrain.data.sources.messages import check_order, kind_of, parse_message, parse_tools
from lightning_protrain.data.sources.spec import MESSAGE_FIELDS, ROW_FIELDS

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
        kind = self._detect(row, where) if self.format == "auto" else _KIND[self.format]
        entries = kind.entries(self, row, where)
        messages = [
            parse_message(entry, f"{where}, message {number}", self.roles) for number, entry in enumerate(entries)
        ]
        _add_system(messages, row.get("system", row.get("system_prompt")), where)
        check_order(messages, where, self.trained_roles)
        conversation: Conversation = {"messages": messages}
        tools = parse_tools(row.get("tools"), where)
        if tools:
            conversation["tools"] = tools
        columns = {kind: _column(row, kind, where) for kind in MEDIA_KINDS}
        media = [Media(kind, value) for kind, value in place_media(messages, columns, where)]
        if media:
            conversation["media"] = [
                Media(medium.kind, media_source(medium.kind, medium.source, folder, name))
                for medium, name in named_media(media, where)
            ]
        return conversation

    def entry(self, entry: Any) -> Any:
        """Rename the keys of a message to standard names, as `fields` says."""
        return self._renamed(entry, MESSAGE_FIELDS) if isinstance(entry, Mapping) else entry

    def _detect(self, row: Mapping[str, Any], where: str) -> RowKind:
        """Return the kind of a row: from the columns named in `fields`, or else from its non-null columns."""
        claims = {kind: columns for kind in KINDS if (columns := kind.columns(row))}
        named = {kind: columns for kind, columns in claims.items() if any(name in self.fields for name in columns)}
        claims = named or claims
        if len(claims) > 1:
            names = ", ".join(chain.from_iterable(claims.values()))
            raise MalformedRow(
                f"{where}: several columns may hold the conversation: {names}. Choose with `format` or `fields`, or "
                "remove columns."
            )
        for kind, columns in claims.items():
            return self._style(row, columns[0], where) if columns[0] in _LISTS else kind
        null = [name for name in (*_LISTS, *PROMPTS, *RESPONSES) if name in row and row[name] is None]
        if null:
            what = "a list of messages" if null[0] in _LISTS else "text"
            raise MalformedRow(f"{where}: `{null[0]}` is null. Give {what}, or remove the row.")
        raise MalformedRow(
            f"{where}: no `messages` list, no `conversations`, and no prompt with its response; the columns are "
            f"{_names(row)}. Name the right ones with `fields`."
        )

    def _style(self, row: Mapping[str, Any], column: str, where: str) -> RowKind:
        """Return the kind of a list of messages from their keys, or from its column if the keys do not tell."""
        entries = _listed(row[column])
        entries = list(map(self.entry, entries)) if isinstance(entries, list) else []
        styles = {_LISTS[column]}
        if entries and all(isinstance(entry, Mapping) for entry in entries):
            signs = {style for entry in entries for key, style in _SIGNS.items() if entry.get(key) is not None}
            styles = signs or styles
        if len(styles) > 1:
            raise MalformedRow(
                f"{where}: keys of several formats in `{column}`. Use role and content, or from and value."
            )
        return _KIND[styles.pop()]

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


def _only(row: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[str, Any]:
    columns = _given(row, names)
    if len(columns) == 1:
        return columns[0], row[columns[0]]
    wanted = "prompt" if names[0] == PROMPTS[0] else "response"
    if not columns:
        raise MalformedRow(
            f"{where}: no {wanted}: none of {', '.join(names)} among the columns {_names(row)}. "
            f'Name it with `fields`: {{"{wanted}": ...}}.'
        )
    raise MalformedRow(
        f"{where}: several columns may be the {wanted}: {', '.join(columns)}. Name the right one with `fields`: "
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
    name, prompt = _only(row, prompts, where)
    answer, response = _only(row, responses, where)
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


def _turns(row_format: RowFormat, entries: Any, what: str) -> list[Any]:
    entries = _listed(entries)
    if not isinstance(entries, list):
        raise MalformedRow(f"{what} is {kind_of(entries)}. Give text, or a list of messages.")
    return [row_format.entry(entry) for entry in entries]


def _untrained(entry: Any) -> Any:
    if not isinstance(entry, Mapping) or any(entry.get(key) is not None for key in ("train", "training", "weight")):
        return entry
    return {**entry, "train": False}


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


def _column(row: Mapping[str, Any], kind: MediaKind, where: str) -> list[Any] | None:
    """Return the media of a kind in the columns of a row; None if the row has no column for that kind."""
    names = (f"{kind}s", kind)
    columns = _given(row, names)
    if len(columns) > 1:
        raise MalformedRow(f"{where}: columns `{kind}` and `{kind}s`. Keep one of them, or rename it with `fields`.")
    if not columns:
        return [] if any(name in row for name in names) else None
    media = row[columns[0]]
    return list(media) if isinstance(media, list | tuple) else [media]


def _pair_columns(row: Mapping[str, Any]) -> list[str]:
    prompts, responses = _given(row, PROMPTS), _given(row, RESPONSES)
    return [*prompts, *responses] if responses and (prompts or row.get("input") is not None) else []


@dataclass(frozen=True)
class RowKind:
    """A way in which a row holds a conversation.

    Attributes:
        name: Value of `DatasetSpec.format`.
        columns: Returns the columns of a row that hold a conversation of this kind; empty if it has none.
        entries: Returns the messages of a row as `parse_message` reads them; the last argument is the row's name.
    """

    name: str
    columns: Callable[[Mapping[str, Any]], list[str]]
    entries: Callable[[RowFormat, Mapping[str, Any], str], list[Any]]


KINDS = (
    RowKind("messages", lambda row: _given(row, ["messages"]), _parse_messages),
    RowKind("sharegpt", lambda row: _given(row, ["conversations"]), _parse_sharegpt),
    RowKind("prompt_response", _pair_columns, _parse_pair),
)
_KIND = {kind.name: kind for kind in KINDS}
