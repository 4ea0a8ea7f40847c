from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.planner.policies import lay_out, spread, swap_interval, swap_places


@pytest.mark.parametrize(
    ("swapped", "num_checkpoint", "letters"),
    [((), 0, "KKKKKK"), ((0, 3), 2, "SCCSKK"), ((0, 2, 4), 3, "SCSCSC"), ((1,), 1, "CSKKKK"), ((), 6, "CCCCCC")],
)
def test_layout(swapped: tuple[int, ...], num_checkpoint: int, letters: str) -> None:
    assert "".join(policy.name[0] for policy in lay_out(6, swapped, num_checkpoint)) == letters


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 30), st.integers(0, 30))
def test_one_more_changes_one_block_from_keep(able: list[bool], interval: int, num_swap: int) -> None:
    places = swap_places(able, interval)
    swapped = places[:num_swap]
    count = len(able) - len(swapped)
    for num_checkpoint in range(count):
        one, more = lay_out(len(able), swapped, num_checkpoint), lay_out(len(able), swapped, num_checkpoint + 1)
        changed = [pair for pair in zip(one, more, strict=True) if pair[0] is not pair[1]]
        assert changed == [(BlockPolicy.KEEP, BlockPolicy.CHECKPOINT)]


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 30), st.integers(1, 30))
def test_as_many_places_as_are_pinned(able: list[bool], interval: int, pinned: int) -> None:
    free, places = swap_places(able, interval), swap_places(able, interval, pinned)
    assert all(able[place] for place in (*free, *places))
    assert all(later - place >= interval for place, later in pairwise(free))
    assert len(places) == min(pinned, sum(able))
    assert swap_places(able, interval, len(free) or None) == free


def test_interval_hides_the_heaviest_transfer() -> None:
    assert swap_interval([3.0, 1.0, 0.0, 0.0], [1.0] * 4) == 3
    assert swap_interval([9.0, 1.0, 0.0, 0.0], [1.0] * 4) == 4
    assert swap_interval([0.5, 0.5], [1.0, 1.0]) == 1
    assert swap_interval([], []) == 1


@given(st.integers(1, 20), st.integers(0, 20))
def test_spread_over_the_first_blocks(num_swap: int, num_checkpoint: int) -> None:
    places = spread(num_swap, num_swap + num_checkpoint)
    assert len(set(places)) == num_swap
    assert places[0] == 0
    assert places[-1] < num_swap + num_checkpoint
