"""Clocks grow along fences and nowhere else; accesses that conflict must be ordered by them."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.simulated.accesses import WHOLE, Accesses, Extent, extent_of
from tests.support.simulated.streams import Host, Link, RaceError, SimulatedStream, SimulatedWorker


def test_a_job_runs_when_it_is_waited_for_and_not_before() -> None:
    worker, ran = SimulatedWorker(Host()), []
    jobs = [worker.submit(lambda index=index: ran.append(index)) for index in range(4)]
    assert not ran
    jobs[1].result()
    assert ran == [0, 1]
    assert [job.done() for job in jobs] == [True, True, False, False]
    worker.close()
    assert ran == [0, 1, 2, 3]


def test_only_what_was_before_a_job_is_before_it() -> None:
    host = Host()
    worker = SimulatedWorker(host)
    before = host.stream.step()
    job = worker.submit(worker.stream.step)
    later = host.stream.step()
    assert "worker" not in host.stream.clock
    job.result()
    assert worker.stream.clock["host"] == before < later
    assert host.stream.clock["worker"] == 1


def test_a_job_takes_its_time_beside_the_host() -> None:
    host = Host()
    worker = SimulatedWorker(host)
    host.stream.spend(1.0)
    job = worker.submit(lambda: worker.stream.spend(2.0))
    host.stream.spend(5.0)
    job.result()
    assert (worker.stream.time, host.stream.time) == (3.0, 6.0)
    worker.submit(lambda: worker.stream.spend(2.0)).result()
    assert (worker.stream.time, host.stream.time) == (8.0, 8.0)


def test_what_a_job_raises_is_raised_where_it_is_waited_for() -> None:
    host, called = Host(), []
    worker = SimulatedWorker(host)
    main = host.stream

    def fail() -> None:
        raise RuntimeError("out of luck")

    job = worker.submit(fail)
    job.add_done_callback(called.append)
    with pytest.raises(RuntimeError, match="out of luck"):
        job.result()
    assert str(job.exception()) == "out of luck"
    assert called == [job]
    assert host.stream is main
    job.add_done_callback(called.append)
    assert called == [job, job]


# --- a link -----------------------------------------------------------------------------------------------------------
def test_streams_that_share_a_link_cannot_both_have_all_of_it() -> None:
    host, link = Host(), Link()
    first = SimulatedStream("first", host, eager=False, link=link)
    second = SimulatedStream("second", host, eager=False, link=link)
    alone = SimulatedStream("alone", host, eager=False)
    for stream in (first, second, alone):
        stream.spend(2.0)
    assert (first.time, second.time, alone.time) == (2.0, 4.0, 2.0)
    assert second.busy == 2.0  # it has waited for the rest


def test_a_copy_that_may_begin_late_holds_up_nothing_before() -> None:
    link = Link()
    assert link.carry(10.0, 5.0) == 15.0
    assert link.carry(0.0, 4.0) == 4.0
    assert link.carry(2.0, 8.0) == 17.0  # 6 of them before the first copy, 2 behind it
    assert sum(end - begin for begin, end in link.busy) == 17.0


copies = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=12)


@given(copies)
def test_a_link_carries_everything_once_and_idles_only_when_nothing_waits(given_copies: list[tuple[int, int]]) -> None:
    link = Link()
    ends = [link.carry(begin, seconds) for begin, seconds in given_copies]
    assert all(end >= begin + seconds for end, (begin, seconds) in zip(ends, given_copies, strict=True))
    assert sum(end - begin for begin, end in link.busy) == sum(seconds for _, seconds in given_copies)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(link.busy))
    # A copy that is alone in the world, or the last of all, never ends later than if all came one after the other.
    assert max(ends) <= max(begin for begin, _ in given_copies) + sum(seconds for _, seconds in given_copies)


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
