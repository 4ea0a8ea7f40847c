"""Host memory has exact sizes and is page-locked if possible; jobs and their uploads run in order."""

from __future__ import annotations

import copy
import gc
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_protrain.device import host
from lightning_protrain.device.device import PendingUpload
from lightning_protrain.device.host import (
    PAGE,
    HostMemory,
    HostWorker,
    KeptFromForks,
    step_cores,
    step_threads,
    usable_cores,
    worker_cores,
)


class Locks:
    """Page-locking that records its calls and can be made to fail."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most
        self.held: dict[int, int] = {}
        self.failures = 0

    def lock(self, address: int, size: int) -> bool:
        assert size % PAGE == 0
        assert address % PAGE == 0
        assert address not in self.held
        if sum(self.held.values()) + size > self.most:
            return False
        self.held[address] = size
        return True

    def unlock(self, address: int) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("unlock")
        del self.held[address]


def address_of(memory: HostMemory, nbytes: int) -> int:
    return torch.frombuffer(memory.empty(nbytes), dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)])
def test_blocks_are_whole_pages_and_no_more(nbytes: int, pages: int) -> None:
    memory = HostMemory()
    block = memory.empty(nbytes)
    assert len(block) == memory.allocated_bytes == pages * PAGE
    assert torch.frombuffer(block, dtype=torch.uint8).data_ptr() % PAGE == 0
    assert memory.locked_bytes == 0


def test_a_block_comes_back_when_the_last_tensor_dies() -> None:
    memory = HostMemory()
    first = memory.empty_like(torch.empty(1000))
    address = first.data_ptr()
    view = first[10:20]
    del first
    second = memory.empty_like(torch.empty(1000))
    assert second.data_ptr() != address
    assert memory.allocated_bytes == 2 * PAGE
    del view
    third = memory.empty_like(torch.empty(1000))
    assert third.data_ptr() == address
    assert memory.allocated_bytes == 2 * PAGE


def as_gradient(tensor: Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros_like(tensor))
    parameter.grad = tensor
    return parameter


@pytest.mark.parametrize("hold", [Tensor.untyped_storage, Tensor.detach, Tensor.numpy, as_gradient, lambda one: [one]])
def test_whatever_holds_a_block_keeps_it(hold: Callable[[Tensor], Any]) -> None:
    memory = HostMemory()
    tensor = memory.empty_like(torch.empty(16))
    tensor.fill_(7)
    held = hold(tensor)
    address = tensor.data_ptr()
    del tensor
    other = memory.empty_like(torch.empty(16))
    other.fill_(1)
    assert other.data_ptr() != address
    del held
    gc.collect()
    assert address_of(memory, 16) == address


def test_a_block_that_is_used_keeps_no_memory_and_no_device_alive() -> None:
    class Device:
        """A device that locks host memory."""

        def lock(self, address: int, size: int) -> bool:
            return True

    device = Device()
    memory = HostMemory(device.lock)
    tensor = memory.empty_like(torch.zeros(3))
    alive = weakref.ref(device), weakref.ref(memory)
    del device, memory
    gc.collect()
    assert [each() for each in alive] == [None, None]
    assert tensor.fill_(1.0).sum() == 3.0
    del tensor


def test_only_blocks_of_the_same_size_are_used_again() -> None:
    memory = HostMemory()
    small = address_of(memory, 1)
    assert address_of(memory, PAGE + 1) != small
    assert address_of(memory, PAGE) == small
    assert memory.allocated_bytes == 3 * PAGE


@given(sizes=st.lists(st.integers(0, 5 * PAGE), max_size=12), keep=st.lists(st.booleans(), min_size=12, max_size=12))
def test_no_two_tensors_share_a_byte(sizes: list[int], keep: list[bool]) -> None:
    memory = HostMemory()
    held: list[tuple[int, Tensor]] = []
    for value, (size, stays) in enumerate(zip(sizes, keep, strict=False)):
        tensor = torch.frombuffer(memory.empty(size), dtype=torch.uint8)
        tensor.fill_(value)
        if stays:
            held.append((value, tensor))
        del tensor
    assert all(bool((tensor == value).all()) for value, tensor in held)
    assert memory.allocated_bytes % PAGE == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(4, dtype=torch.complex128),
        torch.randn(5).bfloat16(),
        torch.ones(3, dtype=torch.bool),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_empty_like(tensor: Tensor) -> None:
    empty = HostMemory().empty_like(tensor)
    assert (empty.dtype, empty.shape, empty.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    empty.copy_(tensor)
    assert torch.equal(empty, tensor)
    assert empty.untyped_storage().nbytes() == tensor.nbytes
    assert torch.equal(copy.deepcopy(empty), tensor)


def test_new_blocks_are_locked_once_and_unlocked_at_the_end() -> None:
    locks = Locks()
    memory = HostMemory(locks.lock, locks.unlock)
    kept = memory.empty_like(torch.empty(PAGE))
    for _ in range(3):
        memory.empty_like(torch.empty(2 * PAGE))
    assert memory.locked_bytes == memory.allocated_bytes == sum(locks.held.values()) == 12 * PAGE
    memory.close()
    assert locks.held == {}
    assert memory.locked_bytes == 0
    kept.fill_(3)
    assert bool((kept == 3).all())
    memory.close()


def test_memory_that_shrinks_returns_free_blocks_and_then_each_block_that_becomes_free() -> None:
    locks = Locks()
    memory = HostMemory(locks.lock, locks.unlock)
    memory.reserve([PAGE, PAGE, 2 * PAGE])
    used, later = memory.empty_like(torch.empty(PAGE // 4)), memory.empty_like(torch.empty(PAGE // 4))
    memory.shrink()
    assert memory.locked_bytes == memory.allocated_bytes == sum(locks.held.values()) == 2 * PAGE
    used.fill_(3)
    assert bool((used == 3).all())
    gone = used.view(-1)
    del used
    assert memory.locked_bytes == 2 * PAGE
    del gone
    assert memory.locked_bytes == memory.allocated_bytes == sum(locks.held.values()) == PAGE
    memory.keeps_free = True
    del later
    assert memory.locked_bytes == PAGE
    memory.close()
    assert locks.held == {}


def is_mapped(tensor: Tensor) -> bool:
    """Return whether this process has the memory of `tensor`."""
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= tensor.data_ptr() < int(end, 16) for begin, end in ranges)


def inherited(tensor: Tensor) -> bool:
    """Return whether a process that is forked now would have the memory of `tensor`, as Linux says it."""
    covers = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            covers = begin <= tensor.data_ptr() < end
        elif covers and first == "VmFlags:":
            return "dc" not in rest.split()  # "don't copy"
    raise AssertionError("no such memory")


@pytest.mark.parametrize("most", [1 << 30, 0])
def test_forked_processes_do_not_get_what_is_locked(most: int) -> None:
    """Linux would copy all locked memory for each forked process."""
    locks = Locks(most)
    memory = HostMemory(locks.lock, locks.unlock)
    tensor = memory.empty_like(torch.empty(PAGE))
    assert inherited(tensor) is (most == 0)
    memory.close()
    assert inherited(tensor)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="only Linux keeps memory from forks")
def test_memory_is_kept_from_forks_as_they_are_made_and_carries_no_mark_afterwards() -> None:
    large, small, wide = torch.ones(1 << 20), torch.ones(1 << 10), torch.ones(1).expand(1 << 20)
    kept = KeptFromForks(lambda: [large, small, wide])
    for is_kept in (True, False):
        read, write = os.pipe()
        if (process := os.fork()) == 0:
            found = [is_mapped(tensor) for tensor in (large[1 << 19 :], small[1 << 9 :])]
            os.write(write, bytes(found))
            os._exit(0)
        os.waitpid(process, 0)
        assert list(os.read(read, 8)) == [not is_kept, True]
        assert inherited(large)
        if is_kept:
            del kept


def test_memory_that_cannot_be_locked_is_used_all_the_same() -> None:
    locks = Locks(most=2 * PAGE)
    memory = HostMemory(locks.lock, locks.unlock)
    held = [memory.empty(PAGE) for _ in range(5)]
    assert memory.locked_bytes == 2 * PAGE
    assert memory.allocated_bytes == 5 * PAGE
    assert len({id(block) for block in held}) == 5
    memory.close()
    assert locks.held == {}


def test_large_blocks_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Map(mmap.mmap):
        def madvise(self, option: int, *rest: int) -> None:
            asked.append((len(self), option))
            raise OSError("this kernel has none")

    monkeypatch.setattr(mmap, "mmap", Map)
    memory = HostMemory()
    held = [memory.empty(size) for size in (PAGE, 2 << 20, 5 << 20)]
    assert asked == [(2 << 20, mmap.MADV_HUGEPAGE), (5 << 20, mmap.MADV_HUGEPAGE)]
    assert [len(block) for block in held] == [PAGE, 2 << 20, 5 << 20]
    memory.close()


def test_large_blocks_are_touched_before_they_are_locked() -> None:
    seen: list[str] = []
    memory = HostMemory(
        lambda address, size: seen.append(f"lock {size}") is None,
        lambda address: None,
        lambda block: seen.append(f"touch {block.numel()}"),
    )
    large = 2 << 20
    memory.reserve([large, 1])
    assert seen == [f"touch {large}", f"lock {large}", f"lock {PAGE}"]
    held = [memory.empty(large - 1), memory.empty(5)]
    assert len(seen) == 3
    assert memory.locked_bytes == large + PAGE
    del held
    memory.close()


def test_unlocking_that_fails_is_tried_again_from_where_it_stopped() -> None:
    locks = Locks()
    memory = HostMemory(locks.lock, locks.unlock)
    held = [memory.empty(PAGE) for _ in range(3)]
    locks.failures = 1
    with pytest.raises(RuntimeError, match="unlock"):
        memory.close()
    assert memory.locked_bytes == 3 * PAGE
    assert len(held) == 3
    memory.close()
    assert memory.locked_bytes == 0
    assert locks.held == {}


def test_locking_that_raises_leaves_nothing_locked() -> None:
    def lock(address: int, size: int) -> bool:
        raise OSError("no")

    memory = HostMemory(lock, lambda address: None)
    with pytest.raises(OSError, match="no"):
        memory.empty(1)
    assert memory.locked_bytes == 0
    memory.close()


def test_closed_memory_gives_nothing_and_takes_nothing_back() -> None:
    memory = HostMemory()
    held = memory.empty_like(torch.empty(4))
    memory.close()
    del held
    with pytest.raises(AssertionError):
        memory.empty(1)


# --- the CPU as a device --------------------------------------------------------------------------------------------
def test_jobs_run_in_order_on_one_thread() -> None:
    worker = HostWorker()
    ran: list[tuple[int, int]] = []
    jobs = [worker.submit(lambda index=index: ran.append((index, threading.get_ident()))) for index in range(20)]
    for job in jobs:
        job.result()
    worker.close()
    assert [index for index, _ in ran] == list(range(20))
    assert len({thread for _, thread in ran} - {threading.get_ident()}) == 1


def test_jobs_that_wait_are_put_into_another_order() -> None:
    worker, go, ran = HostWorker(), threading.Event(), list[str]()
    worker.submit(go.wait)
    jobs = {name: worker.submit(lambda name=name: ran.append(name)) for name in "abcd"}
    worker.reorder([jobs["d"], jobs["b"], jobs["a"]])
    go.set()
    for job in jobs.values():
        job.result()
    worker.reorder([jobs["a"]])
    worker.submit(lambda: ran.append("e")).result()
    worker.close()
    assert ran == ["c", "d", "b", "a", "e"]


def test_jobs_run_as_submitted_until_what_their_order_waits_for_has_ended() -> None:
    worker, go, ran = HostWorker(), threading.Event(), list[str]()
    ended = SimpleNamespace(query=lambda: len(ran) >= 2)
    worker.submit(go.wait)
    jobs = [worker.submit(lambda name=name: ran.append(name)) for name in "abcde"]
    worker.reorder([jobs[4], jobs[1], jobs[3]], ended)
    jobs += [worker.submit(lambda name=name: ran.append(name)) for name in "fg"]
    go.set()
    for job in jobs:
        job.result()
    worker.close()
    assert ran == ["a", "b", "c", "e", "d", "f", "g"]


def test_no_thread_without_a_job_and_none_after_the_end() -> None:
    before = threading.enumerate()
    worker = HostWorker()
    assert threading.enumerate() == before
    worker.submit(lambda: None)
    worker.close()
    worker.close()
    assert threading.enumerate() == before


def test_what_a_job_raises_is_raised_where_it_is_waited_for() -> None:
    worker = HostWorker()
    failing = worker.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert worker.submit(lambda: None).result() is None
    worker.close()


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_kernels_of_a_job_have_their_own_number_of_threads(threads: int | None) -> None:
    worker, seen = HostWorker(threads), []
    here = torch.get_num_threads()
    worker.submit(lambda: seen.append(torch.get_num_threads())).result()
    worker.close()
    assert seen == [threads or here]
    assert torch.get_num_threads() == here


def test_the_worker_is_bound_to_its_cores() -> None:
    cores, seen = os.sched_getaffinity(0), []
    one = frozenset({min(cores)})
    worker = HostWorker(1, one)
    worker.submit(lambda: seen.append(os.sched_getaffinity(0))).result()
    worker.close()
    assert seen == [one]
    assert os.sched_getaffinity(0) == cores


def test_the_worker_is_told_before_its_first_job() -> None:
    seen: list[object] = []
    worker = HostWorker(1, begin=lambda: seen.append(threading.current_thread()))
    assert seen == []
    for _ in range(2):
        worker.submit(lambda: seen.append(threading.current_thread())).result()
    worker.close()
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert threading.current_thread() not in seen


def test_workers_of_several_ranks_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_quota", lambda: None)
    cores = frozenset(range(8))
    workers = [HostWorker(8, cores) for _ in range(3)]
    for rank, worker in enumerate(workers):
        worker.share(rank, len(workers))
    assert [sorted(worker._cores) for worker in workers] == [[0, 1], [2, 3], [4, 5]]
    assert [worker.threads for worker in workers] == [2, 2, 2]
    free = HostWorker()
    free.share(1, 2)
    assert (free._cores, free.threads) == (frozenset(), None)


@pytest.mark.parametrize(
    ("allowed", "ranks", "rank", "listed", "expected"),
    [
        (range(8), 1, 0, None, range(8)),
        (range(8), 2, 1, None, range(4, 8)),
        (range(8), 2, 0, "4-7", (4, 5)),
        (range(8), 1, 0, "0-1,6", (0, 1, 6)),
        (range(4), 1, 0, "4-7", range(4)),  # the process may not run there
        (range(4), 1, 0, "", range(4)),  # a node of memory alone
        (range(2), 8, 5, None, (1,)),  # more ranks than cores
    ],
)
def test_cores_are_shared_out(
    allowed: Sequence[int],
    ranks: int,
    rank: int,
    listed: str | None,
    expected: Sequence[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    if listed is not None:
        (tmp_path / "node3").mkdir()
        (tmp_path / "node3" / "cpulist").write_text(listed + "\n")
    worker = HostWorker(cores=worker_cores(3, tmp_path))
    worker.share(rank, ranks)
    assert worker._cores == set(expected)
    assert worker_cores(-1, tmp_path) == worker_cores(None, tmp_path) == set(allowed)


@pytest.mark.parametrize(
    ("cores", "siblings", "stepping"),
    [
        ({3}, None, {3}),
        ({0, 1, 2}, "0-1", {0, 1, 2}),
        ({4, 5, 6, 7}, None, {5, 6, 7}),
        ({4, 5, 6, 7}, "4", {5, 6, 7}),
        ({4, 5, 6, 7}, "4-5", {6, 7}),
        (set(range(4, 36)), "4,20", set(range(5, 36)) - {20}),
        ({4, 5, 6, 7}, "4,68", {5, 6, 7}),  # the process may not run on the other hardware thread
    ],
)
def test_of_many_cores_one_with_all_its_threads_is_left_to_launch_kernels(
    cores: set[int], siblings: str | None, stepping: set[int], tmp_path: Path
) -> None:
    if siblings is not None:
        folder = tmp_path / f"cpu{min(cores)}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert step_cores(frozenset(cores), tmp_path) == stepping


@pytest.mark.parametrize(
    ("quota", "ranks", "threads", "usable"),
    [
        (None, 1, 127, 128),
        (16.0, 1, 15, 16),  # one is left to launch kernels
        (16.0, 4, 3, 16),
        (3.9, 1, 3, 3),
        (0.5, 1, 1, 1),
        (1000.0, 1, 127, 128),
    ],
)
def test_threads_are_within_the_quota_of_processor_time(
    quota: float | None, ranks: int, threads: int, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1000, 1128)))
    monkeypatch.setattr(host, "cpu_quota", lambda: quota)
    assert step_threads(worker_cores(), ranks) == threads
    assert usable_cores() == usable
    worker = HostWorker(step_threads(worker_cores()), worker_cores())
    worker.share(0, ranks)
    assert worker.threads is not None
    assert worker.threads <= threads


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


def test_waiting_for_the_last_upload_issues_all() -> None:
    """A real worker is used, whose jobs end in the opposite order."""
    worker, gate = HostWorker(1), threading.Event()
    issued: list[str] = []
    jobs: dict[str, Any] = {name: worker.submit(gate.wait) for name in reversed(NAMES)}
    found = uploads({name: jobs[name] for name in NAMES}, issued)
    gate.set()
    assert found["c"].event() == "c"
    assert issued == list(NAMES)
    worker.close()


@pytest.mark.parametrize("fails", [False, True])
def test_keeping_an_event_keeps_nothing_of_the_job(fails: bool) -> None:
    class Work(list[str]):
        """An object that a job and an upload hold."""

    work, job = Work(), Future[Any]()
    job.add_done_callback(lambda _, held=work: None)  # type: ignore[misc]
    pending = PendingUpload(job, lambda held=work: "issued")  # type: ignore[misc]
    alive = weakref.ref(work)
    job.set_exception(KeyError("broken")) if fails else job.set_result(None)
    del work, job
    gc.collect()
    assert alive() is None
    assert pending.event() == (None if fails else "issued")
