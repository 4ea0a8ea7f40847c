"""How many chunk buffers fit, for many numbers of resident chunks at once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.entries import Remembered
from lightning_protrain.planner.memory import nests
from lightning_protrain.planner.sizes import before_each
from lightning_protrain.profiler.records import ModelLayout

Integers = NDArray[np.int64]
# So many of the functions below are kept, at most; each has an entry for every chunk.
KEPT = 512
# Of so many guesses of the most buffers, one halves.
HALVED = 4


class Buffers:
    """Bytes of chunk buffers if the first p chunks are resident, as in `memory_terms`.

    Args:
        layout: The model.
        sizes: Bytes of all chunks in execution order, (N,).
        needed: Indices of those that each unit needs.

    Attributes:
        least: The fewest buffers that the model can run with, by p, (N + 1,).
        sums: Bytes of the first chunks, (N + 1,).
    """

    def __init__(self, layout: ModelLayout, sizes: Integers, needed: Mapping[str, tuple[int, ...]]) -> None:
        self.count = len(sizes)
        self.sums = before_each(sizes)
        self._largest = max(int(sizes.max(initial=1)), 1)
        self.least, self._least_bytes = _together(layout, sizes, needed)
        self._heaviest = Remembered(self._heaviest_windows, KEPT)

    def bytes(self, persistent: Integers, buffers: Integers) -> Integers:
        """Bytes of so many buffers, (K,)."""
        left = self.count - persistent
        windows = self.sums[-1] - self.sums[persistent]
        some = np.flatnonzero(buffers < left)
        table, which = self._heaviest.of(buffers[some])
        windows[some] = table[persistent[some], which]
        return np.maximum(self._least_bytes[persistent], windows)

    def at_most(self, persistent: Integers, room: Integers) -> Integers:
        """A number of buffers that is never below the most that fit into `room` bytes, (K,); below `least` if none fit.

        It is that of the window at the first offloaded chunk, where others may be heavier. It does not fall if fewer
        chunks are resident, as long as `room` stays: then there are more windows.
        """
        reach = np.searchsorted(self.sums, self.sums[persistent] + np.maximum(room, 0), side="right") - 1
        most = np.minimum(reach, self.count) - persistent
        return np.where(self._least_bytes[persistent] <= room, most, -1)

    def most(self, persistent: Integers, room: Integers) -> Integers:
        """The most buffers that fit into `room` bytes, (K,), at most all offloaded chunks; -1: not even `least`."""
        least = self.least[persistent]
        low = least - 1  # Too few; and this is what is left where none fit.
        high = np.maximum(self.at_most(persistent, room), low)
        probe, step = high.copy(), 0  # Usually that is it.
        while (open_ := np.flatnonzero(low < high)).size:
            step += 1
            over = self.bytes(persistent[open_], probe[open_]) - room[open_]
            low[open_] = np.where(over <= 0, probe[open_], low[open_])
            # Without one of them, a window is lighter by the largest chunk at most.
            fewer = np.maximum(-(-over // self._largest), 1)
            high[open_] = np.where(over <= 0, high[open_], np.maximum(probe[open_] - fewer, low[open_]))
            probe = (low + high + 1) // 2 if step % HALVED == 0 else high
        return np.where(low < least, -1, low)

    def _heaviest_windows(self, widths: Integers) -> Integers:
        """Bytes of the heaviest neighbours, so many, from each chunk on; 0 where there are not as many, (N + 1, K)."""
        heaviest = np.zeros((self.count + 1, widths.size), dtype=np.int64)
        for column, width in enumerate(widths.tolist()):
            last = self.count - width
            windows = self.sums[width:] - self.sums[: last + 1]
            heaviest[: last + 1, column] = np.maximum.accumulate(windows[::-1])[::-1]
        return heaviest


def _together(layout: ModelLayout, sizes: Integers, needed: Mapping[str, tuple[int, ...]]) -> tuple[Integers, Integers]:
    """Number and bytes of the chunks that have to be there at one time if the first p are resident, (N + 1,) each."""
    number, nbytes = np.zeros(len(sizes) + 1, dtype=np.int64), np.zeros(len(sizes) + 1, dtype=np.int64)
    found = list(nests(layout, needed))
    members = np.fromiter(chain.from_iterable(found), dtype=np.int64)
    counts = np.array([len(nest) for nest in found], dtype=np.int64)
    # What is left of a set if the first p are resident changes at its members.
    sums, ends = before_each(sizes[members]), np.repeat(np.cumsum(counts), counts)
    np.maximum.at(number, members, ends - np.arange(len(members)))
    np.maximum.at(nbytes, members, sums[ends] - sums[:-1])
    # Between two members of one set all that come later are left: as at the next member.
    return np.maximum.accumulate(number[::-1])[::-1], np.maximum.accumulate(nbytes[::-1])[::-1]
