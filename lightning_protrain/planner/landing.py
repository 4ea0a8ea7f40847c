"""How gradients that leave the device hold up what is computed after them, position by position.

[Note: Landings]
The device has room for the two largest gradients: for those under way, and for the one that is computed next. So when a
gradient has been computed, the device waits until those under way leave room for the next one. Which one waits for
which, inside of a block and across several, is walked through once, as sums and maxima of two things alone: when the
position's computation begins, and when the link has carried what was given to it before. The clock then goes by six
durations for each position. Gradients of one module come together, when its backward ends, and computation goes by
elements. It is assumed that the link carries what earlier positions gave it without a pause, as it does where it is
waited for.

[Note: Affected]
A gradient that stays on the device changes what is found for its own position and for those close by. So positions are
walked through with everything offloaded, once for each size of the room, and again only where a plan keeps something
that counts there. Sets of plans with so many chunks resident or fewer have a bound there: with more gradients, more is
under way and what is given later lands later, so what is waited for with the fewest is waited for in all of them, if of
all that may come next it is the least.

[Note: Kinds]
Most positions are calls of equal blocks. Two of them whose gradients have the same sizes, times and chunks, counted
from their first one, are of one *kind*. Where those before them, as far as they may be waited for, and those after them
are of the same kinds, too, so are the durations: one position of each such neighbourhood is walked through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.sizes import before_each

Seconds = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Durations = tuple[float, float, float, float, float, float]
NEVER = -np.inf


@dataclass(frozen=True)
class Near:
    """What counts for the gradients of a position.

    Attributes:
        nbytes: Of its own gradients that land, in order.
        ends: Seconds from the beginning of its backward until each is there.
        before: Bytes of those that land before its own, the latest first: as many as may be waited for.
        following: Bytes of the one that lands after each of its own; 0: there is none.
        worked: Seconds that the worker has worked for the position before each of its own; infinite: it does nothing
            for that one.
        compute: Seconds of its backward.
    """

    nbytes: tuple[int, ...]
    ends: tuple[float, ...]
    before: tuple[int, ...]
    following: tuple[int, ...]
    worked: tuple[float, ...]
    compute: float


def come_together(gradients: Sequence[str], numels: Sequence[int]) -> list[float]:
    """Which part of a segment's backward has been computed when each of its gradients is there.

    Args:
        gradients: First names of their parameters.
        numels: Elements of each.
    """
    modules = [fqn.rpartition(".")[0] for fqn in gradients]
    sums = list(accumulate(numels))
    ends = dict(zip(modules, sums, strict=True))
    return [ends[module] / max(sums[-1], 1) for module in modules]


def walk(near: Near, room: int, rate: float) -> Durations:
    """The durations of a position, as `Landings.of` has them.

    Args:
        near: What counts for it.
        room: Bytes that gradients may take on the device.
        rate: Bytes per second of the link.
    """
    return _walk(near, _waits(near, room), rate)


def _waits(near: Near, room: int) -> list[int]:
    """Which gradient each one of a position waits for, of those before it and its own, in order; -1: none."""
    under_way = list(near.before[::-1])
    found = []
    for nbytes, following in zip(near.nbytes, near.following, strict=True):
        found.append(_waited(under_way, max(room - following - nbytes, 0)))
        under_way.append(nbytes)
    return found


def _walk(near: Near, waits: Sequence[int], rate: float) -> Durations:
    # How much later than without waiting: behind the beginning, and behind the link. When each has landed: the same.
    late, late_link = 0.0, NEVER
    landed, carried = NEVER, 0.0
    ready, ready_behind = NEVER, NEVER
    ends = [(NEVER, -nbytes / rate) for nbytes in accumulate((0, *near.before[:-1]))][::-1] if near.before else []
    for nbytes, end, waited, worked in zip(near.nbytes, near.ends, waits, near.worked, strict=True):
        if waited >= 0:
            behind_begin, behind_link = ends[waited]
            late, late_link = max(late, behind_begin - end), max(late_link, behind_link - end)
        seconds = nbytes / rate
        landed, carried = max(end + late, landed) + seconds, max(end + late_link, carried) + seconds
        ready, ready_behind = max(ready, landed - worked), max(ready_behind, carried - worked)
        ends.append((landed, carried))
    return late, near.compute + late_link, landed, carried, ready, ready_behind


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
        works: Seconds of the worker when each has landed, see `Gradients.works`, (M,).
        computes: Seconds of each position's backward, (P,).
        rates: Bytes per second that the link may have, (R,).
    """

    def __init__(
        self,
        positions: Integers,
        chunks: Integers,
        nbytes: Integers,
        parts: Seconds,
        works: Seconds,
        computes: Seconds,
        rates: tuple[float, ...],
    ) -> None:
        count = len(computes)
        self._rates, self._computes = rates, computes.tolist()
        self._chunks, self._nbytes = chunks.tolist(), nbytes.tolist()
        self._ends = (parts * computes[positions]).tolist() if len(positions) else []
        self._works = works.tolist()
        falling = -positions
        self._first = np.searchsorted(falling, -np.arange(count)).tolist()
        self._stop = np.searchsorted(falling, -np.arange(count), side="right").tolist()
        # The last chunk of each position; the last one of any gradient from each on; bytes of all before each.
        self._last = np.full(count, -1, dtype=np.int64)
        np.maximum.at(self._last, positions, chunks)
        self._later = np.append(np.maximum.accumulate(chunks[::-1])[::-1], -1).tolist()
        self._sums = before_each(nbytes)
        self._landing = (-np.unique(falling)).tolist()
        self._kinds = self._kinds_of_positions()
        self._walked: dict[tuple[Near, int], Seconds] = {}
        self._bases: dict[int, tuple[Seconds, Integers]] = {}
        self._exceptions: dict[tuple[int, int, int, bool], Seconds] = {}

    def of(self, persistent: Integers, room: Integers, loose: Flags) -> Seconds:
        """Seconds for each rate, position and plan, (R, 6, P, K); 0 where nothing lands.

        - stall: How much longer than its computation it takes, if the link is free when it begins.
        - drain: From when the link has carried what came before until the computation has ended; it may be negative.
        - landed: From the beginning of the computation until the last gradient has landed.
        - carry: From when the link has carried what came before until then.
        - ready: From the beginning of the computation until the worker could begin and never wait for one of them.
        - ready_behind: From when the link has carried what came before until then.

        Args:
            persistent: How many of the first chunks are resident, (K,).
            room: Bytes that gradients may take on the device, (K,), see [Note: Landings].
            loose: Whether a bound is wanted of all plans with so many resident chunks or fewer, (K,), see
                [Note: Affected].
        """
        rooms, which = np.unique(room, return_inverse=True)
        tables, firsts = zip(*map(self._base, rooms.tolist()), strict=True)
        least = np.stack(firsts, axis=-1)[:, which]
        found = np.where(least >= persistent, np.stack(tables, axis=-1)[..., which], 0.0)
        positions, plans = np.nonzero((self._last[:, None] >= persistent) & (least < persistent))
        keys = (positions, persistent[plans], room[plans], loose[plans])
        for plan, key in zip(plans.tolist(), zip(*(part.tolist() for part in keys), strict=True), strict=True):
            if key not in self._exceptions:
                self._exceptions[key] = self._durations(self._near(*key), key[2])
            found[:, :, key[0], plan] = self._exceptions[key]
        return found

    def _base(self, room: int) -> tuple[Seconds, Integers]:
        """The same with nothing resident, (R, 6, P); and the first chunk that counts for each position, (P,)."""
        if room not in self._bases:
            count = len(self._computes)
            table, least = np.zeros((len(self._rates), 6, count)), np.full(count, -1, dtype=np.int64)
            starts = np.array([self._first[position] for position in self._landing], dtype=np.int64)
            reaches = np.maximum(np.searchsorted(self._sums, self._sums[starts] - room) - 1, 0)
            since = (np.searchsorted(starts, reaches, side="right") - 1).tolist()
            known: dict[tuple[int, ...], Seconds] = {}
            for index, (position, reach) in enumerate(zip(self._landing, reaches.tolist(), strict=True)):
                kinds = (index - since[index], *self._kinds[since[index] : index + 2])
                if kinds not in known:
                    known[kinds] = self._durations(self._near(position, 0, room, loose=False), room)
                table[:, :, position] = known[kinds]
                least[position] = min(self._chunks[reach : self._stop[position] + 1])
            self._bases[room] = table, least
        return self._bases[room]

    def _kinds_of_positions(self) -> list[int]:
        """A number for each kind, see [Note: Kinds], of all positions at which something lands, in that order."""
        numbers: dict[tuple[tuple[float, ...], ...], int] = {}
        found = []
        for position in self._landing:
            own = slice(self._first[position], self._stop[position])
            chunks = self._chunks[own]
            counted = tuple(chunk - chunks[0] for chunk in chunks)
            works = tuple(self._works[own])
            kind = tuple(self._nbytes[own]), tuple(self._ends[own]), counted, works, (self._computes[position],)
            found.append(numbers.setdefault(kind, len(numbers)))
        return found

    def _near(self, position: int, persistent: int, room: int, loose: bool) -> Near:
        """What counts for a position."""
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
        return Near(
            tuple(nbytes[index] for index in own),
            tuple(self._ends[index] for index in own),
            tuple(before),
            tuple(following) if some else (*following, 0),
            tuple(self._worked(own, range(self._first[position], stop) if loose else own)),
            self._computes[position],
        )

    def _durations(self, near: Near, room: int) -> Seconds:
        """Those of every rate, (R, 6)."""
        if (near, room) not in self._walked:
            waits = _waits(near, room)
            self._walked[near, room] = np.array([_walk(near, waits, rate) for rate in self._rates])
        return self._walked[near, room]

    def _worked(self, own: Sequence[int], counted: Sequence[int]) -> Iterator[float]:
        """Seconds of the worker for those of `counted` before each of `own`, which are among them."""
        before = dict(zip(counted, accumulate((self._works[index] for index in counted), initial=0.0), strict=False))
        for index in own:
            yield before[index] if self._works[index] > 0 else np.inf
