"""Policies of blocks, and the knobs that decide about them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.config import Knobs
from lightning_protrain.planner.packing import (
    ALIKE,
    Recomputation,
    by_place,
    lay_out,
    order_steps,
    spread,
    swap_interval,
    swap_places,
)
from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.planner.search import NoFeasiblePlan, search
from tests.planner.problems import random_problem

KEEP, SELECTIVE, CHECKPOINT, SWAP = BlockPolicy
LETTERS = {KEEP: "K", SELECTIVE: "L", CHECKPOINT: "C", SWAP: "S"}
# What a block becomes, by one of `LETTERS`.
BLOCKS = st.builds(
    Recomputation,
    seconds=st.floats(0.0, 1e3),
    nbytes=st.integers(-10, 1 << 40).map(float),
    selective_seconds=st.floats(0.0, 1e3),
    selective_nbytes=st.integers(-10, 1 << 40).map(float),
)


def letters(policies: Iterable[BlockPolicy]) -> str:
    return "".join(LETTERS[policy] for policy in policies)


@pytest.mark.parametrize(
    ("swapped", "num_checkpoint", "found"),
    [((), 0, "KKKKKK"), ((0, 3), 2, "SCCSKK"), ((0, 2, 4), 3, "SCSCSC"), ((1,), 1, "CSKKKK"), ((), 6, "CCCCCC")],
)
def test_layout_by_place(swapped: tuple[int, ...], num_checkpoint: int, found: str) -> None:
    assert letters(lay_out(6, by_place(6), swapped, num_checkpoint)) == found


@pytest.mark.parametrize(
    ("swapped", "num_steps", "found"),
    [
        ((), 0, "KKK"),
        ((), 2, "LKL"),
        ((), 3, "LKC"),
        ((), 4, "LCC"),
        ((), 5, "CCC"),
        ((2,), 1, "LKS"),
        ((0,), 2, "SKC"),
    ],
)
def test_layout_in_steps(swapped: tuple[int, ...], num_steps: int, found: str) -> None:
    steps = ((2, SELECTIVE), (0, SELECTIVE), (2, CHECKPOINT), (1, CHECKPOINT), (0, CHECKPOINT))
    assert letters(lay_out(3, steps, swapped, num_steps)) == found


@pytest.mark.parametrize(
    ("blocks", "order"),
    [
        ([(1.0, 8)] * 3, "0C 1C 2C"),
        ([(1.0, 8), (0.99, 8), (0.98, 8)], "0C 1C 2C"),  # alike
        ([(1.0, 8), (0.5, 8), (1.0, 8), (0.5, 8)], "1C 3C 0C 2C"),
        ([(1.0, 8), (0.5, 4), (1.0, 16), (0.5, 4)], "2C 0C 1C 3C"),
        ([(1.0, 0), (1.0, 8), (0.0, -8)], "1C 0C 2C"),  # who frees nothing comes last
        ([(1.0, 8, 0.1, 4)] * 2, "0L 1L 0C 1C"),
        ([(1.0, 8, 0.1, 4), (4.0, 8, 1.0, 4)], "0L 0C 1L 1C"),
        ([(1.0, 8, 0.6, 4)], "0C"),  # more for the first half than for the second
        ([(1.0, 8, 0.5, 4)], "0C"),  # as much: one step does
        ([(1.0, 8, 0.1, 0)], "0C"),
        ([(1.0, 8, 0.1, 8)], "0C"),
        ([], ""),
    ],
)
def test_cheapest_bytes_first(blocks: list[tuple[float, ...]], order: str) -> None:
    steps = order_steps([Recomputation(*block) for block in blocks])
    assert " ".join(f"{index}{LETTERS[policy]}" for index, policy in steps) == order


@given(st.lists(BLOCKS, max_size=20))
def test_every_block_ends_checkpointed_and_never_gets_back_what_it_gave_up(blocks: list[Recomputation]) -> None:
    steps = order_steps(blocks)
    of_each = [[policy for at, policy in steps if at == index] for index in range(len(blocks))]
    assert all(policies in ([CHECKPOINT], [SELECTIVE, CHECKPOINT]) for policies in of_each)


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.integers(1, 1 << 40)), max_size=20))
def test_an_earlier_step_costs_less_or_about_the_same_and_is_of_an_earlier_block(
    blocks: list[tuple[float, int]],
) -> None:
    order = [index for index, _ in order_steps([Recomputation(*block) for block in blocks])]
    assert sorted(order) == list(range(len(blocks)))
    costs = [seconds / nbytes for seconds, nbytes in blocks]
    for one, other in pairwise(order):
        between = sorted(
            cost for cost in costs if min(costs[one], costs[other]) <= cost <= max(costs[one], costs[other])
        )
        alike = all(high <= ALIKE * low for low, high in pairwise(between))
        assert one < other if alike else costs[one] < costs[other]


@given(st.lists(st.tuples(st.booleans(), BLOCKS), min_size=1, max_size=30), st.integers(1, 30), st.integers(0, 30))
def test_one_more_step_changes_one_block(
    blocks: list[tuple[bool, Recomputation]], interval: int, num_swap: int
) -> None:
    able = [can for can, _ in blocks]
    steps = order_steps([block for _, block in blocks])
    swapped = swap_places(able, interval)[:num_swap]
    count = sum(index not in swapped for index, _ in steps)
    for num_steps in range(count):
        one, more = (lay_out(len(able), steps, swapped, number) for number in (num_steps, num_steps + 1))
        changed = [pair for pair in zip(one, more, strict=True) if pair[0] is not pair[1]]
        assert changed in ([(KEEP, SELECTIVE)], [(KEEP, CHECKPOINT)], [(SELECTIVE, CHECKPOINT)])
    assert KEEP not in lay_out(len(able), steps, swapped, count)


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
    assert swap_interval([0.0, 0.0, 0.0], [1.0] * 3) == 3


@given(st.integers(1, 20), st.integers(0, 20))
def test_spread_over_the_first_blocks(num_swap: int, num_checkpoint: int) -> None:
    places = spread(num_swap, num_swap + num_checkpoint)
    assert len(set(places)) == num_swap
    assert places[0] == 0
    assert places[-1] < num_swap + num_checkpoint


@pytest.mark.parametrize("name", [field.name for field in fields(Knobs)])
@pytest.mark.parametrize("value", [True, False, -1, 1.0, "2", [1]])
def test_knobs_refuse_values(name: str, value: object) -> None:
    least = 1 if name == "chunk_bytes" else 0
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: give an integer of at least {least}")):
        Knobs(**{name: value})  # type: ignore[arg-type]


def test_knobs_that_are_given() -> None:
    assert Knobs().given == ()
    assert Knobs(num_chunk_buffers=0, chunk_bytes=1).given == ("num_chunk_buffers", "chunk_bytes")
    with pytest.raises(ValueError, match="chunk_bytes=0: give an integer of at least 1"):
        Knobs(chunk_bytes=0)
    assert Knobs(num_swap_blocks=2).given == ("num_swap_blocks",)


def test_a_plan_beside_knobs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plan=a Plan .* ignore num_chunk_buffers=3, chunk_bytes=9"):
        Knobs(num_chunk_buffers=3, chunk_bytes=9).refuse("a Plan")
    forbidden = r"num_swap_blocks=1, num_keep_offloaded_blocks=0 \(or forbid_keep_offload_with_fused_lora=True\)\. "
    with pytest.raises(ValueError, match=forbidden):
        Knobs(num_swap_blocks=1).without_keep_offloaded().refuse("a Plan")


def test_to_forbid_kept_blocks_with_offloaded_chunks_pins_their_number() -> None:
    knobs = Knobs(num_persistent_chunks=2).without_keep_offloaded()
    assert knobs == Knobs(num_persistent_chunks=2, num_keep_offloaded_blocks=0)
    assert knobs.without_keep_offloaded() == knobs
    assert knobs.forbids_alone == ("num_keep_offloaded_blocks",)
    assert Knobs().forbids_alone == Knobs(num_keep_offloaded_blocks=1).forbids_alone == ()
    with pytest.raises(ValueError, match="contradicts num_keep_offloaded_blocks=3"):
        Knobs(num_keep_offloaded_blocks=3).without_keep_offloaded()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_persistent_chunks": 99}, "num_persistent_chunks=99: this model has"),
        ({"num_checkpoint_blocks": 99}, "num_checkpoint_blocks=99: this model has"),
        ({"num_swap_blocks": 99}, "num_swap_blocks=99: this model has"),
        ({"num_chunk_buffers": 0, "num_persistent_chunks": 0}, "num_chunk_buffers=0: this model needs at least"),
        ({"num_keep_offloaded_blocks": 99}, "num_keep_offloaded_blocks=99: at most"),
        (
            {
                "num_keep_offloaded_blocks": 1,
                "num_checkpoint_blocks": 0,
                "num_swap_blocks": 0,
                "num_persistent_chunks": 0,
            },
            "num_keep_offloaded_blocks=1 contradicts num_persistent_chunks=0 and num_swap_blocks=0",
        ),
    ],
)
def test_knobs_that_contradict(knobs: dict[str, int], message: str) -> None:
    problem = next(p for p in map(random_problem, range(99)) if len(p.layout.blocks) >= 3)
    with pytest.raises(ValueError, match=message) as caught:
        search(problem, Knobs(**knobs))
    assert not isinstance(caught.value, NoFeasiblePlan)
