"""Orders: where the next call of a unit is expected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.runtime.block import Block, BlockOrder

UNITS = [Block(str(index), nn.Identity(), (index,), (), BlockPolicy.KEEP) for index in range(4)]
RUNS = st.lists(st.sampled_from(UNITS), max_size=8)


@given(forward=RUNS, unit=st.sampled_from(UNITS), position=st.integers(0, 9))
def test_behind_is_the_next_place_of_the_unit(forward: list[Block], unit: Block, position: int) -> None:
    expected = next((at + 1 for at in range(position, len(forward)) if forward[at] is unit), position)
    assert BlockOrder(forward, []).behind(unit, position) == expected


@given(forward=RUNS, backward=RUNS, others=RUNS)
def test_an_order_is_known_by_its_units(forward: list[Block], backward: list[Block], others: list[Block]) -> None:
    order = BlockOrder(forward, backward)
    assert order.is_of(list(forward), list(backward))
    assert order.is_of(others, backward) is (others == forward)
    assert order.is_of(forward, others) is (others == backward)


def test_an_order_keeps_what_it_was_given() -> None:
    forward = UNITS[:2]
    order = BlockOrder(forward, [])
    forward.append(UNITS[2])
    assert order.forward == UNITS[:2]


@pytest.mark.parametrize("reads", [True, False])
def test_a_backward_that_reads_no_weights_needs_none(reads: bool) -> None:
    unit = Block("table", nn.Identity(), (7,), (), BlockPolicy.KEEP, backward_reads=reads)
    assert list(BlockOrder([unit], [unit]).timeline.upcoming(0)) == [(0, 7), (1, 7)][: 1 + reads]
