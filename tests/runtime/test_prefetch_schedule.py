"""The schedule keeps its bounds and its order, fetches as little as possible, and fetching ahead costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.runtime.block import Block, BlockOrder
from lightning_protrain.runtime.prefetch_schedule import Capacity, Timeline, choose_evictions, choose_prefetch

Needs = list[tuple[int, ...]]
# One chunk at each position, all of one size: the case in which Belady's rule is optimal.
SINGLE_NEEDS = st.lists(st.integers(0, 4).map(lambda chunk: (chunk,)), min_size=1, max_size=9)
# Any number of chunks at each position, of any size.
MANY_NEEDS = st.lists(st.sets(st.integers(0, 5), max_size=3).map(lambda chunks: tuple(sorted(chunks))), max_size=14)
SIZES = st.lists(st.integers(1, 9), min_size=6, max_size=6).map(lambda sizes: dict(enumerate(sizes)))


def run(needs: Needs, capacity: Capacity, prefetch: bool) -> int:
    """Runs a step as the executor does, checks the bounds at every position, and returns the number of fetches."""
    timeline = Timeline(needs)
    live: set[int] = set()
    fetches = 0
    for position, wanted in enumerate(needs):
        evicted = choose_evictions(live - set(wanted), set(wanted), timeline, position + 1, capacity)
        assert evicted is not None
        assert set(evicted) <= live - set(wanted)
        live.difference_update(evicted)
        fetches += len(set(wanted) - live)
        live.update(wanted)
        assert capacity.holds(live)
        if prefetch:
            released, fetched = choose_prefetch(live, set(wanted), timeline, position + 1, capacity)
            assert set(released) <= live - set(wanted)
            live.difference_update(released)
            assert live.isdisjoint(fetched)
            assert len(set(fetched)) == len(fetched)
            live.update(fetched)
            fetches += len(fetched)
            assert capacity.holds(live)
    return fetches


def fewest_fetches(needs: Needs, num_buffers: int) -> int:
    """Return the fewest fetches if each position needs one chunk, by trying all evictions."""

    @cache
    def rest(position: int, live: frozenset[int]) -> int:
        if position == len(needs):
            return 0
        (wanted,) = needs[position]
        if wanted in live:
            return rest(position + 1, live)
        if len(live) < num_buffers:
            return 1 + rest(position + 1, live | {wanted})
        return 1 + min(rest(position + 1, live - {victim} | {wanted}) for victim in live)

    return rest(0, frozenset())


def room_for(needs: Needs, sizes: dict[int, int], chunks: int, nbytes: int) -> Capacity:
    """Return a capacity that is at least what the most demanding position needs."""
    most_chunks = max((len(wanted) for wanted in needs), default=0)
    most_bytes = max((sum(sizes[chunk] for chunk in wanted) for wanted in needs), default=0)
    return Capacity(max(chunks, most_chunks), max(nbytes, most_bytes), sizes)


@given(needs=SINGLE_NEEDS, num_buffers=st.integers(1, 4))
@settings(deadline=None)
def test_no_schedule_fetches_less(needs: Needs, num_buffers: int) -> None:
    sizes = dict.fromkeys(range(5), 1)
    fetches = run(needs, Capacity(num_buffers, 1 << 30, sizes), prefetch=False)
    assert fetches == fewest_fetches(needs, num_buffers)


@given(needs=MANY_NEEDS, sizes=SIZES, chunks=st.integers(1, 5), nbytes=st.integers(1, 40), prefetch=st.booleans())
@settings(deadline=None)
def test_bounds_hold_for_any_sizes(
    needs: Needs, sizes: dict[int, int], chunks: int, nbytes: int, prefetch: bool
) -> None:
    fetches = run(needs, room_for(needs, sizes, chunks, nbytes), prefetch)
    assert fetches >= len({chunk for wanted in needs for chunk in wanted})


@pytest.mark.parametrize("num_buffers", range(1, 9))
@pytest.mark.parametrize("num_chunks", range(1, 9))
@pytest.mark.parametrize("backward", [True, False])
def test_fetching_ahead_costs_nothing_in_a_step(num_chunks: int, num_buffers: int, backward: bool) -> None:
    forward: Needs = [(index,) for index in range(num_chunks)]
    needs = forward + forward[::-1] if backward else forward
    sizes = dict.fromkeys(range(num_chunks), 1)
    assert run(needs, Capacity(num_buffers, 1 << 30, sizes), prefetch=True) == fewest_fetches(needs, num_buffers)


@given(
    needs=MANY_NEEDS,
    live=st.sets(st.integers(0, 5)),
    pinned=st.sets(st.integers(0, 5)),
    wanted=st.sets(st.integers(0, 5), max_size=3),
    sizes=SIZES,
    chunks=st.integers(1, 6),
    nbytes=st.integers(1, 60),
)
def test_what_is_pinned_stays_and_nothing_goes_without_need(
    needs: Needs,
    live: set[int],
    pinned: set[int],
    wanted: set[int],
    sizes: dict[int, int],
    chunks: int,
    nbytes: int,
) -> None:
    capacity = Capacity(chunks, nbytes, sizes)
    pinned &= live
    evicted = choose_evictions(live - wanted - pinned, wanted | (live & pinned), Timeline(needs), 0, capacity)
    if evicted is None:
        assert not capacity.holds(pinned | wanted)
    else:
        assert set(evicted) <= live - pinned - wanted
        assert capacity.holds((live | wanted) - set(evicted))
        assert not evicted or not capacity.holds((live | wanted) - set(evicted[:-1]))


@given(
    needs=MANY_NEEDS,
    live=st.sets(st.integers(0, 5), max_size=3),
    sizes=SIZES,
    nbytes=st.integers(1, 60),
)
def test_nothing_of_earlier_use_is_given_up(needs: Needs, live: set[int], sizes: dict[int, int], nbytes: int) -> None:
    timeline = Timeline(needs)
    capacity = Capacity(4, max(nbytes, sum(sizes[chunk] for chunk in live)), sizes)
    released, fetched = choose_prefetch(live, set(), timeline, 0, capacity)
    for chunk in fetched:
        assert all(timeline.next_use(other, 0) >= timeline.next_use(chunk, 0) for other in released)


@given(
    needs=MANY_NEEDS,
    live=st.sets(st.integers(0, 5), max_size=4),
    pinned=st.sets(st.integers(0, 5), max_size=2),
    sizes=SIZES,
    chunks=st.integers(1, 6),
    nbytes=st.integers(1, 60),
    position=st.integers(0, 15),
)
@settings(deadline=None)
def test_fetching_ahead_evicts_as_fetching_in_need_does(
    needs: Needs, live: set[int], pinned: set[int], sizes: dict[int, int], chunks: int, nbytes: int, position: int
) -> None:
    """One use after the other, with the evictions of a chunk that is needed at once, up to the first that costs."""
    timeline, capacity = Timeline(needs), Capacity(chunks, nbytes, sizes)
    released: list[int] = []
    fetched: list[int] = []
    present = set(live)
    for use, chunk in [(at, chunk) for at, wanted in enumerate(needs) if at >= position for chunk in wanted]:
        if chunk in present:
            continue
        evicted = choose_evictions(
            present - {chunk} - pinned, {chunk} | (present & pinned), timeline, position, capacity
        )
        if evicted is None or any(timeline.next_use(other, position) <= use for other in evicted):
            break
        present = (present - set(evicted)) | {chunk}
        released += evicted
        fetched.append(chunk)
    assert choose_prefetch(live, pinned, timeline, position, capacity) == (released, fetched)


def test_backward_begins_with_what_forward_left() -> None:
    forward: Sequence[tuple[int, ...]] = [(index,) for index in range(6)]
    needs = [*forward, *reversed(forward)]
    # Of six chunks, three stay live over the turn: 6 fetches forward, 3 backward.
    assert run(needs, Capacity(3, 1 << 30, dict.fromkeys(range(6), 1)), prefetch=True) == 9


def test_the_bytes_bound_too() -> None:
    sizes = {0: 10, 1: 10, 2: 1}
    timeline = Timeline([(0,), (1,), (2,)])
    assert choose_prefetch({0}, {0}, timeline, 1, Capacity(3, 11, sizes)) == ([], [])
    assert choose_prefetch({0}, {0}, timeline, 1, Capacity(3, 20, sizes)) == ([], [1])
    assert choose_prefetch({0}, {0}, timeline, 1, Capacity(3, 21, sizes)) == ([], [1, 2])


def test_a_shared_chunk_is_given_up_for_what_comes_next() -> None:
    """Fetching ahead beats keeping: a tied embedding is fetched again for the head, or no copy would overlap."""
    needs = [(0,), (1,), (2,), (3,), (0,)]
    sizes = dict.fromkeys(range(4), 1)
    assert run(needs, Capacity(2, 1 << 30, sizes), prefetch=False) == 4
    assert run(needs, Capacity(2, 1 << 30, sizes), prefetch=True) == 5


def test_what_is_needed_later_is_all_but_what_is_needed_here() -> None:
    timeline = Timeline([(0,), (1, 2), (), (0,)])
    assert [timeline.later(position) for position in range(6)] == [{1, 2}, {0}, {0, 1, 2}, {1, 2}, {0, 1, 2}, {0, 1, 2}]


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
