"""Checks the turns that were found in tokens against the messages that were rendered.

[Note: Turns and messages]
The mask comes from the tokens (`scanner`), the messages from the data. Each must account for the other: a template may
join neighbouring messages of the trained roles into one turn, answers to tools may stand within it, and reasoning and
calls may be turns of their own, but there are never more turns than these, nor fewer than runs of messages. A
conversation that breaks this is not trained on silently: its markers stand in its own text, or its template drops
messages. Where the numbers say too little, what is trained is also held against the text of the messages: where a
message holds a marker that is plain text, where messages have weights, where the numbers differ, and where the first
word is the assistant's or the last one somebody else's. Whatever is trained of such a conversation must not hold what
others said, more often than the assistant itself did. All this is left out for usual rows: plain messages of user and
assistant in turn, maybe after one of the system, with as many turns as messages; these are told apart for a whole
batch at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.data.conversation import Conversation, Message, text_of

SEVERAL = "several turns"
SYSTEM = "a system message"
DEVELOPER = "a developer message"
JOINED = "neighbouring messages of one role"
TOOLS = "offered tools"
CALLS = "calls and results of tools"
REASONING = "reasoning"
QUIET = "leaving thoughts out"
MARKERS = "markers in messages"

THOUGHT_TAGS = ("think", "thinking", "thought", "thoughts", "reasoning")
"""Names of the tags that mark thoughts in plain text, in any chat format."""
THOUGHT_WORD = re.compile(r"think|thought|reason", re.IGNORECASE)
"""Is in the tags of thoughts of any chat format."""
_TAG = re.compile(rf"</?(?:{'|'.join(THOUGHT_TAGS)})>", re.IGNORECASE)
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def has_tags(text: str) -> bool:
    """Whether a tag of a thought stands in a text."""
    return _TAG.search(text) is not None


def features(conversation: Conversation, sanitized: bool = False, quiet: bool = False) -> Iterator[str]:
    """What of these a conversation has.

    Args:
        conversation: Its messages and tools.
        sanitized: Whether one of its messages holds a marker or another control token.
        quiet: Whether thoughts are not trained.
    """
    messages = conversation["messages"]
    roles = [message["role"] for message in messages]
    if "system" in roles:
        yield SYSTEM
    if "developer" in roles:
        yield DEVELOPER
    if roles.count("assistant") > 1:
        yield SEVERAL
    if any(one == other != "tool" for one, other in pairwise(roles)):
        yield JOINED
    if conversation.get("tools"):
        yield TOOLS
    if "tool" in roles or any("tool_calls" in message for message in messages):
        yield CALLS
    if any("reasoning_content" in message for message in messages):
        yield REASONING
    if quiet and any("reasoning_content" in message or has_tags(text_of(message)) for message in messages):
        yield QUIET
    if sanitized:
        yield MARKERS


def unproven_feature(conversation: Conversation, unproven: Collection[str], sanitized: bool, quiet: bool) -> str | None:
    """The first feature of a conversation for which its chat format is not proven; None if there is none."""
    return next((one for one in features(conversation, sanitized, quiet) if one in unproven), None)


def thoughts(message: Message) -> list[str]:
    """What a message thinks, in single spaces: its reasoning, and what its text has between tags of thoughts."""
    found = [message["reasoning_content"]] if "reasoning_content" in message else []
    text = text_of(message)
    if "</think>" in text:
        found += _THOUGHT.findall(text)
    return [one for one in (" ".join(thought.split()) for thought in found) if one]


def num_unwritten(messages: Sequence[Message], text: str) -> int:
    """Messages of whose thoughts a chat template leaves out some.

    Args:
        messages: Of a conversation.
        text: What the template made of it.
    """
    said = [thoughts(message) for message in messages]
    if not any(said):
        return 0
    written = " ".join(text.split())
    return sum(any(thought not in written for thought in one) for one in said)


def text_said(message: Message) -> str:
    """All text of a message, of its thoughts and of its calls, in single spaces."""
    return " ".join(" ".join(_strings(dict(message))).split())


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from _strings(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _strings(part)
    elif value is not None:
        yield str(value)


NOT_PROVEN = "turns and messages differ"
LEAKING = "the chat format does not tell who speaks"
NO_CALLS = "the chat template leaves out a tool call"
NO_TEXT = "the chat template leaves out what is said beside a tool call"
LEAKED = "what others said would be trained"
THINKS = "its thoughts cannot be left out"
NO_END = "a trained turn has no end marker"
# Shorter texts of others may occur in what a template writes within a turn.
_TELLING = 12
_USER, _SYSTEM, _OTHER, _TRAINED, _NOT_PLAIN = range(5)


class WeightsError(ValueError):
    """Messages have weights of their own and share turns."""


class UntrainableError(ValueError):
    """A conversation that cannot be trained on as the options say; `reason` is the same for all of a kind."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(f"{reason}{f': {details}' if details else ''}")
        self.reason = reason


@dataclass(frozen=True)
class Speakers:
    """Who speaks in the conversations of a batch.

    Attributes:
        usual: By row, whether it is usual: [Note: Turns and messages].
        num_messages: By row, its messages of trained roles.
    """

    usual: NDArray[np.bool_]
    num_messages: NDArray[np.int64]


def speakers(
    conversations: Sequence[Conversation], roles: Sequence[str], unproven: Collection[str] = (), quiet: bool = False
) -> Speakers:
    """Who speaks, for all rows at once.

    Args:
        conversations: The rows.
        roles: Those that are trained.
        unproven: Features for which the format is not proven; rows that have them are not usual.
        quiet: Whether thoughts are not trained; rows that have them in their text are then not usual.
    """
    messages = [message for row in conversations for message in row["messages"]]
    kinds = {"user": _USER, "system": _SYSTEM, **dict.fromkeys(roles, _TRAINED)}
    # One pass in Python over what may be millions of messages.
    kind = np.array(
        [
            kinds.get(one["role"], _OTHER) if len(one) == 2 and "</think>" not in one["content"] else _NOT_PLAIN
            for one in messages
        ],
        dtype=np.int8,
    )
    plain = kind != _NOT_PLAIN
    if not plain.all():
        kind[~plain] = [kinds.get(messages[at]["role"], _OTHER) for at in np.flatnonzero(~plain)]
    if quiet:
        plain &= np.array([not has_tags(text_of(message)) for message in messages], dtype=bool)
    stops = np.cumsum([len(row["messages"]) for row in conversations])
    starts = np.concatenate(([0], stops[:-1]))
    first = np.zeros(len(messages) + 1, dtype=bool)
    first[starts] = True
    first = first[:-1]
    before = np.roll(kind, 1)
    before[first] = _SYSTEM
    odd = ~plain | (kind == _OTHER) | (kind == before) & ~((kind == _SYSTEM) & first) | (kind == _SYSTEM) & ~first
    odd |= (kind == _TRAINED) & (before == _SYSTEM)
    if SYSTEM in unproven:
        odd |= kind == _SYSTEM
    trained = np.concatenate(([0], np.cumsum(kind == _TRAINED)))
    counts = trained[stops] - trained[starts]
    oddities = np.concatenate(([0], np.cumsum(odd)))
    usual = (oddities[stops] == oddities[starts]) & (stops > starts)
    usual[usual] = kind[stops[usual] - 1] == _TRAINED
    usual &= np.array(["tools" not in row for row in conversations], dtype=bool)
    if SEVERAL in unproven:
        usual &= counts < 2
    return Speakers(usual, counts)


def turn_weights(messages: Sequence[Message], num_turns: int) -> list[float] | None:
    """One weight for each trained turn; None where no message has one.

    Args:
        messages: Those of the trained roles.
        num_turns: How many turns they became.

    Raises:
        WeightsError: Messages of different weights share turns.
    """
    if not any("train" in message or "weight" in message for message in messages):
        return None
    weights = [float(message.get("weight", 1.0)) * bool(message.get("train", True)) for message in messages]
    if len(weights) == num_turns:
        return weights
    if len(set(weights)) > 1:
        raise WeightsError(
            f"{len(weights)} messages with `train` or `weight` are {num_turns} turns after the chat template, so the "
            "weights cannot be told apart. Leave them out, or give neighbouring messages the same."
        )
    return weights[:1] * num_turns


def check_turns(
    conversation: Conversation,
    roles: Sequence[str],
    read: Callable[[], list[str]],
    num_turns: int,
    suspicious: bool = False,
    leaking: frozenset[str] = frozenset(),
) -> None:
    """Holds the trained turns against the messages, see [Note: Turns and messages].

    Args:
        conversation: Its messages.
        roles: Those that are trained.
        read: Gives the text of each trained turn; called where the numbers say too little.
        num_turns: How many turns are trained.
        suspicious: Whether a message holds a marker that is plain text.
        leaking: Roles whose messages the format does not tell from those of the assistant before them.

    Raises:
        UntrainableError: They do not agree.
    """
    messages = [message for message in conversation["messages"] if message["role"] in roles]
    _check_roles(conversation, leaking)
    least = len(messages) if suspicious else _runs(conversation, roles)
    most = sum(1 + len(message.get("tool_calls") or ()) + ("reasoning_content" in message) for message in messages)
    if not least <= num_turns <= most:
        details = f"{num_turns} turns for {len(messages)} messages of {', '.join(roles)}"
        raise UntrainableError(NOT_PROVEN, details)
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    speakers = [message["role"] for message in conversation["messages"] if message["role"] != "system"]
    usual = speakers[0] not in roles and speakers[-1] in roles
    weighted = any("train" in message or "weight" in message for message in messages)
    if num_turns == len(messages) and usual and not (suspicious or weighted or calls):
        return
    turns = [" ".join(turn.split()) for turn in read()]
    together = " ".join(turns)
    # Templates may leave out what was thought in earlier turns.
    contents = [_line(text_of(message).rpartition("</think>")[2]) for message in messages]
    _check_calls(calls, (), together)
    one_by_one = turns if num_turns == len(messages) else [together] * len(messages)
    for message, said, found in zip(messages, contents, one_by_one, strict=True):
        expected = 1 if num_turns == len(messages) else sum(other.count(said) for other in contents if said)
        if said and found.count(said) < expected:
            reason = NO_TEXT if "tool_calls" in message else NOT_PROVEN
            raise UntrainableError(reason, f"found {found!r} where the message is {said!r}")
    _check_calls(calls, contents, together)


def _check_calls(calls: Sequence[Mapping[str, Any]], contents: Sequence[str], together: str) -> None:
    """Check that each call is written, by how often its name and its arguments stand in the assistant's turns.

    Args:
        calls: As `Message.tool_calls` has them.
        contents: What is said beside the calls.
        together: Text of all turns of the assistant, in single spaces.

    Raises:
        UntrainableError: A name or an argument stands there less often than the calls and the contents hold it.
    """
    functions = [call["function"] for call in calls]
    texts = {text: one["name"] for one in functions for text in (one["name"], *_leaves(one["arguments"]))}
    parts = (_line(text) for one in functions for text in (one["name"], *_leaves(one["arguments"])))
    said = "\0".join((*contents, *parts))
    ids = {call["function"]["name"]: call["id"] for call in calls if call.get("id")}
    for text, name in texts.items():
        expected = said.count(_line(text))
        if sum(map(together.count, _spellings(text))) >= expected:
            continue
        if text == name and name not in together and ids.get(name, "\0") in together:
            raise UntrainableError(
                NO_CALLS,
                f"it writes the id {ids[name]!r} in place of the name {name!r}. Give ids such as 'functions.{name}:0'",
            )
        what = "is called" if text == name else f"is an argument of {name!r}"
        times = "" if expected == 1 else f", {expected} times in all"
        raise UntrainableError(NO_CALLS, f"{text!r} {what}{times}, and the assistant's turns are {together!r}")


def _leaves(value: Any) -> Iterator[str]:
    """Yield the keys and values of arguments as text; not those that are empty or null."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if part is not None:
                yield str(key)
                yield from _leaves(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, bool):
        yield str(value).lower()
    elif value is not None and str(value).strip():
        yield str(value)


def _spellings(text: str) -> set[str]:
    """Return how templates may write a text, in single spaces: plainly, as JSON once or twice, and as Python does."""
    once = {json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)}
    found = {text, repr(text)[1:-1], *once, *(json.dumps(one)[1:-1] for one in once)}
    return set(map(_line, found)) | ({text.capitalize()} if text in ("true", "false") else set())


def _line(text: str) -> str:
    return " ".join(text.split())


def _runs(conversation: Conversation, roles: Sequence[str]) -> int:
    """Runs of neighbouring messages of the trained roles; answers of tools do not end one."""
    within = {*roles, "tool"}
    runs = groupby(conversation["messages"], key=lambda message: message["role"] in within)
    return sum(part and any(message["role"] in roles for message in run) for part, run in runs)


def _check_roles(conversation: Conversation, leaking: frozenset[str]) -> None:
    has_spoken = False
    for message in conversation["messages"]:
        if has_spoken and message["role"] in leaking:
            details = f"what {message['role']!r} says after the assistant would be trained"
            raise UntrainableError(LEAKING, details)
        has_spoken |= message["role"] == "assistant"


def check_trained(
    conversation: Conversation, roles: Sequence[str], trained: str, quiet: bool, whole: bool = True
) -> None:
    """Holds what is trained against what was said.

    Args:
        conversation: Its messages.
        roles: Those that are trained.
        trained: The text of all trained tokens.
        quiet: Whether thoughts are not trained.
        whole: Whether all turns of these roles are trained.

    Raises:
        UntrainableError: Others said it; or it is a thought, or lacks an answer behind one.
    """
    kept = " ".join(trained.split())
    own = [message for message in conversation["messages"] if message["role"] in roles]
    said = " ".join(map(text_said, own))
    for message in conversation["messages"]:
        text = " ".join(text_of(message).split())
        if message["role"] not in roles and len(text) >= _TELLING and kept.count(text) > said.count(text):
            raise UntrainableError(LEAKED, f"{message['role']!r} says {text[:80]!r}")
    if not quiet:
        return
    if has_tags(kept):
        raise UntrainableError(THINKS, f"{kept[:200]!r} has a tag of one; train_thinking is false")
    parts = [" ".join(text_of(message).rpartition("</think>")[2].split()) for message in own]
    for part in parts if whole else ():
        if part not in kept:
            raise UntrainableError(THINKS, f"found {kept!r} where the answer is {part!r}; train_thinking is false")
    calls = [
        text_said({"role": "", "content": "", "tool_calls": one["tool_calls"]}) for one in own if "tool_calls" in one
    ]
    answers = " ".join((*parts, *calls))
    for thought in (thought for message in own for thought in thoughts(message)):
        if kept.count(thought) > answers.count(thought):
            raise UntrainableError(THINKS, f"{thought[:80]!r} would be trained; train_thinking is false")
