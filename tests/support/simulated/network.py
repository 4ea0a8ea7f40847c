"""Ranks in threads of one process, of which one runs at a time.

[Note: Rank threads]
A rank runs until it needs something that another one has not said yet; then the next one runs. So what ranks do is the
same every time, nothing of the runtime needs to be safe for threads, and where all of them wait for each other that is
an error at once and no hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class SimulatedNetwork:
    """A network of ranks in threads, which exchange objects, see [Note: Rank threads].

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._turn = threading.Condition()
        # What each rank that has come to a place has said there.
        self._said: dict[str, dict[int, Any]] = {}
        # What each rank that does not run waits for.
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._num_begun = 0
        self._failed: list[int] = []

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call `function(rank)` in one thread for each rank; a network runs once.

        Returns:
            Results of all ranks.

        Raises:
            BaseException: A rank raised; other ranks that wait for it raise RuntimeError.
        """
        assert self._num_begun == 0, "a network runs once"
        with ThreadPoolExecutor(self.world_size) as pool:
            futures: list[Future[T]] = [pool.submit(self._take_part, function, rank) for rank in range(self.world_size)]
        for rank in self._failed:
            futures[rank].result()
        return [future.result() for future in futures]

    def exchange(
        self, place: str, rank: int, members: Sequence[int], value: Any, idle: Callable[[], object] = lambda: None
    ) -> list[Any]:
        """Wait until every member has called this with the same `place`; return their values in the order of members.

        Args:
            place: Name of the exchange, used once.
            rank: This rank.
            members: Ranks that take part, equal on all of them.
            value: Value of this rank.
            idle: Called before this rank waits, if it has to wait.

        Raises:
            RuntimeError: One of them never will: it has ended, or all ranks wait in different places.
        """
        said = self._said.setdefault(place, {})
        said[rank] = value
        if len(said) == len(members):
            del self._said[place]
        else:
            idle()
        self.wait(rank, lambda: len(said) == len(members), place)
        return [said[member] for member in members]

    def wait(self, rank: int, arrived: Callable[[], bool], what: str) -> None:
        """Let other ranks run until a condition is true.

        Args:
            rank: Rank that waits.
            arrived: Returns whether the condition is true; called again whenever another rank waits or ends.
            what: Description of the condition, for the error.

        Raises:
            RuntimeError: All ranks have ended or wait in vain.
        """
        self._waiting[rank] = arrived
        self._turn.notify_all()
        self._turn.wait_for(lambda: rank == self._next())
        del self._waiting[rank]
        if not arrived():
            raise RuntimeError(f"Rank {rank} waits for {what}, and no other rank goes on.")

    def _next(self) -> int | None:
        """Return the rank that runs next: the first whose condition is true, or else the first that waits."""
        if self._num_begun < self.world_size:
            return None
        ready = (rank for rank, arrived in self._waiting.items() if arrived())
        return min(ready, default=min(self._waiting, default=None))

    def _take_part(self, function: Callable[[int], T], rank: int) -> T:
        with self._turn:
            self._turn.wait_for(lambda: self._num_begun == rank)
            self._num_begun += 1
            self._turn.notify_all()
            failed = True
            try:
                value = function(rank)
                failed = False
            finally:
                if failed:
                    self._failed.append(rank)
                self._turn.notify_all()
        return value
