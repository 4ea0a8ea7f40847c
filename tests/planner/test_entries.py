"""Runs of chunks, and what is summed by position, against going through chunk by chunk."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightning_protrain.planner.columns import traffic
from lightning_protrain.planner.entries import Entries, Floats, Integers, Remembered, Runs, Uses, runs_of


@pytest.mark.parametrize(
    ("needs", "start", "runs"),
    [
        ([[0], [1, 2], [3]], 0, ([0, 1, 2, 3], [0, 1, 1, 2], [0, 1, 1, 2])),
        # A head that is called again, with something between.
        ([[0], [1], [1], [], [1]], 0, ([0, 1], [0, 1], [0, 4])),
        # Two chunks of one unit, and a later one that needs the last of them, too.
        ([[0, 1], [0, 1], [1, 2]], 0, ([0, 1, 2], [0, 0, 2], [1, 2, 2])),
        # A tied embedding: the rest is in order.
        ([[0], [1], [2], [0]], 1, ([1, 2], [1, 2], [1, 2])),
        # Only the second of the last two: the first one is out of order if it comes later.
        ([[0, 1], [1], [0]], 1, ([1], [0], [1])),
        ([[0, 1], [0]], 1, ([1], [0], [0])),
        ([[], []], 0, ([], [], [])),
        ([[1], [0]], 1, ([1], [0], [0])),
        ([[2], [1], [0]], 2, ([2], [0], [0])),
    ],
)
def test_runs_by_hand(needs: list[list[int]], start: int, runs: tuple[list[int], ...]) -> None:
    assert runs_of(needs) == (start, Runs(*runs))


def windows(source: random.Random) -> list[list[int]]:
    """Chunks that positions need, mostly in order, some again."""
    needs: list[list[int]] = []
    first = last = 0
    for _ in range(source.randint(1, 9)):
        kind = source.random()
        if kind < 0.2:
            needs.append([])
            continue
        if kind < 0.7:
            first, last = last, last + source.randint(1, 3)
        elif kind < 0.85:
            first = source.randint(first, max(first, last - 1))
        needs.append(list(range(first, last)))
    if source.random() < 0.3:
        needs.append([0])
    return needs


@pytest.mark.parametrize("seed", range(300))
def test_runs_say_what_comes(seed: int) -> None:
    source = random.Random(seed)
    needs = windows(source)
    count = max((chunk for needed in needs for chunk in needed), default=0) + 1
    sizes = [source.randint(1, 9) for _ in range(count)]
    start, runs = runs_of(needs)
    uses, back = (Uses(len(needs), runs, np.array(sizes), backward) for backward in (False, True))
    for persistent in range(start, count):
        left = [[chunk for chunk in needed if chunk >= persistent] for needed in needs]
        at = np.array([persistent])
        begin, end = uses.begin(at)[:, 0], uses.end[:, 0]
        for width in range(max(map(len, left)), count + 1):
            found = traffic(left, range(len(needs)), sizes, max(width, 1))
            assert found.nbytes == tuple((uses.sums[end] - uses.sums[begin]).tolist())
            waits = [
                uses.until[last - 1 - width] if first < last and last - 1 - width >= uses.first[persistent] else -1
                for first, last in zip(begin, end, strict=True)
            ]
            assert found.waits == tuple(waits) or width == 0
        # In backward, if nothing is there at its beginning, and all can stay.
        found = traffic([needed[::-1] for needed in left], reversed(range(len(needs))), sizes, count)
        assert found.nbytes == tuple((back.sums[back.end[:, 0]] - back.sums[back.begin(at)[:, 0]]).tolist())


@pytest.mark.parametrize("seed", range(60))
def test_sums_by_position(seed: int) -> None:
    source = np.random.default_rng(seed)
    positions, chunks = source.integers(0, 5, 12), source.integers(0, 7, 12)
    if seed % 2:  # In order.
        chunks = np.sort(chunks)
        positions = np.sort(positions)
    amounts = source.integers(0, 9, (2, 12))
    entries = Entries(6, 7, positions, chunks, amounts)
    for persistent in range(8):
        begin = entries.begin(np.array([persistent]))
        for index, row in enumerate(amounts):
            expected = [int(row[(positions == at) & (chunks >= persistent)].sum()) for at in range(6)]
            assert entries.amount(index, begin)[:, 0].tolist() == expected


def test_what_is_remembered_is_computed_once() -> None:
    source, asked = random.Random(0), []

    def compute(numbers: Integers) -> Floats:
        asked.extend(numbers.tolist())
        return np.stack((numbers * 0.5, numbers + 7.0))

    remembered = Remembered(compute)
    for _ in range(20):
        numbers = np.array([source.randrange(1 << 40) % 90 for _ in range(source.randint(0, 9))], dtype=np.int64)
        table, which = remembered.of(numbers)
        assert (table[:, which] == [numbers * 0.5, numbers + 7.0]).all()
    assert len(set(asked)) == len(asked) > 30


def test_no_more_is_remembered_than_may_be_kept() -> None:
    source, asked = random.Random(1), []

    def compute(numbers: Integers) -> Integers:
        asked.append(numbers.size)
        return np.stack((numbers * 3, numbers + 7))

    remembered = Remembered(compute, kept=20)
    for _ in range(60):
        numbers = np.array([source.randrange(90) for _ in range(source.randint(0, 12))], dtype=np.int64)
        table, which = remembered.of(numbers)
        assert (table[:, which] == [numbers * 3, numbers + 7]).all()
        assert table.shape[-1] <= 40
    assert sum(asked) > 90, "nothing was forgotten, so that nothing is shown"
    numbers = np.arange(30)  # More than may be kept at one time.
    table, which = remembered.of(numbers)
    assert (table[:, which] == [numbers * 3, numbers + 7]).all()
