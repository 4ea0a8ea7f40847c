from __future__ import annotations

from itertools import pairwise
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.planner.policies import ALIKE, checkpoint_order, lay_out, spread, swap_interval, swap_places


@pytest.mark.parametrize(
    ("swapped", "num_checkpoint", "letters"),
    [((), 0, "KKKKKK"), ((0, 3), 2, "SCCSKK"), ((0, 2, 4), 3, "SCSCSC"), ((1,), 1, "CSKKKK"), ((), 6, "CCCCCC")],
)
def test_layout(swapped: tuple[int, ...], num_checkpoint: int, letters: str) -> None:
    assert "".join(policy.name[0] for policy in lay_out(range(6), swapped, num_checkpoint)) == letters


@pytest.mark.parametrize(
    ("swapped", "num_checkpoint", "letters"),
    [((), 2, "KCKCKK"), ((0, 3), 2, "SCKSKC"), ((1, 3), 3, "CSCSKC"), ((), 0, "KKKKKK"), ((5,), 5, "CCCCCS")],
)
def test_layout_in_another_order(swapped: tuple[int, ...], num_checkpoint: int, letters: str) -> None:
    order = (1, 3, 5, 0, 2, 4)
    assert "".join(policy.name[0] for policy in lay_out(order, swapped, num_checkpoint)) == letters


@pytest.mark.parametrize(
    ("seconds", "nbytes", "order"),
    [
        ((1.0, 1.0, 1.0), (8, 8, 8), (0, 1, 2)),
        ((1.0, 0.99, 0.98), (8, 8, 8), (0, 1, 2)),  # alike
        ((1.0, 0.5, 1.0, 0.5), (8, 8, 8, 8), (1, 3, 0, 2)),
        ((1.0, 0.5, 1.0, 0.5), (8, 4, 16, 4), (2, 0, 1, 3)),
        ((1.0, 1.0, 0.0), (0, 8, -8), (1, 0, 2)),  # who frees nothing comes last
        ((0.0, 1.0, 0.0), (8, 8, 8), (0, 2, 1)),
        ((), (), ()),
    ],
)
def test_cheapest_bytes_first(seconds: tuple[float, ...], nbytes: tuple[int, ...], order: tuple[int, ...]) -> None:
    assert checkpoint_order(seconds, nbytes) == order


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.integers(1, 1 << 40)), max_size=20))
def test_who_comes_first_is_cheaper_or_alike_and_before(blocks: list[tuple[float, int]]) -> None:
    order = checkpoint_order([seconds for seconds, _ in blocks], [nbytes for _, nbytes in blocks])
    assert sorted(order) == list(range(len(blocks)))
    costs = [seconds / nbytes for seconds, nbytes in blocks]
    steps = sorted(costs)
    for one, other in pairwise(order):
        between = [cost for cost in steps if min(costs[one], costs[other]) <= cost <= max(costs[one], costs[other])]
        alike = all(log(high / low) <= log(ALIKE) + 1e-9 for low, high in pairwise(between))
        assert one < other if alike else costs[one] < costs[other]


@given(
    st.lists(st.booleans(), min_size=1, max_size=30).flatmap(
        lambda able: st.tuples(st.just(able), st.permutations(range(len(able))))
    ),
    st.integers(1, 30),
    st.integers(0, 30),
)
def test_one_more_changes_one_block_from_keep(
    blocks: tuple[list[bool], list[int]], interval: int, num_swap: int
) -> None:
    able, order = blocks
    places = swap_places(able, interval)
    swapped = places[:num_swap]
    count = len(able) - len(swapped)
    for num_checkpoint in range(count):
        one, more = lay_out(order, swapped, num_checkpoint), lay_out(order, swapped, num_checkpoint + 1)
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
