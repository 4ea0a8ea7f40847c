"""The least value of a function over a grid of integers, by branch and bound over boxes, evaluated in batches.

[Note: Branch and bound]
A *box* is all points between two corners. Whoever knows the function gives for every box a bound: no point in it has a
smaller value; of a box that is one point, the value itself. The boxes with the smallest bounds are divided, those whose
bound is above the best value found so far are dropped with all their points. So the result is the least of all, however
loose the bounds are: loose ones only take longer. Whoever knows where no point of a box is allowed cuts that part off
first. Among equal values the point that is first in lexicographic order wins, as if all had been enumerated.
Bounds that tell boxes apart badly could make that long: past `LIMIT` evaluations the best point found is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
# Corners (D, K), (D, K) to bounds (K,); infinite where no point of the box is allowed, or where no point has a value up
# to the third argument.
Bound = Callable[[Integers, Integers, float], Floats]
# Corners (D, K), (D, K) to one promising point in each box, (D, K).
Probe = Callable[[Integers, Integers], Integers]
# Corners (D, K), (D, K) to those of what is left of each box, where only points that are not allowed are cut off.
Cut = Callable[[Integers, Integers], tuple[Integers, Integers]]
# About so many boxes are evaluated at one time: enough to hide what a round costs, few enough to learn between rounds.
# After some rounds they are too few, and twice as many are taken, up to the most.
BATCH, MOST, PATIENCE = 144, 1152, 3
PIECES = 8
LIMIT = 1 << 18
# Points are tried in so many of the boxes that are divided: those with the smallest bounds.
PROBED = 4


@dataclass(frozen=True)
class Minimum:
    """What was found.

    Attributes:
        value: The least value; that which was to be beaten if none is below it.
        point: Where; empty if no value is below.
        evaluations: How many boxes and points were evaluated.
        rounds: In how many batches.
    """

    value: float
    point: tuple[int, ...]
    evaluations: int
    rounds: int


def whole(low: Integers, high: Integers) -> tuple[Integers, Integers]:
    """Cuts nothing off."""
    return low, high


def minimize(
    bound: Bound,
    probe: Probe,
    low: Integers,
    high: Integers,
    below: float = np.inf,
    batch: int = BATCH,
    cut: Cut = whole,
    weights: Floats | None = None,
    limit: int = LIMIT,
) -> Minimum:
    """Finds the least value in some boxes, see [Note: Branch and bound].

    Args:
        bound: Lower bounds of boxes, and values of points.
        probe: Points where small values are likely, to drop boxes early; any will do.
        low: Least corners of the boxes that are searched, (D, K).
        high: Their greatest corners, (D, K), inclusive; a box where it is below `low` is empty.
        below: Only smaller values are of interest.
        batch: About how many boxes are evaluated at one time, at first.
        cut: What is left of boxes that were divided; those of which nothing is left are not evaluated.
        weights: By how much values differ, about, from one point to the next in each direction, (D, 1): there boxes are
            divided first; None: as `divide` has it.
        limit: Evaluations after which the search ends, if anything was found.
    """
    value = below
    point: tuple[int, ...] = ()
    evaluations = rounds = 0
    waiting = low[:, :0], high[:, :0], np.zeros(0)
    new = probed = _nonempty(low, high)
    if 0 < new[0].shape[1] <= batch // PIECES:  # So few that it is no use to know their bounds.
        new = _nonempty(*cut(*divide(*new, batch // new[0].shape[1], weights)))
    while probed[0].size and (evaluations < limit or value == np.inf):
        probes = probe(*probed)
        corners = np.hstack((new[0], probes)), np.hstack((new[1], probes))
        bounds = bound(*corners, value)
        evaluations, rounds = evaluations + bounds.size, rounds + 1
        value, point = _better(*corners, bounds, value, point)

        boxes = np.flatnonzero((new[0] < new[1]).any(axis=0))
        low, high = (np.hstack((old, some[:, boxes])) for old, some in zip(waiting, new, strict=False))
        bounds = np.hstack((waiting[2], bounds[boxes]))
        keep = np.flatnonzero(_may_improve(low, bounds, value, point))
        if not keep.size:
            break
        order = keep[np.lexsort((*low[::-1, keep], bounds[keep]))]
        size = max(min(batch << (rounds // PATIENCE), MOST), batch)
        num_parents = min(order.size, max(size // PIECES, 1))
        chosen, rest = order[:num_parents], order[num_parents:]
        waiting = low[:, rest], high[:, rest], bounds[rest]
        divided = low[:, chosen], high[:, chosen]
        new = _nonempty(*cut(*divide(*divided, max(size // num_parents, 2), weights)))
        probed = divided[0][:, :PROBED], divided[1][:, :PROBED]
    return Minimum(value, point, evaluations, rounds)


def divide(low: Integers, high: Integers, pieces: int, weights: Floats | None = None) -> tuple[Integers, Integers]:
    """Divides each box into about so many smaller ones, the longest sides first; a point stays as it is.

    Args:
        low: Least corners, (D, K).
        high: Greatest corners, (D, K).
        pieces: About how many there should be of each.
        weights: Of sides in each direction, (D, 1); None: sides are compared with the longest ones in the same
            direction, so that none is left whole because it has few points.

    Returns:
        Corners of all pieces, (D, K'); those of one box are next to each other.
    """
    sides = high - low + 1
    if weights is None:
        weights = 1.0 / sides.max(axis=1, keepdims=True)
    weights = np.maximum(weights, np.finfo(np.float64).tiny)  # A side that costs nothing is divided too, but last.
    ways = np.ones_like(sides)
    columns = np.arange(sides.shape[1])
    for _ in range(max(pieces.bit_length() - 1, 1)):
        lengths = np.where(ways < sides, sides * weights / ways, 0.0)
        longest = lengths.argmax(axis=0)
        splits = lengths[longest, columns] > 0.0
        ways[longest[splits], columns[splits]] *= 2
    ways = np.minimum(ways, sides)
    counts = ways.prod(axis=0)
    parents = np.repeat(columns, counts)
    rest = np.arange(parents.size) - np.repeat(np.cumsum(counts) - counts, counts)
    sides, ways, start = sides[:, parents], ways[:, parents], low[:, parents]
    new_low, new_high = np.empty_like(start), np.empty_like(start)
    for axis in range(low.shape[0]):
        rest, index = np.divmod(rest, ways[axis])
        new_low[axis] = start[axis] + index * sides[axis] // ways[axis]
        new_high[axis] = start[axis] + (index + 1) * sides[axis] // ways[axis] - 1
    return new_low, new_high


def _nonempty(low: Integers, high: Integers) -> tuple[Integers, Integers]:
    some = (low <= high).all(axis=0)
    return low[:, some], high[:, some]


def _better(
    low: Integers, high: Integers, values: Floats, value: float, point: tuple[int, ...]
) -> tuple[float, tuple[int, ...]]:
    """The best of the points among these boxes, or what was the best before."""
    points = np.flatnonzero((low == high).all(axis=0) & (values <= value))
    if not points.size:
        return value, point
    first = points[np.lexsort((*low[::-1, points], values[points]))[0]]
    return min((float(values[first]), tuple(low[:, first].tolist())), (value, point))


def _may_improve(low: Integers, bounds: Floats, value: float, point: tuple[int, ...]) -> Flags:
    """Which boxes may hold a better point: one of a smaller value, or of the same one and before `point`."""
    earlier, same = np.zeros(bounds.size, np.bool_), np.ones(bounds.size, np.bool_)
    for axis, coordinate in enumerate(point):
        earlier |= same & (low[axis] < coordinate)
        same &= low[axis] == coordinate
    keep: Flags = (bounds < value) | ((bounds == value) & earlier)
    return keep
