"""Uploads behind jobs: in the order in which they were asked for, whatever becomes of the jobs."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import pytest

from lightning_protrain.device.device import PendingUpload, event_of
from lightning_protrain.device.host import HostWorker

NAMES = "abc"


def uploads(jobs: dict[str, Future[Any]], issued: list[str]) -> dict[str, PendingUpload[str]]:
    """One behind each job, asked for in the order of their names."""
    found: dict[str, PendingUpload[str]] = {}
    before = None
    for name, job in jobs.items():
        before = found[name] = PendingUpload(job, lambda name=name: issued.append(name) or name, before)
    return found


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)), ids="".join)
def test_they_are_issued_in_order_as_soon_as_that_can_be(order: tuple[str, ...]) -> None:
    issued: list[str] = []
    jobs: dict[str, Future[Any]] = {name: Future() for name in NAMES}
    found = uploads(jobs, issued)
    for index, name in enumerate(order):
        jobs[name].set_result(None)
        ended = set(order[: index + 1])
        assert issued == list(itertools.takewhile(ended.__contains__, NAMES))
    assert [found[name].event() for name in NAMES] == list(NAMES)
    assert all(upload.is_issued for upload in found.values())


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)), ids="".join)
@pytest.mark.parametrize("broken", NAMES)
def test_one_whose_job_raises_holds_up_nobody(broken: str, order: tuple[str, ...]) -> None:
    issued: list[str] = []
    jobs: dict[str, Future[Any]] = {name: Future() for name in NAMES}
    found = uploads(jobs, issued)
    for name in order:
        jobs[name].set_exception(KeyError(name)) if name == broken else jobs[name].set_result(None)
    assert sorted(issued) == [name for name in NAMES if name != broken]
    assert found[broken].event() is None
    assert found[broken].is_issued


def test_what_issuing_raises_is_raised_where_it_is_waited_for() -> None:
    issued: list[str] = []
    jobs: dict[str, Future[Any]] = {name: Future() for name in "ab"}

    def fail() -> str:
        raise RuntimeError("no stream")

    first = PendingUpload(jobs["a"], fail)
    second = PendingUpload(jobs["b"], lambda: issued.append("b") or "b", first)
    for job in jobs.values():
        job.set_result(None)
    with pytest.raises(RuntimeError, match="no stream"):
        first.event()
    assert issued == ["b"]
    assert second.is_issued


def test_jobs_that_have_ended_delay_nothing() -> None:
    job: Future[Any] = Future()
    job.set_result(None)
    issued: list[str] = []
    assert uploads({"a": job, "b": job}, issued)["b"].event() == "b"
    assert issued == ["a", "b"]


def test_an_event_is_its_own() -> None:
    job: Future[Any] = Future()
    job.set_result(None)
    assert [event_of("event"), event_of(None), event_of(PendingUpload(job, lambda: "a"))] == ["event", None, "a"]


def test_whoever_waits_for_the_last_gets_all() -> None:
    """On a real worker, whose jobs end in the opposite order."""
    worker, gate = HostWorker(1), threading.Event()
    issued: list[str] = []
    jobs: dict[str, Any] = {name: worker.submit(gate.wait) for name in reversed(NAMES)}
    found = uploads({name: jobs[name] for name in NAMES}, issued)
    gate.set()
    assert found["c"].event() == "c"
    assert issued == list(NAMES)
    worker.close()


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_keeps_an_event_keeps_nothing_of_the_job(fails: bool) -> None:
    class Work(list[str]):
        """What a job and an upload hold."""

    work, job = Work(), Future[Any]()
    job.add_done_callback(lambda _, held=work: None)  # type: ignore[misc]
    pending = PendingUpload(job, lambda held=work: "issued")  # type: ignore[misc]
    alive = weakref.ref(work)
    job.set_exception(KeyError("broken")) if fails else job.set_result(None)
    del work, job
    gc.collect()
    assert alive() is None
    assert pending.event() == (None if fails else "issued")
