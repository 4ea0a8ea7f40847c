"""Conversations are read, checked and divided; what they hold beside plain turns is found and said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import PreTrainedTokenizerFast

from lightning_protrain.data.batches.encode import encode_rows
from lightning_protrain.data.chat.check_turns import (
    CALLS,
    DEVELOPER,
    JOINED,
    MARKERS,
    QUIET,
    REASONING,
    RESULTS,
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
from lightning_protrain.data.conversation import Media, Samples, fingerprint, text_of
from lightning_protrain.data.sources.load import split_indices
from tests.data.conftest import conversation

GOOD = conversation("Why?", "Because.")


def test_the_fingerprint_changes_with_text_order_and_settings() -> None:
    other = conversation("Why?", "Because!")
    prints = [
        fingerprint([GOOD, other], size=1),
        fingerprint([other, GOOD], size=1),
        fingerprint([GOOD, GOOD], size=1),
        fingerprint([GOOD, other], size=2),
        fingerprint([GOOD], size=1),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint([GOOD, other], size=1) == prints[0]


def test_the_fingerprint_sees_images() -> None:
    red, blue = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "blue")
    sources = (b"1", b"2", "1.png", "2.png", red, blue, Samples(b"1", 1), Samples(b"1", 2), Samples(b"2", 1))
    prints = [fingerprint([{**GOOD, "media": [Media("image", source)]}]) for source in sources]
    prints.append(fingerprint([{**GOOD, "media": [Media("audio", b"1")]}]))
    assert len(set(prints)) == len(prints)
    assert fingerprint([{**GOOD, "media": [Media("image", red.copy())]}]) == prints[4]


@pytest.mark.parametrize(
    ("content", "text"),
    [("a", "a"), ("", ""), ([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}], "ab")],
)
def test_the_text_of_a_message(content: Any, text: str) -> None:
    assert text_of({"role": "user", "content": content}) == text


@given(count=st.integers(2, 60), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**32))
def test_a_split_is_a_partition_in_order(count: int, fraction: float, seed: int) -> None:
    parts = split_indices(count, fraction, seed)
    train, val = [part.tolist() for part in parts]
    assert sorted(train + val) == list(range(count))
    assert all(part == sorted(part) and part for part in (train, val))
    assert abs(len(val) - count * fraction) <= 1
    assert [part.tolist() for part in split_indices(count, fraction, seed)] == [train, val]
    assert all(part.dtype == np.int64 for part in parts)


def test_another_seed_chooses_other_rows() -> None:
    assert split_indices(100, 0.2, 0)[1].tolist() != split_indices(100, 0.2, 1)[1].tolist()


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
        ({"messages": [USER, ANSWER, {**USER, "role": "tool"}, {**USER, "role": "tool"}, ANSWER]}, {RESULTS, SEVERAL}),
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
