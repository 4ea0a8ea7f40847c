"""The search for the fastest plan that fits, over `step_time` and `memory_timeline` (paper, section 3.3).

[Note: Search]
A candidate is a chunk size, a number of swapped blocks, a number of recompute steps of the other blocks, a number of
offloaded chunks, and a number of checkpointed blocks whose inputs are on the host. The first chunks are resident, and
policies follow [Note: Layout of policies]. A candidate has as many chunk buffers as fit, or the pinned number. If there
are few candidates, all are tried. Otherwise the search starts with a coarse grid over swapped blocks and recompute
steps. Each point of the grid has about the fewest offloaded chunks that fit. From the best points the search descends
along one coordinate at a time, with halved step sizes. No descent leads to candidates that offload nothing, because the
first offloaded chunk also takes the memory of chunk buffers. So for each number of swapped blocks, the one with the
fewest recompute steps is tried. Times are not convex, so the fastest candidate is good and not provably the best; tests
compare it with the best of all candidates. The number of evaluations is bounded.

First no inputs are on the host. If nothing fits, the search is repeated, beginning with the inputs of all checkpointed
blocks on the host. Else some numbers of inputs are tried beside the best candidate, and the search descends if one is
faster.

The result is not the fastest candidate. A gain below `WORTH` is smaller than the error of the prediction, and a plan
with more copies loses far more if the link is slower than expected. So of all candidates that are that close to the
fastest one, the search takes one without inputs on the host, then the one with the least time of copies, then with the
fewest offloaded chunks. From there it descends again by these.

Only `memory_timeline` decides whether a plan fits. Bisection assumes that one more offloaded chunk, or one buffer less,
never takes more device memory. If that is wrong, the search may find a slower plan, but never one that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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

# Maximum number of timed candidates, over all chunk sizes.
LIMIT = 600
# Grid points along swapped blocks and recompute steps; numbers of offloaded chunks to try at the best grid point.
SWAPS, STEPS, OFFLOADED = 3, 5, 5
# Numbers of blocks with inputs on the host that are tried beside the best candidate without.
INPUTS = 3
# Least and greatest number of starts of a descent; the number grows if there are few chunks, as timing is then fast.
# Further chunk sizes start once, from the best candidate so far.
STARTS, MOST_STARTS, CHUNKS = 2, 6, 200
# Numbers of swapped blocks for which a candidate without offloaded chunks is tried.
RESIDENT = 24
# Bisection over chunks stops at an interval of 1/PART of the chunks; ending it exactly saves 0.1 % of a step at most.
PART = 128
# Bisection halves its interval at least once in this many guesses.
HALVED = 5
# Times whose relative difference is smaller count as equal.
RESOLUTION = 1e-9
# A step that is longer by this fraction is worth fewer copies.
WORTH = 0.015


class DescentPoint(NamedTuple):
    """A point of the descent; `more` is the number of offloaded chunks beyond about the fewest that fit."""

    num_swap: int
    num_steps: int
    more: int
    num_inputs: int = 0


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        plan: The plan with the fewest copies among those about as fast as the fastest one.
        seconds: Predicted step time of the plan.
        fastest: Predicted step time of the fastest candidate.
        evaluations: Number of timed candidates.
    """

    plan: Plan
    seconds: float
    fastest: float
    evaluations: int


def search(problem: Problem, knobs: Knobs) -> Plan:
    """Find the fastest plan that fits, see [Note: Search].

    Args:
        problem: The model, the hardware and the budgets.
        knobs: Decisions that the user pinned.

    Raises:
        ValueError: A knob contradicts the model or another knob.
        NoFeasiblePlan: No plan fits.
    """
    packed = _packed(problem, knobs)
    result = _best(problem, knobs, packed)
    if result is None:
        refuse(problem, knobs, packed)
    return result.plan


def resident_plan(problem: Problem, knobs: Knobs, min_num_params: int) -> Plan | None:
    """Return the plan that streams nothing and keeps all activations if it fits and the knobs allow it; else None.

    A search could prefer to offload a little, for a gain smaller than the error of the prediction. A model that fits
    must not be slowed down.
    """
    if set(knobs.given) - set(knobs.forbids_alone):
        return None
    plan = make_plan(StatesProblem(problem.layout, problem.state_bytes), "resident", min_num_params=min_num_params)
    return plan if memory_timeline(problem, plan).device_peak <= (problem.device_bytes or 0) else None


def search_with_evaluation(problem: Problem, knobs: Knobs, say: Callable[[str], None]) -> Plan:
    """Find the fastest plan that fits in evaluation too; if there is none, the fastest that fits in training.

    Evaluation may need more memory than training, if it needs whole-precision weights.

    Args:
        problem: The model, the hardware and the budgets; `device_bytes` must be set.
        knobs: Decisions that the user pinned.
        say: Called with one sentence for the user if evaluation may run out of memory.

    Raises:
        NoFeasiblePlan: No plan fits in training. The message names the memory for evaluation too if the run evaluates.
    """
    assert problem.device_bytes is not None
    evaluated = replace(problem, evaluates=True)
    result = find_any(evaluated, knobs)
    if result is not None:
        return result.plan
    result = find_any(problem, knobs)
    if result is None:
        short = evaluated if problem.training.evaluates else problem
        refuse(short, knobs, _packed(short, knobs))
    plan = result.plan
    if problem.training.evaluates:
        say(
            f"Evaluation is predicted to take "
            f"{format_bytes(memory_timeline(problem, plan).device_peak)} on the device, but "
            f"{format_bytes(problem.device_bytes)} are allowed. It may run out of memory; training fits."
        )
    return plan


def find_any(problem: Problem, knobs: Knobs) -> Found | None:
    """Find the fastest plan that fits; return None if none fits, without the search for what would help.

    Raises:
        ValueError: A knob contradicts the model or another knob.
    """
    return _best(problem, knobs, _packed(problem, knobs))


def _packed(problem: Problem, knobs: Knobs) -> list[Packing]:
    """Return the packings to search; raise ValueError for a knob that contradicts the model or another knob."""
    packed = packings(problem, knobs)
    check_pins(packed, knobs)
    return [packing for packing in packed if len(packing.chunks) >= (knobs.num_persistent_chunks or 0)]


def _best(problem: Problem, knobs: Knobs, packed: Sequence[Packing]) -> Found | None:
    """Return the result of a search over some packings; None if no plan fits."""
    searches = [_Search(problem, knobs, packing) for packing in packed]
    first = _fastest(searches, moves_inputs=False) or _fastest(searches, moves_inputs=True)
    if first is None:
        return None
    best = first.with_moved_inputs()
    seconds = (1 + WORTH) * best.seconds
    close = [(value, search) for search in searches for value in search.timed() if value.seconds <= seconds]
    value, search = min(close, key=lambda pair: pair[0].copies)
    evaluations = sum(other.evaluations for other in searches)
    value = search.leaner(value, seconds, LIMIT - evaluations)
    return Found(search.plan(value), value.seconds, best.seconds, sum(other.evaluations for other in searches))


def _fastest(searches: Sequence[_Search], moves_inputs: bool) -> _Search | None:
    """Run the searches over all packings, and return the one with the best candidate; None if no candidate fits."""
    first: _Search | None = None
    best: Value | None = None
    left = LIMIT
    for search in searches:
        search.run(None if best is None else best.point, left, moves_inputs)
        left -= search.evaluations
        # Of equal times, the first chunk size wins.
        if search.best is not None and (best is None or search.best.seconds < (1 - RESOLUTION) * best.seconds):
            first, best = search, search.best
    return first


class Value(NamedTuple):
    """A candidate with its predicted step time.

    Attributes:
        seconds: Step time.
        point: The candidate.
        buffers: Number of chunk buffers.
        link: Time of copies between host and device in a step, hidden or not, seconds.
    """

    seconds: float
    point: Point
    buffers: int
    link: float

    @property
    def copies(self) -> tuple[bool, float, int, float]:
        """The figures to compare plans about as fast by: moved inputs, time of copies, offloaded chunks, step time."""
        return self.point.num_inputs > 0, round(self.link, 12), self.point.offloaded, self.seconds

    def beats(self, other: Value | None) -> bool:
        """Return True if this one is faster, or as fast with less swapped, recomputed and offloaded, in this order."""
        if other is None:
            return True
        if abs(self.seconds - other.seconds) <= RESOLUTION * other.seconds:
            return self.point < other.point
        return self.seconds < other.seconds


class _Search:
    """The search over one packing."""

    def __init__(self, problem: Problem, knobs: Knobs, packing: Packing) -> None:
        self.best: Value | None = None
        self.evaluations = 0
        self._problem, self._knobs, self._packing, self._limit = problem, knobs, packing, LIMIT
        self._values: dict[Point, Value | None] = {}
        self._fewest: dict[tuple[int, int, int], int | None] = {}
        # The next bisections begin at the results of the last ones.
        self._last_offloaded, self._last_beside = len(packing.chunks) // 2, 0
        self._slack = max(len(packing.chunks) // PART, 1)
        self._slope = sum(chunk.nbytes for chunk in packing.chunks) / len(packing.chunks)

    def run(self, start: Point | None, limit: int, moves_inputs: bool) -> None:
        """Search for the best candidate with at most `limit` evaluations.

        `start` is the best candidate of another chunk size, to start the descent from; None: start from the grid. With
        `moves_inputs`, begin with the inputs of all checkpointed blocks on the host.
        """
        packing, self._limit = self._packing, self.evaluations + limit
        if packing.has_few(self._knobs):
            for point in packing.points(self._knobs):
                self._value(point)
            return
        places = [] if start is None else [DescentPoint(start.num_swap, start.num_steps, 0, start.num_inputs)]
        known = [(value, place) for place in places if (value := self._at(place)) is not None]
        if not known:
            grid = [DescentPoint(*pair, 0, packing.most_inputs(*pair) if moves_inputs else 0) for pair in self._grid()]
            known = [(value, place) for place in grid if (value := self._at(place)) is not None]
        if not known:
            # Bisection may have missed the candidates that fit.
            for point in sampled(self._packing, self._knobs):
                if moves_inputs or not point.num_inputs:
                    self._value(point)
        known.sort()
        # Also try far more offloaded chunks, because many buffers may be worth more than resident chunks.
        for place in [place for _, place in known[:1]]:
            bounds = packing.offloaded_range(place.num_swap, place.num_steps, self._knobs)
            fewest = self._fewest_offloaded(place.num_swap, place.num_steps, place.num_inputs)
            if bounds is not None and fewest is not None:
                others = (place._replace(more=more) for more in spread(0, bounds[1] - fewest, OFFLOADED))
                known += [(value, other) for other in others if (value := self._at(other)) is not None]
        if start is None:  # Without streamed chunks, the chunk size hardly matters.
            for point in self._resident():
                self._value(point)
        known.sort()
        starts = min(max(CHUNKS // len(packing.chunks), STARTS), MOST_STARTS)
        for _, place in known[: starts if start is None else 1]:
            self._descend(place, Value.beats)

    def with_moved_inputs(self) -> Value:
        """Return the best candidate; it may have inputs on the host if that makes room for something faster."""
        best, packing = self.best, self._packing
        assert best is not None
        num_swap, num_steps, _, num_inputs = best.point
        if not num_inputs and not packing.has_few(self._knobs):
            levels = spread(1, packing.most_inputs(num_swap, num_steps), INPUTS)
            places = [DescentPoint(num_swap, num_steps, 0, level) for level in levels]
            known = [(value, place) for place in places if (value := self._at(place)) is not None]
            if known and min(known)[0].beats(best):
                self._descend(min(known)[1], Value.beats)
        return self.best or best

    def timed(self) -> list[Value]:
        """Return all candidates that were timed and fit."""
        return [value for value in self._values.values() if value is not None]

    def leaner(self, value: Value, seconds: float, limit: int) -> Value:
        """Return a candidate with fewer copies that takes at most `seconds`, or else `value`."""
        num_swap, num_steps, offloaded, num_inputs = value.point
        fewest = self._fewest_offloaded(num_swap, num_steps, num_inputs)
        if fewest is None or self._packing.has_few(self._knobs):  # With few candidates, all have been tried.
            return value
        self._limit = self.evaluations + limit
        place = DescentPoint(num_swap, num_steps, offloaded - fewest, num_inputs)
        return self._descend(place, lambda new, old: new.seconds <= seconds and new.copies < old.copies) or value

    def plan(self, value: Value) -> Plan:
        """Return the plan of a candidate."""
        return self._packing.plan(value.point, value.buffers)

    def _grid(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of swapped blocks and recompute steps, spread over the range that the knobs allow."""
        packing, knobs = self._packing, self._knobs
        if knobs.num_keep_offloaded_blocks is not None:
            # Only some pairs of swapped blocks and recompute steps leave the required number of kept blocks.
            pairs = [pair for pair in packing.policies_allowed(knobs) if packing.offloaded_range(*pair, knobs)]
            yield from (pairs[index] for index in spread(0, len(pairs) - 1, SWAPS * STEPS))
            return
        for num_swap in spread(*packing.swap_range(knobs), SWAPS):
            for num_steps in spread(*packing.step_range(num_swap, knobs), STEPS):
                yield num_swap, num_steps

    def _resident(self) -> Iterator[Point]:
        """Yield candidates without offloaded chunks, with the fewest recompute steps for a number of swapped blocks."""
        packing, knobs, guess = self._packing, self._knobs, 0
        for num_swap in spread(*packing.swap_range(knobs), RESIDENT):
            excess = partial(self._excess_resident, num_swap)
            num_steps = _first(excess, packing.step_range(num_swap, knobs), 1, guess, self._slope)
            if num_steps is not None:
                guess = num_steps
                yield Point(num_swap, num_steps, 0)

    def _excess_resident(self, num_swap: int, num_steps: int) -> float:
        return self._excess(Point(num_swap, num_steps, 0), 0)

    def _descend(self, place: DescentPoint, beats: Callable[[Value, Value], bool]) -> Value | None:
        """Descend from a point that fits, one coordinate at a time, halving the step sizes; return the candidate."""
        packing, knobs = self._packing, self._knobs
        low, high = packing.swap_range(knobs)
        least, most = packing.step_range(place.num_swap, knobs)
        sides = [high - low, most - least, len(packing.chunks) // 2, place.num_inputs]
        steps = [max(side // 4, 1) if side else 0 for side in sides]
        value = self._at(place)
        while any(steps) and self.evaluations < self._limit:
            moved = False
            for move in _moves(steps):
                while (
                    better := self._at(next_place := DescentPoint(*map(sum, zip(place, move, strict=True))))
                ) is not None:
                    if value is None or not beats(better, value):
                        break
                    place = next_place._replace(num_inputs=better.point.num_inputs)
                    value, moved = better, True
            if not moved:
                steps = [step // 2 for step in steps]
        return value

    def _at(self, place: DescentPoint) -> Value | None:
        """Return the candidate at a point; None if the knobs forbid it or it does not fit."""
        packing, knobs = self._packing, self._knobs
        low, high = packing.swap_range(knobs)
        if not low <= place.num_swap <= high:
            return None
        low, high = packing.step_range(place.num_swap, knobs)
        if not low <= place.num_steps <= high:
            return None
        num_swap, num_steps, more, num_inputs = place
        if num_inputs < 0:
            return None
        num_inputs = min(num_inputs, packing.most_inputs(num_swap, num_steps)) if num_inputs else 0
        fewest = self._fewest_offloaded(num_swap, num_steps, num_inputs)
        return None if fewest is None else self._value(Point(num_swap, num_steps, fewest + more, num_inputs))

    def _value(self, point: Point) -> Value | None:
        """Time a candidate with as many buffers as fit; return None if the knobs forbid it or it does not fit."""
        if point not in self._values:
            value = None
            if self._packing.allows(point, self._knobs) and (buffers := self._buffers(point)) is not None:
                self.evaluations += 1
                time = step_time(self._problem, self._packing.plan(point, buffers))
                value = Value(time.seconds, point, buffers, time.upload + time.download)
                if value.beats(self.best):
                    self.best = value
            self._values[point] = value
        return self._values[point]

    def _fewest_offloaded(self, num_swap: int, num_steps: int, num_inputs: int) -> int | None:
        """Return about the fewest offloaded chunks with which a plan fits the device; None if none fits."""
        key = num_swap, num_steps, num_inputs
        if key not in self._fewest:
            bounds = self._packing.offloaded_range(num_swap, num_steps, self._knobs)
            least = None
            if bounds is not None:

                def excess(offloaded: int) -> float:
                    point = Point(num_swap, num_steps, offloaded, num_inputs)
                    return self._excess(point, self._packing.least_buffers(point, self._knobs))

                least = _first(excess, bounds, self._slack, self._last_offloaded, self._slope)
                self._last_offloaded = self._last_offloaded if least is None else least
            self._fewest[key] = least
        return self._fewest[key]

    def _buffers(self, point: Point) -> int | None:
        """Return about the most buffers that fit; None: not even the fewest fit."""
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
        """Return the device bytes of a candidate above the budget; not positive if it fits."""
        if self._problem.device_bytes is None:
            return -1.0
        return self._packing.device_bytes(point, buffers) - self._problem.device_bytes

    def _fits_host(self, point: Point, buffers: int) -> bool:
        budget = self._problem.host_bytes
        return budget is None or self._packing.host_bytes(point, buffers) <= budget


def _first(excess: Callable[[int], float], bounds: tuple[int, int], slack: int, guess: int, slope: float) -> int | None:
    """Return about the least number within `bounds` without excess; None if every number has excess.

    The excess falls about linearly, so the next guess is the root of a straight line. The line goes through both ends
    of the interval, or has slope `slope` while one end is unknown. The result is at most `slack - 1` above the least
    number without excess.
    """
    low, high = bounds
    over_at, under_at = low - 1, high + 1  # Just outside the bounds: excess unknown.
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


def _moves(steps: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield moves of one coordinate, and moves that exchange swapped blocks for recompute steps."""
    swap, step, more, inputs = steps
    for sign in (-1, 1):
        yield from ((sign * swap, 0, 0, 0), (0, sign * step, 0, 0), (0, 0, sign * more, 0))
        yield from ((sign * swap, -sign * step, 0, 0), (0, 0, 0, sign * inputs))
