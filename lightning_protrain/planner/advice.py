"""Predicts memory and time of a plan, with advice for the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from lightning_protrain.config import Knobs, format_bytes, plural
from lightning_protrain.planner.explain import short_seconds
from lightning_protrain.planner.memory_timeline import MemoryTimeline, memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.prediction import PhasePrediction, Prediction
from lightning_protrain.planner.search import NoFeasiblePlan, Problem, search
from lightning_protrain.planner.step_time import StepTime, step_time
from lightning_protrain.profiler.records import ModelProfile, OperationCost, Pass, Segment

_Record = TypeVar("_Record", OperationCost, Pass, Segment)
GIB = 1 << 30
# With fewer samples in a step, little computation hides the transfers.
FEW_SAMPLES = 4
# Multiples of the present batch size to try, to find a batch that hides the transfers.
LARGER_BATCHES = (2, 4, 8, 16, 32)
# Multiples of the present number of micro-batches to try if no larger batch hides the transfers.
MORE_BATCHES = (2, 4, 8, 16)
# Advice is given only if it shortens a step by this fraction.
WORTH_SAYING = 0.02


def predict(problem: Problem, plan: Plan, knobs: Knobs) -> Plan:
    """Return the plan with its prediction.

    Args:
        problem: Problem that the plan solves.
        plan: Result of the search.
        knobs: Decisions that the user pinned.
    """
    timeline = memory_timeline(problem, plan)
    prediction = _prediction(problem, plan, timeline)
    # A placed tensor counts at its maximum over all phases; activations are the rest of the peak.
    activations = max(timeline.device_peak - plan.memory.total, 0)
    return replace(
        plan,
        memory=replace(plan.memory, activations=activations),
        prediction=prediction.with_advice(*_advice(problem, plan, prediction, timeline, knobs)),
    )


def expected(problem: Problem, plan: Plan) -> Prediction:
    """Return the prediction of a given plan, with a warning if the device has less memory than the plan needs.

    Args:
        problem: Problem for which the plan is evaluated.
        plan: Any plan for the model.
    """
    timeline, has = memory_timeline(problem, plan), problem.hardware.device_bytes
    prediction = _prediction(problem, plan, timeline)
    if timeline.device_peak <= has:
        return prediction
    return prediction.with_advice(
        f"Warning: it would run out of memory, as {problem.hardware.name} has {format_bytes(has)} and the plan takes "
        f'{format_bytes(timeline.device_peak)}. plan="auto" searches for one that fits.'
    )


def scaled(profile: ModelProfile, factor: float) -> ModelProfile:
    """Return the profile of a step with `factor` times the samples; all figures are assumed to grow in proportion.

    The time to read weights grows less in reality, so the predicted time is an upper bound if `factor` is above 1.
    """

    def larger(record: _Record, **changes: Any) -> _Record:
        numbers = {field.name: getattr(record, field.name) for field in fields(record)}
        grown = {name: round(value * factor) for name, value in numbers.items() if type(value) is int}
        return replace(record, **{**grown, **changes})

    def both(way: Pass) -> Pass:
        named = {"operations": way.operations, "again_operations": way.again_operations}
        if way.recomputed_operations is not None:
            named["recomputed_operations"] = way.recomputed_operations
        return larger(way, **{name: tuple(larger(one, count=one.count) for one in ran) for name, ran in named.items()})

    return replace(
        profile,
        segments=tuple(larger(one, forward=both(one.forward), backward=both(one.backward)) for one in profile.segments),
        calls=tuple(replace(call, swap_bytes=round(call.swap_bytes * factor)) for call in profile.calls),
        samples=round(profile.samples * factor),
        tokens=round(profile.tokens * factor),
    )


def _prediction(problem: Problem, plan: Plan, timeline: MemoryTimeline) -> Prediction:
    time = step_time(problem, plan)
    phases = []
    for phase in timeline.phases:
        extra = {"fragmentation": phase.fragmentation} if phase.fragmentation > 0 else {}
        phases.append(PhasePrediction(phase.name, phase.unit, {**phase.device, **extra}, dict(phase.host)))
    busy = {"compute": time.compute, "upload": time.upload, "download": time.download, "host": time.host}
    alone = None
    if problem.network is not None:
        alone = step_time(replace(problem, network=None), plan).seconds
        busy["network"] = time.network
    return Prediction(
        hardware=problem.hardware.name,
        budget=problem.device_bytes or problem.hardware.device_bytes,
        phases=tuple(phases),
        step_seconds=time.seconds,
        busy=busy,
        bound=time.bound,
        samples=problem.profile.samples,
        tokens=problem.profile.tokens,
        accumulate=problem.training.accumulate,
        alone_seconds=alone,
        alpha=problem.alpha if problem.hardware.asynchronous else None,
    )


def _advice(
    problem: Problem, plan: Plan, prediction: Prediction, timeline: MemoryTimeline, knobs: Knobs
) -> Iterator[str]:
    if timeline.unexercised:
        yield (
            f"The profiled batch does not run {', '.join(timeline.unexercised)}: what they take is an estimate "
            "from their parameters."
        )
    if problem.profile.absent:
        first, *others = problem.profile.absent
        also = f" and {plural(len(others), 'unit')} like it" if others else ""
        yield f"The data has no media, so nothing is reserved for {first}{also}."
    if not plan.num_offloaded_chunks:
        return
    more = _with_more_memory(problem, knobs)
    if more is not None and more < (1 - WORTH_SAYING) * prediction.step_seconds:
        yield (
            f"One more GiB on the device would make the step {1 - more / prediction.step_seconds:.0%} shorter "
            f"({short_seconds(more)})."
        )
    elif more is not None:
        yield f"One more GiB on the device would buy nothing: a step at most {WORTH_SAYING:.0%} shorter."
    yield from few_samples(prediction.samples, prediction.accumulate)
    if prediction.bound != "compute":
        yield from _more_samples(problem, prediction, knobs)


def few_samples(samples: int, accumulate: int) -> Iterator[str]:
    """Yield a warning if a step that streams weights has too few samples to hide the transfers.

    Args:
        samples: Samples of one micro-batch; 0: unknown, no warning.
        accumulate: Number of micro-batches in a step.
    """
    samples *= accumulate
    if 0 < samples < FEW_SAMPLES:
        yield (
            f"Warning: a step of {samples} sample{'s' if samples > 1 else ''} streams weights for little computation. "
            "Give a larger batch, or accumulate_grad_batches."
        )


def _with_more_memory(problem: Problem, knobs: Knobs) -> float | None:
    """Return the predicted step time on a device with one GiB more memory, seconds."""
    if problem.device_bytes is None:
        return None
    larger = replace(problem, device_bytes=problem.device_bytes + GIB)
    return _seconds(larger, knobs)


def _more_samples(problem: Problem, prediction: Prediction, knobs: Knobs) -> Iterator[str]:
    """Yield advice on the smallest batch that hides the wait, or the largest that fits; else on more micro-batches."""
    waits = {"link": "the copies", "network": "what ranks send"}
    what = waits.get(prediction.bound, "the host's optimizer step")
    larger = ((factor, replace(problem, profile=scaled(problem.profile, factor))) for factor in LARGER_BATCHES)
    found = _fastest(larger, knobs, prediction.step_seconds)
    if found is not None:
        samples = found[0] * prediction.samples
        batch = f"A micro-batch of {samples} samples" if samples else f"{found[0]} times the batch"
    else:
        found = _fastest(
            ((factor, _accumulating(problem, factor)) for factor in MORE_BATCHES), knobs, prediction.step_seconds
        )
        if found is None:
            return
        batch = f"A step of {found[0] * prediction.accumulate} micro-batches (accumulate_grad_batches)"
    factor, time = found
    hidden = "would hide" if time.bound == "compute" else "would hide more of"
    sentence = f"{batch} {hidden} {what}: {prediction.step_seconds * factor / time.seconds:.1f} times the throughput"
    rate = prediction.tokens_per_second
    if rate is not None:
        sentence += (
            f", {rate * prediction.step_seconds * factor / time.seconds:,.0f} tokens per second in place of {rate:,.0f}"
        )
    yield f"{sentence}."


def _fastest(problems: Iterable[tuple[int, Problem]], knobs: Knobs, per_sample: float) -> tuple[int, StepTime] | None:
    """Return the first problem whose step is bound by computation, else the last one faster than all before it.

    Args:
        problems: Pairs of the factor on the samples and the problem; the first one that does not fit ends the search.
        knobs: Decisions that the user pinned.
        per_sample: Seconds of the present step.

    Returns:
        The factor and the step time; None if no problem is faster per sample.
    """
    best = None
    for factor, problem in problems:
        try:
            plan = search(problem, knobs)
        except NoFeasiblePlan:
            break
        time = step_time(problem, plan)
        if time.seconds / factor < (1 - WORTH_SAYING) * per_sample:
            best, per_sample = (factor, time), time.seconds / factor
        if time.bound == "compute":
            break
    return best


def _accumulating(problem: Problem, factor: int) -> Problem:
    """Return the problem with `factor` times the micro-batches in a step, so that gradients are accumulated."""
    training = replace(problem.training, accumulate=factor * problem.training.accumulate)
    return replace(problem, training=training, layout=replace(problem.layout, lends_copies=False))


def _seconds(problem: Problem, knobs: Knobs) -> float | None:
    try:
        plan = search(problem, knobs)
    except NoFeasiblePlan:
        return None
    return step_time(problem, plan).seconds
