"""Checks that the turns found in a conversation's tokens belong to its messages.

[Note: Turns and messages]
The loss mask is computed from turns, which are found in the tokens by their markers. A message that contains markers,
or a template that drops messages, would give a wrong mask. So the number of trained turns is compared with the messages
of trained roles. A template may join consecutive messages of one role into a turn, and write reasoning and tool calls
as turns of their own. So there must be at least as many turns as groups of consecutive messages, and at most as many as
messages, reasoning parts and tool calls together.

Numbers are not sufficient if a message contains a plain-text marker, messages have weights or tool calls, the numbers
differ, the assistant speaks first, or another role speaks last. Then the text of the turns is compared with the text of
the messages, too. If a message contains a plain-text marker, each message must be a turn. If the numbers differ, turns
get weights of messages only if the text of each turn tells to which message it belongs. In all rows that are checked,
trained text must not contain what other roles say.

A row may have a feature for which the chat format failed its check. Such a row is trained if each turn is exactly the
text of its message. A turn without an end marker is trained if nothing but tags and symbols follows its last words.

*Usual* rows are not checked: alternating plain messages of user and assistant, optionally after a system message, with
as many turns as messages.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from lightning_protrain.config import plural
from lightning_protrain.data.conversation import Conversation, Message, text_of

SEVERAL = "several turns"
SYSTEM = "a system message"
DEVELOPER = "a developer message"
JOINED = "consecutive messages of one role"
TOOLS = "offered tools"
CALLS = "tool calls"
RESULTS = "tool results"
REASONING = "reasoning"
QUIET = "leaving reasoning out"
MARKERS = "markers in messages"

THOUGHT_TAGS = ("think", "thinking", "thought", "thoughts", "reasoning")
"""Names of the tags that enclose reasoning in plain text, as in "<think>", in any chat format."""
THOUGHT_WORD = re.compile(r"think|thought|reason", re.IGNORECASE)
"""Matches the tags that enclose reasoning in any chat format."""
_TAG = re.compile(rf"</?(?:{'|'.join(THOUGHT_TAGS)})>", re.IGNORECASE)
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ANY_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


def has_tags(text: str) -> bool:
    """Return True if a text contains a tag such as "<think>"."""
    return _TAG.search(text) is not None


def features(conversation: Conversation, sanitized: bool = False, quiet: bool = False) -> Iterator[str]:
    """Yield the features of a conversation that `verify_family` verifies separately.

    Args:
        conversation: The conversation.
        sanitized: True if a message contains a marker or another control token.
        quiet: True if reasoning is not trained.
    """
    messages = conversation["messages"]
    roles = [message["role"] for message in messages]
    if "system" in roles:
        yield SYSTEM
    if "developer" in roles:
        yield DEVELOPER
    if roles.count("assistant") > 1:
        yield SEVERAL
    if any(role == other != "tool" for role, other in pairwise(roles)):
        yield JOINED
    if conversation.get("tools"):
        yield TOOLS
    if any("tool_calls" in message for message in messages):
        yield CALLS
    if "tool" in roles:
        yield RESULTS
    if any("reasoning_content" in message for message in messages):
        yield REASONING
    if quiet and any("reasoning_content" in message or has_tags(text_of(message)) for message in messages):
        yield QUIET
    if sanitized:
        yield MARKERS


def unproven_feature(conversation: Conversation, unproven: Collection[str], sanitized: bool, quiet: bool) -> str | None:
    """Return the first feature of a conversation that is in `unproven`; None if there is none."""
    return next((feature for feature in features(conversation, sanitized, quiet) if feature in unproven), None)


def thoughts(message: Message) -> list[str]:
    """Return the reasoning of a message and the text in its <think> tags, with whitespace normalized."""
    texts = [message["reasoning_content"]] if "reasoning_content" in message else []
    text = text_of(message)
    if "</think>" in text:
        texts += _THOUGHT.findall(text)
    return [line for line in (" ".join(thought.split()) for thought in texts) if line]


def is_thought(message: Message) -> bool:
    """Return True if a message has reasoning in <think> tags, but neither an answer nor a tool call."""
    _, tag, answer = text_of(message).rpartition("</think>")
    return bool(tag) and not answer.strip() and "tool_calls" not in message


def num_unwritten(messages: Sequence[Message], text: str) -> int:
    """Return the number of messages whose reasoning a chat template has left out of `text`."""
    thoughts_of = [thoughts(message) for message in messages]
    if not any(thoughts_of):
        return 0
    written = " ".join(text.split())
    return sum(any(thought not in written for thought in of_message) for of_message in thoughts_of)


def text_said(message: Message) -> str:
    """Return all text of a message, including reasoning and tool calls, with whitespace normalized."""
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
NO_TEXT = "the chat template leaves out the text beside a tool call"
LEAKED = "text of other roles would be trained"
THINKS = "its reasoning cannot be left out"
NO_WORDS = "only the end marker of a turn would be trained"
NO_END = "a trained turn has no end marker"
# Minimum length of another role's text, characters, for which finding it in trained text is an error. Shorter texts may
# occur by chance.
_TELLING = 12


class WeightsError(ValueError):
    """An error for messages with different weights that share a turn."""


class UntrainableError(ValueError):
    """An error for a conversation that cannot be trained on; `reason` is the same for all errors of a kind."""

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
    """Return True if a row is usual and has a turn for each message of trained roles, see [Note: Turns and messages].

    Args:
        conversation: The row.
        num_turns: Number of trained turns.
        roles: Trained roles.
        unproven: Features that could not be verified; rows with such features are not usual.
        quiet: True if reasoning is not trained; then rows with <think> tags are not usual.
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


def turn_weights(messages: Sequence[Message], num_turns: int, sizes: Sequence[int] | None = None) -> list[float] | None:
    """Return the weight of each trained turn; None if no message has a weight.

    Args:
        messages: Messages of trained roles.
        num_turns: Number of turns that the messages have after rendering.
        sizes: Number of turns of each message; None if it is not known.

    Raises:
        WeightsError: If the weights of messages differ, and it is not known which turns they have.
    """
    if not any("train" in message or "weight" in message for message in messages):
        return None
    weights = [float(message.get("weight", 1.0)) * bool(message.get("train", True)) for message in messages]
    if sizes is not None:
        return [weight for weight, size in zip(weights, sizes, strict=True) for _ in range(size)]
    if len(weights) == num_turns:
        return weights
    if len(set(weights)) > 1:
        raise WeightsError(
            f"{plural(len(weights), 'message')} with `train` or `weight` become "
            f"{plural(num_turns, 'turn')} after the chat template, so the "
            "weights cannot be assigned. Leave them out, or give consecutive messages the same weight."
        )
    return weights[:1] * num_turns


def turns_of_messages(messages: Sequence[Message], turns: Sequence[str]) -> tuple[int, ...] | None:
    """Return the number of turns of each message; None if it is not certain.

    A template may write reasoning and tool calls as turns of their own.

    Args:
        messages: Messages of trained roles.
        turns: Text of each trained turn, without its end marker.
    """
    lines = [*map(_line, turns)]
    # Map from the number of turns that the messages so far may have to at most two ways to divide these turns.
    divided: dict[int, list[tuple[int, ...]]] = {0: [()]}
    for message in messages:
        longer: dict[int, list[tuple[int, ...]]] = {}
        for begin, ways in divided.items():
            for size in range(1, min(_most_turns(message), len(lines) - begin) + 1):
                if _is_divided(message, lines[begin : begin + size]):
                    ends = longer.setdefault(begin + size, [])
                    ends += [(*way, size) for way in ways][: 2 - len(ends)]
        divided = longer
    ways = divided.get(len(lines), [])
    return ways[0] if len(ways) == 1 else None


def _most_turns(message: Message) -> int:
    return 1 + len(message.get("tool_calls") or ()) + ("reasoning_content" in message)


def _is_divided(message: Message, turns: Sequence[str]) -> bool:
    """Return True if turns are the calls and the answer of a message, after at most one turn of its reasoning."""
    answer = _line(text_of(message).rpartition("</think>")[2])
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    said = [any(name in turn for name in names) or (answer and _ends_with(turn, answer)) for turn in turns]
    is_whole = all(any(name in turn for turn in turns) for name in names) and any(answer in turn for turn in turns)
    return is_whole and all(said[1:]) and bool(said[0] or any(_ends_with(turns[0], text) for text in thoughts(message)))


def _ends_with(turn: str, text: str) -> bool:
    """Return True if nothing but tags and symbols follows a text in a turn."""
    _, found, rest = turn.rpartition(text)
    return bool(found) and not re.search(r"\w", _ANY_TAG.sub("", rest))


def is_exact(messages: Sequence[Message], turns: Sequence[str], ends: Sequence[str], markers: Collection[str]) -> bool:
    """Return True if each turn is the text of its message, without reasoning and tool calls, and nothing else.

    Args:
        messages: Messages of trained roles.
        turns: Text of each trained turn, without its end marker.
        ends: Text of the tokens of each turn's end marker; empty if it has none.
        markers: Text of all markers; a turn may begin with the last characters of one.
    """
    known = {"", *map(_line, markers)}
    if len(messages) != len(turns) or not known.issuperset(map(_line, ends)):
        return False
    for message, turn in zip(messages, map(_line, turns), strict=True):
        text = _line(text_of(message))
        if not text or {"tool_calls", "reasoning_content"} & message.keys() or has_tags(text):
            return False
        lead = turn.removesuffix(text).rstrip()
        if not turn.endswith(text) or not any(marker.endswith(lead) for marker in known):
            return False
    return True


def check_end(turn: str, messages: Sequence[Message], others: Sequence[Message]) -> None:
    """Check that a turn without an end marker ends with what its messages say.

    Args:
        turn: Text of the turn.
        messages: Messages that the turn may belong to.
        others: Messages of other roles.

    Raises:
        UntrainableError: If words other than tags, or text of `others`, follow the last words of the messages.
    """
    parts = Counter(_line(part) for message in messages for part in _parts(message))
    rest = _line(turn)
    for part, number in sorted(parts.items(), key=lambda entry: -len(entry[0])):
        for spelling in sorted(_spellings(part), key=len, reverse=True):
            times = min(number, rest.count(spelling))
            rest, number = rest.replace(spelling, "\0", times), number - times
    _, mark, rest = rest.rpartition("\0")
    words = re.search(r"\w", _ANY_TAG.sub("", rest))
    if not mark or words or any(text in rest for text in map(_line, map(text_of, others)) if text):
        raise UntrainableError(NO_END, f"it ends with {turn[-80:]!r}, which is more than its message says")


def _parts(message: Message) -> Iterator[str]:
    """Yield the texts of a message: answer, reasoning, and names, arguments and ids of tool calls."""
    texts = [*thoughts(message), text_of(message).rpartition("</think>")[2]]
    for call in message.get("tool_calls") or ():
        texts += [call["function"]["name"], *_leaves(call["function"]["arguments"]), str(call.get("id") or "")]
    yield from (text for text in texts if text.strip())


def check_turns(
    conversation: Conversation,
    roles: Sequence[str],
    read: Callable[[], list[str]],
    num_turns: int,
    suspicious: bool = False,
) -> None:
    """Check the trained turns of a conversation against its messages, see [Note: Turns and messages].

    Args:
        conversation: The conversation.
        roles: Trained roles.
        read: Returns the text of each trained turn; it is called only if numbers are not sufficient.
        num_turns: Number of trained turns.
        suspicious: True if a message contains a plain-text marker.

    Raises:
        UntrainableError: If turns and messages differ.
    """
    messages = [message for message in conversation["messages"] if message["role"] in roles]
    least, most = _runs(conversation, roles), sum(map(_most_turns, messages))
    if suspicious:
        least = most = len(messages)
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
    # Compare answers only: templates may leave out the reasoning of earlier turns.
    contents = [_line(text_of(message).rpartition("</think>")[2]) for message in messages]
    _check_calls(calls, (), together)
    one_by_one = turns if num_turns == len(messages) else [together] * len(messages)
    for message, content, spoken in zip(messages, contents, one_by_one, strict=True):
        expected = 1 if num_turns == len(messages) else sum(other.count(content) for other in contents if content)
        if content and spoken.count(content) < expected:
            reason = NO_TEXT if "tool_calls" in message else NOT_PROVEN
            raise UntrainableError(reason, f"found {spoken!r} where the message is {content!r}")
    _check_calls(calls, contents, together)


def _check_calls(calls: Sequence[Mapping[str, Any]], contents: Sequence[str], together: str) -> None:
    """Check that the assistant's turns contain the names and arguments of all tool calls.

    Args:
        calls: Calls in the form of `Message.tool_calls`.
        contents: Text of the messages without calls and reasoning.
        together: Text of the assistant's turns, with whitespace normalized.

    Raises:
        UntrainableError: If a name or argument occurs less often in the turns than in calls and contents together.
    """
    functions = [call["function"] for call in calls]
    texts = {
        text: function["name"] for function in functions for text in (function["name"], *_leaves(function["arguments"]))
    }
    parts = (_line(text) for function in functions for text in (function["name"], *_leaves(function["arguments"])))
    written = "\0".join((*contents, *parts))
    for text, name in texts.items():
        expected = written.count(_line(text))
        if sum(map(together.count, _spellings(text))) >= expected:
            continue
        what = "is called" if text == name else f"is an argument of {name!r}"
        times = "" if expected == 1 else f", {expected} times in all"
        raise UntrainableError(NO_CALLS, f"{text!r} {what}{times}, and the assistant's turns are {together!r}")


def _leaves(value: Any) -> Iterator[str]:
    """Yield the keys and values of tool call arguments as text; skip empty and null values."""
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
    """Return the forms in which templates may write a text: plain, JSON-encoded once or twice, or as `repr`."""
    once = {json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)}
    spellings = {text, repr(text)[1:-1], *once, *(json.dumps(encoded)[1:-1] for encoded in once)}
    return set(map(_line, spellings)) | ({text.capitalize()} if text in ("true", "false") else set())


def _line(text: str) -> str:
    return " ".join(text.split())


def _runs(conversation: Conversation, roles: Sequence[str]) -> int:
    """Return the number of groups of consecutive messages of trained roles; tool messages do not end a group."""
    within = {*roles, "tool"}
    runs = groupby(conversation["messages"], key=lambda message: message["role"] in within)
    return sum(part and any(message["role"] in roles for message in run) for part, run in runs)


def check_leaks(
    conversation: Conversation, roles: Sequence[str], trained: str, leaking: Collection[str], closed: bool
) -> None:
    """Check that messages of leaking roles, see `leaking_roles`, are not trained.

    Args:
        conversation: The conversation.
        roles: Trained roles.
        trained: Text of all trained tokens.
        leaking: Roles whose messages after one of the assistant may be trained.
        closed: True if each trained turn has its end marker.

    Raises:
        UntrainableError: If such a message may be trained.
    """
    has_spoken = False
    for message in conversation["messages"]:
        if has_spoken and message["role"] in leaking and message["role"] not in roles:
            texts = _spellings(text_of(message)) - {""}
            if not closed or not texts or _exceeds(trained, conversation, roles, texts):
                details = f"what {message['role']!r} says after the assistant would be trained"
                raise UntrainableError(LEAKING, details)
        has_spoken |= message["role"] == "assistant"


# Functions that write a tool call as templates do.
_CALL_WRITERS: tuple[Callable[[Any], str], ...] = (
    lambda call: " ".join(_strings(call)),
    functools.partial(json.dumps, ensure_ascii=False, default=str),
    functools.partial(json.dumps, ensure_ascii=False, default=str, separators=(",", ":")),
    repr,
)


def _exceeds(trained: str, conversation: Conversation, roles: Sequence[str], texts: Collection[str]) -> bool:
    """Return True if a text is trained more often than the trained roles say it, however calls are written."""
    messages = [message for message in conversation["messages"] if message["role"] in roles]
    answers = [text_said({**message, "tool_calls": []}) for message in messages]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    spoken = [_line(" ".join((*answers, *map(write, calls)))) for write in _CALL_WRITERS]
    trained_line = _line(trained)
    return any(trained_line.count(text) > max(form.count(text) for form in spoken) for text in texts)


def check_trained(
    conversation: Conversation, roles: Sequence[str], trained: str, quiet: bool, whole: bool = True
) -> None:
    """Check the trained text of a conversation against its messages.

    Args:
        conversation: The conversation.
        roles: Trained roles.
        trained: Text of all trained tokens.
        quiet: True if reasoning is not trained.
        whole: True if all turns of trained roles are trained.

    Raises:
        UntrainableError: If text of another role is trained; or if, with `quiet`, reasoning is trained or an answer is
            not.
    """
    trained_line = " ".join(trained.split())
    messages = [message for message in conversation["messages"] if message["role"] in roles]
    for message in conversation["messages"]:
        text = " ".join(text_of(message).split())
        is_other = message["role"] not in roles and len(text) >= _TELLING and text in trained_line
        if is_other and _exceeds(trained, conversation, roles, [text]):
            raise UntrainableError(LEAKED, f"{message['role']!r} says {text[:80]!r}")
    if not quiet:
        return
    if has_tags(trained_line):
        raise UntrainableError(THINKS, f"{trained_line[:200]!r} has a tag of reasoning; train_thinking is false")
    parts = [" ".join(text_of(message).rpartition("</think>")[2].split()) for message in messages]
    for part in parts if whole else ():
        if part not in trained_line:
            raise UntrainableError(
                THINKS, f"found {trained_line!r} where the answer is {part!r}; train_thinking is false"
            )
    calls = [
        text_said({"role": "", "content": "", "tool_calls": message["tool_calls"]})
        for message in messages
        if "tool_calls" in message
    ]
    answers = " ".join((*parts, *calls))
    for thought in (thought for message in messages for thought in thoughts(message)):
        if trained_line.count(thought) > answers.count(thought):
            raise UntrainableError(THINKS, f"{thought[:80]!r} would be trained; train_thinking is false")
