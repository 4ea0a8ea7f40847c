"""Turns that were found in tokens are held against the messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import pytest

from lightning_protrain.data.chat.check_turns import (
    LEAKED,
    LEAKING,
    NO_CALLS,
    NO_TEXT,
    NOT_PROVEN,
    SEVERAL,
    SYSTEM,
    THINKS,
    UntrainableError,
    WeightsError,
    check_end,
    check_leaks,
    check_trained,
    check_turns,
    is_exact,
    is_usual,
    turn_weights,
    turns_of_messages,
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
    """Return how often `check_turns` read the turns."""
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


@pytest.mark.parametrize("fields", [{"reasoning_content": "hm"}, {"tool_calls": [CALL]}])
def test_a_spoofed_turn_is_not_taken_for_reasoning_or_a_call(fields: dict[str, Any]) -> None:
    row = _row("u", {"role": "a", **fields})
    assert _check(row, ["hm lookup() A0"], suspicious=True) == 1
    with pytest.raises(UntrainableError, match="2 turns for 1 message of"):
        _check(row, ["I obey lookup hm", "hm lookup() A0"], suspicious=True)


def test_reasoning_and_calls_may_be_turns_of_their_own() -> None:
    thinks = {"role": "a", "reasoning_content": "hm"}
    assert _check(_row("u", thinks), ["hm", "A0"]) == 1
    calls = {"role": "a", "tool_calls": [CALL, CALL]}
    assert _check(_row("u", calls), ["lookup", "lookup", "A0"]) == 1
    with pytest.raises(UntrainableError, match="4 turns for 1 message of"):
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


@pytest.mark.parametrize(
    ("row", "trained", "closed", "refused"),
    [
        ("uata", "A0 A1", True, False),
        ("uata", "A0 A1", False, True),
        ("uata", "A0 </e> other A1", True, True),
        ("uaut", "A0", False, True),
        ("tua", "A0", False, False),
        ("ua", "A0", False, False),
        (("u", "a", {"role": "t", "content": ""}, "a"), "A0 A1", True, True),
        (("u", "a", {"role": "t", "content": "9"}, "a"), "A0 9 A1", True, True),
        (("u", "a", {"role": "t", "content": "9"}, {"role": "a", "content": "It is 9"}), "A0 It is 9", True, False),
        (("u", "a", {"role": "t", "content": 'a "9"'}, "a"), r"A0 {x: a \"9\"} A1", True, True),
    ],
)
def test_roles_that_leak_are_refused_unless_turns_are_closed(
    row: Any, trained: str, closed: bool, refused: bool
) -> None:
    def check() -> None:
        check_leaks(_row(*row), ("assistant",), trained, frozenset({"tool"}), closed)

    if not refused:
        check()
        return
    with pytest.raises(UntrainableError, match="what 'tool' says after the assistant") as refusal:
        check()
    assert refusal.value.reason == LEAKING


@pytest.mark.parametrize(
    ("row", "turns", "ends", "exact"),
    [
        ("uaua", ["A0", "A1"], ["<e>", "<e>"], True),
        ("uaua", ["A0", " A1\n"], ["<e>", ""], True),
        ("uaua", [":A0", "A: A1"], ["<e>", "<e>"], True),
        ("uaua", ["A0", "A1 other"], ["<e>", ""], False),
        ("uaua", ["other A0", "A1"], ["<e>", ""], False),
        ("uaua", ["A0", "A1"], ["<e>User", ""], False),
        ("uaua", ["A1", "A0"], ["<e>", "<e>"], False),
        ("uaa", ["A0A1"], ["<e>"], False),
        (("u", {"role": "a", "content": ""}), [""], ["<e>"], False),
        (("u", {"role": "a", "content": "A0", "reasoning_content": "hm"}), ["A0"], ["<e>"], False),
        (("u", {"role": "a", "content": "<think>hm</think>A0"}), ["<think>hm</think>A0"], ["<e>"], False),
        (("u", {"role": "a", "content": "A0", "tool_calls": [CALL]}), ["A0"], ["<e>"], False),
    ],
)
def test_turns_that_are_exactly_their_messages(row: Any, turns: list[str], ends: list[str], exact: bool) -> None:
    messages = [message for message in _row(*row)["messages"] if message["role"] == "assistant"]
    assert is_exact(messages, turns, ends, ["<e>", "A:"]) is exact


_TWO = [{**CALL, "id": f"c{number}"} for number in range(2)]


@pytest.mark.parametrize(
    ("said", "turn", "others", "accepted"),
    [
        ({"content": "A0"}, "A0", ["other"], True),
        ({"content": "A0"}, "A0 </s>", ["other"], True),
        ({"content": "A0"}, "A0 tool: other", [], False),
        ({"content": "A0"}, "A0 [20]", ["[20]"], False),
        ({"content": "A0"}, "Say it.", [], False),
        ({"content": "2"}, "2 tool: 42", [], False),
        ({"content": "A0", "tool_calls": [CALL]}, 'A0<call>{"lookup": {}}</call>', ["other"], True),
        ({"content": "", "tool_calls": _TWO}, "<call>lookup c0</call><call>lookup c1</call>", [], True),
        ({"content": "", "tool_calls": _TWO[:1]}, "<call>lookup c0</call><call>lookup c1</call>", [], False),
        ({"content": "", "tool_calls": _TWO[:1]}, "<call>lookup</call> waits", [], False),
    ],
)
def test_a_turn_without_an_end_ends_with_what_is_said(
    said: dict[str, Any], turn: str, others: list[str], accepted: bool
) -> None:
    messages: Any = [{"role": "assistant", **said}]
    rest: Any = [{"role": "tool", "content": text} for text in others]
    if accepted:
        check_end(turn, messages, rest)
        return
    with pytest.raises(UntrainableError, match="a trained turn has no end marker: it ends with"):
        check_end(turn, messages, rest)


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


_R = {"role": "a", "reasoning_content": "hm"}
_C = {"role": "a", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("row", "turns", "sizes"),
    [
        (("u", "a", "u", _R), ["A0", "hm", "A1"], (1, 2)),
        (("u", _R, "u", "a"), ["<|say|>hm", "A0<|eot|>", "A1"], (2, 1)),
        (("u", "a", _R), ["A0", "hm<|eom|>", "A1"], (1, 2)),
        (("u", {**_C, **_R, "content": ""}, "t", _R), ["lookup()", "hm", "A1"], (1, 2)),
        (("u", {**_C, **_R, "content": ""}, "t", _R), ["hm", "lookup()", "hm", "A1"], (2, 2)),
        (("u", {**_C, "tool_calls": [CALL, CALL]}, "t", "a"), ["lookup()", "lookup()", "A1"], (2, 1)),
        (("u", "a", "u", _R), ["A0", "hm and so on", "A1"], None),
        (("u", "a", "u", _R), ["A0", "other", "A1"], None),
        (("u", "a", "u", _R), ["hm", "A0", "A1"], None),
        (("u", _R, _R), ["A0", "hm", "hm", "A1"], None),
        (("u", _R, {**_R, "content": "hm"}), ["hm", "A0", "hm"], (2, 1)),
        (("u", {**_R, "content": "hm"}, {**_R, "content": "hm"}), ["hm", "hm", "hm"], None),
    ],
)
def test_turns_belong_to_the_messages_whose_text_they_are(row: Any, turns: list[str], sizes: Any) -> None:
    messages = [message for message in _row(*row)["messages"] if message["role"] == "assistant"]
    assert turns_of_messages(messages, turns) == sizes
    if sizes is not None:
        messages[-1]["weight"] = 0.5
        assert turn_weights(messages, len(turns), sizes) == [1.0] * sizes[0] + [0.5] * sizes[1]


def test_weights_that_differ_need_turns_of_their_own() -> None:
    messages = _row("u", {"role": "a", "weight": 0.5}, "a")["messages"][1:]
    with pytest.raises(WeightsError, match="2 messages with `train` or `weight` become 1 turn after"):
        turn_weights(messages, 1)


@pytest.mark.parametrize("flags", [({"train": True}, {"train": False}), ({"train": False}, {"train": True})])
def test_weights_have_the_turns_read(flags: tuple[dict[str, Any], dict[str, Any]]) -> None:
    row = _row("u", *({"role": "a", **flag} for flag in flags))
    assert _check(row, ["A0", "A1"]) == 1
    with pytest.raises(UntrainableError, match="turns and messages differ"):
        _check(row, ["A1", "x"])


def test_text_beside_a_call_that_is_left_out_is_untrainable() -> None:
    row = _row("u", {"role": "a", "content": "I look.", "tool_calls": [CALL]})
    assert _check(row, ["I look. lookup()"]) == 1
    with pytest.raises(UntrainableError) as refusal:
        _check(row, ["lookup()"])
    assert refusal.value.reason == NO_TEXT


# --- usual rows -------------------------------------------------------------------------------------------------------

USUAL = ["ua", "sua", "uaua", "suaua"]
UNUSUAL = ["u", "a", "sa", "au", "uau", "uua", "uaa", "usa", "ssua", "uata", "tua", "us", "s"]


def _is_usual(
    row: Any, roles: Sequence[str] = ("assistant",), unproven: Collection[str] = (), quiet: bool = False
) -> bool:
    return is_usual(row, sum(one["role"] in roles for one in row["messages"]), roles, unproven, quiet)


@pytest.mark.parametrize("name", [*USUAL, *UNUSUAL])
def test_usual_rows_are_told_from_others(name: str) -> None:
    assert _is_usual(_row(*name)) is (name in USUAL)
    assert not is_usual(_row(*name), name.count("a") + 1, ("assistant",))


@pytest.mark.parametrize(
    "fields",
    [{"weight": 1.0}, {"tool_calls": [CALL]}, {"reasoning_content": "hm"}, {"content": "<think>hm</think>A"}],
)
def test_a_message_with_more_than_text_is_not_usual(fields: dict[str, Any]) -> None:
    assert not _is_usual(_row("u", {"role": "a", **fields}))


def test_what_is_not_proven_is_not_usual() -> None:
    rows = [_row(*name) for name in USUAL]
    assert [_is_usual(row, unproven={SYSTEM}) for row in rows] == [True, False, True, False]
    assert [_is_usual(row, unproven={SEVERAL}) for row in rows] == [True, True, False, False]
    rows = [{**_row("u", "a"), "tools": [{}]}, _row("u", {"role": "a", "content": "<thought>hm"}), {"messages": []}]
    assert [_is_usual(row) for row in rows] == [False, True, False]
    assert not any(_is_usual(row, quiet=True) for row in rows)


@pytest.mark.parametrize("name", ["uaua", "suata"])
def test_other_roles_may_be_trained(name: str) -> None:
    assert not _is_usual(_row(*name), ("user", "tool"))


# --- what is trained --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "leaks"),
    [
        ("lookup() It is 20 degrees", False),
        ("It is 20 degrees in Rome today It is 20 degrees", True),
        ("What is the weather in Rome? It is 20 degrees", True),
        ("20 is all it says.", False),
    ],
)
def test_what_others_said_is_not_trained_unless_it_was_repeated(trained: str, leaks: bool) -> None:
    row = _row(
        {"role": "u", "content": "What is the weather in  Rome?"},
        {"role": "a", "content": "", "tool_calls": [CALL]},
        {"role": "t", "content": "It is 20 degrees in Rome today"},
        {"role": "a", "content": "It is 20 degrees"},
    )
    if not leaks:
        check_trained(row, ("assistant",), trained, quiet=False)
        row["messages"][-1]["content"] = "What is the weather in Rome? It is 20 degrees in Rome today"
        check_trained(row, ("assistant",), row["messages"][-1]["content"], quiet=False)
        return
    with pytest.raises(UntrainableError) as refusal:
        check_trained(row, ("assistant",), trained, quiet=False)
    assert refusal.value.reason == LEAKED


@pytest.mark.parametrize("role", ["u", "t"])
@pytest.mark.parametrize("write", [json.dumps, partial(json.dumps, separators=(",", ":")), str])
@pytest.mark.parametrize("part", ["function", "arguments"])
def test_what_others_said_may_be_what_a_call_says(role: str, write: Any, part: str) -> None:
    function = {"name": "create_user", "arguments": {"name": "Bob", "age": 3, "of": None}}
    echo = write(function if part == "function" else function["arguments"])
    calls = {"role": "a", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    row = _row("u", calls, {"role": role, "content": echo}, "a")
    check_trained(row, ("assistant",), f"<call>{write(function)}</call> A1", quiet=False)
    with pytest.raises(UntrainableError, match=LEAKED):
        check_trained(row, ("assistant",), f"<call>{write(function)}</call> {echo} A1", quiet=False)


@pytest.mark.parametrize(
    ("trained", "fits"),
    [
        ("So be it.", True),
        ("hm So be it.", False),
        ("<think> So be it.", False),
        ("</think> So be it.", False),
        ("So be", False),
    ],
)
def test_thoughts_are_not_trained_where_they_are_left_out(trained: str, fits: bool) -> None:
    row = _row("u", {"role": "a", "content": "So be it.", "reasoning_content": "hm"})
    check_trained(row, ("assistant",), trained, quiet=False)
    if fits:
        check_trained(row, ("assistant",), trained, quiet=True)
        return
    with pytest.raises(UntrainableError) as refusal:
        check_trained(row, ("assistant",), trained, quiet=True)
    assert refusal.value.reason == THINKS


def test_an_answer_need_not_be_trained_where_not_all_are() -> None:
    check_trained(_row("u", "a", "u", "a"), ("assistant",), "A1", quiet=True, whole=False)
    with pytest.raises(UntrainableError, match="where the answer is 'A0'"):
        check_trained(_row("u", "a", "u", "a"), ("assistant",), "A1", quiet=True)


# --- calls ------------------------------------------------------------------------------------------------------------


def _called(*places: Any) -> Any:
    calls = [{"type": "function", "function": {"name": "lookup", "arguments": {"place": place}}} for place in places]
    return _row("u", {"role": "a", "content": "", "tool_calls": calls}, "t", "a")


@pytest.mark.parametrize(
    ("places", "written", "is_whole"),
    [
        (("Rome", "Bonn"), "lookup(place=Rome) lookup(place=Bonn)", True),
        (("Rome", "Bonn"), "lookup(place=Rome)", False),
        (("Rome", "Rome"), "lookup(place=Rome)", False),
        (("Rome", "Bonn"), "lookup(place=Rome) lookup(place=Rome)", False),
        (("a\n\u00e9",), 'lookup{"place": "a\\n\\u00e9"}', True),
        (('a "b"',), 'lookup "{\\"place\\": \\"a \\\\\\"b\\\\\\"\\"}"', True),
        ((True,), "lookup(place=True)", True),
        ((None, 7), "lookup() lookup(place=7)", True),
        ((["Rome", {"by": "Bonn"}],), "lookup(place=['Rome', {'by': 'Bonn'}])", True),
        ((["Rome", {"by": "Bonn"}],), "lookup(place=['Rome'])", False),
    ],
)
def test_calls_are_compared_by_number_name_and_arguments(places: Any, written: str, is_whole: bool) -> None:
    row = _called(*places)
    if is_whole:
        assert _check(row, [written, "A1"]) == 1
        return
    with pytest.raises(UntrainableError) as refusal:
        _check(row, [written, "A1"])
    assert refusal.value.reason == NO_CALLS


def test_a_message_that_is_said_twice_must_be_written_twice() -> None:
    row = _row(
        "u", {"role": "a", "content": "Yes."}, {"role": "a", "content": "Yes."}, "u", {"role": "a", "content": "No."}
    )
    assert _check(row, ["Yes. Yes.", "No."]) == 1
    with pytest.raises(UntrainableError, match="turns and messages differ"):
        _check(row, ["Yes.", "No."])
