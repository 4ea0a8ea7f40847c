"""Converts rows of common data set formats; `KINDS` has the kinds of rows.

A row is a conversation, plain text, or a preference: answers to one prompt that were judged. Formats are those of the
Hugging Face Hub; the names of kinds are those of https://huggingface.co/docs/trl/dataset_formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, dropwhile, takewhile
from pathlib import Path
from typing import Any

from lightning_protrain.data.conversation import (
    Conversation,
    Document,
    MalformedRow,
    Media,
    MediaKind,
    Message,
    Preference,
    Row,
)
from lightning_protrain.data.sources.media import MEDIA_KINDS, media_source, named_media, place_media
from lightning_protrain.data.sources.messages import (
    check_order,
    kind_of,
    parse_message,
    parse_tools,
    parse_variables,
    role_of,
)
from lightning_protrain.data.sources.spec import MESSAGE_FIELDS, ROW_FIELDS, Format

# Common column names: a row with one of PROMPTS and one of RESPONSES is a prompt with its response.
PROMPTS = ("prompt", "instruction", "question", "query")
RESPONSES = ("response", "completion", "output", "answer")
CONTEXTS = ("input", "context")
CHOSEN = ("chosen", "chosen_response", "preferred", "preferred_output")
REJECTED = ("rejected", "rejected_response", "dispreferred", "non_preferred_output")
LABELS = ("label", "kto_tag")
_COMMON = {"prompt": PROMPTS, "response": RESPONSES, "chosen": CHOSEN, "rejected": REJECTED, "label": LABELS}
_LISTS = ("messages", "conversations")
MEDIA_COLUMNS = tuple(name for kind in MEDIA_KINDS for name in (kind, f"{kind}s"))
# Columns that only a chat template can write.
_CHAT_COLUMNS = ("system", "system_prompt", "history", "tools", "chat_template_kwargs", *MEDIA_COLUMNS)


@dataclass(frozen=True)
class RowFormat:
    """Converts the rows of a data set.

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

    def parse(self, row: Any, where: str, folder: Path) -> Row:
        """Parse one row.

        Args:
            row: Row of the data set; null columns count as absent.
            where: Name of the row, for errors.
            folder: Folder to which relative paths of media refer.

        Raises:
            MalformedRow: If the row is not valid, or its format is ambiguous.
        """
        if not isinstance(row, Mapping):
            raise MalformedRow(f"{where}: the row is {kind_of(row)}. Give an object with a `messages` list.")
        row = self._renamed(row, ROW_FIELDS)
        # A column named in `fields` takes precedence over columns with common names.
        others = [name for ours in self.fields for name in _COMMON.get(ours, ()) if name != ours]
        row = _without(row, others) if others else row
        kind = self._detect(row, where) if self.format == "auto" else _KIND[self.format]
        return kind.parse(self, row, where, folder)

    def conversation(self, entries: Sequence[Any], row: Mapping[str, Any], where: str, folder: Path) -> Conversation:
        """Make a conversation of messages as `parse_message` reads them, and of the other columns of their row."""
        if not entries:
            raise MalformedRow(f"{where}: there is no message. Give messages, or remove the row.")
        messages = [
            parse_message(entry, f"{where}, message {number}", self.roles) for number, entry in enumerate(entries)
        ]
        _add_system(messages, row.get("system") or row.get("system_prompt"), where)
        check_order(messages, where, self.trained_roles)
        conversation: Conversation = {"messages": messages}
        tools = parse_tools(row.get("tools"), where)
        if tools:
            conversation["tools"] = tools
        variables = parse_variables(row.get("chat_template_kwargs"), where)
        if variables:
            conversation["template_kwargs"] = variables
        columns = {kind: _column(row, kind, where) for kind in MEDIA_KINDS}
        media = [Media(kind, value) for kind, value in place_media(messages, columns, where)]
        if media:
            conversation["media"] = [
                Media(medium.kind, media_source(medium.kind, medium.source, folder, name))
                for medium, name in named_media(media, where)
            ]
        return conversation

    def entry(self, entry: Any) -> Any:
        """Rename the keys of a message to standard names: as `fields` says, and those of ShareGPT."""
        if not isinstance(entry, Mapping):
            return entry
        entry = self._renamed(entry, MESSAGE_FIELDS)
        if entry.get("role") is None and entry.get("from") is not None:
            return {**_without(entry, ("from", "value")), "role": entry["from"], "content": entry.get("value")}
        return entry

    def _detect(self, row: Mapping[str, Any], where: str) -> RowKind:
        """Return the kind of a row: from the columns named in `fields`, or else from its non-null columns."""
        claims = {kind: columns for kind in KINDS if (columns := kind.columns(row))}
        for kind in KINDS:  # Judged answers also have the columns of a conversation, which is their prompt.
            if kind.name in _JUDGED and kind in claims:
                if kind.name == "unpaired_preference":
                    _refuse_number(row, claims[kind][0], self.fields, where)
                return kind
        named = {kind: columns for kind, columns in claims.items() if any(name in self.fields for name in columns)}
        claims = named or claims
        if len(claims) > 1:
            claims.pop(_KIND["text"], None)  # Beside a conversation, `text` is the same, written by some template.
        if len(claims) > 1:
            names = ", ".join(chain.from_iterable(claims.values()))
            raise MalformedRow(
                f"{where}: several columns may hold the conversation: {names}. Choose with `format` or `fields`, or "
                "remove columns."
            )
        for kind in claims:
            return kind
        null = [name for name in (*CHOSEN, *REJECTED, *_LISTS, *PROMPTS, *RESPONSES, "text") if name in row]
        null = [name for name in null if row[name] is None]
        if null:
            what = "a list of messages" if null[0] in _LISTS else "text"
            raise MalformedRow(f"{where}: `{null[0]}` is null. Give {what}, or remove the row.")
        raise MalformedRow(
            f"{where}: no `messages` list, no `conversations`, no prompt with its response, no `text`, and no `chosen` "
            f"with `rejected`; the columns are {_names(row)}. Name the right ones with `fields`."
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


def _listed(entries: Any) -> Any:
    """Return messages as a list of objects; old versions of `datasets` store them as an object of lists."""
    if not isinstance(entries, Mapping) or not all(isinstance(column, list) for column in entries.values()):
        return entries
    lengths = {len(column) for column in entries.values()}
    if len(lengths) != 1:
        return entries
    return [dict(zip(entries, values, strict=True)) for values in zip(*entries.values(), strict=True)]


def _without(row: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in names}


def _message_list(row_format: RowFormat, row: Mapping[str, Any], where: str, column: str) -> list[Any]:
    other = next(name for name in _LISTS if name != column)
    name = column if row.get(column) is not None or row.get(other) is None else other
    entries = _listed(row.get(name))
    if not isinstance(entries, list) or not entries:
        what = "an empty list" if entries == [] else kind_of(entries)
        what = what if name in row else f"absent; the columns are {_names(row)}"
        raise MalformedRow(f"{where}: no `{name}` list with at least one message: it is {what}. Each row needs one.")
    return [row_format.entry(entry) for entry in entries]


def _only(row: Mapping[str, Any], names: Sequence[str], wanted: str, where: str) -> tuple[str, Any]:
    """Return the only column among `names` that a row has, and its value; `wanted` says what it is."""
    columns = _given(row, names)
    if len(columns) == 1:
        return columns[0], row[columns[0]]
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
    (name, prompt), (answer, response) = _prompt_and_response(row, where)
    entries = _history(row.get("history"), where)
    if isinstance(prompt, str):
        entries.append({"role": "user", "content": _with_places(prompt, entries, row, where)})
    else:
        entries += [_untrained(entry) for entry in _turns(row_format, prompt, f"{where}: the {name}")]
    if isinstance(response, str):
        return [*entries, {"role": "assistant", "content": response}]
    return [*entries, *_turns(row_format, response, f"{where}: the {answer}")]


def _prompt_and_response(row: Mapping[str, Any], where: str) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """Return the prompt, with its context if both are text, and the response; both with the names of their columns."""
    if not _given(row, PROMPTS) and isinstance(row.get("input"), str):
        row = {**_without(row, ["input"]), "prompt": row["input"]}
    name, prompt = _only(row, PROMPTS, "prompt", where)
    context = [row[key] for key in CONTEXTS if row.get(key)]
    if context and isinstance(prompt, str):
        if len(context) > 1 or not isinstance(context[0], str):
            raise MalformedRow(f"{where}: the input beside `{name}` is not one text. Give one text in `input`.")
        prompt = f"{prompt}\n\n{context[0]}"
    return (name, prompt), _only(row, RESPONSES, "response", where)


def _turns(row_format: RowFormat, entries: Any, what: str) -> list[Any]:
    entries = _listed(entries)
    if not isinstance(entries, list):
        raise MalformedRow(f"{what} is {kind_of(entries)}. Give text, or a list of messages.")
    return [row_format.entry(entry) for entry in entries]


def _untrained(entry: Any) -> Any:
    if not isinstance(entry, Mapping) or any(entry.get(key) is not None for key in ("train", "training", "weight")):
        return entry
    if isinstance(entry.get("loss"), bool):
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


def _response_columns(row: Mapping[str, Any]) -> list[str]:
    prompts, responses = _given(row, PROMPTS), _given(row, RESPONSES)
    return [*prompts, *responses] if responses and (prompts or row.get("input") is not None) else []


# Kinds of plain text


def _parse_text(row_format: RowFormat, row: Mapping[str, Any], where: str, folder: Path) -> Document:
    if not isinstance(row.get("text"), str):
        raise MalformedRow(f"{where}: `text` is {kind_of(row.get('text'))}. Give text, or name its column in `fields`.")
    return {"text": row["text"]}


def _parse_completion(row_format: RowFormat, row: Mapping[str, Any], where: str, folder: Path) -> Document:
    chats = [name for name in _CHAT_COLUMNS if row.get(name)]
    if chats:
        raise MalformedRow(
            f"{where}: `format: completion` writes plain text, which has no place for `{chats[0]}`. Remove the column, "
            "or use `format: prompt_response`."
        )
    values = dict(_prompt_and_response(row, where))
    for name, value in values.items():
        if not isinstance(value, str):
            raise MalformedRow(f"{where}: `{name}` is {kind_of(value)}, and `format: completion` needs text.")
    prompt, completion = values.values()
    return {"text": completion, "prompt": prompt}


def _parse_response(row_format: RowFormat, row: Mapping[str, Any], where: str, folder: Path) -> Conversation:
    conversation = row_format.conversation(_parse_pair(row_format, row, where), row, where, folder)
    _add_plain(conversation, row, row.get("prompt"), row.get("completion"))
    return conversation


def _add_plain(conversation: Conversation, row: Mapping[str, Any], prompt: Any, answer: Any) -> None:
    """Add the plain form of a row if it is a prompt and an answer in text, and nothing else."""
    if isinstance(prompt, str) and isinstance(answer, str) and not any(map(row.get, (*CONTEXTS, *_CHAT_COLUMNS))):
        conversation["plain"] = {"text": answer, "prompt": prompt}


# Kinds of judged answers

_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def _parse_preference(row_format: RowFormat, row: Mapping[str, Any], where: str, folder: Path) -> Preference:
    answers = dict(_answer(row_format, row, columns, where) for columns in (CHOSEN, REJECTED))
    _refuse_media(row, where)
    prompt = _prompt(row_format, row, where) or []
    are_texts = all(isinstance(answer, str) for answer in answers.values())
    if are_texts and not prompt and (parsed := _parse_whole_texts(row_format, row, where, folder)):
        return parsed
    turns = [
        [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer for answer in answers.values()
    ]
    if prompt in turns and _is_answer(row_format, prompt[-1]):  # `messages` is the chosen conversation.
        prompt = []
    prompt, turns = _divided(row_format, prompt, turns)
    if not prompt:
        raise MalformedRow(
            f"{where}: `{'` and `'.join(answers)}` have no prompt: no column has one, and they do not begin with the "
            'same messages. Name its column with `fields`: {"prompt": ...}.'
        )
    for name, (first, *_) in zip(answers, turns, strict=True):
        role, _ = _words(row_format, first)
        if role not in ("assistant", "tool", None):
            raise MalformedRow(
                f"{where}: `{name}` begins with a message of the {role} that is not the prompt. Begin both answers "
                "with the same messages, or with those of the assistant."
            )
    sides = [_side(row_format, (prompt, side), row, where, folder) for side in turns]
    if are_texts:
        for side, answer in zip(sides, answers.values(), strict=True):
            _add_plain(side, row, row.get("prompt"), answer)
    return {"sides": sides, "num_prompt": len(sides[0]["messages"]) - len(turns[0])}


def _parse_whole_texts(row_format: RowFormat, row: Mapping[str, Any], where: str, folder: Path) -> Preference | None:
    """Parse two texts that begin with their prompt; return None if there is none.

    Texts are dialogues in the manner of https://huggingface.co/datasets/Anthropic/hh-rlhf, or begin with the same words
    and have no other column beside them.
    """
    texts: dict[str, Any] = {name: row[name] for name in _given(row, (*CHOSEN, *REJECTED))}
    if all(map(_SPEAKER.match, texts.values())):
        parsed = _parse_preference(row_format, {**row, **{n: _dialogue(t) for n, t in texts.items()}}, where, folder)
        for side, text in zip(parsed["sides"], texts.values(), strict=True):
            num_answers = len(side["messages"]) - parsed["num_prompt"]
            at = [*_SPEAKER.finditer(text)][-num_answers].end()
            _add_plain(side, row, text[:at], text[at:])
        return parsed
    first, second = texts.values()
    shared = first[: _num_equal(first, second)]
    at = max(shared.rfind(" "), shared.rfind("\n"))
    if at < 1 or len(row) > len(texts):
        return None
    row = {"prompt": shared[:at], **{name: text[at:] for name, text in texts.items()}}
    return _parse_preference(row_format, row, where, folder)


def _dialogue(text: str) -> list[Any]:
    _, *pieces = _SPEAKER.split(text)
    return [
        {"role": "user" if speaker == "Human" else "assistant", "content": words.strip()}
        for speaker, words in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def _divided(row_format: RowFormat, prompt: list[Any], turns: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
    """Return the prompt and the answers after it.

    Answers may begin with the prompt, or with its last messages; a column may have only some messages of the prompt.
    """
    shared = turns[0][: _num_equal(*([*map(_without_nulls, side[:-1])] for side in turns))]
    asked = [*dropwhile(lambda entry: _is_answer(row_format, entry), reversed(shared))][::-1]
    begin, column = ([_words(row_format, entry) for entry in part] for part in (asked, prompt))
    if begin and column[-len(begin) :] == begin:
        prompt = [*prompt, *shared[len(begin) :]]
    elif any(begin[at : at + len(column)] == column for at in range(len(begin))):
        prompt = shared
    else:
        return prompt, turns
    return prompt, [side[len(shared) :] for side in turns]


def _parse_unpaired(row_format: RowFormat, row: Mapping[str, Any], where: str, folder: Path) -> Preference:
    name, label = _only(row, LABELS, "label", where)
    if label not in (0, 1):
        raise MalformedRow(f"{where}: `{name}` is {label!r}. Give true for a desirable answer, or false.")
    _refuse_media(row, where)
    is_list = not _response_columns(row)
    column = next(iter(_given(row, _LISTS)), "messages")
    entries = _message_list(row_format, row, where, column) if is_list else _parse_pair(row_format, row, where)
    num_answers = sum(1 for _ in takewhile(lambda entry: _is_answer(row_format, entry), reversed(entries)))
    at = len(entries) - num_answers
    if at in (0, len(entries)):
        missing = "prompt" if at == 0 else "answer after the prompt"
        raise MalformedRow(f"{where}: there is no {missing}. Give a prompt and an answer, or remove the row.")
    side = _side(row_format, (entries[:at], entries[at:]), row, where, folder)
    _add_plain(side, row, row.get("prompt"), None if is_list else row.get("completion"))
    return {"sides": [side], "num_prompt": len(side["messages"]) - num_answers, "label": bool(label)}


def _is_answer(row_format: RowFormat, entry: Any) -> bool:
    """Return True if a message belongs to an answer: it is the assistant's, or the result of a tool that it calls."""
    return _words(row_format, entry)[0] in ("assistant", "tool")


def _words(row_format: RowFormat, entry: Any) -> tuple[Any, Any]:
    """Return what makes a message the same in two columns: its standard role and its content."""
    entry = entry if isinstance(entry, Mapping) else {}
    role, content = entry.get("role"), entry.get("content")
    role = role_of(role, row_format.roles) if isinstance(role, str) else None
    return role, content.strip() if isinstance(content, str) else content


def _answer(
    row_format: RowFormat, row: Mapping[str, Any], columns: Sequence[str], where: str
) -> tuple[str, str | list[Any]]:
    """Return a column and its answer: text, or messages, of which old data sets have a single one without a list."""
    name, value = _only(row, columns, columns[0], where)
    if isinstance(value, Mapping) and not all(isinstance(item, list) for item in value.values()):
        value = [value]
    answer = value if isinstance(value, str) else _turns(row_format, value or [], f"{where}: `{name}`")
    if not answer or (isinstance(answer, str) and not answer.strip()):
        raise MalformedRow(f"{where}: `{name}` is empty. Give an answer, or remove the row.")
    return name, answer


def _prompt(row_format: RowFormat, row: Mapping[str, Any], where: str) -> list[Any] | None:
    """Return the messages of the columns that hold a prompt; None if there is no such column."""
    value = row.get("input")
    if isinstance(value, Mapping | list) and not _given(row, PROMPTS):
        row = {**row, "prompt": value if isinstance(value, list) else value.get("messages"), "input": None}
    if _given(row, PROMPTS) or isinstance(row.get("input"), str):
        return _parse_pair(row_format, {**_without(row, RESPONSES), "response": []}, where)
    columns = _given(row, _LISTS)
    return _message_list(row_format, row, where, columns[0]) if columns else None


def _num_equal(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the number of equal entries with which both begin."""
    return sum(1 for _ in takewhile(lambda entries: entries[0] == entries[1], zip(first, second, strict=False)))


def _without_nulls(entry: Any) -> Any:
    """Return what of a message says that it is the same as another."""
    return {key: value for key, value in entry.items() if value is not None} if isinstance(entry, Mapping) else entry


def _side(
    row_format: RowFormat, parts: tuple[Sequence[Any], Sequence[Any]], row: Mapping[str, Any], where: str, folder: Path
) -> Conversation:
    """Return a conversation whose first part, the prompt, is not trained."""
    prompt, answer = ([_without(entry, ("weight",)) for entry in part if isinstance(entry, Mapping)] for part in parts)
    entries = [*({**entry, "train": False} for entry in prompt), *answer]
    if len(entries) != sum(map(len, parts)):
        raise MalformedRow(f"{where}: a message is no object. Give objects with `role` and `content`.")
    return row_format.conversation(entries, _without(row, MEDIA_COLUMNS), where, folder)


def _refuse_media(row: Mapping[str, Any], where: str) -> None:
    columns = [name for name in _given(row, MEDIA_COLUMNS) if row[name]]
    if columns:
        raise MalformedRow(
            f"{where}: preferences with images, audio or videos are not trained, and `{columns[0]}` has some. Remove "
            "the column, or the row."
        )


def _preference_columns(row: Mapping[str, Any]) -> list[str]:
    chosen, rejected = _given(row, CHOSEN), _given(row, REJECTED)
    return [*chosen, *rejected] if chosen and rejected else []


def _labelled_columns(row: Mapping[str, Any]) -> list[str]:
    labels = [name for name in _given(row, LABELS) if row[name] in (0, 1)]
    return labels if labels and (_response_columns(row) or _given(row, _LISTS)) else []


def _refuse_number(row: Mapping[str, Any], column: str, fields: Mapping[str, str], where: str) -> None:
    """Refuse a label that is 0 or 1: it may be the class of something, or say whether the answer is desirable."""
    if not isinstance(row[column], bool) and "label" not in fields:
        raise MalformedRow(
            f"{where}: `{column}` is {row[column]!r}, which may judge the answer. If it does, give "
            "`format: unpaired_preference`; else give the format of the rest of the row, such as `messages` or "
            "`prompt_response`."
        )


def _list_kind(name: str, column: str) -> RowKind:
    """Return the kind of rows with a list of messages in a column."""

    def parse(row_format: RowFormat, row: Mapping[str, Any], where: str, folder: Path) -> Row:
        return row_format.conversation(_message_list(row_format, row, where, column), row, where, folder)

    return RowKind(name, lambda row: _given(row, [column]), parse)


@dataclass(frozen=True)
class RowKind:
    """A way in which a row holds what is trained.

    Attributes:
        name: Value of `DatasetSpec.format`.
        columns: Returns the columns of a row that hold something of this kind; empty if it has none.
        parse: Parses a row; the other arguments are its name, and the folder to which relative paths refer.
    """

    name: str
    columns: Callable[[Mapping[str, Any]], list[str]]
    parse: Callable[[RowFormat, Mapping[str, Any], str, Path], Row]


KINDS = (
    _list_kind("messages", "messages"),
    _list_kind("sharegpt", "conversations"),
    RowKind("prompt_response", _response_columns, _parse_response),
    RowKind("text", lambda row: _given(row, ["text"]), _parse_text),
    RowKind("completion", lambda row: [], _parse_completion),
    RowKind("preference", _preference_columns, _parse_preference),
    RowKind("unpaired_preference", _labelled_columns, _parse_unpaired),
)
_KIND = {kind.name: kind for kind in KINDS}
_JUDGED = ("preference", "unpaired_preference")
