"""Figures behind the charts of a plan: the work of each resource, memory over time, and curves of throughput."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_protrain.planner.advice import scaled
from lightning_protrain.planner.lanes import Work
from lightning_protrain.planner.memory import StatesProblem
from lightning_protrain.planner.memory_timeline import Phase, memory_course, memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.request import PlanRequest
from lightning_protrain.planner.search import NoFeasiblePlan
from lightning_protrain.planner.step_time import lanes, step_time
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.progress import waiting

# Number of device memory sizes to plan for; the largest size as a multiple of the budget.
NUM_SIZES, MOST_OVER_BUDGET = 8, 2.0
# Batch sizes to try, as multiples of the present one.
SMALLER_BATCHES = (1 / 8, 1 / 4, 1 / 2)
LARGER_BATCHES = (2, 4, 8, 16, 32)


class Moment(NamedTuple):
    """The device memory from one time on, until the next moment.

    Attributes:
        begin: Seconds from the beginning of the step.
        what: Running phase and unit.
        terms: Bytes by kind of memory.
    """

    begin: float
    what: str
    terms: Mapping[str, int]


class Rate(NamedTuple):
    """The throughput of the fastest plan for one device memory or one batch size.

    Attributes:
        given: Device memory in bytes, or samples of a micro-batch.
        rate: Tokens per second; samples or steps per second if the number of tokens or samples is unknown.
    """

    given: int
    rate: float


@dataclass(frozen=True)
class Charts:
    """The figures behind the charts of one plan.

    Attributes:
        seconds: Predicted seconds of one step.
        spans: Work of each resource in the step.
        moments: Device memory in the step, in order of time.
        of: Unit of throughput: "tokens", "samples" or "steps".
        by_memory: Throughput of the fastest plan against device memory; empty if the plan leaves nothing to search.
        by_batch: Throughput of the fastest plan against the samples of a micro-batch; costs are assumed proportional.
    """

    seconds: float
    spans: Sequence[Work]
    moments: Sequence[Moment]
    of: str = "steps"
    by_memory: Sequence[Rate] = ()
    by_batch: Sequence[Rate] = ()


@waiting("Drawing the plan")
def charts(request: PlanRequest, plan: Plan, hardware: HardwareProfile | None) -> Charts | None:
    """Return the figures behind the charts of a plan; None if no step has been profiled.

    Args:
        request: Request that the plan answers, with the profile of a step on `hardware`.
        plan: The plan.
        hardware: Hardware that the plan is for; None: this node.
    """
    request = replace(request, say=lambda _: None)
    if plan.prediction is None or request.workload.profile is None or request.workload.training is None:
        return None
    problem = request.here(hardware)
    spans = lanes(problem, plan)
    seconds, moments = step_time(problem, plan).seconds, list(_moments(spans, memory_course(problem, plan)))
    profile = problem.profile
    of = "tokens" if profile.tokens else "samples" if profile.samples else "steps"
    if not request.searches(hardware):
        return Charts(seconds, spans, moments, of)
    sizes = ((nbytes, replace(problem, device_bytes=nbytes)) for nbytes in _sizes(problem))
    samples = profile.samples or 1
    smaller = [factor for factor in SMALLER_BATCHES if (samples * factor).is_integer()]
    batches = (
        (round(factor * samples), replace(problem, profile=scaled(profile, factor)))
        for factor in (*smaller, 1, *LARGER_BATCHES)
    )
    return Charts(seconds, spans, moments, of, _rates(request, sizes)[::-1], _rates(request, batches))


def _sizes(problem: Problem) -> list[int]:
    """Return device memory sizes to plan for, up to where all is resident or to twice the budget, whichever is less."""
    assert problem.device_bytes is not None
    resident = make_plan(StatesProblem(problem.layout, problem.state_bytes), "resident")
    most = int(min(memory_timeline(problem, resident).device_peak * 1.02, MOST_OVER_BUDGET * problem.device_bytes))
    most = max(most, problem.device_bytes)
    sizes = {most * part // NUM_SIZES for part in range(1, NUM_SIZES + 1)}
    return sorted(sizes | {problem.device_bytes}, reverse=True)


def _rates(request: PlanRequest, problems: Iterable[tuple[int, Problem]]) -> list[Rate]:
    """Return the throughput of the fastest plan for each problem, until one has no plan."""
    rates = []
    for given, problem in problems:
        try:
            solved, plan = request.fastest(problem)
        except NoFeasiblePlan:
            break
        profile = problem.profile
        amount = problem.training.accumulate * (profile.tokens or profile.samples) or 1
        rates.append(Rate(given, amount / step_time(solved, plan).seconds))
    return rates


def _moments(spans: Iterable[Work], course: Sequence[Phase]) -> Iterator[Moment]:
    """Yield the device memory at each span of device computation."""
    number = len(course) // 2
    for span in sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.begin):
        if span.position < 0:
            phase = course[-1]
        else:
            phase = course[span.position if span.what == "forward" else 2 * number - 1 - span.position]
        extra = {"fragmentation": phase.fragmentation} if phase.fragmentation > 0 else {}
        yield Moment(span.begin, f"{phase.name} {phase.unit}".strip(), {**phase.device, **extra})
