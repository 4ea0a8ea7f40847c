"""Two accesses that conflict must be ordered by fences; others need not be."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.simulated.accesses import WHOLE, Accesses, Extent, extent_of
from tests.support.simulated.streams import Host, RaceError, SimulatedStream


def two() -> tuple[SimulatedStream, SimulatedStream]:
    host = Host()
    return SimulatedStream("first", host, eager=True), SimulatedStream("second", host, eager=True)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True), (False, False)])
def test_accesses_conflict_if_one_writes_and_nothing_orders_them(before: bool, after: bool, waits: bool) -> None:
    (first, second), accesses = two(), Accesses()
    accesses.add(first, first.step(), 1, before, "one")
    if waits:
        second.wait_stream(first)
    if waits or not (before or after):
        accesses.add(second, second.step(), 1, after, "other")
        return
    how = "wrote in one" if before else "may still read in one"
    with pytest.raises(RaceError, match=f"second {'writes' if after else 'reads'} in other what first {how}"):
        accesses.add(second, second.step(), 1, after, "other")


def test_other_storages_and_forgotten_ones_do_not_conflict() -> None:
    (first, second), accesses = two(), Accesses()
    accesses.add(first, first.step(), 1, True, "one")
    accesses.add(second, second.step(), 2, True, "other")
    accesses.forget(1)
    accesses.add(second, second.step(), 1, True, "other")
    with pytest.raises(RaceError):
        accesses.add(first, first.step(), 2, False, "one")


@pytest.mark.parametrize(
    ("extent", "races"),
    [((0, 4), False), ((0, 5), True), ((5, 6), True), ((6, 6), False), ((7, 9), True), ((8, 9), False), (WHOLE, True)],
)
@pytest.mark.parametrize("write", [False, True])
def test_extents_conflict_that_have_a_byte_in_common(extent: Extent, races: bool, write: bool) -> None:
    (first, second), accesses = two(), Accesses()
    accesses.add(first, first.step(), 1, True, "one", (4, 8))
    with pytest.raises(RaceError) if races else nullcontext():
        accesses.add(second, second.step(), 1, write, "other", extent)


@pytest.mark.parametrize(("extent", "before"), [((0, 2), "first wrote in one"), ((4, 6), "second wrote in other")])
def test_what_is_written_in_part_keeps_its_history_for_the_rest(extent: Extent, before: str) -> None:
    (first, second), accesses = two(), Accesses()
    third = SimulatedStream("third", first.host, eager=True)
    accesses.add(first, first.step(), 1, True, "one", (0, 4))
    second.wait_stream(first)
    accesses.add(second, second.step(), 1, True, "other", (2, 6))
    with pytest.raises(RaceError, match=f"third reads in last what {before}"):
        accesses.add(third, third.step(), 1, False, "last", extent)
    third.wait_stream(second)
    accesses.add(third, third.step(), 1, True, "last", WHOLE)
    accesses.add(third, third.step(), 1, False, "last", extent)


extents = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda ends: (min(ends), max(ends)))
kinds = st.sampled_from(["read", "write", "wait 0", "wait 1", "wait 2"])
steps = st.lists(st.tuples(st.integers(0, 2), kinds, st.just(WHOLE) | extents), max_size=20)


@given(steps)
def test_what_is_found_is_what_no_chain_of_fences_orders(program: list[tuple[int, str, Extent]]) -> None:
    """Compared with all pairs of accesses and the paths between them."""
    host = Host()
    streams = [SimulatedStream(str(number), host, eager=True) for number in range(3)]
    accesses, done = Accesses(), list[tuple[bool, range]]()
    # Of each stream: the accesses that come before its next one.
    before: list[set[int]] = [set(), set(), set()]
    for number, what, extent in program:
        if what.startswith("wait"):
            other = int(what[-1])
            streams[number].wait_stream(streams[other])
            before[number] |= before[other]
            continue
        write, touched = what == "write", range(*extent)
        races = [
            at
            for at, (wrote, others) in enumerate(done)
            if (wrote or write) and at not in before[number] and _have_a_byte_in_common(touched, others)
        ]
        try:
            accesses.add(streams[number], streams[number].step(), 0, write, what, extent)
        except RaceError:
            assert races
            return
        assert not races
        before[number] = before[number] | {len(done)}
        done.append((write, touched))


def _have_a_byte_in_common(one: range, other: range) -> bool:
    return len(range(max(one.start, other.start), min(one.stop, other.stop))) > 0


@pytest.mark.parametrize(
    ("tensor", "extent"),
    [
        (torch.zeros(6), (0, 24)),
        (torch.zeros(6)[2:4], (8, 16)),
        (torch.zeros(6)[5], (20, 24)),
        (torch.zeros(6)[3:3], (12, 12)),
        (torch.zeros(3, 4).t(), (0, 48)),
        (torch.zeros(3, 4)[:, 1], (4, 40)),
        (torch.zeros(3).expand(5, 3), (0, 12)),
        (torch.zeros(6, dtype=torch.bfloat16)[1:], (2, 12)),
    ],
)
def test_extents_go_from_the_first_byte_to_the_last(tensor: Tensor, extent: Extent) -> None:
    assert extent_of(tensor) == extent
    assert extent_of(tensor, 100) == (100 + extent[0], 100 + extent[1])
