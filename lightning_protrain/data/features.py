"""What conversations may hold beside plain turns; a chat format may be proven for some of it and not for the rest."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_protrain.data.conversations import Conversation, Message, text_of

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


def said_by(message: Message) -> str:
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
