"""Two accesses that conflict must be ordered by fences; others need not be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.simulation.accesses import Accesses
from lightning_protrain.simulation.streams import Host, RaceError, SimulatedStream


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


steps = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["read", "write", "wait 0", "wait 1", "wait 2"])))


@given(steps)
def test_what_is_found_is_what_no_chain_of_fences_orders(program: list[tuple[int, str]]) -> None:
    """Compared with all pairs of accesses and the paths between them."""
    host = Host()
    streams = [SimulatedStream(str(number), host, eager=True) for number in range(3)]
    accesses, done = Accesses(), []
    # Of each stream: the accesses that come before its next one.
    before: list[set[int]] = [set(), set(), set()]
    for number, what in program:
        if what.startswith("wait"):
            other = int(what[-1])
            streams[number].wait_stream(streams[other])
            before[number] |= before[other]
            continue
        write = what == "write"
        races = [at for at, wrote in enumerate(done) if (wrote or write) and at not in before[number]]
        try:
            accesses.add(streams[number], streams[number].step(), 0, write, what)
        except RaceError:
            assert races
            return
        assert not races
        before[number] = before[number] | {len(done)}
        done.append(write)
