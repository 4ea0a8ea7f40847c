"""Holds the turns that were found in tokens against the messages that were rendered.

[Note: Turns and messages]
The mask comes from the tokens (`scanner`), the messages from the data. Each must account for the other: a template may
join neighbouring messages of the trained roles into one turn, answers to tools may stand within it, and reasoning and
calls may be turns of their own, but there are never more turns than these, nor fewer than runs of messages. A
conversation that breaks this is not trained on silently: its markers stand in its own text, or its template drops
messages. Where the numbers say too little, what is trained is also held against the text of the messages: where a
message holds a marker that is plain text, where messages have weights, where the numbers differ, and where the first
word is the assistant's or the last one somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from lightning_protrain.data.conversations import Conversation, Message, text_of

NOT_PROVEN = "turns and messages differ"
LEAKING = "the chat format does not tell who speaks"
NO_CALLS = "the chat template leaves out a tool call"


class WeightsError(ValueError):
    """Messages have weights of their own and share turns."""


class UntrainableError(ValueError):
    """A conversation that cannot be trained on as the options say; `reason` is the same for all of a kind."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(f"{reason}{f': {details}' if details else ''}")
        self.reason = reason


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
    calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
    speakers = [message["role"] for message in conversation["messages"] if message["role"] != "system"]
    usual = speakers[0] not in roles and speakers[-1] in roles
    weighted = any("train" in message or "weight" in message for message in messages)
    if num_turns == len(messages) and usual and not (suspicious or weighted or calls):
        return
    turns = [" ".join(turn.split()) for turn in read()]
    together = " ".join(turns)
    for name in calls:
        if name not in together:
            raise UntrainableError(NO_CALLS, f"{name!r} is called, and the assistant's turns are {together!r}")
    one_by_one = turns if num_turns == len(messages) else [together] * len(messages)
    for message, found in zip(messages, one_by_one, strict=True):
        # Templates may leave out what was thought in earlier turns.
        said = " ".join(text_of(message).rpartition("</think>")[2].split())
        if said not in found:
            raise UntrainableError(NOT_PROVEN, f"found {found!r} where the message is {said!r}")


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
