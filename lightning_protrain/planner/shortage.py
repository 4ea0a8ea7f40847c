"""Why there is no plan, and what is nearest to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, floor
from typing import NoReturn

import numpy as np

from lightning_protrain.planner.branch import minimize
from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.memory import HostTooSmall, format_bytes
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.positions import LOSS_COPIES
from lightning_protrain.planner.prediction import GRADIENT_BUCKETS
from lightning_protrain.planner.problem import Packing, Problem, Unpacked
from lightning_protrain.planner.space import Space
from lightning_protrain.planner.timeline import MemoryTimeline, memory_timeline

COPY = "the copy of the checkpoint: saves that the training waits for, with asynchronous=False, need none."


class NoFeasiblePlan(ValueError):
    """No plan fits the device and the host; the message says what is short, by how much, and what would help."""


class NoPlanForHost(NoFeasiblePlan, HostTooSmall):
    """The same where more memory of the host would help."""


def refuse(problem: Problem, knobs: Knobs, spaces: Sequence[Space]) -> NoReturn:
    """Says what is short.

    Args:
        problem: One that no plan solves.
        knobs: What is pinned.
        spaces: All candidates.

    Raises:
        NoFeasiblePlan: Always; of the kind `NoPlanForHost` where that is what is short; but for
        ValueError: if the knobs contradict each other, whatever the memory.
    """
    if not any(
        minimize(space.bytes(space.device, space.anywhere), space.probe, *space.roots()).point for space in spaces
    ):
        given = ", ".join(f"{name}={getattr(knobs, name)}" for name in knobs.given)
        raise ValueError(f"These knobs contradict each other in this model: {given}. Leave one of them out.")
    kind: type[NoFeasiblePlan] = NoPlanForHost
    device, on_device = _least(spaces, "device", "anywhere")
    host, _ = _least(spaces, "host", "anywhere")
    if problem.device_bytes is not None and device > problem.device_bytes:
        alone, condition = device, ""
        if problem.host_bytes is not None and host <= problem.host_bytes:
            # What is named has to work: what streams most may be too much for the host.
            device, on_device = _least(spaces, "device", "fits_host")
            condition = " if it is to fit the host" if device > alone else ""
        kind = NoFeasiblePlan
        sentences = _device_sentences(problem, problem.device_bytes, on_device, device, condition)
        if problem.host_bytes is not None and host > problem.host_bytes:
            available = format_bytes(problem.host_bytes)
            sentences.append(f"The host is short as well: at least {format_bytes(host)}, {available} are available.")
    elif problem.host_bytes is not None and host > problem.host_bytes:
        alone = host
        host, _ = _least(spaces, "host", "fits_device")
        condition = " if it is to fit the device" if host > alone else ""
        sentences = _host_sentences(problem, problem.host_bytes, host, condition)
    else:
        # Each would fit alone: what fits one of them is too much for the other.
        assert problem.device_bytes is not None
        assert problem.host_bytes is not None
        device, on_device = _least(spaces, "device", "fits_host")
        host, _ = _least(spaces, "host", "fits_device")
        sentences = [
            *_device_sentences(problem, problem.device_bytes, on_device, device, " if it is to fit the host"),
            f"Or raise host_memory to {format_bytes(host)}, {format_bytes(host - problem.host_bytes)} more.",
            *_sharing_sentences(problem),
            *_copy_sentences(problem),
        ]
    raise kind(" ".join([*sentences, *_pins(problem, knobs, spaces)]))


def _least(spaces: Sequence[Space], what: str, limit: str) -> tuple[int, Plan]:
    """The least bytes of any candidate within a limit, and its plan."""
    least, plan = np.inf, None
    for space in spaces:
        bound = space.bytes(getattr(space, what), getattr(space, limit))
        found = minimize(bound, lambda low, high: high, *space.roots(), below=least)
        if found.point:
            least, plan = found.value, space.least_plan(found.point)
    assert plan is not None, "nothing is allowed at all"
    return int(least), plan


def _device_sentences(problem: Problem, budget: int, plan: Plan, needed: int, condition: str = "") -> list[str]:
    """What the device lacks for the plan that needs least, and how large a batch would fit."""
    timeline = memory_timeline(
        problem.profile,
        problem.layout,
        plan,
        problem.hardware,
        problem.state_bytes,
        problem.training.accumulate,
        problem.alpha,
        problem.foreach,
    )
    phase = max(timeline.phases, key=lambda phase: phase.total)
    short, reserved = needed - budget, problem.reserved
    held = {**phase.device, GRADIENT_BUCKETS: reserved}
    terms = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in held.items() if nbytes)
    unit = f" at {phase.unit!r}" if phase.unit else ""
    sentences = [
        (
            f"No plan fits: the device would need at least {format_bytes(needed + reserved)}{condition}, "
            f"{format_bytes(budget + reserved)} are allowed, {format_bytes(short)} are short. Most is there in the "
            f"phase {phase.name!r}{unit}: {terms}."
        ),
        f"Raise device_memory to {format_bytes(needed + reserved)}.",
    ]
    # In between every level is at most as far along the way as activations are: it is the largest of straight lines.
    idle = _without_activations(problem, plan, timeline)
    share = (budget - idle) / (needed - idle) if needed > idle else 0.0
    size = _part_of_the_batch(problem, share)
    if size:
        sentences.append(
            f"Or give batches, or sequences, of at most {size}: activations take {format_bytes(needed - idle)}, and "
            f"{format_bytes(budget - idle)} are left for them."
        )
    else:
        without = format_bytes(min(idle, needed) + reserved)  # `idle` is an upper bound.
        sentences.append(f"A smaller batch would not help that plan: without any activations it needs {without}.")
    return sentences


def _without_activations(problem: Problem, plan: Plan, timeline: MemoryTimeline) -> int:
    """What the device needs for `plan` however small a batch is: model states, or those and what steps of them make."""
    memory = plan.memory
    copies = ceil(LOSS_COPIES * (max(problem.alpha, 1.0) if problem.hardware.asynchronous else 1.0))
    states = memory.total - memory.swapped_activations + copies
    return max(states, timeline.phase("step").total + memory.chunk_buffers + memory.gradients_in_flight)


def _part_of_the_batch(problem: Problem, share: float) -> str:
    """In tokens where the profile knows them, as a batch may be of one sample; empty if there is nothing left of it."""
    tokens, percent = problem.profile.tokens, max(floor(100 * share), 0)
    if tokens and floor(tokens * share) > 0:
        return f"about {floor(tokens * share):,} of {tokens:,} tokens ({percent} %)"
    return f"{percent} % of this size" if percent and not tokens else ""


def _copy_sentences(problem: Problem) -> list[str]:
    """Of what the host would need, what is for checkpoints."""
    if not problem.checkpoint_copy:
        return []
    return [f"{format_bytes(problem.checkpoint_copy)} of the host are {COPY}"]


def _sharing_sentences(problem: Problem) -> list[str]:
    """Of what the host would need, what comes with each rank."""
    if problem.sharers == 1:
        return []
    what = "each has swapped activations and gradients that wait to be added of its own"
    return [f"That is for all {problem.sharers} ranks of the machine: {what}."]


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


def _pins(problem: Problem, knobs: Knobs, spaces: Sequence[Space]) -> list[str]:
    """Which single knobs are in the way."""
    helpful = []
    for name in knobs.given:
        freed = replace(knobs, **{name: None})
        sizes = problem.chunk_bytes if name == "chunk_bytes" else [space.packing.chunk_bytes for space in spaces]
        unpacked = Unpacked(problem, freed.num_swap_blocks, freed.leave_policies)
        packings = [Packing(problem, size, None, unpacked) for size in sizes]
        if any(_fits(Space(packing, freed)) for packing in packings):
            helpful.append(f"{name}={getattr(knobs, name)}")
    return [f"Without {' or without '.join(helpful)} there is a plan that fits."] if helpful else []


def _fits(space: Space) -> bool:
    bound = space.bytes(space.device, space.fits_both)
    return bool(minimize(bound, space.probe, *space.roots()).point)
