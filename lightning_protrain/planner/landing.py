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
Most positions are calls of equal blocks. Two of them whose gradients have the same sizes and times are of one *kind*.
Where those before them, as far as they may be waited for, and those after them are of the same kinds, too, so are the
durations with everything offloaded: one position of each such neighbourhood is walked through.

[Note: Side by side]
All positions that are to be walked through, each for some number of resident chunks and some room, are walked through
side by side, from their first gradients on: to numpy, one step for many costs as much as one for a single one. For
each there is a row of the gradients around its own, of which those that land count: before them as many as may be
waited for, and after them up to the next one that lands. Most chunks come in order: so all before some gradient land,
where a difference of sums tells how many may be waited for, and none from another one on. Each row ends with *nothing*,
which lands, but has no bytes. Positions with fewer gradients have nothing behind their last: it is there at once, waits
for none, and takes no time on the link, which changes no duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.sizes import before_each

Seconds = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
NEVER = -np.inf
NO_CHUNK = np.iinfo(np.int64).max  # Of nothing: it is never resident.


class _Cases(NamedTuple):
    """What is walked through, (Q,): positions, and what `Landings.of` is told of the plan."""

    positions: Integers
    persistent: Integers
    room: Integers
    loose: Flags


class _Rows(NamedTuple):
    """Gradients that land, row by row, see [Note: Side by side]; places are those among all of them.

    Attributes:
        gradients: Which ones they are, (L,).
        following: Bytes of the one that lands after each, the least of any plan in a set, (L - 1,); 0: there is none.
        begin: The place of the first one in each row that may be waited for, (Q,).
        first: The place of the position's first one, (Q,).
        stop: The place after the position's last one, (Q,).
    """

    gradients: Integers
    following: Integers
    begin: Integers
    first: Integers
    stop: Integers


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
        self._rates, self._computes = np.array(rates), computes
        # Gradients are counted from 1 here: there is nothing before the first and after the last.
        self._chunks, self._nbytes = np.full(len(chunks) + 2, NO_CHUNK), _within(nbytes)
        self._chunks[1:-1] = chunks
        self._ends, self._works = _within(parts * computes[positions] if len(positions) else parts), _within(works)
        bounds = np.searchsorted(-positions, 1 - np.arange(len(computes) + 1)) + 1
        self._first, self._stop = bounds[1:], bounds[:-1]
        self._landing = np.flatnonzero(self._first < self._stop)[::-1]
        # The last chunk of each position; the first one of any up to each gradient, the last of any from each on, both
        # negative; bytes of all before each.
        self._last = np.full(len(computes), -1, dtype=np.int64)
        if len(positions):
            self._last[self._landing] = np.maximum.reduceat(chunks, self._first[self._landing] - 1)
        self._earlier = -np.minimum.accumulate(self._chunks[:-1])
        self._later = -np.maximum.accumulate(chunks[::-1])[::-1]
        self._sums = before_each(self._nbytes)
        self._kinds, self._worked = self._kinds_of_positions()
        # With nothing resident, by room: all durations, (R, 6, P, K), the first chunk that counts for each, (P, K).
        self._rooms: dict[int, int] = {}
        self._bases = np.zeros((len(rates), 6, len(computes), 0))
        self._least = np.zeros((len(computes), 0), dtype=np.int64)

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
        new = sorted(set(room.tolist()) - self._rooms.keys())
        for number in new:
            self._rooms[number] = len(self._rooms)
            self._least = np.append(self._least, self._least_of(number), axis=1)
        which = np.array([self._rooms[number] for number in room.tolist()])
        offloaded = self._least[:, which] >= persistent
        positions, plans = np.nonzero((self._last[:, None] >= persistent) & ~offloaded)
        affected = self._walk(new, _Cases(positions, persistent[plans], room[plans], loose[plans]))
        found: Seconds = np.where(offloaded, self._bases[..., which], 0.0)
        found[:, :, positions, plans] = affected
        return found

    def _least_of(self, room: int) -> Integers:
        """The first chunk that counts for each position if nothing is resident, (P, 1); -1: nothing lands."""
        found = np.full((len(self._computes), 1), -1)
        if len(self._landing):
            stop = self._stop[self._landing]
            bounds = np.stack((self._since(self._first[self._landing], room), stop), axis=1)
            before = np.minimum.reduceat(self._chunks, bounds.reshape(-1))[::2]
            found[self._landing, 0] = np.minimum(before, self._chunks[stop])
        return found

    def _walk(self, new: Sequence[int], cases: _Cases) -> Seconds:
        """Durations of cases, (R, 6, Q); and of those with nothing resident in rooms that are new."""
        if not new:
            return self._durations(cases)
        several, places = zip(*map(self._neighbourhoods, new), strict=True)
        found = self._durations(_Cases(*map(np.concatenate, zip(*several, cases, strict=True))))
        *pieces, rest = np.split(found, np.cumsum([len(bare.positions) for bare in several]), axis=-1)
        bases = np.zeros((*self._bases.shape[:-1], len(new)))
        for index, (piece, each) in enumerate(zip(pieces, places, strict=True)):
            bases[..., self._landing, index] = piece[..., each]
        self._bases = np.concatenate((self._bases, bases), axis=-1)
        return rest

    def _neighbourhoods(self, room: int) -> tuple[_Cases, Integers]:
        """One position of each, see [Note: Kinds], with nothing resident; which one each has that has gradients."""
        starts = self._first[self._landing]
        since = (np.searchsorted(starts, self._since(starts, room), side="right") - 1).tolist()
        known: dict[tuple[int, ...], int] = {}
        which: list[int] = []
        some: list[int] = []
        for index, begin in enumerate(since):
            kinds = (index - begin, *self._kinds[begin : index + 2])
            which.append(known.setdefault(kinds, len(known)))
            if which[-1] == len(some):
                some.append(index)
        none = np.zeros(len(some), dtype=np.int64)
        return _Cases(self._landing[some], none, none + room, none > 0), np.array(which, dtype=np.int64)

    def _kinds_of_positions(self) -> tuple[list[int], Seconds]:
        """A number for each kind, see [Note: Kinds], of all positions that have gradients, in the order of landing.

        And seconds that the worker has worked for its position before each gradient, if all of them land, (M + 2,).
        """
        # Their bytes: those of a position are found in a dictionary much faster than its numbers.
        entries = np.stack((self._nbytes, self._ends.view(np.int64), self._works.view(np.int64)), axis=1)
        width, flat = entries.itemsize * 3, entries.tobytes()
        numbers: dict[tuple[bytes, float], int] = {}
        kinds: list[int] = []
        worked: list[Seconds] = []
        bounds = (each[self._landing].tolist() for each in (self._first, self._stop, self._computes))
        for first, stop, compute in zip(*bounds, strict=True):
            kinds.append(numbers.setdefault((flat[first * width : stop * width], compute), len(numbers)))
            if kinds[-1] == len(worked):
                worked.append(np.append(0.0, np.cumsum(self._works[first : stop - 1])))
        return kinds, _within(np.concatenate([worked[kind] for kind in kinds]) if kinds else np.zeros(0))

    def _since(self, gradients: Integers, room: int | Integers) -> Integers:
        """The last gradient from which on there is more than the room before each of these; 1 if there is none."""
        found: Integers = np.maximum(self._sums.searchsorted(self._sums[gradients] - room) - 1, 1)
        return found

    def _durations(self, cases: _Cases) -> Seconds:
        """The six of each rate and case, (R, 6, Q)."""
        found = np.zeros((len(self._rates), 3, 2, len(cases.positions)))
        if found.size:
            rows = self._rows(cases)
            places = rows.first + np.arange((rows.stop - rows.first).max())[:, None]
            places = np.where(places < rows.stop, places, -1)
            gradients = rows.gradients.take(places)
            ends, nbytes = self._ends.take(gradients), self._nbytes.take(gradients)
            found[:, 0], landed = _landed(ends, nbytes, *self._waits(cases.room, rows, places), self._rates)
            found[:, 0, 1] += self._computes[cases.positions]
            found[:, 1] = landed[-1]
            found[:, 2] = (landed - self._before(gradients, cases.loose)[:, None, None]).max(axis=0)
        return found.reshape(len(found), 6, -1)

    def _rows(self, cases: _Cases) -> _Rows:
        positions, persistent, room, loose = cases
        first, stop = self._first[positions], self._stop[positions]
        # All before `mixed` land, and none from `resident` on.
        mixed = self._earlier.searchsorted(-persistent, side="right")
        resident = self._later.searchsorted(-persistent, side="right") + 1
        before = (first - self._since(np.minimum(first, mixed), room)).max()
        after = (np.where(stop < mixed, stop + 1, np.maximum(stop, resident)) - first).max()
        nothing = len(self._nbytes) - 1
        index = first[:, None] + np.arange(-before, after + 1)
        index[:, -1] = nothing
        lands = self._chunks.take(index, mode="clip") >= persistent[:, None]
        found = np.flatnonzero(lands)
        gradients = index.reshape(-1).take(found).clip(0, nothing)
        counted = np.where(lands | loose[:, None], self._nbytes.take(index, mode="clip"), NO_CHUNK).reshape(-1)
        following = np.minimum.reduceat(counted, found[:-1] + 1)
        columns = np.arange(len(index)) * index.shape[1] + before
        since = first - self._since(first, room)
        bounds = np.concatenate((columns - before, columns, columns + stop - first, columns - since))
        begin, own, end, reach = found.searchsorted(bounds).reshape(4, -1)
        # In a set: how long ago the link has carried those before depends on the plan, if one of them may be resident.
        return _Rows(gradients, following, np.where(loose & (own - reach < since), own, begin), own, end)

    def _waits(self, room: Integers, rows: _Rows, places: Integers) -> tuple[Integers, Seconds]:
        """Which gradient of its position each waits for, (G, Q), counted from the first; negative: none of them.

        And bytes from one of another position that it waits for to the first one, negative; or `NEVER`.
        """
        nbytes = self._nbytes.take(rows.gradients)
        sums = before_each(nbytes)
        most = np.maximum(room - (rows.following + nbytes[:-1]).take(places), 0)
        wanted = np.where(places >= 0, sums.take(places) - most, -1)
        waited = sums.searchsorted(wanted.T).T - 1
        between = (waited >= rows.begin) & (waited < rows.first)
        return waited - rows.first, np.where(between, sums.take(waited + 1) - sums[rows.first], NEVER)

    def _before(self, gradients: Integers, loose: Flags) -> Seconds:
        """Seconds that the worker has worked for the position before each, (G, Q); infinite: it does nothing for it."""
        works = self._works.take(gradients)
        worked = np.zeros_like(works)
        np.cumsum(works[:-1], axis=0, out=worked[1:])
        return np.where(works > 0, np.where(loose, self._worked.take(gradients), worked), np.inf)


def _landed(
    ends: Seconds, nbytes: Integers, waited: Integers, carried: Seconds, rates: Seconds
) -> tuple[Seconds, Seconds]:
    """How much later computation ends than without waiting, (R, 2, Q), and when each has landed, (G, R, 2, Q).

    Both from the beginning of the computation, and from when the link has carried what came before.

    Args:
        ends: Seconds from the beginning of the computation until each gradient is there, (G, Q).
        nbytes: Of each, (G, Q).
        waited: As `Landings._waits` has it.
        carried: The same.
        rates: Bytes per second of the link, (R,).
    """
    count, lanes = len(ends), (len(rates), 2, ends.shape[1])
    # What may be waited for: for each the one of another position, then all of the position.
    times = np.full((2 * count, *lanes), NEVER)
    times[:count, :, 1] = carried[:, None] / rates[:, None]
    landed = times[count:].reshape(count, -1)
    which = np.where(waited < 0, np.arange(count)[:, None], waited + count) * landed.shape[1]
    which = (which[:, None, None] + np.arange(landed.shape[1]).reshape(lanes)).reshape(count, -1)
    shares = np.empty((2, count, *lanes))
    shares[0], shares[1] = ends[:, None, None], nbytes[:, None, None] / rates[:, None, None]
    late, begun = np.zeros(lanes), np.zeros(lanes)
    late[:, 1], begun[:, 0] = NEVER, NEVER
    delay, now, free = late.reshape(-1), begun.reshape(-1), np.empty(late.size)
    take, maximum, add = times.reshape(-1).take, np.maximum, np.add
    for index, end, seconds, found in zip(which, *shares.reshape(2, count, -1), landed, strict=True):
        maximum(delay, take(index) - end, delay)
        now = add(maximum(add(end, delay, free), now, free), seconds, found)
    return late, times[count:]


def _within(values: NDArray[Any]) -> NDArray[Any]:
    """With a 0 before and after them."""
    return np.concatenate(([0], values, [0]))
