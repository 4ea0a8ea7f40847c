"""The scanner finds the turns that a conversation was put together from, and what the plain rules find in anything."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_protrain.data.chat import turns
from lightning_protrain.data.chat.marker_search import TokenRows, lay_out
from lightning_protrain.data.chat.markers import Markers
from lightning_protrain.data.chat.turns import Spans, scan
from tests.data.cases import random_case
from tests.data.reference_scan import Turn, reference_scan
from tests.data.styles import STYLES
from tests.data.turns import conversations, family, mark, role


def as_turns(spans: Spans) -> list[Turn]:
    columns = [spans.start, spans.content, spans.end, spans.stop, spans.role, spans.complete]
    return [Turn(*values) for values in zip(*[column.tolist() for column in columns], strict=True)]


def agree(markers: Markers, rows: Sequence[Sequence[int]]) -> None:
    assert as_turns(scan(lay_out(rows), markers)) == reference_scan(rows, markers)


@pytest.mark.parametrize("seed", range(6))
def test_many_cases_are_scanned_as_by_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        case = random_case(rng)
        agree(case.markers, case.rows)
        spans = scan(lay_out(case.rows), case.markers)
        assert (spans.end[:-1] <= spans.start[1:]).all()


_first_match = turns._next
PLANTED = {
    "overlapping starts are kept": (turns, "without_overlap", lambda position, stop: slice(None)),
    "ends are looked for from the start": (
        turns,
        "_next",
        lambda matches, position: _first_match(matches, position - 1),
    ),
    "borders are ignored": (TokenRows, "limits", lambda rows, position: np.full(position.size, rows.ids.size)),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[bug])
    rng = random.Random(0)

    def compare() -> None:
        for _ in range(5000):
            case = random_case(rng)
            agree(case.markers, case.rows)

    with pytest.raises((AssertionError, IndexError)):
        compare()


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_turns_are_those_that_were_written(name: str, data: st.DataObject) -> None:
    style = STYLES[name]
    conversation = data.draw(conversations(style))
    spans = scan(lay_out([conversation.ids]), style.markers)
    roles = [style.markers.roles[index].role for index in spans.role]
    found = zip(
        spans.start.tolist(), spans.content.tolist(), spans.end.tolist(), spans.stop.tolist(), roles, strict=True
    )
    assert list(found) == conversation.spans()


CHATML = STYLES["chatml"].markers


@pytest.mark.parametrize("rows", [[[]], [[], []], [[], [7], []]])
def test_nothing_at_all(rows: list[list[int]]) -> None:
    assert as_turns(scan(lay_out(rows), CHATML)) == []


def test_ids_outside_of_the_vocabulary_of_the_markers() -> None:
    markers = family("zero", [role("assistant", [mark(0, 1)], [mark(0)])])
    rows = lay_out([[-200, 1, 0, 1, -7, 10**9, 0]])
    assert as_turns(scan(rows, markers)) == [Turn(2, 4, 6, 7, 0, True)]
    tailed = family("zero", [role("assistant", [mark(0, tails=frozenset({0, 3}))], [mark(2)])])
    assert [turn.start for turn in as_turns(scan(lay_out([[0, -1, 0, 10**9, 0, 3, 2, 0], [0]]), tailed))] == [4]
