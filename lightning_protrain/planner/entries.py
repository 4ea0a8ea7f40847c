"""What belongs to chunks and to positions of a step, summed over the chunks from some number on.

[Note: Runs]
A chunk that is needed again before any other one has come is still there: a head that is called once for each slice
of a sequence, with nothing but the loss between. So what counts is not how often a chunk is used but its *run*, from
the position that it comes for to the last one that needs it without another chunk coming between. It holds for several
chunks, too, if each position needs those that came last, in order, before it needs new ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.sizes import before_each

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
# Positions behind which a step may end, see [Note: Behind the last step] in clock.py.
LAST = 3
Number = TypeVar("Number", bound=np.generic)


class Remembered(Generic[Number]):
    """Arrays that belong to a number, each computed once.

    Args:
        compute: From numbers, (K,), to their arrays, (..., K).
        kept: Where there are more, all are forgotten and those that are asked for are computed again; None: never.
    """

    def __init__(self, compute: Callable[[Integers], NDArray[Number]], kept: int | None = None) -> None:
        self._compute, self._kept = compute, kept
        self._known: dict[int, int] = {}
        self._table: NDArray[Number] | None = None

    def of(self, numbers: Integers) -> tuple[NDArray[Number], Integers]:
        """Arrays of all numbers so far, (..., U), and which of them each of these has, (K,)."""
        asked = numbers.tolist()
        new = [*set(asked).difference(self._known)]
        if self._kept is not None and len(self._known) + len(new) > self._kept:
            self._known.clear()
            new = [*set(asked)]
        first = len(self._known)
        self._known.update(zip(new, range(first, first + len(new)), strict=True))
        if new or self._table is None:
            found = self._compute(np.array(new, dtype=np.int64))
            if self._table is None or len(self._known) > self._table.shape[-1]:
                wider = np.zeros((*found.shape[:-1], 2 * len(self._known)), dtype=found.dtype)
                if self._table is not None:
                    wider[..., :first] = self._table[..., :first]
                self._table = wider
            self._table[..., first : len(self._known)] = found
        return self._table, np.fromiter(map(self._known.__getitem__, asked), dtype=np.int64, count=len(asked))


class Entries:
    """Amounts that belong to a chunk at a position.

    Args:
        num_positions: How many positions there are.
        num_chunks: How many chunks there are.
        positions: Of each entry, (E,).
        chunks: The same.
        amounts: Of each entry, (A, E).

    Attributes:
        sums: Of each amount, of the entries before, in the order of positions and then of chunks; whole numbers,
            (A, E + 1).
        end: The entry after the last one of each position, (P, 1).
    """

    def __init__(
        self, num_positions: int, num_chunks: int, positions: Integers, chunks: Integers, amounts: Integers
    ) -> None:
        order = np.lexsort((chunks, positions))
        positions, chunks, amounts = positions[order], chunks[order], amounts[:, order]
        # Whole numbers far below 2 ** 53, so that they are exact; what is divided later is not converted each time.
        self.sums = np.zeros((len(amounts), len(order) + 1))
        self.sums[:, 1:] = np.cumsum(amounts, axis=1)
        bounds = np.searchsorted(positions, np.arange(num_positions + 1))
        self._start, self.end = bounds[:-1, None], bounds[1:, None]
        self._first = None if (np.diff(chunks) < 0).any() else np.searchsorted(chunks, np.arange(num_chunks + 1))
        self._rows = np.arange(num_positions)[:, None] * (num_chunks + 1)
        self._keys = positions * (num_chunks + 1) + chunks

    def begin(self, persistent: Integers) -> Integers:
        """The first entry of each position that is not of the first `persistent` chunks, (P, K)."""
        if self._first is None:
            return np.searchsorted(self._keys, self._rows + persistent)
        begin: Integers = np.minimum(np.maximum(self._first[persistent], self._start), self.end)
        return begin

    def amount(self, index: int, begin: Integers) -> Floats:
        """Sums of one amount from an entry to the end of its position, (P, K)."""
        sums = self.sums[index]
        found: Floats = sums[self.end] - sums.take(begin)
        return found


@dataclass(frozen=True)
class Runs:
    """Uses of chunks between which no other chunk comes, in order; see [Note: Runs].

    Attributes:
        chunks: The chunk of each.
        first: Position of the first use.
        last: Of the last one.
    """

    chunks: list[int]
    first: list[int]
    last: list[int]


def runs_of(needs: Sequence[Sequence[int]]) -> tuple[int, Runs]:
    """From which chunk on each has one run, and chunks come in order; and these runs.

    Args:
        needs: Chunks that each position needs, in order.
    """
    start, found = _runs_from(needs, 0)
    while found is None:
        start, found = _runs_from(needs, start)
    return start, found


def _runs_from(needs: Sequence[Sequence[int]], start: int) -> tuple[int, Runs | None]:
    """Runs of chunks from `start` on; or None, and from where on there may be some."""
    chunks: list[int] = []
    first: list[int] = []
    last: list[int] = []
    for position, needed in enumerate(needs):
        own = needed[bisect_left(needed, start) :]
        again = bisect_right(own, chunks[-1]) if chunks else 0
        for back in range(1, again + 1):
            if back > len(chunks) or chunks[-back] != own[again - back]:
                return own[again - back] + 1, None
            last[-back] = position
        new = own[again:]
        chunks += new
        first += [position] * len(new)
        last += [position] * len(new)
    return start, Runs(chunks, first, last)


class Uses:
    """Runs of chunks in forward, or in backward, where the last position comes first.

    Args:
        num_positions: How many positions there are.
        runs: As `runs_of` gives them.
        sizes: Bytes of each chunk.
        backward: Whether chunks come for the last position of a run, and stay until the first.

    Attributes:
        size: How many runs there are.
        chunks: Of each run; and one more, the number of chunks, (E + 1,).
        until: Position after which the chunk of each run is not needed; and one for none, (E + 1,).
        sums: Bytes of the chunks before, whole numbers, (E + 1,).
        end: The run after the last one that begins at each position, (P, 1).
        first: The first run that is not of the first n chunks, (N + 1,).
        last: Where the last runs begin: some positions, (L,).
    """

    def __init__(self, num_positions: int, runs: Runs, sizes: Integers, backward: bool) -> None:
        self.size = len(runs.chunks)
        begun = np.array(runs.last if backward else runs.first, dtype=np.int64)
        until = np.array(runs.first if backward else runs.last, dtype=np.int64)
        own = np.array(runs.chunks, dtype=np.int64)
        self.until, self.chunks = np.append(until, -1), np.append(own, len(sizes))
        nbytes = sizes[own]
        self.sums = before_each(nbytes).astype(np.float64)
        places = np.arange(num_positions + 1)
        bounds = np.searchsorted(begun, places)
        self._start, self.end = bounds[:-1, None], bounds[1:, None]
        self.last = np.unique(begun)[-LAST:]
        self.first = np.searchsorted(own, np.arange(len(sizes) + 1))
        self._ending = np.searchsorted(until, places)
        least = np.full(num_positions, np.iinfo(np.int64).max)
        np.minimum.at(least, begun, nbytes)
        self._least, self._step = np.where(self._start < self.end, least[:, None], 0), -1 if backward else 1

    def begin(self, persistent: Integers) -> Integers:
        """The first run that begins at each position and is not of the first `persistent` chunks, (P, K)."""
        begin: Integers = np.minimum(np.maximum(self.first[persistent], self._start), self.end)
        return begin

    def begin_of_last(self, persistent: Integers) -> Integers:
        """The same at the last positions; `size` where none begins, (L, K)."""
        start, end = self._start[self.last], self.end[self.last]
        begin = np.maximum(self.first[persistent], start)
        return np.where(begin < end, begin, self.size)

    def ending(self, positions: Integers) -> Integers:
        """The first run that ends at each of these positions or behind it."""
        return self._ending.take(positions)

    def least_held(self, meanwhile: Floats) -> Floats:
        """What a set of plans holds back at least, see [Note: Held back] in candidates.py; (2 * P * (P + 1),).

        By position, and by what it waits for, from nothing (-1) on; then the same for plans, which hold back what they
        do: no limit.

        Args:
            meanwhile: Bytes that come while each position is computed, at the very least, (P,).
        """
        places = np.arange(len(meanwhile))[:, None]
        later = np.arange(-1, len(meanwhile)) + self._step
        least = self._least + np.floor(np.maximum(meanwhile, 0)).take(later, mode="clip")
        return np.append(np.where(later == places, np.inf, least), np.full(least.size, np.inf))
