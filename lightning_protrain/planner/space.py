"""The candidates of a search over one packing: their bounds for the branch and bound, see [Note: Search].

[Note: Enough buffers]
Where the next block does not fit beside the one that is computed, steps take up to a third longer. Whether it does
depends on all decisions, so that boxes learn it one by one. But the box of all candidates, told that it has so many
buffers at most, is a bound of all plans with so many or fewer. If some plan is faster, none of these is of interest,
and boxes are cut where no more than so many fit. Plans of a coarse grid, with a few more chunks offloaded than have to
be, are fast enough for this; and the best of them is the first that is to be beaten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.activity import Backward, Columns, broadcast
from lightning_protrain.planner.boxes import Boxes, Each
from lightning_protrain.planner.branch import BATCH, Bound
from lightning_protrain.planner.clock import begin, simulate
from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.problem import Packing

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
UNLIMITED = 1 << 60
# Of the computation in a step: times that differ by less are the same.
RESOLUTION = 1e-9
# Halvings on the way to the fewest offloaded chunks that fit.
PROBES = 2
# Of the grid that a search begins with: numbers of swapped blocks and of steps, offloaded chunks more than the fewest.
GRID, MORE = 3, (0, 2, 5)
# Up to so many times as many buffers as a unit needs it is asked whether they are enough, for so many numbers of them.
UNITS, ASKED = 3, 24


class Space:
    """Candidates (swapped blocks, steps of the others, offloaded chunks) over one packing, under the knobs.

    Args:
        packing: The model in chunks.
        knobs: What is pinned.
    """

    def __init__(self, packing: Packing, knobs: Knobs) -> None:
        self.packing = packing
        self.knobs = knobs
        self.num_chunks = len(packing.chunks)
        problem = packing.problem
        self._device_budget = UNLIMITED if problem.device_bytes is None else problem.device_bytes
        self._host_budget = UNLIMITED if problem.host_bytes is None else problem.host_bytes
        named = all(block.name for block in problem.layout.blocks)
        # How many steps there are beside each number of swapped blocks.
        self._num_steps = packing.footprint.num_steps if named else np.zeros(1, dtype=np.int64)
        # More buffers than these are wanted, see [Note: Enough buffers].
        self._too_few = 0

    @cached_property
    def _quantum(self) -> float:
        return RESOLUTION * self.packing.candidates.computation

    @cached_property
    def _beside(self) -> Integers:
        """Bytes of the fewest chunk buffers if the first p chunks are resident, (N + 1,)."""
        return self._buffer_bytes(np.arange(self.num_chunks + 1))

    @cached_property
    def _wanted(self) -> Integers:
        """Bytes of the fewest buffers that are of interest if the first p chunks are resident, (N + 1,)."""
        if not self._too_few:
            return self._beside
        persistent = np.arange(self.num_chunks + 1)
        wanted = np.maximum(self._fewest_buffers(persistent), self._too_few + 1)
        return self.packing.footprint.buffers.bytes(persistent, wanted)

    @cached_property
    def weights(self) -> Floats:
        """About how many seconds one more swapped block, step or offloaded chunk may take, (3, 1)."""
        checkpoint, chunk = self.packing.candidates.each
        step = checkpoint * len(self.packing.problem.layout.blocks) / max(int(self._num_steps[0]), 1)
        return np.array([checkpoint + chunk, step, chunk])[:, None]

    def roots(self) -> tuple[Integers, Integers]:
        """Least and greatest corners of one box for each number of swapped blocks, (3, K)."""
        knobs = self.knobs
        swap, checkpoint, resident = knobs.num_swap_blocks, knobs.num_checkpoint_blocks, knobs.num_persistent_chunks
        swaps = np.arange(len(self._num_steps)) if swap is None else np.array([swap])
        swaps = swaps[swaps < len(self._num_steps)]
        least = np.zeros_like(swaps) if checkpoint is None else np.full_like(swaps, checkpoint)
        most = self._num_steps[swaps] if checkpoint is None else least
        offloaded = (0, self.num_chunks) if resident is None else (self.num_chunks - resident,) * 2
        low = np.stack((swaps, least, np.full_like(swaps, offloaded[0])))
        high = np.stack((swaps, most, np.full_like(swaps, offloaded[1])))
        possible = (least <= self._num_steps[swaps]) & (offloaded[0] >= 0)
        return low[:, possible], high[:, possible]

    def whole(self) -> tuple[Integers, Integers]:
        """All of them in one box, (3, 1), if it can be bounded and that is of use.

        With steps behind backward the host is what counts more often, and then few boxes are left of each number.
        """
        low, high = self.roots()
        behind = self.packing.problem.training.overlap == "backward"
        if not low.size or behind or self.knobs.num_keep_offloaded_blocks is not None:
            return low, high
        return low.min(axis=1, keepdims=True), high.max(axis=1, keepdims=True)

    @property
    def batch(self) -> int:
        """About how many boxes to evaluate at one time: where few are left, the way to the best is what takes long."""
        return BATCH if self.packing.problem.training.overlap == "backward" else 2 * BATCH

    def begin(self, below: float) -> tuple[Integers, Integers, float, int]:
        """Where a search begins, with what has too few buffers left out, see [Note: Enough buffers]; asked for once.

        With steps behind backward the fewest buffers are as good as any.

        Args:
            below: Only plans that take less are of interest.

        Returns:
            Least and greatest corners of boxes with all plans of interest, (3, K) each; `below`, or a little more than
            what a plan takes that was found; how many plans and sets were evaluated.
        """
        low, high = self.whole()
        behind = self.packing.problem.training.overlap == "backward"
        if behind or self._device_budget == UNLIMITED or self.knobs.num_chunk_buffers is not None or not low.size:
            return *self.cut(low, high), below, 0
        # At one time the boxes and the first points of the grid, each with all that is offloaded beside it.
        grid = self._grid(low.min(axis=1), high.max(axis=1))
        low, high = self.cut(*(np.hstack(corners) for corners in zip((low, high), grid, strict=True)))
        boxes, points = np.split(np.stack((low, high)), [-grid.shape[2]], axis=2)
        if not (boxes[0] <= boxes[1]).all(axis=0).any():
            return boxes[0], boxes[1], below, 0
        points = _with_more(*points)
        _, some, buffers = self._fitting(points, points)
        everything = self._boxes(boxes[0].min(axis=1, keepdims=True), boxes[1].max(axis=1, keepdims=True))
        least = int(self._fewest_buffers(everything.persistent)[0])
        asked = np.unique(np.linspace(least, UNITS * least, ASKED).astype(np.int64))
        together = some.beside(everything.only(np.zeros_like(asked)))
        seconds, bounds = np.split(self._simulate(together, np.concatenate((buffers, asked))), [buffers.size])
        best = min(below, float(seconds.min(initial=np.inf)) + self._quantum)
        self._too_few = int(asked[bounds >= best].max(initial=0))
        self.__dict__.pop("_wanted", None)
        self.packing.footprint.tighten()
        return boxes[0], boxes[1], best, seconds.size + bounds.size

    def _grid(self, low: Integers, high: Integers) -> Integers:
        """Numbers of swapped blocks and of steps all over a box, with all that may be offloaded, (2, 3, K)."""
        swap, part = np.meshgrid(np.linspace(low[0], high[0], GRID).astype(np.int64), np.linspace(0, 1, GRID))
        swap = swap.reshape(-1)
        most = np.minimum(self._num_steps[swap], high[1])
        steps = (low[1] + part.reshape(-1) * np.maximum(most - low[1], 0)).astype(np.int64)
        return np.stack([np.stack((swap, steps, np.full_like(swap, end[2]))) for end in (low, high)])

    def seconds(self, low: Integers, high: Integers, below: float = np.inf) -> Floats:
        """Lower bounds of the time of boxes, and the time of points; infinite where nothing fits, (K,).

        Points that take more than `below` may be infinite, too.
        """
        seconds = np.full(low.shape[1], np.inf)
        which, boxes, buffers = self._fitting(low, high)
        if which.size:
            seconds[which] = self._simulate(boxes, buffers, below)
        return seconds

    def _fitting(self, low: Integers, high: Integers) -> tuple[Integers, Boxes, Integers]:
        """Which boxes may have a candidate that fits, these boxes, and their buffers."""
        boxes = self._boxes(low, high)
        which = np.flatnonzero(self._allowed(boxes) & self.fits_host(boxes))
        boxes = boxes.only(which)
        if not which.size:
            return which, boxes, which
        buffers = self._buffers(boxes)
        fits = buffers >= 0
        return which[fits], boxes.only(fits), buffers[fits]

    def bytes(self, what: Callable[[Boxes], Integers], limit: Callable[[Boxes], Flags]) -> Bound:
        """A bound of bytes instead of seconds: of `what`, where the box is within `limit`."""

        def bound(low: Integers, high: Integers, _: float) -> Floats:
            boxes = self._boxes(low, high)
            return np.where(self._allowed(boxes) & limit(boxes), what(boxes), np.inf)

        return bound

    def device(self, boxes: Boxes) -> Integers:
        """The least bytes on the device, with the fewest buffers, (K,)."""
        return self._taken(boxes) + self._beside[boxes.persistent]

    def host(self, boxes: Boxes) -> Integers:
        """The least bytes on the host, (K,)."""
        return self.packing.footprint.host(boxes.swap, boxes.fewest, boxes.persistent)

    def anywhere(self, boxes: Boxes) -> Flags:
        """No limit."""
        return np.ones_like(boxes.point)

    def fits_device(self, boxes: Boxes) -> Flags:
        """Whether a candidate of the box may fit the device."""
        return self.device(boxes) <= self._device_budget

    def fits_host(self, boxes: Boxes) -> Flags:
        """Whether a candidate of the box may fit the host."""
        if self._host_budget == UNLIMITED:
            return self.anywhere(boxes)
        return self.host(boxes) <= self._host_budget

    def fits_both(self, boxes: Boxes) -> Flags:
        """Whether a candidate of the box may fit both."""
        return self.fits_device(boxes) & self.fits_host(boxes)

    def cut(self, low: Integers, high: Integers) -> tuple[Integers, Integers]:
        """What is left of boxes without candidates that do not fit the device, see [Note: Fewest offloaded]."""
        most = np.minimum(high[1], self._num_steps[low[0]])
        swaps = len(self._num_steps) - np.searchsorted(self._num_steps[::-1], low[1]) - 1
        high = np.stack((np.minimum(high[0], swaps), most, high[2]))
        some = (low <= high).all(axis=0)
        low, high = low[:, some], high[:, some]
        if self._device_budget == UNLIMITED or not low.size:
            return low, high
        each, width = Each.of(low[0], high[0]), int(self._num_steps[0]) + 1
        pair = each.swap * width + self._most(high[1], each)
        # Of each pair the fewest that are known in any box; then how many there have to be.
        fewest = np.full(len(self._num_steps) * width, UNLIMITED)
        np.minimum.at(fewest, pair, low[2, each.box])
        pairs = np.flatnonzero(fewest < UNLIMITED)
        known = *np.divmod(pairs, width), fewest[pairs], self._device_budget, self._wanted
        fewest[pairs] = self.packing.footprint.fewest_offloaded(*known)
        of_each = fewest[pair]
        fits = of_each <= high[2, each.box]
        first = each.least(np.where(fits, each.swap, UNLIMITED))
        last = -each.least(np.where(fits, -each.swap, 1))
        return np.stack((first, low[1], np.maximum(low[2], each.least(of_each)))), np.stack((last, *high[1:]))

    def corner(self, low: Integers, high: Integers) -> Integers:
        """In each box the candidate with the most steps and the fewest offloaded chunks."""
        return np.stack((low[0], high[1], low[2]))

    def probe(self, low: Integers, high: Integers) -> Integers:
        """In each box the candidate with the most steps and as few offloaded chunks as fit, about."""
        first, last = low[2].copy(), high[2].copy()
        for _ in range(PROBES):
            middle = (first + last) // 2
            corner = np.stack((high[0], high[1], middle))
            fits = self.fits_device(self._boxes(corner, corner))
            first, last = np.where(fits, first, np.minimum(middle + 1, last)), np.where(fits, middle, last)
        return np.stack((high[0], high[1], last))

    def plan(self, point: tuple[int, ...]) -> Plan:
        """The plan of a candidate that fits."""
        corner = np.array(point, dtype=np.int64)[:, None]
        boxes = self._boxes(corner, corner)
        return self._plan(boxes, 0, int(self._buffers(boxes)[0]))

    def least_plan(self, point: tuple[int, ...]) -> Plan:
        """The plan of a candidate with the fewest buffers."""
        corner = np.array(point, dtype=np.int64)[:, None]
        boxes = self._boxes(corner, corner)
        return self._plan(boxes, 0, int(self._fewest_buffers(boxes.persistent)[0]))

    def _boxes(self, low: Integers, high: Integers) -> Boxes:
        count = self.num_chunks
        return Boxes(low[0], high[0], low[1], high[1], count - high[2], count - low[2], (low == high).all(axis=0))

    def _allowed(self, boxes: Boxes) -> Flags:
        """Whether a candidate of the box may have the pinned buffers, and the pinned streamed blocks that keep."""
        keep, buffers = self.knobs.num_keep_offloaded_blocks, self.knobs.num_chunk_buffers
        enough: Flags = np.ones_like(boxes.point)
        if buffers is not None:
            enough = self.packing.footprint.buffers.least[boxes.persistent] <= buffers
        if keep is None:
            return enough
        keeps = self.packing.keeps
        fewest = keeps(boxes.swap, boxes.most, boxes.persistent)
        most = keeps(boxes.swap, boxes.least, boxes.fewest)
        return enough & (fewest <= keep) & (keep <= most)

    def _taken(self, boxes: Boxes) -> Integers:
        each = Each.of(boxes.swap, boxes.swaps)
        of_each = boxes.fewest[each.box], boxes.point[each.box]
        return each.least(self.packing.footprint.device(each.swap, self._most(boxes.most, each), *of_each))

    def _most(self, most: Integers, each: Each) -> Integers:
        """The most steps beside each number of swapped blocks."""
        return np.minimum(most[each.box], self._num_steps[each.swap])

    def _fewest_buffers(self, persistent: Integers) -> Integers:
        pinned = self.knobs.num_chunk_buffers
        least = self.packing.footprint.buffers.least[persistent]
        return least if pinned is None else np.full_like(least, pinned)

    def _buffer_bytes(self, persistent: Integers) -> Integers:
        """Bytes of the fewest buffers, (K,)."""
        return self.packing.footprint.buffers.bytes(persistent, self._fewest_buffers(persistent))

    def _buffers(self, boxes: Boxes) -> Integers:
        """How many chunk buffers points have, and boxes at most; -1 where there are too few."""
        buffers, pinned = self.packing.footprint.buffers, self.knobs.num_chunk_buffers
        room = self._device_budget - self._taken(boxes)
        if pinned is not None:
            return np.where(self._beside[boxes.persistent] <= room, pinned, -1)
        found = buffers.at_most(boxes.persistent, room)
        found[boxes.point] = buffers.most(boxes.persistent[boxes.point], room[boxes.point])
        return found

    def _simulate(self, boxes: Boxes, buffers: Integers, below: float = np.inf) -> Floats:
        problem, candidates, footprint = self.packing.problem, self.packing.candidates, self.packing.footprint
        # Those of all candidates.
        recomputes = footprint.recomputes(boxes.swap, boxes.least) & ~footprint.swaps(boxes.swaps)
        selects = footprint.selects(boxes.swap, boxes.least)
        at, loose = candidates.block, ~boxes.point
        swapped = footprint.swapped(boxes.swap, boxes.fewest)[at]
        ahead = boxes.persistent, buffers, swapped, loose
        what = recomputes[at], None if selects is None else selects[at], swapped, loose
        back = candidates.backward(boxes.persistent, boxes.fewest, buffers, *what)
        if self._behind_last_step:
            return self._bounded(back, ahead, below)
        columns = Columns(**vars(candidates.forward(*ahead)), **vars(back))
        sums = self.packing.sums
        averages = sums.of(boxes.persistent, boxes.fewest, loose) if sums is not None else None
        return self._rounded(simulate(columns, problem.training, problem.hardware.asynchronous, averages))

    @cached_property
    def _behind_last_step(self) -> bool:
        """Whether boxes are bounded by their backwards, see [Note: Behind the last step]."""
        training, hardware = self.packing.problem.training, self.packing.problem.hardware
        alone = training.overlap == "forward" and training.accumulate == 1 and self.packing.sums is None
        return alone and hardware.asynchronous

    def _bounded(self, back: Backward, ahead: tuple[Integers, Integers, Integers, Flags], below: float) -> Floats:
        """Bounds of boxes, and what points take, from what they do in backward; `ahead` tells of their forward."""
        candidates, (persistent, buffers, swapped, loose) = self.packing.candidates, ahead
        begun = begin(broadcast(back), self.packing.problem.training)
        # Additions in another order may be off by one.
        least = begun.least(candidates.computes, candidates.last, candidates.last_tail(persistent)) - self._quantum
        seconds = self._rounded(least)
        close = loose | (seconds <= below)
        points = np.flatnonzero(close & ~loose)
        seconds[~close] = np.inf
        if points.size:
            of_points = persistent[points], buffers[points], swapped[:, points], loose[points]
            seconds[points] = self._rounded(begun.end(broadcast(candidates.forward(*of_points)), points)[0])
        return seconds

    def _rounded(self, seconds: Floats) -> Floats:
        """Times that differ by nothing but the order of additions are the same."""
        rounded: Floats = np.rint(seconds / self._quantum) * self._quantum
        return rounded

    def _plan(self, boxes: Boxes, index: int, buffers: int) -> Plan:
        return self.packing.plan(int(boxes.swap[index]), int(boxes.least[index]), int(boxes.persistent[index]), buffers)


def _with_more(low: Integers, high: Integers) -> Integers:
    """Points with the fewest offloaded chunks of each box, and with a few more, (3, K)."""
    some = (low <= high).all(axis=0)
    points, last = np.repeat(low[:, some], len(MORE), axis=1), np.repeat(high[2, some], len(MORE))
    points[2] += np.tile(MORE, int(some.sum()))
    return points[:, points[2] <= last]
