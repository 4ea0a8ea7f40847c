"""Threads that compute beside the one that calls them.

[Note: Threads]
A kernel that divides its work between OpenMP threads ends at a barrier, and a neighbour on the machine delays them all.
So each thread here computes alone (`torch.set_num_threads(1)`), and takes what it does from where the others take it. A
thread that wakes too late is not waited for. `torch.set_num_threads` also sets what threads started later begin with,
and even what the main thread gets if it has not computed yet; so the calling thread reads its own number before, and
sets it again when ours have started and at the end.

The queues are those of the C library of Python: waking a thread of an executor takes several times as long when nothing
of the interpreter is in the caches.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch

from lightning_protrain.runtime.guard import below_guard

_Work = Callable[[], None]
_Ends = SimpleQueue[BaseException | None]


class Crew:
    """Threads for `run`; the first call that needs them starts them, on the cores of the thread that calls it.

    Args:
        name: The names of the threads begin with it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._starting = threading.Lock()

    def run(self, work: _Work, others: int) -> None:
        """Calls `work` here and in other threads at once; returns when all of them have returned.

        Args:
            work: Shares out among its calls what there is to do; without gradients, below the guard in other threads.
            others: In how many other threads; one that has not begun when the call here ends does nothing any more.

        Raises:
            BaseException: What one of the calls raised, when the others have ended.
        """
        before = torch.get_num_threads()
        task = self._offer(work, others) if others else None
        if before > 1:
            torch.set_num_threads(1)
        try:
            work()
        finally:
            if before > 1:
                torch.set_num_threads(before)
            errors = task.finish() if task else ()
        for error in errors:
            raise error

    def close(self) -> None:
        """Ends the threads when they have done what they were given; a later call would start others."""
        with self._starting:
            for _ in self._threads:
                self._tasks.put(None)
            while self._threads:
                self._threads.pop().join()

    def _offer(self, work: _Work, others: int) -> _Task:
        self._start(others)
        task = _Task(work, others)
        for _ in range(others):
            self._tasks.put(task)
        return task

    def _start(self, number: int) -> None:
        if len(self._threads) >= number:
            return
        with self._starting:
            begun: SimpleQueue[None] = SimpleQueue()
            new = range(len(self._threads), number)
            for index in new:
                thread = threading.Thread(target=self._loop, args=(begun,), name=f"{self._name}-{index}", daemon=True)
                self._threads.append(thread)
                thread.start()
            for _ in new:
                begun.get()  # see [Note: Threads]

    def _loop(self, begun: SimpleQueue[None]) -> None:
        torch.set_num_threads(1)
        begun.put(None)
        with below_guard(), torch.no_grad():
            while (task := self._tasks.get()) is not None:
                task.join()


class _Task:
    """Work for several threads, each of which may join as long as there is a place."""

    def __init__(self, work: _Work, places: int) -> None:
        self._work = work
        self._number = places
        self._places = deque(range(places))
        self._ends: _Ends = SimpleQueue()

    def join(self) -> None:
        """Works, if there is still a place."""
        try:
            self._places.pop()
        except IndexError:
            return
        try:
            self._work()
        except RuntimeError as error:
            self._ends.put(error)
        except BaseException as error:
            self._ends.put(error)
            raise
        else:
            self._ends.put(None)

    def finish(self) -> list[BaseException]:
        """Lets nobody join any more, waits for those who have, and returns what they raised."""
        free = 0
        while self._places:
            try:
                self._places.pop()
                free += 1
            except IndexError:  # Somebody has just joined.
                break
        ends = [self._ends.get() for _ in range(self._number - free)]
        return [error for error in ends if error is not None]
