"""Markers are found where they are, in sets that do not disturb one another."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightning_protrain.data.chat import marker_trie
from lightning_protrain.data.chat.marker_trie import MarkerTrie, lay_out, without_overlap
from tests.data.cases import random_case
from tests.data.reference_scan import match, pieces
from tests.data.turns import mark


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", [1, 3, 1 << 18])
def test_sets_of_markers_are_found_as_by_the_rules(seed: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_trie, "_BLOCK", block)
    rng = random.Random(seed)
    for _ in range(100):
        case = random_case(rng)
        sets = [entry for role in case.markers.roles for entry in (role.starts, role.ends)]
        row = lay_out(case.ids, case.attended, case.segments)
        for markers, matches in zip(sets, MarkerTrie(sets).find(row), strict=True):
            expected = [
                (at, *found)
                for first, border in pieces(len(case.ids), case.attended, case.segments)
                for at in range(first, border)
                if (found := match(markers, case.ids, at, border))
            ]
            columns = (matches.position, matches.stop, matches.marker)
            assert list(zip(*[column.tolist() for column in columns], strict=True)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_intervals_without_overlap(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        position = sorted(rng.sample(range(40), rng.randint(0, 20)))
        stop = [at + rng.randint(1, 6) for at in position]
        expected: list[int] = []
        for index, at in enumerate(position):
            if not expected or at >= stop[expected[-1]]:
                expected.append(index)
        kept = without_overlap(np.array(position, dtype=np.int64), np.array(stop, dtype=np.int64))
        assert np.arange(len(position))[kept].tolist() == expected


def test_a_long_chain_of_overlaps() -> None:
    position = np.arange(100_001)
    assert (without_overlap(position, position + 2) == position[::2]).all()


def test_more_markers_than_a_byte_counts() -> None:
    markers = [mark(number, number + 1) for number in range(0, 2000, 2)]
    ids = [4, 5, 1998, 1999, 7, 8, 256, 257]
    found = MarkerTrie([markers, []]).find(lay_out(ids))
    assert found[0].position.tolist() == [0, 2, 6]
    assert found[0].marker.tolist() == [2, 999, 128]
    assert found[1].position.size == 0


def test_no_markers() -> None:
    assert MarkerTrie([]).find(lay_out([1, 2])) == []


def test_borders() -> None:
    row = lay_out([[1, 2, 3], [4, 5, 6]], [[0, 1, 1], [1, 1, 0]], [[0, 0, 1], [1, 1, 1]])
    assert row.borders.tolist() == [0, 1, 2, 3, 5, 6]
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.attended is not None
    assert row.attended.tolist() == [False, True, True, True, True, False]
    assert lay_out([[1, 2], [3, 4]]).borders.tolist() == [0, 2, 4]
    assert lay_out([]).borders.tolist() == [0]
