"""The scanner finds the turns that a conversation was put together from, and what the plain rules find in anything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_protrain.data.chat import turns
from lightning_protrain.data.chat.markers import ExclusionMarkers, Marker, Markers, RoleMarkers
from lightning_protrain.data.chat.turns import Spans, scan
from tests.data.cases import random_case
from tests.data.reference_scan import Turn, reference_scan
from tests.data.styles import ASSISTANT, STYLES, USER
from tests.data.turns import NEWLINE, NEWLINES, conversations, family, mark, role

TOKENS = st.integers(0, 4)
IDS = st.lists(TOKENS, max_size=30)


def marker_lists(max_size: int) -> st.SearchStrategy[tuple[Marker, ...]]:
    tails = st.one_of(st.just(frozenset[int]()), st.frozensets(TOKENS, min_size=1, max_size=2))
    marker = st.builds(Marker, st.just("m"), st.lists(TOKENS, min_size=1, max_size=3).map(tuple), tails)
    return st.lists(marker, min_size=0 if max_size < 2 else 1, max_size=max_size).map(tuple)


@st.composite
def any_markers(draw: st.DrawFn) -> Markers:
    """Markers of so few ids that they overlap, contain and repeat one another."""
    roles = [
        RoleMarkers(name, draw(marker_lists(2)), draw(marker_lists(1)), *draw(st.tuples(*[st.booleans()] * 3)))
        for name in ("assistant", "user", "tool")[: draw(st.integers(1, 3))]
    ]
    parts = [
        ExclusionMarkers(kind, draw(marker_lists(2)), draw(marker_lists(1)))
        for kind in draw(st.lists(st.sampled_from(["tool_output", "thinking", "scaffold"]), max_size=2))
    ]
    return Markers("any", tuple(roles), tuple(parts), draw(st.frozensets(TOKENS, max_size=1)))


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int] | None, list[int] | None]:
    """Ids with padding anywhere and segments, or without."""
    ids = draw(IDS)
    same_length = {"min_size": len(ids), "max_size": len(ids)}
    attended = draw(st.none() | st.lists(st.integers(0, 1), **same_length))
    segments = draw(st.none() | st.lists(st.integers(0, 1), **same_length))
    return ids, attended, segments


def as_turns(spans: Spans) -> list[Turn]:
    columns = [spans.start, spans.content, spans.end, spans.stop, spans.role, spans.complete]
    return [Turn(*values) for values in zip(*[column.tolist() for column in columns], strict=True)]


def array(ids: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.array(ids, dtype=np.int64)


def agree(markers: Markers, row: tuple[list[int], list[int] | None, list[int] | None]) -> None:
    ids, attended, segments = row
    assert as_turns(scan(ids, markers, attended, segments)) == reference_scan(ids, markers, attended, segments)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(any_markers(), rows())
def test_anything_is_scanned_as_by_the_rules(
    markers: Markers, row: tuple[list[int], list[int] | None, list[int] | None]
) -> None:
    agree(markers, row)


@pytest.mark.parametrize("seed", range(4))
def test_many_cases_are_scanned_as_by_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        case = random_case(rng)
        agree(case.markers, (case.ids, case.attended, case.segments))


PLANTED = {
    "overlapping starts are kept": ("without_overlap", lambda position, stop: slice(None)),
    "ends are looked for from the start": ("_next", lambda matches, position: _first_match(matches, position - 1)),
    "padding is ignored": ("lay_out", lambda ids, mask, segments: _lay_out(ids, None, segments)),
    "segments are ignored": ("lay_out", lambda ids, mask, segments: _lay_out(ids, mask, None)),
}
_first_match, _lay_out = turns._next, turns.lay_out


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, *PLANTED[bug])
    rng = random.Random(0)

    def compare() -> None:
        for _ in range(5000):
            case = random_case(rng)
            agree(case.markers, (case.ids, case.attended, case.segments))

    with pytest.raises((AssertionError, IndexError)):
        compare()


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_turns_are_those_that_were_written(name: str, data: st.DataObject) -> None:
    style = STYLES[name]
    conversation = data.draw(conversations(style))
    spans = scan(array(conversation.ids), style.markers)
    roles = [style.markers.roles[index].role for index in spans.role]
    found = zip(
        spans.start.tolist(), spans.content.tolist(), spans.end.tolist(), spans.stop.tolist(), roles, strict=True
    )
    assert list(found) == conversation.spans()


@settings(max_examples=30, deadline=None)
@given(any_markers(), st.integers(0, 4), st.integers(0, 9), st.data())
def test_a_batch_is_its_rows(markers: Markers, count: int, length: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(TOKENS, min_size=count * length, max_size=count * length))
    ids = array(values).reshape(count, length)
    expected = [
        turn._replace(**{name: getattr(turn, name) + row * length for name in ("start", "content", "end", "stop")})
        for row in range(count)
        for turn in as_turns(scan(ids[row], markers))
    ]
    assert as_turns(scan(ids, markers)) == expected


@settings(max_examples=30, deadline=None)
@given(any_markers(), rows())
def test_no_turn_crosses_a_border_or_another_turn(
    markers: Markers, row: tuple[list[int], list[int] | None, list[int] | None]
) -> None:
    ids, attended, segments = row
    spans = scan(ids, markers, attended, segments)
    for turn in as_turns(spans):
        assert turn.start < turn.content <= turn.end <= turn.stop
        covered = slice(turn.start, turn.stop)
        assert attended is None or all(attended[covered])
        assert segments is None or len(set(segments[covered])) == 1
    assert (spans.end[:-1] <= spans.start[1:]).all()


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_the_side_of_padding_does_not_matter(name: str, data: st.DataObject) -> None:
    style = STYLES[name]
    ids = data.draw(conversations(style)).ids
    # Padding with each id that means something.
    padding = data.draw(st.lists(st.sampled_from([token for token in range(100) if token]), min_size=1, max_size=4))
    alone = as_turns(scan(array(ids), style.markers))
    right = scan(array([*ids, *padding]), style.markers, [1] * len(ids) + [0] * len(padding))
    left = scan(array([*padding, *ids]), style.markers, [0] * len(padding) + [1] * len(ids))
    assert as_turns(right) == alone
    shift = len(padding)
    assert [turn[4:] for turn in as_turns(left)] == [turn[4:] for turn in alone]
    assert [[at - shift for at in turn[:4]] for turn in as_turns(left)] == [list(turn[:4]) for turn in alone]


CHATML = STYLES["chatml"].markers
TALK = [1, USER, NEWLINE, 200, 2, NEWLINE, 1, ASSISTANT, NEWLINES, 201, 2, NEWLINE]
TURNS = [Turn(0, 3, 4, 5, 1, True), Turn(6, 9, 10, 11, 2, True)]


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64", "uint16", "uint32"])
def test_any_integers(dtype: str) -> None:
    assert as_turns(scan(np.array(TALK, dtype=dtype), CHATML)) == TURNS


def test_views() -> None:
    ids = torch.tensor(TALK)
    assert as_turns(scan(ids.numpy(), CHATML)) == TURNS
    apart = np.stack([array(TALK)] * 3, axis=1)
    assert as_turns(scan(apart[:, 1], CHATML)) == TURNS
    assert len(scan(apart.T, CHATML).start) == 6
    frozen = array(TALK)
    frozen.flags.writeable = False
    assert as_turns(scan(frozen, CHATML)) == TURNS


@pytest.mark.parametrize("shape", [(0,), (0, 7), (3, 0), (0, 0)])
def test_nothing_at_all(shape: tuple[int, ...]) -> None:
    ids = np.empty(shape, dtype=np.int64)
    assert as_turns(scan(ids, CHATML, np.ones(shape), np.zeros(shape))) == []


def test_nothing_but_padding() -> None:
    assert as_turns(scan(TALK, CHATML, [0] * len(TALK))) == []


def test_ids_outside_of_the_vocabulary_of_the_markers() -> None:
    markers = family("zero", [role("assistant", [mark(0, 1)], [mark(0)])])
    assert as_turns(scan([-200, 1, 0, 1, -7, 10**9, 0], markers)) == [Turn(2, 4, 6, 7, 0, True)]
    tailed = family("zero", [role("assistant", [mark(0, tails=frozenset({0, 3}))], [mark(2)])])
    assert [turn.start for turn in as_turns(scan([0, -1, 0, 10**9, 0, 3, 2], tailed))] == [4]


@pytest.mark.parametrize(
    ("ids", "arguments", "said"),
    [
        ([1.5], {}, "`ids` must be integers of shape .*float64 of shape"),
        ([True], {}, "bool"),
        ([[[1]]], {}, r"\(1, 1, 1\)"),
        (1, {}, "of shape"),
        ([1, 2], {"attention_mask": [1]}, r"attention_mask must have the shape of ids, \(2,\), got \(1,\)"),
        ([[1, 2]], {"segments": [0, 0]}, r"segments must have the shape of ids, \(1, 2\), got \(2,\)"),
    ],
)
def test_what_cannot_be_scanned(ids: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scan(ids, CHATML, **arguments)
