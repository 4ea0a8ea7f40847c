"""Threads that step tiles.

An OpenMP kernel ends at a barrier, so one core that another process delays holds up all cores, and they wait busily.
So threads take calls from a queue. But each operation ends by taking Python's lock, which the thread that launches
kernels needs, too. So there are few threads, each computes on several cores, and tiles are as many times as large. They
compute on no more cores than there are. With eight threads of two cores on 15, an H200 was busy for 28 % of a backward,
with three of five for 99 %; which of the differences did it was not told apart.

`torch.set_num_threads` also sets the number for threads that start later, and even for the main thread if it has not
computed yet. So the caller reads its number first, and restores it at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from lightning_protrain.runtime.access_guard import below_guard

MOST_THREADS = 3


class StepThreads:
    """Threads that make calls; they start with the first call, on the cores of its caller.

    Args:
        cores: Number of cores to compute on; None: as many as PyTorch uses in the thread of the first call.
    """

    def __init__(self, cores: int | None = None) -> None:
        self._cores = cores
        self._pool: ThreadPoolExecutor | None = None

    @property
    def width(self) -> int:
        """Number of cores that each thread computes on; tiles are to be as many times as large."""
        return self.split[1]

    @property
    def split(self) -> tuple[int, int]:
        """Number of threads, and of cores that each of them computes on, so that few cores are left over."""
        cores = self._cores = self._cores or torch.get_num_threads()
        numbers = range(min(cores, MOST_THREADS), min(cores, 2) - 1, -1)
        threads = max(numbers, key=lambda number: cores // number * number)
        return threads, cores // threads

    def make(self, calls: Sequence[Callable[[], object]]) -> None:
        """Make calls in any order, on this thread and others, without gradients; return when all have ended.

        Raises:
            BaseException: The exception of a call, after all calls that had begun have ended.
        """
        (threads, width), before = self.split, torch.get_num_threads()
        left = deque(calls)
        torch.set_num_threads(width)
        try:
            if self._pool is None and threads > 1:
                self._pool = ThreadPoolExecutor(threads - 1, "protrain-step", _begin, (width,))
            others = min(threads, len(left)) - 1
            begun = [self._pool.submit(_make, left) for _ in range(others) if self._pool is not None]
            try:
                _make(left)
            finally:
                errors = [start.exception() for start in begun if not start.cancel()]
        finally:
            torch.set_num_threads(before)
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads; a later call would start new ones."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _begin(threads: int) -> None:
    torch.get_num_threads()  # Otherwise the first computation would replace the number that is set here.
    torch.set_num_threads(threads)


def _make(left: deque[Callable[[], object]]) -> None:
    with below_guard(), torch.no_grad():
        while left:
            try:
                call = left.popleft()
            except IndexError:
                return
            call()
