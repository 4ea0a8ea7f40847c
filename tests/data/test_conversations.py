"""Reading, checking and dividing conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.data.conversations import check_conversation, fingerprint, read_jsonl, split_rows
from tests.data.conftest import conversation

GOOD = conversation("Why?", "Because.")


def _row(role: Any = "user", content: Any = "x") -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "y"}, {"role": role, "content": content}]}


def test_a_good_row_loses_its_other_columns() -> None:
    extra = {"messages": [{**message, "weight": 1} for message in GOOD["messages"]], "id": 7}
    assert check_conversation(extra, "row 0") == GOOD


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "row 3: no `messages` list"),
        ([], "row 3: no `messages` list"),
        ({"messages": []}, "row 3: no `messages` list"),
        ({"messages": "text"}, "row 3: no `messages` list"),
        (_row(role="bot"), "row 3, message 1: the role is 'bot'. Use one of system, user, assistant, tool"),
        (_row(role=None), "row 3, message 1: the role is None"),
        ({"messages": ["text"]}, "row 3, message 0: the role is None"),
        (_row(content=None), "row 3, message 1: the content is a NoneType"),
        (_row(content=["x"]), "row 3, message 1: the content is a list"),
        ({"messages": [{"role": "user", "content": "x"}]}, "row 3: no message of the assistant"),
    ],
)
def test_a_bad_row_is_named(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("(", r"\(")):
        check_conversation(row, "row 3")


def test_jsonl_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(conversation("\u00e4\u2028?", "\u00f6.")) + "\n")
    assert read_jsonl(path) == [GOOD, conversation("\u00e4\u2028?", "\u00f6.")]


@pytest.mark.parametrize(("line", "message"), [("{", "not valid JSON"), ('{"messages": 1}', "no `messages` list")])
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=f"chats.jsonl, line 3: {message}"):
        read_jsonl(path)


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


@given(count=st.integers(2, 60), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**32))
def test_a_split_is_a_partition_in_order(count: int, fraction: float, seed: int) -> None:
    rows = [conversation(str(i), "x") for i in range(count)]
    train, val = split_rows(rows, fraction, seed)
    numbers = [[int(row["messages"][0]["content"]) for row in part] for part in (train, val)]
    assert sorted(numbers[0] + numbers[1]) == list(range(count))
    assert all(part == sorted(part) and part for part in numbers)
    assert abs(len(val) - count * fraction) <= 1
    assert split_rows(rows, fraction, seed) == (train, val)


def test_another_seed_chooses_other_rows() -> None:
    rows = [conversation(str(i), "x") for i in range(100)]
    assert split_rows(rows, 0.2, 0)[1] != split_rows(rows, 0.2, 1)[1]


def test_one_row_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="1 conversations cannot be divided"):
        split_rows([GOOD], 0.5, 0)
