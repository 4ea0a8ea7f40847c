"""The network in a backward that ends with averages, see [Note: Sends] in averages.py: a part of the clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.averages import Averages

Seconds = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Sending:
    """What is under way, of K plans side by side.

    Args:
        sums: What they send.
        works: Of the host's worker at each position, (P, K).
        start: When backward begins, (K,).

    Attributes:
        free: When the network will have sent all that it was given, (K,).
        least: Before which it cannot have, (K,).
        down: When the link towards the host will have carried that, (K,).
        host: When the worker will have done its work, (K,).
        stepped: When it has done that of each position, (P, K).
    """

    def __init__(self, sums: Averages, works: Seconds, start: Seconds) -> None:
        self.free = self.least = self.down = self.host = start
        self.stepped = np.zeros(works.shape)
        self._sums, self._works = sums, works
        self._column = np.arange(len(start))
        # The position whose chunks are complete, and the one whose last chunk has been sent and has not landed.
        self._complete = self._under_way = np.full(len(start), -1)
        self._sent = np.full(start.shape, -np.inf)
        self._down = self._work = np.zeros(start.shape)

    def complete(self, index: int, time: Seconds) -> None:
        """All gradients of a position have been computed."""
        resident, least = self._sums.resident[index], self._sums.least[index]
        self.least = np.maximum(self.least, time + least)
        self.free = np.maximum(self.free, np.where(resident > 0, time, -np.inf)) + resident
        here = self._sums.early[index] + self._sums.late[index] > 0
        self._complete = np.where(here, index, self._complete)

    def send(self, time: Seconds, where: Flags, waiting: Flags) -> Seconds:
        """Sends what is complete, at a time and in those plans that do so there; until when the device waits, (K,).

        It waits in some of them only.
        """
        sums, some = self._sums, where & (self._complete >= 0)
        at, gate = np.where(some, self._complete, 0), np.where(some, 0.0, -np.inf)
        tables = sums.early, sums.late, sums.down_early, sums.down_late, sums.worked, self._works, sums.held
        early, late, down_early, down_late, worked, work, held = (
            np.where(some, table[at, self._column], 0.0) for table in tables
        )
        waits = self._sent
        self._land(time, some)
        begun = np.maximum(self.free, time + gate) + early
        self.down = np.maximum(self.down, np.where(down_early > 0, begun, -np.inf)) + down_early
        first = worked * work
        self.host = np.maximum(self.host + first, np.where(first > 0, self.down, -np.inf))
        self.free = begun + late
        waits = np.maximum(np.maximum(waits, np.where(early > 0, begun, -np.inf)), self.down - held)
        self._sent = np.where(some, self.free, self._sent)
        self._down, self._work = np.where(some, down_late, self._down), np.where(some, work - first, self._work)
        self._under_way = np.where(some, self._complete, self._under_way)
        self._complete = np.where(some, -1, self._complete)
        return np.where(waiting, waits + gate, -np.inf)

    def finish(self, time: Seconds) -> None:
        """Backward has ended: what is left is sent, and all lands."""
        everywhere = np.ones(time.shape, dtype=np.bool_)
        self.send(time, everywhere, everywhere)
        self._land(time, everywhere)
        self.free = np.maximum(self.free, self.least)

    def _land(self, time: Seconds, where: Flags) -> None:
        """What was sent last lands."""
        here = where & (self._under_way >= 0)
        gate = np.where(here, 0.0, -np.inf)
        self.down = np.maximum(self.down, np.maximum(time, self._sent) + gate) + np.where(here, self._down, 0.0)
        self.host = np.maximum(self.host, self.down + gate) + np.where(here, self._work, 0.0)
        at = self._under_way[here], self._column[here]
        self.stepped[at] = self.host[here]
        self._under_way = np.where(here, -1, self._under_way)
