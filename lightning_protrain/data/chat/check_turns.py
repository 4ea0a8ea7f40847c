"""Checks the turns that were found in tokens against the messages that were rendered.

[Note: Turns and messages]
The mask comes from the tokens, the messages from the data. Each turn must have its message, and each message its turn.
A template may join neighbouring messages of trained roles into one turn, and answers of tools may stand within a turn.
Reasoning and calls may be turns of their own. So there are at least as many turns as runs of neighbouring trained
messages, and at most as many as trained messages, reasoning parts and calls together. A conversation outside these
limits is not trained silently: its text contains markers, or its template drops messages.

If the numbers say too little, the trained text is also compared with the text of the messages. That is the case if a
message contains a plain-text marker, if messages have weights, if the numbers differ, and if the assistant speaks first
or another role speaks last. The trained text of such a conversation must not contain what others said more often than
the assistant said it.

All of this is skipped for *usual* rows: plain messages of user and assistant in turn, maybe after a system message,
with as many turns as messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from lightning_protrain.config import plural
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
"""Matches the tags of thoughts of any chat format."""
_TAG = re.compile(rf"</?(?:{'|'.join(THOUGHT_TAGS)})>", re.IGNORECASE)
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def has_tags(text: str) -> bool:
    """Return True if a text contains a tag of a thought."""
    return _TAG.search(text) is not None


def features(conversation: Conversation, sanitized: bool = False, quiet: bool = False) -> Iterator[str]:
    """Yield the features of a conversation for which a chat format must be proven.

    Args:
        conversation: Its messages and tools.
        sanitized: True if one of its messages contains a marker or another control token.
        quiet: True if thoughts are not trained.
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
    """Return the first feature of a conversation for which its chat format is not proven, or None."""
    return next((one for one in features(conversation, sanitized, quiet) if one in unproven), None)


def thoughts(message: Message) -> list[str]:
    """Return the thoughts of a message with single spaces: its reasoning, and the text between thought tags."""
    found = [message["reasoning_content"]] if "reasoning_content" in message else []
    text = text_of(message)
    if "</think>" in text:
        found += _THOUGHT.findall(text)
    return [one for one in (" ".join(thought.split()) for thought in found) if one]


def num_unwritten(messages: Sequence[Message], text: str) -> int:
    """Return the number of messages with thoughts that a chat template leaves out.

    Args:
        messages: Messages of a conversation.
        text: Text that the template wrote.
    """
    said = [thoughts(message) for message in messages]
    if not any(said):
        return 0
    written = " ".join(text.split())
    return sum(any(thought not in written for thought in one) for one in said)


def text_said(message: Message) -> str:
    """Return all text of a message, with its thoughts and calls, with single spaces."""
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
# Shorter texts of others may also be part of what a template writes within a turn.
_TELLING = 12


class WeightsError(ValueError):
    """An error for messages that have weights of their own but share turns."""


class UntrainableError(ValueError):
    """A conversation that cannot be trained on with these options; `reason` names the kind of problem."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(f"{reason}{f': {details}' if details else ''}")
        self.reason = reason


def is_usual(
    conversation: Conversation,
    num_turns: int,
    roles: Sequence[str],
    unproven: Collection[str] = (),
    quiet: bool = False,
) -> bool:
    """Return True for a usual row with one turn for each trained message, see [Note: Turns and messages].

    Args:
        conversation: The row.
        num_turns: Number of trained turns.
        roles: Trained roles.
        unproven: Features for which the format is not proven; rows with such features are not usual.
        quiet: True if thoughts are not trained; then rows with thoughts in their text are not usual.
    """
    messages = conversation["messages"]
    speakers = [None if message["role"] in roles else message["role"] for message in messages]
    if speakers[:1] == ["system"]:
        if SYSTEM in unproven:
            return False
        del speakers[0]
    if num_turns < 1 or speakers != ["user", None] * num_turns or "tools" in conversation:
        return False
    if num_turns > 1 and SEVERAL in unproven:
        return False
    return all(
        len(message) == 2 and "</think>" not in message["content"] and not (quiet and has_tags(text_of(message)))
        for message in messages
    )


def turn_weights(messages: Sequence[Message], num_turns: int) -> list[float] | None:
    """Return one weight for each trained turn, or None if no message has one.

    Args:
        messages: Messages of the trained roles.
        num_turns: Number of turns that they became.

    Raises:
        WeightsError: If messages of different weights share turns.
    """
    if not any("train" in message or "weight" in message for message in messages):
        return None
    weights = [float(message.get("weight", 1.0)) * bool(message.get("train", True)) for message in messages]
    if len(weights) == num_turns:
        return weights
    if len(set(weights)) > 1:
        raise WeightsError(
            f"{plural(len(weights), 'message')} with `train` or `weight` become "
            f"{plural(num_turns, 'turn')} after the chat template, so the "
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
    """Check the trained turns against the messages, see [Note: Turns and messages].

    Args:
        conversation: Its messages.
        roles: Trained roles.
        read: Returns the text of each trained turn; called if the numbers say too little.
        num_turns: Number of trained turns.
        suspicious: True if a message contains a plain-text marker.
        leaking: Roles whose messages the format does not distinguish from those of the assistant before them.

    Raises:
        UntrainableError: If they do not agree.
    """
    messages = [message for message in conversation["messages"] if message["role"] in roles]
    _check_roles(conversation, leaking)
    least = len(messages) if suspicious else _runs(conversation, roles)
    most = sum(1 + len(message.get("tool_calls") or ()) + ("reasoning_content" in message) for message in messages)
    if not least <= num_turns <= most:
        details = f"{plural(num_turns, 'turn')} for {plural(len(messages), 'message')} of {', '.join(roles)}"
        raise UntrainableError(NOT_PROVEN, details)
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    speakers = [message["role"] for message in conversation["messages"] if message["role"] != "system"]
    usual = speakers[0] not in roles and speakers[-1] in roles
    weighted = any("train" in message or "weight" in message for message in messages)
    if num_turns == len(messages) and usual and not (suspicious or weighted or calls):
        return
    turns = [" ".join(turn.split()) for turn in read()]
    together = " ".join(turns)
    # Templates may leave out the thoughts of earlier turns.
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
    """Check that each call is written, by counting its name and its arguments in the assistant's turns.

    Args:
        calls: Calls in the form of `Message.tool_calls`.
        contents: Text beside the calls.
        together: Text of all turns of the assistant, with single spaces.

    Raises:
        UntrainableError: If a name or an argument occurs less often than in the calls and the contents.
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
    """Yield the keys and values of arguments as text, without empty and null ones."""
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
    """Return the ways in which templates may write a text: plainly, as JSON once or twice, and as Python does."""
    once = {json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)}
    found = {text, repr(text)[1:-1], *once, *(json.dumps(one)[1:-1] for one in once)}
    return set(map(_line, found)) | ({text.capitalize()} if text in ("true", "false") else set())


def _line(text: str) -> str:
    return " ".join(text.split())


def _runs(conversation: Conversation, roles: Sequence[str]) -> int:
    """Return the number of runs of neighbouring messages of the trained roles; answers of tools do not end a run."""
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
    """Check the trained text against the messages.

    Args:
        conversation: Its messages.
        roles: Trained roles.
        trained: Text of all trained tokens.
        quiet: True if thoughts are not trained.
        whole: True if all turns of these roles are trained.

    Raises:
        UntrainableError: If text of others would be trained; or, with `quiet`, a thought would be, or an answer after a
            thought would not be.
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
