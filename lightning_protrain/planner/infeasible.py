"""Explains why no plan fits, and finds the plan that comes closest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil, floor, inf
from typing import NoReturn

from lightning_protrain.config import Knobs, format_bytes
from lightning_protrain.planner.candidates import Packing, Point, packings, spread
from lightning_protrain.planner.explain import listed_terms, short_bytes
from lightning_protrain.planner.memory import CHECKPOINT_COPY_ADVICE, HostTooSmall
from lightning_protrain.planner.memory_timeline import LOSS_COPIES, MemoryTimeline, memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.prediction import GRADIENT_BUCKETS
from lightning_protrain.planner.problem import Problem

# Maximum number of values to sample for each of: swapped blocks, recompute steps, offloaded chunks. Of the blocks with
# inputs on the host, none and all are sampled.
SAMPLED = 5


class NoFeasiblePlan(ValueError):
    """No plan fits device and host; the message names the scarce memory, the shortage and what would help.

    Attributes:
        slices_may_help: False if the host is too small for the model states, with slices of the tokens as well.
    """

    slices_may_help = True


class NoPlanForHost(NoFeasiblePlan, HostTooSmall):
    """No plan fits, but more host memory would help."""


def refuse(problem: Problem, knobs: Knobs, packed: Sequence[Packing]) -> NoReturn:
    """Raise an error that names the memory that is too small.

    Args:
        problem: A problem that no plan solves.
        knobs: Decisions that the user pinned.
        packed: Packings of the model for all allowed chunk sizes.

    Raises:
        NoFeasiblePlan: Always, unless ValueError is raised; it is a `NoPlanForHost` if host memory is short.
        ValueError: The knobs contradict each other, however much memory there is.
    """
    known = [_Bytes(packing, point, knobs) for packing in packed for point in sampled(packing, knobs)]
    if not known:
        settings = ", ".join(f"{name}={getattr(knobs, name)}" for name in knobs.given)
        raise ValueError(f"These settings contradict each other in this model: {settings}. Leave one of them out.")
    on_device, on_host = problem.device_bytes, problem.host_bytes
    alone = min(known, key=lambda candidate: candidate.device)
    least_host = min(candidate.host for candidate in known)
    fitting_host = [candidate for candidate in known if on_host is None or candidate.host <= on_host]
    fitting_device = [candidate for candidate in known if on_device is None or candidate.device <= on_device]
    kind: type[NoFeasiblePlan] = NoPlanForHost
    if on_device is not None and not fitting_device:
        # The advice must work: a plan that streams everything may need too much host memory.
        best = min(fitting_host, key=lambda candidate: candidate.device, default=alone)
        condition = " if it is to fit the host" if best.device > alone.device else ""
        kind = NoFeasiblePlan
        sentences = _device_sentences(problem, on_device, best.plan, best.device, condition)
        if on_host is not None and not fitting_host:
            least = min(candidate.host for candidate in known if candidate.device <= best.device)
            short = f"at least {format_bytes(least)}, {format_bytes(on_host)} are available."
            sentences.append(f"The host is short as well: {short}")
    elif on_host is not None and not fitting_host:
        needed = min(candidate.host for candidate in fitting_device)
        condition = " if it is to fit the device" if needed > least_host else ""
        sentences = _host_sentences(problem, on_host, needed, condition)
    else:
        # Either budget could be met alone, but every plan that meets one of them exceeds the other.
        assert on_device is not None
        assert on_host is not None
        best = min(fitting_host, key=lambda candidate: candidate.device)
        needed = min(candidate.host for candidate in fitting_device)
        sentences = [
            *_device_sentences(problem, on_device, best.plan, best.device, " if it is to fit the host"),
            f"Or raise host_memory to {format_bytes(needed)}, {format_bytes(needed - on_host)} more.",
            *_sharing_sentences(problem),
            *_copy_sentences(problem),
        ]
    refusal = kind(" ".join([*sentences, *_pins(problem, knobs)]))
    # All that slices save on the host are shadow copies of sliced modules: at most two bytes for each element.
    copies = 2 * sum(info.numel for info in problem.layout.parameters)
    refusal.slices_may_help = on_host is None or least_host - copies <= on_host
    raise refusal


def any_fits(problem: Problem) -> bool:
    """Return True if a plan without swapping fits device and host; swapping would only need more host memory."""
    return _fits(problem, Knobs(num_swap_blocks=0))


class _Bytes:
    """The memory that a candidate needs with the fewest buffers."""

    def __init__(self, packing: Packing, point: Point, knobs: Knobs) -> None:
        self._packing, self._point = packing, point
        self._buffers = packing.least_buffers(point, knobs)
        self.device = packing.device_bytes(point, self._buffers)
        self.host = packing.host_bytes(point, self._buffers)

    @property
    def plan(self) -> Plan:
        """The plan of the candidate."""
        return self._packing.plan(self._point, self._buffers)


def sampled(packing: Packing, knobs: Knobs) -> Iterator[Point]:
    """Yield all candidates if there are few, else a sample spread over the allowed range."""
    if packing.has_few(knobs):
        yield from packing.points(knobs)
        return
    for num_swap in spread(*packing.swap_range(knobs), SAMPLED):
        for num_steps in spread(*packing.step_range(num_swap, knobs), SAMPLED):
            bounds = packing.offloaded_range(num_swap, num_steps, knobs)
            if bounds is not None:
                levels = dict.fromkeys((0, packing.most_inputs(num_swap, num_steps)))
                every = product(spread(*bounds, SAMPLED), levels)
                yield from (Point(num_swap, num_steps, *counts) for counts in every)


def _device_sentences(problem: Problem, budget: int, plan: Plan, needed: int, condition: str = "") -> list[str]:
    """Return sentences on the device memory that the smallest plan lacks, and on the batch that would fit."""
    timeline = memory_timeline(problem, plan)
    phases = [phase for phase in timeline.phases if problem.evaluates or phase.name != "evaluation"]
    phase = max(phases, key=lambda phase: phase.total)
    reserved = problem.reserved
    terms = ", ".join(listed_terms({**phase.device, GRADIENT_BUCKETS: reserved}))
    unit = f" at {phase.unit}" if phase.unit else ""
    sentences = [
        (
            f"No plan fits: the device would need at least {format_bytes(needed + reserved)}{condition}, "
            f"{format_bytes(budget + reserved)} are allowed. Most is needed in {phase.name}{unit}: {terms}."
        ),
        f"Raise device_memory to {format_bytes(needed + reserved)}.",
    ]
    # Each phase's memory grows linearly with the batch, so their maximum is convex. Between a batch of zero (`idle`)
    # and this batch (`needed`) it is at most the straight line.
    idle = _without_activations(problem, plan, timeline)
    share = (budget - idle) / (needed - idle) if needed > idle else 0.0
    size = _part_of_the_batch(problem, share)
    if size:
        sentences.append(
            f"Or give batches, or sequences, of at most {size}: activations take {short_bytes(needed - idle)}, and "
            f"{short_bytes(budget - idle)} are left for them."
        )
    else:
        without = format_bytes(min(idle, needed) + reserved)  # `idle` is an upper bound.
        sentences.append(f"A smaller batch would not help: without any activations the plan needs {without}.")
    return sentences


def _without_activations(problem: Problem, plan: Plan, timeline: MemoryTimeline) -> int:
    """Return the device memory of `plan` without activations: model states, or the optimizer step if that is more."""
    memory = plan.memory
    copies = ceil(LOSS_COPIES * (max(problem.alpha, 1.0) if problem.hardware.asynchronous else 1.0))
    states = memory.total - memory.swapped_activations + copies
    return max(states, timeline.phase("step").total + memory.chunk_buffers + memory.gradients_in_flight)


def _part_of_the_batch(problem: Problem, share: float) -> str:
    """Return the part of the batch that fits, in tokens if their number is known; empty if nothing fits."""
    tokens, percent = problem.profile.tokens, max(floor(100 * share), 0)
    if tokens and floor(tokens * share) > 0:
        return f"about {floor(tokens * share):,} of {tokens:,} tokens ({percent} %)"
    return f"{percent} % of this size" if percent and not tokens else ""


def _copy_sentences(problem: Problem) -> list[str]:
    """Return a sentence on the host memory for the copy of a checkpoint, if there is such a copy."""
    if not problem.checkpoint_copy:
        return []
    return [f"{format_bytes(problem.checkpoint_copy)} of the host are {CHECKPOINT_COPY_ADVICE}"]


def _sharing_sentences(problem: Problem) -> list[str]:
    """Return a sentence that says that host memory is for all ranks of the node, if there are several."""
    if problem.sharers == 1:
        return []
    what = "each has swapped activations and gradients that wait to be added of its own"
    return [f"That is for all {problem.sharers} ranks of the node: {what}."]


def _host_sentences(problem: Problem, budget: int, needed: int, condition: str) -> list[str]:
    return [
        (
            f"No plan fits: the host would need at least {format_bytes(needed)}{condition}, "
            f"{format_bytes(budget)} are available."
        ),
        f"{format_bytes(needed - budget)} are short.",
        *_sharing_sentences(problem),
        f"Raise host_memory to {format_bytes(needed)}, or train fewer parameters.",
        *_copy_sentences(problem),
    ]


def _pins(problem: Problem, knobs: Knobs) -> list[str]:
    """Return a sentence that names knobs to leave out so that a plan fits; empty if that does not help."""
    helpful = [
        f"{name}={getattr(knobs, name)}" for name in knobs.given if _fits(problem, replace(knobs, **{name: None}))
    ]
    return [f"Without {' or without '.join(helpful)} there is a plan that fits."] if helpful else []


def _fits(problem: Problem, knobs: Knobs) -> bool:
    """Return True if a sampled candidate fits device and host."""
    device, host = (inf if budget is None else budget for budget in (problem.device_bytes, problem.host_bytes))
    known = (_Bytes(packing, at, knobs) for packing in packings(problem, knobs) for at in sampled(packing, knobs))
    return any(candidate.device <= device and candidate.host <= host for candidate in known)
