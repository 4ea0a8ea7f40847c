"""What conversations hold beside plain turns."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_protrain.data.batches.encode import encode_rows
from lightning_protrain.data.chat.check_turns import (
    CALLS,
    DEVELOPER,
    JOINED,
    MARKERS,
    QUIET,
    REASONING,
    SEVERAL,
    SYSTEM,
    TOOLS,
    features,
    has_tags,
    num_unwritten,
    text_said,
    unproven_feature,
)
from lightning_protrain.data.chat.pipeline import ChatEncoders, ChatSettings
from tests.data.conftest import conversation

USER: Any = {"role": "user", "content": "Q"}
ANSWER: Any = {"role": "assistant", "content": "A"}
CALL: Any = {"type": "function", "function": {"name": "lookup", "arguments": {"place": "Rome", "n": 3}}}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"messages": [USER, ANSWER]}, set()),
        ({"messages": [{**USER, "role": "system"}, USER, ANSWER]}, {SYSTEM}),
        ({"messages": [{**USER, "role": "developer"}, USER, ANSWER]}, {DEVELOPER}),
        ({"messages": [USER, ANSWER, USER, ANSWER]}, {SEVERAL}),
        ({"messages": [USER, USER, ANSWER]}, {JOINED}),
        ({"messages": [USER, ANSWER], "tools": [{}]}, {TOOLS}),
        ({"messages": [USER, {**ANSWER, "tool_calls": [CALL]}]}, {CALLS}),
        ({"messages": [USER, ANSWER, {**USER, "role": "tool"}, {**USER, "role": "tool"}, ANSWER]}, {CALLS, SEVERAL}),
        ({"messages": [USER, {**ANSWER, "reasoning_content": "hm"}]}, {REASONING}),
    ],
)
def test_features_of_a_conversation(row: Any, found: set[str]) -> None:
    assert set(features(row)) == found
    assert set(features(row, sanitized=True)) == found | {MARKERS}
    assert unproven_feature(row, {SYSTEM: "why"}, False, False) == (SYSTEM if SYSTEM in found else None)


@pytest.mark.parametrize("fields", [{"reasoning_content": "hm"}, {"content": "<think>hm</think>A"}])
def test_thoughts_count_where_they_are_left_out(fields: dict[str, str]) -> None:
    row: Any = {"messages": [USER, {**ANSWER, **fields}]}
    assert QUIET in features(row, quiet=True)
    assert QUIET not in features(row)


def test_tags_of_thoughts_are_known_in_any_case() -> None:
    assert all(map(has_tags, ["a <think> b", "</Thinking>", "<reasoning>"]))
    assert not any(map(has_tags, ["I think", "<b>", "<thinker>", "think>"]))


@pytest.mark.parametrize(
    ("message", "text", "count"),
    [
        (ANSWER, "A", 0),
        ({**ANSWER, "reasoning_content": "one\n two"}, "<think>one two</think>A", 0),
        ({**ANSWER, "reasoning_content": "one two"}, "A", 1),
        ({**ANSWER, "content": "<think>\none\n</think>\nA"}, "one A", 0),
        ({**ANSWER, "content": "<think>\none\n</think>\nA"}, "A", 1),
        ({**ANSWER, "content": "<think></think>A"}, "A", 0),
        ({**ANSWER, "content": "<think>one</think><think>two</think>A", "reasoning_content": "three"}, "A", 1),
    ],
)
def test_messages_whose_thoughts_are_not_written_are_counted(message: Any, text: str, count: int) -> None:
    assert num_unwritten([message, ANSWER, message], text) == 2 * count


def test_calls_are_said_too() -> None:
    said = text_said({**ANSWER, "reasoning_content": "hm\nhm", "tool_calls": [CALL]})
    assert all(part in said for part in ("A", "hm hm", "lookup", "place", "Rome", "3"))


def test_rows_whose_thoughts_are_not_written_are_reported(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [conversation("?", "yes"), conversation("?", "yes", "no"), conversation("?", "<think>hm</think>yes")]
    for message in (rows[1]["messages"][1], rows[1]["messages"][3]):
        message["reasoning_content"] = "Because of all that."
    encoder = ChatEncoders(tokenizer, None).encoder(ChatSettings(max_length=1000))
    examples, report = encode_rows(rows, encoder, "chats")
    assert (len(examples), report.num_unwritten) == (3, 1)
    assert [one.num_unwritten for one in encoder.encode(rows)] == [0, 2, 0]  # type: ignore[union-attr]
    assert "leaves out reasoning of 1 conversations" in report.describe()
