"""How gradients that leave the device hold up what is computed after them, position by position.

[Note: Landings]
The device has room for the two largest gradients: for those under way, and for the one that is computed next. So when a
gradient has been computed, the device waits until those under way leave room for the next one. Which one waits for
which, inside of a block and across several, is walked through once, as sums and maxima of two things alone: when the
position's computation begins, and when the link has carried what was given to it before. The clock then goes by five
durations for each position. Gradients of one module come together, when its backward ends, and computation goes by
elements. It is assumed that the link carries what earlier positions gave it without a pause, as it does where it is
waited for.

[Note: Affected]
A gradient that stays on the device changes what is found for its own position and for those close by. So positions are
walked through with everything offloaded, once for each size of the room, and again only where a plan keeps something
that counts there. Sets of plans with so many chunks resident or fewer have a bound there: with more gradients, more is
under way and what is given later lands later, so what is waited for with the fewest is waited for in all of them, if of
all that may come next it is the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.profiler.records import ModelLayout, Segment

Seconds = NDArray[np.float64]
Integers = NDArray[np.int64]
Durations = tuple[float, float, float, float, float]
NEVER = -np.inf


@dataclass(frozen=True)
class Near:
    """What counts for the gradients of a position.

    Attributes:
        nbytes: Of its own gradients that land, in order.
        ends: Seconds from the beginning of its backward until each is there.
        before: Bytes of those that land before its own, the latest first: as many as may be waited for.
        following: Bytes of the one that lands after each of its own; 0: there is none.
        rest: Bytes that land when all those of a chunk have.
        compute: Seconds of its backward.
    """

    nbytes: tuple[int, ...]
    ends: tuple[float, ...]
    before: tuple[int, ...]
    following: tuple[int, ...]
    rest: int
    compute: float


def come_together(layout: ModelLayout, segment: Segment) -> list[float]:
    """Which part of the segment's backward has been computed when each of its gradients is there."""
    modules = [fqn.rpartition(".")[0] for fqn in segment.gradients]
    sums = list(accumulate(layout.parameter(fqn).numel for fqn in segment.gradients))
    ends = dict(zip(modules, sums, strict=True))
    return [ends[module] / max(sums[-1], 1) for module in modules]


def walk(near: Near, room: int, rate: float) -> Durations:
    """Stall, drain, landed, carry and ready of a position, as `Landings.of` has them.

    Args:
        near: What counts for it.
        room: Bytes that gradients may take on the device.
        rate: Bytes per second of the link.
    """
    # How much later than without waiting: behind the beginning, and behind the link. When each has landed: the same.
    late, late_link = 0.0, NEVER
    landed, carried = NEVER, 0.0
    ends = [(NEVER, -nbytes / rate) for nbytes in accumulate((0, *near.before[:-1]))][::-1] if near.before else []
    under_way = list(near.before[::-1])
    for nbytes, end, following in zip(near.nbytes, near.ends, near.following, strict=True):
        waited = _waited(under_way, max(room - following - nbytes, 0))
        if waited >= 0:
            late, late_link = max(late, ends[waited][0] - end), max(late_link, ends[waited][1] - end)
        landed = max(end + late, landed) + nbytes / rate
        carried = max(end + late_link, carried) + nbytes / rate
        under_way.append(nbytes)
        ends.append((landed, carried))
    return late, near.compute + late_link, landed, carried, -near.rest / rate


def _waited(under_way: Sequence[int], most: int) -> int:
    """The last of those under way that must have landed so that the later ones take no more than `most`; -1: none."""
    nbytes = 0
    for index in range(len(under_way) - 1, -1, -1):
        nbytes += under_way[index]
        if nbytes > most:
            return index
    return -1


class Landings:
    """What the clock is told of gradients that land, see [Note: Landings].

    Args:
        positions: Where each gradient that may land becomes whole, in the order in which they land: falling, (M,).
        chunks: The chunk of each, (M,).
        nbytes: Bytes of each, as they are streamed, (M,).
        parts: Which part of the position's backward has been computed then, (M,).
        computes: Seconds of each position's backward, (P,).
        rate: Bytes per second of the link.
    """

    def __init__(
        self, positions: Integers, chunks: Integers, nbytes: Integers, parts: Seconds, computes: Seconds, rate: float
    ) -> None:
        count = len(computes)
        self._rate, self._computes = rate, computes.tolist()
        self._chunks, self._nbytes = chunks.tolist(), nbytes.tolist()
        self._ends = (parts * computes[positions]).tolist() if len(positions) else []
        self._first = np.searchsorted(-positions, -np.arange(count)).tolist()
        self._stop = np.searchsorted(-positions, -np.arange(count), side="right").tolist()
        # The last chunk of each position; the last one of any gradient from each on.
        self._last = np.full(count, -1, dtype=np.int64)
        np.maximum.at(self._last, positions, chunks)
        self._later = np.append(np.maximum.accumulate(chunks[::-1])[::-1], -1).tolist()
        self._walked: dict[tuple[Near, int], Durations] = {}
        self._bases: dict[int, tuple[Seconds, Integers]] = {}
        self._tables: dict[tuple[int, int, bool], Seconds] = {}

    def of(self, persistent: int, room: int, loose: bool = False) -> Seconds:
        """Seconds for each position if the first chunks are resident, (5, P); 0 where nothing lands.

        - stall: How much longer than its computation it takes, if the link is free when it begins.
        - drain: From when the link has carried what came before until the computation has ended; it may be negative.
        - landed: From the beginning of the computation until the last gradient has landed.
        - carry: From when the link has carried what came before until then.
        - ready: From then until all those of a chunk have landed, never positive.

        Args:
            persistent: How many chunks are resident.
            room: Bytes that gradients may take on the device, see [Note: Landings].
            loose: Whether a bound is wanted of all plans with so many resident chunks or fewer, see [Note: Affected].
        """
        key = persistent, room, loose
        if key not in self._tables:
            base, least = self._base(room)
            table = np.where(least >= persistent, base, 0.0)
            for position in np.flatnonzero((self._last >= persistent) & (least < persistent)).tolist():
                near, _ = self._near(position, persistent, room, loose)
                table[:, position] = self._durations(near, room)
            self._tables[key] = table
        return self._tables[key]

    def _base(self, room: int) -> tuple[Seconds, Integers]:
        """The same with nothing resident; and the first chunk that counts for each position, (P,)."""
        if room not in self._bases:
            table, least = np.zeros((5, len(self._computes))), np.full(len(self._computes), -1, dtype=np.int64)
            for position in np.flatnonzero(self._last >= 0).tolist():
                near, least[position] = self._near(position, 0, room, loose=False)
                table[:, position] = self._durations(near, room)
            self._bases[room] = table, least
        return self._bases[room]

    def _near(self, position: int, persistent: int, room: int, loose: bool) -> tuple[Near, int]:
        """What counts for a position, and the first chunk of it."""
        chunks, nbytes = self._chunks, self._nbytes
        first, stop = self._first[position], self._stop[position]
        own = [index for index in range(first, stop) if chunks[index] >= persistent]
        before: list[int] = []
        held = 0
        while first > 0 and held <= room:
            first -= 1
            if chunks[first] >= persistent:
                before.append(nbytes[first])
                held += nbytes[first]
            elif loose:
                before.clear()  # How long ago the link has carried it depends on the plan.
                break
        after = stop
        while self._later[after] >= persistent and chunks[after] < persistent:
            after += 1
        some = self._later[after] >= persistent
        uses = [*own, after] if some else own
        following = [min(nbytes[index + 1 if loose else last : last + 1]) for index, last in pairwise(uses)]
        near = Near(
            tuple(nbytes[index] for index in own),
            tuple(self._ends[index] for index in own),
            tuple(before),
            tuple(following) if some else (*following, 0),
            sum(nbytes[self._first[position] : stop] if loose else [nbytes[index] for index in self._rest(own)]),
            self._computes[position],
        )
        return near, min(chunks[first : after + some])

    def _durations(self, near: Near, room: int) -> Durations:
        if (near, room) not in self._walked:
            self._walked[near, room] = walk(near, room, self._rate)
        return self._walked[near, room]

    def _rest(self, own: list[int]) -> list[int]:
        """Those of a position's gradients that land when all those of a chunk have."""
        last = {self._chunks[index]: place for place, index in enumerate(own)}
        return own[min(last.values()) + 1 :]
