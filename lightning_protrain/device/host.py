"""Allocator of page-locked host memory in exact sizes, and a worker thread for optimizer steps.

[Note: Jobs]
A *job* is a function that the worker thread runs. Jobs run in the order of submission, unless `reorder` changes the
order of jobs that have not started. PyTorch's kernels release the GIL, so a job of few large kernels hardly slows the
main thread. An exception in a job is raised where the job is waited for.

[Note: Forks]
A forked DataLoader worker shares pages with its parent, and Linux copies a page when either of them writes to it. Each
step writes all optimizer states and master weights, so long-lived workers would double this memory, although they never
read it. Therefore its pages are marked as not inherited right before each fork. The marks are removed after the fork,
because the memory may be freed and used for something else. A forked process that reads such memory dies of SIGSEGV.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import floor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_protrain.cgroup_limits import cpu_quota

PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 << 20


def in_block(block: memoryview, offset: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a host tensor at byte `offset` of `block`, shaped and strided like `like`, with a storage of its own."""
    dtype = dtype or like.dtype
    empty = torch.empty(0, dtype=dtype)
    if not like.numel():
        return empty.new_empty(like.shape)
    flat = torch.frombuffer(block, dtype=dtype, count=like.numel(), offset=offset)
    return empty.set_(flat.untyped_storage(), 0, like.shape, like.stride())


class HostMemory:
    """An allocator of page-aligned host memory in exact sizes.

    PyTorch's pinned allocator rounds sizes up to powers of two, which can double the locked memory. Blocks of this
    allocator are anonymous maps of whole pages. A block is free again when the last tensor that uses it is deleted.

    Args:
        lock: Called with (address, bytes) of a new block; returns True if it could page-lock the block. None does not
            lock blocks.
        unlock: Called by `close` with the address of each locked block.
        touch: Called with a large new block, as bytes, before it is locked; writes to all of its pages.

    Attributes:
        keeps_free: Whether blocks that no tensor uses any more are kept; False: they are returned to the system.
    """

    def __init__(
        self,
        lock: Callable[[int, int], bool] | None = None,
        unlock: Callable[[int], None] | None = None,
        touch: Callable[[Tensor], object] = lambda block: None,
    ) -> None:
        self._lock = lock
        self._unlock = unlock
        self._touch = touch
        self._free: dict[int, deque[mmap.mmap]] = {}
        self._locked: dict[int, mmap.mmap] = {}
        self._open = self.keeps_free = True
        self.allocated_bytes = 0

    @property
    def locked_bytes(self) -> int:
        """Size of all page-locked blocks, bytes."""
        return sum(len(block) for block in list(self._locked.values()))  # A copy: the worker may unlock a block.

    def empty(self, nbytes: int) -> memoryview:
        """Return a block of at least `nbytes` uninitialised bytes; it is freed when no tensor uses it."""
        assert self._open, "host memory requested after close"
        size = max(-(-nbytes // PAGE) * PAGE, PAGE)
        free = self._free.get(size)
        block = free.popleft() if free else self._new_block(size)
        view = memoryview(block)
        # The finalizer must not keep `self` alive.
        weakref.finalize(view, _give_back, weakref.ref(self), block).atexit = False
        return view

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised host tensor with the shape, strides and dtype of `tensor`, which must be dense."""
        return in_block(self.empty(tensor.nbytes), 0, tensor)

    @property
    def locks(self) -> bool:
        """True if blocks are page-locked, which takes seconds for tens of GiB."""
        return self._lock is not None

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate free blocks of these sizes (bytes) for later calls of `empty`."""
        held = [self.empty(size) for size in sizes]
        held.clear()

    def lock_block(self, block: mmap.mmap) -> bool:
        """Page-lock an mmap of the caller until `close`; return False if that fails."""
        address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
        if self._lock is None or not self._lock(address, len(block)):
            return False
        self._locked[address] = block
        return True

    def close(self) -> None:
        """Unlock all blocks and release the free ones. Tensors in blocks stay valid."""
        while self._locked:
            address, block = next(iter(self._locked.items()))
            assert self._unlock is not None
            self._unlock(address)
            block.madvise(mmap.MADV_DOFORK)
            del self._locked[address]
        self._free.clear()
        self._open = False

    def _new_block(self, size: int) -> mmap.mmap:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_PAGE:
            with contextlib.suppress(OSError):  # Raised by kernels without huge pages.
                block.madvise(mmap.MADV_HUGEPAGE)
            self._touch(torch.frombuffer(block, dtype=torch.uint8))
        self.allocated_bytes += size
        if self.lock_block(block):
            # Forked DataLoader workers must not inherit locked blocks: Linux would copy all locked pages at the fork,
            # or (before version 5.9) move this process to new pages, while the device uses the old ones.
            block.madvise(mmap.MADV_DONTFORK)
        return block

    def shrink(self) -> None:
        """Return free blocks to the system now, and every other block when no tensor uses it any more."""
        self.keeps_free = False
        while self._free:
            for block in self._free.popitem()[1]:
                self.take_back(block)

    def take_back(self, block: mmap.mmap) -> None:
        """Add an unused block to the free list, or return it to the system."""
        if self._open and self.keeps_free:
            self._free.setdefault(len(block), deque()).append(block)
        elif self._open:
            address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
            if self._locked.pop(address, None) is not None:
                assert self._unlock is not None
                self._unlock(address)
            self.allocated_bytes -= len(block)


def _give_back(memory: weakref.ref[HostMemory], block: mmap.mmap) -> None:
    owner = memory()
    if owner is not None:
        owner.take_back(block)


# Smaller tensors are inherited, and so are some bytes at both ends, where the C library keeps its books.
_LEAST_KEPT, _EDGE = 1 << 20, 64


class KeptFromForks:
    """Host memory that forked processes do not inherit while this object exists, see [Note: Forks].

    Args:
        tensors: Returns the tensors; called before each fork. None may lie in page-locked memory.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._marked: list[tuple[int, int]] = []
        _KEPT.add(self)

    def mark(self) -> None:
        """Mark the pages of the tensors as not inherited."""
        for tensor in self._tensors():
            storage, begin = tensor.untyped_storage(), tensor.data_ptr()
            nbytes = min(tensor.nbytes, storage.nbytes() - (begin - storage.data_ptr()))
            first, last = -(-(begin + _EDGE) // PAGE) * PAGE, (begin + nbytes - _EDGE) // PAGE * PAGE
            if nbytes >= _LEAST_KEPT and _advise(first, last - first, mmap.MADV_DONTFORK):
                self._marked.append((first, last - first))

    def unmark(self) -> None:
        """Remove all marks."""
        while self._marked:
            _advise(*self._marked.pop(), mmap.MADV_DOFORK)


_KEPT: weakref.WeakSet[KeptFromForks] = weakref.WeakSet()


def _before_fork() -> None:
    for memory in list(_KEPT):
        memory.mark()


def _after_fork() -> None:
    for memory in list(_KEPT):
        memory.unmark()


if hasattr(mmap, "MADV_DONTFORK"):  # Linux
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)


def _advise(address: int, nbytes: int, advice: int) -> bool:
    """Tell Linux how pages are used; return False if it refuses."""
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) == 0


class Job(Protocol):
    """A submitted job, see [Note: Jobs]: the part of `concurrent.futures.Future` that is used."""

    def done(self) -> bool:
        """Return True if the job has ended."""

    def result(self) -> Any:
        """Wait for the job to end, and return its result or raise its exception."""

    def exception(self) -> BaseException | None:
        """Wait for the job to end, and return its exception, or None."""

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call `function` with the job: on the worker thread when the job ends, or at once if it has ended."""


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Return True if all work before the event has ended."""

    def synchronize(self) -> None:
        """Block the host until all work before the event has ended."""


def place_in(jobs: Sequence[Job], waiting: Iterable[Job]) -> Callable[[Job], int]:
    """Return the key by which waiting jobs are sorted, see `HostWorker.reorder`."""
    places = dict.fromkeys(waiting, -1) | {job: place for place, job in enumerate(jobs)}
    return lambda job: places.get(job, len(places))


class HostWorker:
    """A worker thread that runs jobs, see [Note: Jobs]; the first job starts it.

    Args:
        threads: Number of threads of a kernel in a job; None means the main thread's number.
        cores: Cores of this process; the worker is bound to `step_cores(cores)`. Empty does not bind it.
        begin: Called on the thread before its first job.
    """

    def __init__(
        self,
        threads: int | None = None,
        cores: frozenset[int] = frozenset(),
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        self.threads = threads
        self._cores = cores
        self._begin = begin
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Future[object], Callable[[], object]]] = deque()
        # Key by which the waiting jobs are sorted, and the event on whose end they are.
        self._order: tuple[Callable[[Job], int], Event | None] | None = None
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], object]) -> Job:
        """Run `work` on the worker thread after all jobs submitted before, unless `reorder` changes the order."""
        if self._pool is None:
            before = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(1, "protrain-host", self._prepare, (self.threads or before,))
            self._pool.submit(int).result()
            # Threads that start later would inherit the worker's setting: restore the main thread's.
            torch.set_num_threads(before)
        job: Future[object] = Future()
        with self._lock:
            self._waiting.append((job, work))
        self._pool.submit(self._run_next)
        return job

    def reorder(self, jobs: Sequence[Job], after: Event | None = None) -> None:
        """Sort the jobs that have not started: first all others, then `jobs` in this order, then jobs submitted later.

        Args:
            jobs: Submitted jobs.
            after: Event on whose end the jobs are sorted; None: now.
        """
        with self._lock:
            self._order = place_in(jobs, (job for job, _ in self._waiting)), after

    def share(self, rank: int, ranks: int) -> None:
        """Divide the cores among the workers of several ranks; call this before the first job.

        Args:
            rank: Index of this rank among the ranks that share the cores.
            ranks: Number of ranks that share the cores.
        """
        if self._cores:
            assert self._pool is None, "share called after the first job"
            ordered, size = sorted(self._cores), max(len(self._cores) // ranks, 1)
            start = rank * size % len(ordered)  # Ranks share cores if there are too few.
            self._cores = frozenset(ordered[start : start + size])
            self.threads = step_threads(self._cores, ranks)

    def close(self) -> None:
        """Wait for all jobs and end the thread; a later job starts a new one."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _run_next(self) -> None:
        with self._lock:
            if self._order is not None and (self._order[1] is None or self._order[1].query()):
                place, self._order = self._order[0], None
                self._waiting = deque(sorted(self._waiting, key=lambda item: place(item[0])))
            job, work = self._waiting.popleft()
        try:
            result = work()
        except BaseException as error:
            job.set_exception(error)
            raise
        job.set_result(result)

    def _prepare(self, threads: int) -> None:
        torch.get_num_threads()  # Keeps later settings of the main thread from changing this thread's number.
        torch.set_num_threads(threads)  # Affects this thread only: OpenMP has one setting for each thread.
        if self._cores:
            os.sched_setaffinity(0, step_cores(self._cores))
        self._begin()


def allowed_cores() -> set[int]:
    """Return the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def worker_cores(node: int | None = None, nodes: Path = Path("/sys/devices/system/node")) -> frozenset[int]:
    """Return the cores of this host that this process may use, for the worker to step the optimizer.

    `OMP_NUM_THREADS` is ignored, because torchrun sets it to 1. If the NUMA node of the device is known, only its cores
    are used.

    Args:
        node: NUMA node of the device; None or negative means unknown.
        nodes: Folder of NUMA nodes in Linux' sysfs.
    """
    allowed = allowed_cores()
    listed = nodes / f"node{node}" / "cpulist"
    if node is not None and node >= 0 and listed.is_file():
        allowed = (allowed & parse_ranges(listed.read_text())) or allowed
    return frozenset(allowed)


def usable_cores() -> int:
    """Return how many cores this process can use: those that it may run on, within its quota of processor time."""
    cores, quota = len(worker_cores()), cpu_quota()
    return cores if quota is None else min(cores, max(floor(quota), 1))


def step_cores(cores: frozenset[int], cpus: Path = Path("/sys/devices/system/cpu")) -> frozenset[int]:
    """Return the cores that step the optimizer.

    If there are at least four, the thread that launches kernels gets the first core and its sibling hardware thread.

    Args:
        cores: Cores of the rank.
        cpus: Folder of cores in Linux' sysfs.
    """
    if len(cores) < 4:
        return cores
    siblings = cpus / f"cpu{min(cores)}" / "topology" / "thread_siblings_list"
    return cores - {min(cores)} - (parse_ranges(siblings.read_text()) if siblings.is_file() else set())


def step_threads(cores: frozenset[int], ranks: int = 1) -> int:
    """Return the number of threads that step the optimizer: one for each core, within the quota of processor time.

    Threads beyond a quota stop all threads of the process for a part of each period, the launching thread too.

    Args:
        cores: Cores of the rank.
        ranks: Number of ranks that share the quota.
    """
    number, quota = len(step_cores(cores)), cpu_quota()
    if quota is None:
        return number
    allowed = max(floor(quota / ranks), 1)
    return min(number, allowed - 1 if allowed >= 4 else allowed)


def parse_ranges(text: str) -> set[int]:
    """Parse a list of cores or NUMA nodes such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
