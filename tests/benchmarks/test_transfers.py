"""Hidden time of transfers: known cases, and agreement with counting by the tick."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.transfers import Interval, covered_share, merge

TICKS = 30
spans = st.tuples(st.integers(0, TICKS), st.integers(0, TICKS)).map(lambda pair: (float(min(pair)), float(max(pair))))
many_spans = st.lists(spans, max_size=8)


def _ticks(intervals: list[Interval]) -> set[int]:
    return {tick for begin, end in intervals for tick in range(int(begin), int(end))}


@pytest.mark.parametrize(
    ("copies", "kernels", "share"),
    [
        ([(0, 4)], [(0, 4)], 1.0),
        ([(0, 4)], [(1, 2), (3, 9)], 0.5),
        ([(0, 4)], [], 0.0),
        ([(0, 4), (2, 6)], [(5, 7)], 1 / 6),
        ([], [(0, 4)], None),
    ],
)
def test_covered_share(copies: list[Interval], kernels: list[Interval], share: float | None) -> None:
    assert covered_share(copies, kernels) == (share if share is None else pytest.approx(share))


@given(many_spans, many_spans)
def test_covered_share_counts_every_tick_once(copies: list[Interval], kernels: list[Interval]) -> None:
    copying = _ticks(copies)
    share = covered_share(copies, kernels)
    if copying:
        assert share == pytest.approx(len(copying & _ticks(kernels)) / len(copying))
    else:
        assert share is None


@given(many_spans)
def test_merge_keeps_the_time_and_leaves_gaps(intervals: list[Interval]) -> None:
    merged = merge(intervals)
    assert _ticks(merged) == _ticks(intervals)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))
