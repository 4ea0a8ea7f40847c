"""Predicts memory and time of a plan, with advice for the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeVar

from lightning_protrain.config import Knobs, format_bytes, plural
from lightning_protrain.planner.explain import short_bytes, short_seconds
from lightning_protrain.planner.memory import gradient_buffers_of, host_terms
from lightning_protrain.planner.memory_timeline import MemoryTimeline, memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.prediction import PhasePrediction, Prediction
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.search import find_any
from lightning_protrain.planner.step_time import micro_batch, step_time
from lightning_protrain.profiler.records import Backward, Forward, ModelProfile, OperationCost, Segment, Storage

_Record = TypeVar("_Record", OperationCost, Forward, Backward, Segment)
# A change is named if it is expected to raise the throughput by this fraction.
NOTABLE = 0.05
# A tensor of tokens x tokens is named if it has this fraction of the peak of the device's memory.
NOTABLE_SQUARE = 0.01
# A host step this many times as long as AdamW's is told to the user.
NOTABLE_SLOWDOWN = 1.5
# End of a sentence that names a gain.
_MORE = "more tokens per second."


def predict(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with its prediction.

    Args:
        problem: Problem that the plan solves.
        plan: Result of the search.
    """
    timeline = memory_timeline(problem, plan)
    prediction = _prediction(problem, plan, timeline)
    # A placed tensor counts at its maximum over all phases; activations are the rest of the peak.
    activations = max(timeline.device_peak - plan.memory.total, 0)
    return replace(
        plan,
        memory=replace(plan.memory, activations=activations),
        prediction=prediction.with_advice(*_advice(problem, plan, timeline)),
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

    @cache
    def more(costs: tuple[OperationCost, ...]) -> tuple[OperationCost, ...]:
        return tuple(larger(item, count=item.count) for item in costs)

    @cache
    def grown(storages: tuple[Storage, ...]) -> tuple[Storage, ...]:
        return tuple(item._replace(nbytes=round(item.nbytes * factor)) for item in storages)

    def whole(item: Segment) -> Segment:
        ahead, back = item.forward, item.backward
        storages, last = grown(ahead.storages), ahead.last_saved
        ahead = larger(ahead, operations=more(ahead.operations), storages=storages, last_saved=last)
        return larger(item, forward=ahead, backward=larger(back, operations=more(back.operations)))

    return replace(
        profile,
        segments=tuple(map(whole, profile.segments)),
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


def _advice(problem: Problem, plan: Plan, timeline: MemoryTimeline) -> Iterator[str]:
    if timeline.unexercised:
        yield (
            f"The profiled batch does not run {', '.join(timeline.unexercised)}: what they take is an estimate "
            "from their parameters."
        )
    if problem.profile.absent:
        first, *others = problem.profile.absent
        also = f" and {plural(len(others), 'unit')} like it" if others else ""
        yield f"The data has no media, so nothing is reserved for {first}{also}."
    yield from square_tensors(problem.profile, timeline.device_peak)


def square_tensors(profile: ModelProfile, peak: int) -> Iterator[str]:
    """Yield a sentence if a mask or attention scores of tokens x tokens take a notable share of the device's peak.

    Args:
        profile: Profile of the step.
        peak: Peak of the device's memory, bytes.
    """
    length = profile.tokens // (profile.samples or 1)
    nbytes = dict(profile.squares).get(length, 0)
    if nbytes and nbytes >= NOTABLE_SQUARE * peak:
        other = "give sdpa rows without padding (texts may be padded on the right)"
        yield (
            f"Attention makes a tensor of {length:,} x {length:,} tokens, {short_bytes(nbytes)}: a mask or scores. To "
            "avoid it, set attn_implementation: flash_attention_2, or "
            f"{other if profile.attention else 'sdpa if the model has it'}."
        )


def larger_steps(problem: Problem, plan: Plan, knobs: Knobs) -> Iterator[str]:
    """Yield a sentence for the larger step with which the planner expects most throughput, if that is notably more.

    Micro-batches of twice the size need a plan of their own; their profile is assumed to grow in proportion. Twice as
    many micro-batches in a step keep the plan, but each of them streams the weights again.

    Args:
        problem: Problem that the plan solves.
        plan: The plan, with its prediction.
        knobs: Decisions that the user pinned.
    """
    now, accumulate = plan.prediction, problem.training.accumulate
    if now is None or not plan.num_offloaded_chunks:
        return
    # If the device hardly waits for anything else, no larger step is faster by much.
    if now.step_seconds < (1 + NOTABLE) * accumulate * micro_batch(problem, plan).compute:
        return
    # One size of chunks is enough to see the gain. But a pinned number of chunks may be possible with small ones alone.
    sizes = problem.chunk_bytes if knobs.given else problem.chunk_bytes[:1]
    twice = find_any(replace(problem, profile=scaled(problem.profile, 2.0), chunk_bytes=sizes), knobs)
    seconds = {} if twice is None else {"Twice the micro-batch size": twice.seconds}
    # Gradients that wait to be added have memory of their own, instead of that of shadow copies.
    training = replace(problem.training, accumulate=2 * accumulate)
    layout = replace(problem.layout, lends_copies=False, passes_gradients=False)
    more = replace(problem, training=training, layout=layout)
    timeline = memory_timeline(more, plan)
    fits = ((timeline.device_peak, problem.device_bytes), (timeline.host_peak, problem.host_bytes))
    if all(most is None or peak <= most for peak, most in fits):
        seconds[f"accumulate_grad_batches={2 * accumulate}"] = step_time(more, plan).seconds
    for what in sorted(seconds, key=seconds.__getitem__)[:1]:
        if (gain := 2 * now.step_seconds / seconds[what] - 1) >= NOTABLE:
            yield f"{what} is expected to train {100 * gain:.0f} % {_MORE}"


def slow_optimizer(plan: Plan, slowdown: float) -> Iterator[str]:
    """Yield a sentence if the host steps the optimizer far slower than AdamW.

    Args:
        plan: The plan, with its prediction.
        slowdown: Time of the optimizer step on the host as a multiple of AdamW's.
    """
    if slowdown >= NOTABLE_SLOWDOWN and plan.prediction is not None and (busy := plan.prediction.busy["host"]):
        yield (
            f"The host steps this optimizer {slowdown:.2g} times as slowly as AdamW, and works for "
            f"{short_seconds(busy)} in a step."
        )


# The ways to clip that need no norm.
UNCLIPPED = 'with gradient_clip_algorithm="value", or without clipping'


def clipping_memory(problem: Problem, plan: Plan, clipping_keeps: bool) -> Iterator[str]:
    """Yield a sentence if gradients that wait for their norm take notable host memory.

    Args:
        problem: Problem that the plan solves.
        plan: The plan, with its prediction.
        clipping_keeps: Whether gradients could pass otherwise, see [Note: Gradients in passing].
    """
    if clipping_keeps:
        layout = replace(problem.layout, passes_gradients=True)
        passing = replace(plan, gradient_buffers=gradient_buffers_of(layout, plan.chunks, problem.state_bytes))
        now, then = (host_terms(layout, chosen, problem.state_bytes) for chosen in (plan, passing))
        saved = now["gradients"] - then["gradients"]
        if saved >= NOTABLE * sum(now.values()):
            yield (
                f"Gradients wait for their norm in {short_bytes(now['gradients'])} of the host; "
                f"{UNCLIPPED}, {short_bytes(then['gradients'])} would do."
            )


def without_gains(advice: Sequence[str]) -> tuple[str, ...]:
    """Return the advice of a plan whose predicted time has changed, so that gains over it no longer hold."""
    return tuple(sentence for sentence in advice if not sentence.endswith(_MORE))
