"""Searches for the size of a micro-batch: the longest text that fits, or the batch with most tokens per second.

[Note: Sizes]
The memory and time of a step are about proportional to its tokens. So the profile of one size tells about how long a
text fits, or which batch is the fastest. The size that was found is profiled next, until nothing changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from lightning_protrain.planner.advice import expected, scaled
from lightning_protrain.planner.prediction import Prediction
from lightning_protrain.planner.request import PlanRequest
from lightning_protrain.planner.search import NoFeasiblePlan
from lightning_protrain.profiler.records import HardwareProfile

# Shortest text of a search, tokens.
LEAST = 64
# Number of lengths to profile if one fits; relative gain in length, or in tokens per second, that is not worth a try.
ESTIMATES, CLOSE, NOTABLE_GAIN = 5, 0.02, 0.01


@dataclass(frozen=True)
class SizedStep:
    """A training step that was profiled at one size.

    Attributes:
        requests: Request for a plan under each sharding, and the hardware to plan for; None: this node.
        saves_by_slices: True if no plan without slices fits where none with slices does.
    """

    requests: Sequence[tuple[PlanRequest, HardwareProfile | None]]
    saves_by_slices: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch; 0: unknown."""
        profile = self.requests[0][0].workload.profile
        return 0 if profile is None else profile.tokens

    def times(self, factor: float) -> SizedStep:
        """Return the step with `factor` times the tokens, see [Note: Sizes]."""
        if factor == 1:
            return self
        return replace(self, requests=[(_times(request, factor), on) for request, on in self.requests])

    @cached_property
    def sliced(self) -> SizedStep | None:
        """The step on slices of the tokens; None: it cannot be sliced."""
        requests = [(request.in_slices(on), on) for request, on in self.requests]
        known = [(request, on) for request, on in requests if request is not None]
        return SizedStep(known) if known else None

    def fits(self) -> bool:
        """Return True if a plan fits; faster than a search."""
        return any(request.can_fit(on) for request, on in self.requests)

    def prediction(self) -> Prediction | None:
        """Return the prediction of the fastest plan; None: no plan fits."""
        predictions = list(self._predictions()) if self.fits() else []
        return min(predictions, key=lambda prediction: prediction.step_seconds, default=None)

    def _predictions(self) -> Iterator[Prediction]:
        for request, on in self.requests:
            try:
                problem, plan = request.fastest(request.here(on))
            except NoFeasiblePlan:
                continue
            yield expected(problem, plan)


def _times(request: PlanRequest, factor: float) -> PlanRequest:
    workload = request.workload
    assert workload.profile is not None
    workload = replace(workload, profile=scaled(workload.profile, factor))
    return replace(request, workload=workload, profile_on=None, sliced_on=None)


def lengths_to(most: int) -> list[int]:
    """Return lengths to choose from, up to the longest one, in order."""
    return [*range(LEAST, min(most, 512), LEAST), *range(512, min(most, 8192), 512), *range(8192, most, 1024), most]


def longest(at: Callable[[int], SizedStep], lengths: Sequence[int], first: int) -> int:
    """Return the longest text that fits; 0: not even the shortest.

    Args:
        at: Profiles the step at a length.
        lengths: Lengths to choose from, in order.
        first: Length to profile first.
    """
    length, best, estimates = first, 0, 0
    while True:
        estimate = _longest_by(at(length), length, lengths)
        estimates += 1
        if estimate >= length:
            best = length
        if estimate == 0 or length <= estimate <= (1 + CLOSE) * length:
            return best
        if best and (estimate <= best or estimates >= ESTIMATES):
            return best
        length = estimate


def longest_by_one(step: SizedStep, length: int, lengths: Sequence[int]) -> int:
    """Return about the longest text that fits without slices, from the profile of one length; 0: none fits."""
    return _longest_of([step], length, lengths)


def _longest_by(step: SizedStep, length: int, lengths: Sequence[int]) -> int:
    # Slices take the least memory, except of trained float32 weights.
    ways = [step] if step.sliced is None else [step.sliced] if step.saves_by_slices else [step.sliced, step]
    return _longest_of(ways, length, lengths)


def _longest_of(ways: Sequence[SizedStep], length: int, lengths: Sequence[int]) -> int:
    def is_too_long(other: int) -> bool:
        return not any(way.times(other / length).fits() for way in ways)

    if length == lengths[-1] and not is_too_long(length):
        return length
    count = bisect_left(lengths, True, key=is_too_long)
    return lengths[count - 1] if count else 0


def fastest(at: Callable[[int], SizedStep], most: int) -> int:
    """Return the batch size with most tokens per second; 0: one sample does not fit.

    Tried are powers of two and the midpoint above the best of them. A larger batch is taken only if it is notably
    faster.

    Args:
        at: Profiles the step at a batch size.
        most: Maximum batch size.
    """
    at = cache(at)
    size = _Rates(at, most).best()
    while size > 1 and not _any_fits(at(size)):  # It was found with the profile of a smaller one.
        size //= 2
    return size


def _any_fits(step: SizedStep) -> bool:
    return step.fits() or (step.sliced is not None and step.sliced.fits())


class _Rates:
    """Predictions by batch size; the arguments are those of `fastest`."""

    def __init__(self, at: Callable[[int], SizedStep], most: int) -> None:
        self._at, self._most = at, most
        self._sliced: tuple[int, SizedStep] | None = None
        self._known: dict[int, Prediction | None] = {}

    def best(self) -> int:
        """Return the batch size with most tokens per second, 0 if one sample does not fit."""
        size = 1
        if self._prediction(size, slices=True) is None:
            return 0
        while (other := self._larger(size)) > size and self._gains(other, size):
            size = other
        while size > 1 and not self._gains(size, size // 2):
            size //= 2
        middle = 3 * size // 2
        return middle if size > 1 and middle <= self._most and self._gains(middle, size) else size

    def _larger(self, size: int) -> int:
        """Return a larger size to try, a power of two; `size` if none fits.

        A step that waits for copies takes no longer with more samples, until computing takes as long.
        """
        now = self._known[size]
        assert now is not None
        other = 2 * size
        while other * now.busy["compute"] < size * now.step_seconds / 2:
            other *= 2
        # Slices run the forward of their modules once more. That is worth it where a step waits for copies.
        slices = now.bound != "compute"
        while other > size and (other > self._most or self._prediction(other, slices) is None):
            other //= 2
        return other

    def _gains(self, other: int, size: int) -> bool:
        """Return True if another size is notably faster."""
        now = self._prediction(size, slices=True)
        slices = now is None or now.bound != "compute"
        return _rate(self._prediction(other, slices)) > (1 + NOTABLE_GAIN) * _rate(now)

    def _prediction(self, size: int, slices: bool) -> Prediction | None:
        if self._known.get(size) is None:
            self._known[size] = self._at(1).times(size).prediction() or (self._in_slices(size) if slices else None)
        return self._known[size]

    def _in_slices(self, size: int) -> Prediction | None:
        if self._sliced is None and (sliced := self._at(size).sliced) is not None:
            self._sliced = size, sliced
        if self._sliced is None:
            return None
        profiled, step = self._sliced
        return step.times(size / profiled).prediction()


def _rate(prediction: Prediction | None) -> float:
    """Return tokens per second, or samples if tokens are unknown; 0: no plan fits."""
    if prediction is None:
        return 0.0
    return (prediction.tokens or prediction.samples) / prediction.step_seconds
