"""Hidden time of steps and transfers: known cases, the exact virtual clock, and agreement with counting by the tick."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import overlap
from benchmarks.overlap import WANTED, WANTED_RATIO, Case, Model, bound, main, measure
from benchmarks.transfers import Interval, covered_share, merge
from lightning_protrain.runtime.optim.async_step import Overlap

BACKWARD = Case(Overlap.BACKWARD, host=0.25, link=0.1, num_blocks=24)
CLIPPED = Case(Overlap.FORWARD, clipped=True, host=0.25, link=0.1, num_blocks=24)


@pytest.mark.slow
@pytest.mark.parametrize("case", [BACKWARD, CLIPPED], ids=["behind backward", "behind forward, clipped"])
def test_the_step_of_the_host_is_hidden(case: Case) -> None:
    row = measure(case)
    assert row.hidden_of_fitting is not None
    assert row.hidden_of_fitting >= WANTED[case.overlap]
    assert row.ratio <= WANTED_RATIO
    assert row.met
    assert row.busy.device == pytest.approx(row.computing, rel=1e-3)
    # The update, its norms and its scaling, where there are some.
    others = overlap.NORM + overlap.SCALE if case.clipped else 0.0
    assert row.busy.host == pytest.approx((1 + others) * case.host * row.computing, rel=0.01)


def test_the_bound_is_met_with_a_slower_link() -> None:
    assert measure(replace(BACKWARD, link=0.5)).ratio <= WANTED_RATIO


# --- the bound --------------------------------------------------------------------------------------------------------

# Two chunks of 3 seconds each, a third of it forward.
MODEL = Model(nbytes=(8, 8), weights=16, forward=(1.0, 1.0), backward=4.0)


@pytest.mark.parametrize(
    ("case", "seconds"),
    [
        (Case(), 6),
        (Case(link=2.0), 4 + 4),  # forward waits for uploads, backward hides them
        (Case(link=4.0), 8 + 8),  # so that both wait
        (Case(host=0.5), 6 + 3),
        (Case(Overlap.BACKWARD, host=0.5), 6),
        (Case(Overlap.BACKWARD, host=1.0), 2 + 6),
        (Case(Overlap.FORWARD, host=0.5), 4 + 3),
        (Case(Overlap.FORWARD, host=0.25), 6),
        (Case(clipped=True, host=1.0), 6 + 6 + 1.5 + 1.5),
        (Case(Overlap.FORWARD, clipped=True, host=1.0), 4 + 6 + 1.5),
        (Case(accumulate=3, host=1.0), 2 + 4 + 2 + 4.5 + 2 + 4.5 + 6),
        (Case(Overlap.BACKWARD, accumulate=3, host=1.0), 2 + 4 + 2 + 4.5 + 2 + 4.5 + 6),
        (Case(Overlap.FORWARD, accumulate=2, host=0.5), 3 + 4 + 2 + 4),
    ],
)
def test_the_bound(case: Case, seconds: float) -> None:
    assert bound(case, MODEL) == pytest.approx(seconds)


@pytest.mark.parametrize("way", list(Overlap))
def test_a_slower_host_or_link_never_lowers_the_bound(way: Overlap) -> None:
    cases = [Case(way, accumulate=2, host=host, link=0.5) for host in (0.0, 0.1, 1.0, 2.0)]
    bounds = [bound(case, MODEL) for case in cases] + [bound(replace(cases[-1], link=9.0), MODEL)]
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0]


# --- the program ------------------------------------------------------------------------------------------------------
def test_every_way_has_its_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    main(["--blocks=2", "--accumulate", "1", "2", "--host=0.5", "--link=0.5", f"--json={file}"])
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 2 * len(overlap.WAYS)
    for accumulate in (1, 2):
        for way, clipped in overlap.WAYS:
            assert f"| {way} | {'by norm' if clipped else 'no'} | {accumulate} | 0.5 | 0.5 | " in printed


TICKS = 30
spans = st.tuples(st.integers(0, TICKS), st.integers(0, TICKS)).map(lambda pair: (float(min(pair)), float(max(pair))))
many_spans = st.lists(spans, max_size=8)


def _ticks(intervals: list[Interval]) -> set[int]:
    return {tick for begin, end in intervals for tick in range(int(begin), int(end))}


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
