"""Turns that were found in tokens are held against the messages."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_protrain.data.agreement import (
    LEAKING,
    NO_CALLS,
    NOT_PROVEN,
    UntrainableError,
    WeightsError,
    check_turns,
    turn_weights,
)

CALL = {"type": "function", "function": {"name": "lookup", "arguments": {}}}


def _row(*speakers: str | dict[str, Any]) -> Any:
    """`u`, `a`, `t` and `s` for roles; the assistant says A0, A1, ..."""
    roles = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    messages: list[Any] = []
    for speaker in speakers:
        given = {"role": speaker} if isinstance(speaker, str) else dict(speaker)
        role = roles[given.pop("role")]
        number = sum(message["role"] == "assistant" for message in messages)
        messages.append({"role": role, "content": f"A{number}" if role == "assistant" else "other", **given})
    return {"messages": messages}


def _check(row: Any, turns: list[str], **more: Any) -> int:
    """How often the turns were read."""
    reads = []
    check_turns(row, ("assistant",), lambda: reads.append(1) or turns, len(turns), **more)
    return len(reads)


@pytest.mark.parametrize("row", ["ua", "sua", "uaua", "suaua", "uuaa"])
def test_the_usual_rows_are_not_read(row: str) -> None:
    turns = [f"A{number}" for number in range(row.count("a"))]
    assert _check(_row(*row), turns) == 0


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ("uaa", ["A0 A1"]),
        ("uata", ["A0 A1"]),
        ("au", ["A0"]),
        ("uau", ["A0"]),
        ("uat", ["A0"]),
    ],
)
def test_unusual_rows_are_read_and_agree(row: str, turns: list[str]) -> None:
    assert _check(_row(*row), turns) == 1


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ("ua", []),
        ("ua", ["A0", "evil"]),
        ("uaua", ["A0"]),
        ("uaua", ["A0", "x", "A1"]),
        ("uaa", ["A0"]),
        ("uaa", ["A1"]),
        ("aua", ["A1", "x"]),
        ("auau", ["A1", "other"]),
    ],
)
def test_what_does_not_agree_is_untrainable(row: str, turns: list[str]) -> None:
    with pytest.raises(UntrainableError, match="turns and messages differ") as refusal:
        _check(_row(*row), turns)
    assert refusal.value.reason == NOT_PROVEN


def test_suspicious_rows_are_read_one_by_one() -> None:
    assert _check(_row(*"uaua"), ["A0", "A1"], suspicious=True) == 1
    for turns in (["A1", "A0"], ["A0 A1"]):
        with pytest.raises(UntrainableError, match="turns and messages differ"):
            _check(_row(*"uaua"), turns, suspicious=True)


def test_reasoning_and_calls_may_be_turns_of_their_own() -> None:
    thinks = {"role": "a", "reasoning_content": "hm"}
    assert _check(_row("u", thinks), ["hm", "A0"]) == 1
    calls = {"role": "a", "tool_calls": [CALL, CALL]}
    assert _check(_row("u", calls), ["lookup", "lookup", "A0"]) == 1
    with pytest.raises(UntrainableError, match="4 turns for 1 messages"):
        _check(_row("u", calls), ["lookup", "lookup", "A0", "x"])


def test_a_call_that_is_left_out_is_untrainable() -> None:
    row = _row("u", {"role": "a", "content": "", "tool_calls": [CALL]}, "t", "a")
    assert _check(row, ["lookup()", "A1"]) == 1
    with pytest.raises(UntrainableError, match="'lookup' is called") as refusal:
        _check(row, ["", "A1"])
    assert refusal.value.reason == NO_CALLS


def test_thoughts_of_earlier_turns_may_be_left_out() -> None:
    row = _row("u", {"role": "a", "content": "<think>hm</think>A0"}, "a")
    assert _check(row, ["A0 A1"]) == 1


@pytest.mark.parametrize(("row", "refused"), [("uata", True), ("tua", False), ("ua", False), ("uaut", True)])
def test_roles_that_leak_are_refused_behind_the_assistant(row: str, refused: bool) -> None:
    turns = [f"A{number}" for number in range(row.count("a"))]
    if not refused:
        _check(_row(*row), turns, leaking=frozenset({"tool"}))
        return
    with pytest.raises(UntrainableError, match="what 'tool' says after the assistant") as refusal:
        _check(_row(*row), turns, leaking=frozenset({"tool"}))
    assert refusal.value.reason == LEAKING


@pytest.mark.parametrize(
    ("flags", "turns", "weights"),
    [
        ([{}, {}], 2, None),
        ([{}, {}], 1, None),
        ([{"train": False}, {}], 2, [0.0, 1.0]),
        ([{"weight": 0.5}, {"weight": 2.0, "train": True}], 2, [0.5, 2.0]),
        ([{"weight": 0.5}, {"weight": 0.5}], 1, [0.5]),
        ([{"train": False}, {"weight": 0.0}], 3, [0.0, 0.0, 0.0]),
    ],
)
def test_weights_of_turns(flags: list[dict[str, Any]], turns: int, weights: list[float] | None) -> None:
    messages = _row("u", *({"role": "a", **flag} for flag in flags))["messages"][1:]
    assert turn_weights(messages, turns) == weights


def test_weights_that_differ_need_turns_of_their_own() -> None:
    messages = _row("u", {"role": "a", "weight": 0.5}, "a")["messages"][1:]
    with pytest.raises(WeightsError, match="2 messages with `train` or `weight` are 1 turns"):
        turn_weights(messages, 1)


@pytest.mark.parametrize("flags", [({"train": True}, {"train": False}), ({"train": False}, {"train": True})])
def test_weights_have_the_turns_read(flags: tuple[dict[str, Any], dict[str, Any]]) -> None:
    row = _row("u", *({"role": "a", **flag} for flag in flags))
    assert _check(row, ["A0", "A1"]) == 1
    with pytest.raises(UntrainableError, match="turns and messages differ"):
        _check(row, ["A1", "x"])
