"""Host memory in exact sizes, and a worker thread that runs beside the main one.

[Note: Jobs]
A *job* is work given to the host's worker. The worker is one thread and runs jobs in the order of submission, unless
`reorder` changes the order of jobs that have not begun. PyTorch's kernels release the GIL while they run, so a job of
few and large kernels hardly slows the main thread. An exception in a job is raised where the job is waited for.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 << 20


class HostMemory:
    """Exact-size, page-aligned host memory whose blocks return by themselves.

    PyTorch's pinned allocator rounds up to powers of two, which can double the locked memory; these blocks are
    anonymous maps of whole pages. A block returns to the free list when the last tensor over it dies, so a gradient
    that is still referenced is never overwritten.

    Args:
        lock: Called with (address, bytes) of a new block; returns True if the block is page-locked now.
        unlock: Called with the address of a locked block when the memory is closed.
        touch: Called with the bytes of a large new block before it is locked, to write to every page of it.
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
        self._open = True
        self.allocated_bytes = 0

    @property
    def locked_bytes(self) -> int:
        """Bytes that are page-locked now."""
        return sum(len(block) for block in self._locked.values())

    def empty(self, nbytes: int) -> memoryview:
        """Return a block of at least `nbytes` uninitialised bytes; the block returns when no tensor uses it."""
        assert self._open, "host memory asked for after it was closed"
        size = max(-(-nbytes // PAGE) * PAGE, PAGE)
        free = self._free.get(size)
        block = free.popleft() if free else self._new_block(size)
        view = memoryview(block)
        # The finalizer must keep only the block alive: `self` may go before it.
        weakref.finalize(view, _give_back, weakref.ref(self), block).atexit = False
        return view

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised host tensor of the shape, strides and dtype of `tensor`, which must be dense."""
        empty = torch.empty(0, dtype=tensor.dtype)
        if tensor.numel() == 0:
            return empty.new_empty(tensor.shape)
        flat = torch.frombuffer(self.empty(tensor.nbytes), dtype=tensor.dtype, count=tensor.numel())
        return empty.set_(flat.untyped_storage(), 0, tensor.shape, tensor.stride())

    @property
    def locks(self) -> bool:
        """True if blocks are page-locked, which takes seconds for tens of GiB."""
        return self._lock is not None

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate a block of each size, for later calls of `empty`."""
        held = [self.empty(size) for size in sizes]
        held.clear()

    def lock_block(self, block: mmap.mmap) -> bool:
        """Page-lock a block from elsewhere until `close`; return False if it could not be page-locked."""
        address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
        if self._lock is None or not self._lock(address, len(block)):
            return False
        self._locked[address] = block
        return True

    def close(self) -> None:
        """Unlock every block and forget the free ones. Tensors over blocks stay valid."""
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
            with contextlib.suppress(OSError):  # A kernel without huge pages raises EINVAL; 4 KiB pages work too.
                block.madvise(mmap.MADV_HUGEPAGE)
            self._touch(torch.frombuffer(block, dtype=torch.uint8))
        self.allocated_bytes += size
        if self.lock_block(block):
            # A child that is forked for a DataLoader shares pages until one process writes. For page-locked pages,
            # Linux copies all of them for each child at once, or (before version 5.9) gives the first writer other
            # pages than the device uses. So children do not inherit locked blocks; `close` undoes this.
            block.madvise(mmap.MADV_DONTFORK)
        return block

    def take_back(self, block: mmap.mmap) -> None:
        """Add a block that no tensor uses any more to the free list."""
        if self._open:
            self._free.setdefault(len(block), deque()).append(block)


def _give_back(memory: weakref.ref[HostMemory], block: mmap.mmap) -> None:
    owner = memory()
    if owner is not None:
        owner.take_back(block)


class Job(Protocol):
    """Work that has been given to the worker, see [Note: Jobs]. `concurrent.futures.Future` fulfils this protocol."""

    def done(self) -> bool:
        """Return True if the job has ended."""

    def result(self) -> Any:
        """Wait for the job to end, and return its result or raise its exception."""

    def exception(self) -> BaseException | None:
        """Wait for the job to end, and return its exception, or None."""

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call `function` with the job on the worker when the job has ended, or at once if it already has."""


class HostWorker:
    """One thread beside the main one, see [Note: Jobs]; the first job starts it.

    Args:
        threads: Number of threads that a kernel of a job may use; None means as many as on the main thread.
        cores: Cores of this process; the worker is bound to their `step_cores`. Empty means not bound.
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
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], object]) -> Job:
        """Run `work` after everything submitted before it, unless `reorder` is called meanwhile."""
        if self._pool is None:
            before = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(1, "protrain-host", self._prepare, (self.threads or before,))
            self._pool.submit(int).result()
            # Threads that start later would inherit the worker's number of threads: restore the main thread's number.
            torch.set_num_threads(before)
        job: Future[object] = Future()
        with self._lock:
            self._waiting.append((job, work))
        self._pool.submit(self._run_next)
        return job

    def reorder(self, jobs: Sequence[Job]) -> None:
        """Run those of `jobs` that have not begun in this order, behind all other jobs that wait."""
        places = {id(job): place for place, job in enumerate(jobs)}
        with self._lock:
            self._waiting = deque(sorted(self._waiting, key=lambda item: places.get(id(item[0]), -1)))

    def share(self, rank: int, ranks: int) -> None:
        """Divide the cores among the workers of several ranks, before the first job.

        Args:
            rank: Index of this rank among the ranks that share the cores.
            ranks: Number of ranks that share the cores.
        """
        if self._cores:
            assert self._pool is None, "cores are shared out after the first job"
            self._cores = _share(self._cores, rank, ranks)
            self.threads = len(step_cores(self._cores))

    def close(self) -> None:
        """Wait for all jobs and end the thread; a later job starts another one."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _run_next(self) -> None:
        with self._lock:
            job, work = self._waiting.popleft()
        try:
            result = work()
        except BaseException as error:
            job.set_exception(error)
            raise
        job.set_result(result)

    def _prepare(self, threads: int) -> None:
        torch.get_num_threads()  # Otherwise the first kernel would adopt a later setting of the main thread.
        torch.set_num_threads(threads)  # Only for this thread: OpenMP keeps one setting for each thread.
        if self._cores:
            os.sched_setaffinity(0, step_cores(self._cores))
        self._begin()


def worker_cores(
    local_rank: int = 0,
    local_ranks: int = 1,
    node: int | None = None,
    nodes: Path = Path("/sys/devices/system/node"),
) -> frozenset[int]:
    """Return the cores of this node on which one of its ranks should step optimizers.

    The cores that the process may run on are divided among the ranks. `OMP_NUM_THREADS` is ignored, because torchrun
    sets it to 1. If the NUMA node of the device is known, only its cores are used, because copies from and to the
    device go through the memory of that node.

    Args:
        local_rank: Index of this rank on its node.
        local_ranks: Number of ranks on this node; all of them are assumed to use the same NUMA node.
        node: NUMA node of the device; None or negative means unknown.
        nodes: Folder in which Linux describes its NUMA nodes.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    listed = nodes / f"node{node}" / "cpulist"
    if node is not None and node >= 0 and listed.is_file():
        allowed = (allowed & _parse_cores(listed.read_text())) or allowed
    return _share(allowed, local_rank, local_ranks)


def step_cores(cores: frozenset[int]) -> frozenset[int]:
    """Return the cores that step optimizers: all but one, which launches kernels, if there are at least four."""
    return cores - {min(cores)} if len(cores) >= 4 else cores


def _share(cores: Collection[int], rank: int, ranks: int) -> frozenset[int]:
    """Return part `rank` of `ranks` equal parts of the cores: at least one core, which ranks may share."""
    ordered, size = sorted(cores), max(len(cores) // ranks, 1)
    start = rank * size % len(ordered)
    return frozenset(ordered[start : start + size])


def _parse_cores(text: str) -> set[int]:
    """Return the numbers in a list such as `0-3,8`."""
    cores: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
