"""Work is shared out among threads, errors reach the caller, and nobody waits for a thread that comes too late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_protrain.runtime.crew import Crew


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew("test-crew")
    yield made
    made.close()
    assert names() == []


def names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("test-crew"))


@pytest.mark.parametrize("others", [0, 1, 3])
@pytest.mark.parametrize("number", [0, 1, 2, 100])
def test_everything_is_done_once(crew: Crew, others: int, number: int) -> None:
    for _ in range(20):
        queue, done = iter(range(number)), []
        crew.run(lambda queue=queue, done=done: done.extend(queue), others)
        assert sorted(done) == list(range(number))


def test_all_threads_work_at_once_without_gradients_on_one_core_each(crew: Crew) -> None:
    before, together = torch.get_num_threads(), threading.Barrier(3)
    seen: list[tuple[bool, int]] = []

    def work() -> None:
        together.wait(60)
        seen.append((torch.is_grad_enabled(), torch.get_num_threads()))

    with torch.no_grad():
        crew.run(work, 2)
    assert seen == [(False, 1)] * 3
    assert torch.get_num_threads() == before


def test_only_as_many_threads_are_started_as_are_needed(crew: Crew) -> None:
    numbers = []
    for others in (0, 1, 1, 2, 1):
        crew.run(lambda: None, others)
        numbers.append(len(names()))
    assert numbers == [0, 1, 1, 2, 2]


def test_a_thread_that_is_too_late_is_not_waited_for(crew: Crew) -> None:
    """The only other thread is busy with the work of somebody else."""
    release, busy = threading.Event(), threading.Event()

    def hold() -> None:
        if threading.current_thread().name.startswith("test-crew"):
            busy.set()
            release.wait(60)
        else:
            busy.wait(60)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(crew.run, hold, 1)
        assert busy.wait(60)
        here: list[str] = []
        crew.run(lambda: here.append(threading.current_thread().name), 1)
        assert here == [threading.current_thread().name]
        release.set()
        held.result()
    assert len(here) == 1


@pytest.mark.parametrize("where", ["here", "there"])
def test_an_error_is_raised_when_all_have_ended(crew: Crew, where: str) -> None:
    together, ended = threading.Barrier(2), []

    def work() -> None:
        together.wait(60)
        if (threading.current_thread().name.startswith("test-crew")) == (where == "there"):
            raise RuntimeError("out of luck")
        ended.append(where)

    for _ in range(2):  # The thread lives on.
        with pytest.raises(RuntimeError, match="out of luck"):
            crew.run(work, 1)
    assert ended == [where] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unexpected_error_is_raised_too_and_nothing_hangs(crew: Crew) -> None:
    together = threading.Barrier(2)

    def work() -> None:
        together.wait(60)
        if threading.current_thread().name.startswith("test-crew"):
            raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        crew.run(work, 1)
    done: list[int] = []
    crew.run(lambda: done.append(1), 1)
    assert done == [1]


def test_several_callers_at_once(crew: Crew) -> None:
    def one(seed: int) -> int:
        queue, done = iter(range(seed, seed + 50)), []
        crew.run(lambda: done.extend(queue), 2)
        return sum(done)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(60))) == [sum(range(seed, seed + 50)) for seed in range(60)]


def test_it_starts_again_after_it_was_closed(crew: Crew) -> None:
    for _ in range(2):
        crew.run(lambda: None, 2)
        assert len(names()) == 2
        crew.close()
        assert names() == []
