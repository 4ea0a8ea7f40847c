"""Clocks grow along fences and nowhere else; jobs run when they are waited for, in order."""

from __future__ import annotations

import pytest

from lightning_protrain.simulation.streams import Host, SimulatedStream, SimulatedWorker


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
