"""The search for the fastest plan that fits, over `step_time` and `memory_timeline` (paper, section 3.3).

[Note: Search]
A candidate is a size of chunks, a number of swapped blocks, a number of recompute steps of the other blocks, and a
number of offloaded chunks. The first chunks are resident, and policies follow [Note: Layout of policies]. A candidate
has as many chunk buffers as fit, or the pinned number. If there are few candidates, all are tried. Otherwise the search
starts with a coarse grid over swapped blocks and steps, each point with about the fewest offloaded chunks that fit.
From the best points it descends, one coordinate at a time, with halved step sizes. Times are not convex, so the result
is a good plan and not provably the best; tests compare it with trying all. The number of evaluations is bounded.

Only `memory_timeline` decides whether a plan fits. Bisection assumes that one more offloaded chunk, or one buffer less,
never takes more device memory. If that is wrong, the search may find a slower plan, but never one that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from lightning_protrain.config import Knobs, format_bytes
from lightning_protrain.planner.candidates import Packing, Point, check_pins, packings, spread
from lightning_protrain.planner.infeasible import NoFeasiblePlan as NoFeasiblePlan
from lightning_protrain.planner.infeasible import any_fits as any_fits
from lightning_protrain.planner.infeasible import refuse, sampled
from lightning_protrain.planner.memory import StatesProblem
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.step_time import step_time

# Evaluations of time after which the best plan so far is returned, over all sizes of chunks.
LIMIT = 600
# Numbers of swapped blocks and of steps in the grid that a search begins with; of offloaded chunks at the best of its
# points.
SWAPS, STEPS, OFFLOADED = 3, 5, 5
# How many of these go downhill at least and at most: with few chunks an evaluation takes little. Other sizes of chunks
# begin at the best of those before, and go downhill from one place.
STARTS, MOST_STARTS, CHUNKS = 2, 6, 200
# Bisection over chunks ends at this fraction of them; a promising result is refined by descent.
PART = 128
# Bisection halves the rest at least once in this many guesses.
HALVED = 5
# Times that differ by less than this part are the same.
RESOLUTION = 1e-9


class DescentPoint(NamedTuple):
    """A point of the descent: swapped blocks, recompute steps, offloaded chunks beyond about the fewest that fit."""

    num_swap: int
    num_steps: int
    more: int


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        plan: The fastest plan that was found.
        seconds: Predicted seconds of one of its steps.
        evaluations: Number of timed plans.
    """

    plan: Plan
    seconds: float
    evaluations: int


def search(problem: Problem, knobs: Knobs) -> Plan:
    """Find the fastest plan that fits, see [Note: Search].

    Args:
        problem: The model, the hardware and the budgets.
        knobs: Decisions that are made already.

    Raises:
        ValueError: A knob contradicts the model or another knob.
        NoFeasiblePlan: No plan fits.
    """
    return find(problem, knobs).plan


def resident_plan(problem: Problem, knobs: Knobs, min_num_params: int) -> Plan | None:
    """Return the plan that streams nothing and keeps everything, if it fits and no knob is against it; else None.

    If the host steps beside the device, offloading a little may look faster by less than the error of the prediction. A
    model that fits must cost nothing.
    """
    if set(knobs.given) - set(knobs.forbids_alone):
        return None
    plan = make_plan(StatesProblem(problem.layout, problem.state_bytes), "resident", min_num_params=min_num_params)
    return plan if memory_timeline(problem, plan).device_peak <= (problem.device_bytes or 0) else None


def search_with_evaluation(problem: Problem, knobs: Knobs, say: Callable[[str], None]) -> Plan:
    """Find the fastest plan whose evaluation fits the device too, or if there is none, whose training fits.

    Evaluation may take more than training, for weights that it may need whole.

    Args:
        problem: The model, the hardware and the budgets, with one for the device.
        knobs: Decisions that are made already.
        say: Called with one sentence for the user if evaluation may run out of memory.

    Raises:
        NoFeasiblePlan: Training fits nowhere.
    """
    assert problem.device_bytes is not None
    try:
        return search(replace(problem, evaluates=True), knobs)
    except NoFeasiblePlan:
        plan = search(problem, knobs)
    say(
        f"Evaluation is predicted to take "
        f"{format_bytes(memory_timeline(problem, plan).device_peak)} on the device, but "
        f"{format_bytes(problem.device_bytes)} are allowed. It may run out of memory; training fits."
    )
    return plan


def find(problem: Problem, knobs: Knobs) -> Found:
    """Find the fastest plan that fits; return it with figures of the search.

    Raises:
        ValueError: See `search`.
    """
    packed = packings(problem, knobs)
    check_pins(packed, knobs)
    packed = [packing for packing in packed if len(packing.chunks) >= (knobs.num_persistent_chunks or 0)]
    best: tuple[Value, _Search] | None = None
    evaluations = 0
    for packing in packed:
        one = _Search(problem, knobs, packing, LIMIT - evaluations)
        one.run(None if best is None else best[0].point)
        evaluations += one.evaluations
        # If steps are equally long, the first chunk size wins.
        if one.best is not None and (best is None or one.best.seconds < (1 - RESOLUTION) * best[0].seconds):
            best = one.best, one
    if best is None:
        refuse(problem, knobs, packed)
    value, one = best
    return Found(one.plan(value), value.seconds, evaluations)


class Value(NamedTuple):
    """A candidate with its predicted time; ordered by preference.

    Attributes:
        seconds: Duration of a step.
        point: The candidate.
        buffers: Number of its chunk buffers.
    """

    seconds: float
    point: Point
    buffers: int

    def beats(self, other: Value | None) -> bool:
        """Return whether this one is faster, or as fast with less swapped, recomputed and offloaded, in this order."""
        if other is None:
            return True
        if abs(self.seconds - other.seconds) <= RESOLUTION * other.seconds:
            return self.point < other.point
        return self.seconds < other.seconds


class _Search:
    """The search over one packing.

    Attributes:
        best: The best candidate so far; None: none that fits was found.
        evaluations: Number of times that a step was timed.
    """

    def __init__(self, problem: Problem, knobs: Knobs, packing: Packing, limit: int) -> None:
        self.best: Value | None = None
        self.evaluations = 0
        self._problem, self._knobs, self._packing, self._limit = problem, knobs, packing, limit
        self._values: dict[Point, Value | None] = {}
        self._fewest: dict[tuple[int, int], int | None] = {}
        # The next bisection begins at the last result.
        self._last_offloaded, self._last_beside = len(packing.chunks) // 2, 0
        self._slack = max(len(packing.chunks) // PART, 1)
        self._slope = sum(chunk.nbytes for chunk in packing.chunks) / len(packing.chunks)

    def run(self, start: Point | None) -> None:
        """Try candidates.

        Args:
            start: The best candidate of another size of chunks, where the descent begins; None: there is none.
        """
        packing = self._packing
        if packing.has_few(self._knobs):
            for point in packing.points(self._knobs):
                self._value(point)
            return
        places = [] if start is None else [DescentPoint(start.num_swap, start.num_steps, 0)]
        known = [(value, place) for place in places if (value := self._at(place)) is not None]
        if not known:
            known = [(value, place) for place in self._grid() if (value := self._at(place)) is not None]
        if not known:
            # Bisection may have missed what fits.
            for point in sampled(self._packing, self._knobs):
                self._value(point)
        known.sort()
        # Where something else than the device is short, or enough buffers are worth more, far more are offloaded.
        for place in [place for _, place in known[:1]]:
            bounds = packing.offloaded_range(place.num_swap, place.num_steps, self._knobs)
            fewest = self._fewest_offloaded(place.num_swap, place.num_steps)
            if bounds is not None and fewest is not None:
                others = (place._replace(more=more) for more in spread(0, bounds[1] - fewest, OFFLOADED))
                known += [(value, other) for other in others if (value := self._at(other)) is not None]
        known.sort()
        starts = min(max(CHUNKS // len(packing.chunks), STARTS), MOST_STARTS)
        for _, place in known[: starts if start is None else 1]:
            self._descend(place)
        self._refine()

    def plan(self, value: Value) -> Plan:
        """Return the plan of a candidate."""
        return self._packing.plan(value.point, value.buffers)

    def _grid(self) -> Iterator[DescentPoint]:
        """Yield pairs (swapped blocks, recompute steps), spread over the range that the knobs allow."""
        packing, knobs = self._packing, self._knobs
        if knobs.num_keep_offloaded_blocks is not None:
            # Only some numbers of swapped and recomputed blocks leave the required number of kept ones.
            pairs = [pair for pair in packing.policies_allowed(knobs) if packing.offloaded_range(*pair, knobs)]
            yield from (DescentPoint(*pairs[index], 0) for index in spread(0, len(pairs) - 1, SWAPS * STEPS))
            return
        for num_swap in spread(*packing.swap_range(knobs), SWAPS):
            for num_steps in spread(*packing.step_range(num_swap, knobs), STEPS):
                yield DescentPoint(num_swap, num_steps, 0)

    def _descend(self, place: DescentPoint) -> None:
        """Go downhill from a place, one coordinate after the other, with steps that are halved."""
        packing, knobs = self._packing, self._knobs
        low, high = packing.swap_range(knobs)
        least, most = packing.step_range(place.num_swap, knobs)
        sides = [high - low, most - least, len(packing.chunks) // 2]
        steps = [max(side // 4, 1) if side else 0 for side in sides]
        value = self._at(place)
        while any(steps) and self.evaluations < self._limit:
            moved = False
            for move in _moves(steps):
                while (
                    better := self._at(next_place := DescentPoint(*map(sum, zip(place, move, strict=True))))
                ) is not None:
                    if not better.beats(value):
                        break
                    place, value, moved = next_place, better, True
            if not moved:
                steps = [step // 2 for step in steps]

    def _refine(self) -> None:
        """Offload a chunk less, or a few more, as long as that is faster: bisection has ended early."""
        while self.best is not None and self._slack > 1:
            self._slack //= 2
            value = self.best
            self._values.clear()
            self._value(value.point)
            for more in (-self._slack, self._slack):
                self._value(value.point._replace(offloaded=value.point.offloaded + more))

    def _at(self, place: DescentPoint) -> Value | None:
        """Return the candidate at a place; None: it is outside, or does not fit."""
        packing, knobs = self._packing, self._knobs
        low, high = packing.swap_range(knobs)
        if not low <= place.num_swap <= high:
            return None
        low, high = packing.step_range(place.num_swap, knobs)
        if not low <= place.num_steps <= high:
            return None
        fewest = self._fewest_offloaded(place.num_swap, place.num_steps)
        return None if fewest is None else self._value(Point(place.num_swap, place.num_steps, fewest + place.more))

    def _value(self, point: Point) -> Value | None:
        """Time a candidate with as many buffers as fit; None: it is not allowed, or does not fit."""
        if point not in self._values:
            value = None
            if self._packing.allows(point, self._knobs) and (buffers := self._buffers(point)) is not None:
                self.evaluations += 1
                value = Value(step_time(self._problem, self._packing.plan(point, buffers)).seconds, point, buffers)
                if value.beats(self.best):
                    self.best = value
            self._values[point] = value
        return self._values[point]

    def _fewest_offloaded(self, num_swap: int, num_steps: int) -> int | None:
        """Return about the fewest offloaded chunks that fit the device; None: none fit."""
        pair = num_swap, num_steps
        if pair not in self._fewest:
            bounds = self._packing.offloaded_range(num_swap, num_steps, self._knobs)
            least = None
            if bounds is not None:

                def excess(offloaded: int) -> float:
                    point = Point(num_swap, num_steps, offloaded)
                    return self._excess(point, self._packing.least_buffers(point, self._knobs))

                least = _first(excess, bounds, self._slack, self._last_offloaded, self._slope)
                self._last_offloaded = self._last_offloaded if least is None else least
            self._fewest[pair] = least
        return self._fewest[pair]

    def _buffers(self, point: Point) -> int | None:
        """Return about the most buffers that fit; None: not even the fewest do."""
        least = self._packing.least_buffers(point, self._knobs)
        most = point.offloaded if self._knobs.num_chunk_buffers is None else least
        guess = most - least - self._last_beside
        fewer = _first(
            lambda fewer: self._excess(point, most - fewer), (0, most - least), self._slack, guess, self._slope
        )
        if fewer is None or not self._fits_host(point, most - fewer):
            return None
        self._last_beside = most - fewer - least
        return most - fewer

    def _excess(self, point: Point, buffers: int) -> float:
        """Return the bytes of the device that a candidate takes beyond the budget."""
        if self._problem.device_bytes is None:
            return -1.0
        return self._packing.device_bytes(point, buffers) - self._problem.device_bytes

    def _fits_host(self, point: Point, buffers: int) -> bool:
        budget = self._problem.host_bytes
        return budget is None or self._packing.host_bytes(point, buffers) <= budget


def _first(excess: Callable[[int], float], bounds: tuple[int, int], slack: int, guess: int, slope: float) -> int | None:
    """Return about the first number from `low` to `high` without excess, where excess falls; None: there is none.

    The excess falls about linearly, so the next try is where a line meets 0: a line through both ends, or with the
    expected slope while one end is unknown.

    Args:
        excess: Returns the excess for a number; above 0 is too much.
        bounds: The least and the greatest number.
        slack: The result is at most `slack - 1` above the first number.
        guess: Number to try first.
        slope: About so much excess less with each number.
    """
    low, high = bounds
    over_at, under_at = low - 1, high + 1  # So far nothing is known of these.
    over = under = 0.0
    tried, tries = min(max(guess, low), high), 0
    while under_at - over_at > slack:
        value, tries = excess(tried), tries + 1
        if value > 0:
            over_at, over = tried, value
        else:
            under_at, under = tried, value
        if over_at < low or under_at > high:
            distance = max(ceil(abs(value) / slope), slack) * 2 ** (tries - 1)
            tried += distance if value > 0 else -distance
        elif tries % HALVED == 0:
            tried = (over_at + under_at) // 2
        else:
            tried = over_at + round(over / (over - under) * (under_at - over_at))
        nearest = min(slack, (under_at - over_at) // 2)
        tried = min(max(tried, over_at + nearest, low), under_at - nearest, high)
    if under_at > high:
        return high if over_at < high and excess(high) <= 0 else None
    return low if over_at < low < under_at and excess(low) <= 0 else under_at


def _moves(steps: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield moves of one coordinate, and moves that trade a swapped block for recompute steps or back."""
    swap, step, more = steps
    for sign in (-1, 1):
        yield from ((sign * swap, 0, 0), (0, sign * step, 0), (0, 0, sign * more), (sign * swap, -sign * step, 0))
