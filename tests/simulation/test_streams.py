"""Clocks grow along fences and nowhere else; jobs run when they are waited for, in order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulated.streams import Host, Link, SimulatedStream, SimulatedWorker


def test_clocks_grow_only_along_fences() -> None:
    first, second = SimulatedStream("first", Host(), eager=False), SimulatedStream("second", Host(), eager=False)
    first.step()
    second.step()
    assert "first" not in second.clock
    second.wait_stream(first)
    assert second.clock["first"] == 1
    first.step()
    assert second.clock["first"] == 1


def test_a_job_runs_when_it_is_waited_for_and_not_before() -> None:
    worker, ran = SimulatedWorker(Host()), []
    jobs = [worker.submit(lambda index=index: ran.append(index)) for index in range(4)]
    assert not ran
    jobs[1].result()
    assert ran == [0, 1]
    assert [job.done() for job in jobs] == [True, True, False, False]
    worker.close()
    assert ran == [0, 1, 2, 3]


def test_a_job_is_attributed_to_the_worker() -> None:
    host, seen = Host(), []
    main = host.stream
    worker = SimulatedWorker(host)
    worker.submit(lambda: seen.append(host.stream)).result()
    assert seen == [worker.stream]
    assert host.stream is main


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
