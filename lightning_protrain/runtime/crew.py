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
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from lightning_protrain.runtime.guard import below_guard

_Work = Callable[[], None]
_Ends = SimpleQueue[BaseException | None]


class Group:
    """Calls that are waited for together.

    Attributes:
        number: How many.
        ends: Of each when it has ended: None, or what it raised.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.ends: _Ends = SimpleQueue()


class Calls:
    """Calls to make, in order, by whoever has nothing else to do."""

    def __init__(self) -> None:
        self._queue: deque[tuple[_Work, _Ends]] = deque()

    def add(self, works: Sequence[_Work]) -> Group:
        """Adds calls; they do not depend on each other, nor on what is added before or after them."""
        group = Group(len(works))
        self._queue.extend([(work, group.ends) for work in works])
        return group

    def make(self, until: Group | None = None) -> None:
        """Makes calls until none is left, or those of a group have ended."""
        queue = self._queue
        while until is None or until.ends.qsize() < until.number:
            try:
                work, ends = queue.popleft()
            except IndexError:
                return
            try:
                work()
            except RuntimeError as error:
                ends.put(error)
            except BaseException as error:
                ends.put(error)
                raise
            else:
                ends.put(None)

    def finish(self, group: Group) -> None:
        """Makes calls as `make` does, and waits for those of the group that other threads are making. Once.

        Rather than wait, it makes calls that were added later.

        Raises:
            BaseException: What one of the group raised, when all of them have ended.
        """
        before = torch.get_num_threads()
        if before > 1:
            torch.set_num_threads(1)
        try:
            self.make(until=group)
        finally:
            if before > 1:
                torch.set_num_threads(before)
        for error in [group.ends.get() for _ in range(group.number)]:
            if error is not None:
                raise error


class Crew:
    """Threads that make calls; `join` starts them when it needs them, on the cores of the thread that calls it.

    Args:
        name: The names of the threads begin with it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []
        self._tasks: SimpleQueue[Calls | None] = SimpleQueue()
        self._starting = threading.Lock()

    def join(self, calls: Calls, number: int) -> None:
        """Has `number` threads make calls, too, as soon as they can and until none is left.

        They do it without gradients and below the guard.
        """
        if len(self._threads) < number:
            before = torch.get_num_threads()
            self._start(number)
            torch.set_num_threads(before)
        for _ in range(number):
            self._tasks.put(calls)

    def close(self) -> None:
        """Ends the threads when they have done what they were given; a later call would start others."""
        with self._starting:
            for _ in self._threads:
                self._tasks.put(None)
            while self._threads:
                self._threads.pop().join()

    def _start(self, number: int) -> None:
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
            while (calls := self._tasks.get()) is not None:
                calls.make()
                del calls  # Or it, and all that it refers to, would live until the next task.
