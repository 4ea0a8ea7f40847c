"""Tries a plan before training: runs the largest batch in the real runtime, and puts everything back.

A plan is made from a profile of the model and from rates of the hardware, and both are models. A rehearsal measures how
long the device computes and copies, and what it holds. The search then runs again with what was measured (paper,
section 4). No optimizer steps, so weights and optimizer states stay as they are; buffers, gradients and random states
are put back, and so is the state of the module, as far as [Note: Reach] goes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_protrain.config import parse_bytes, plural
from lightning_protrain.device.device import Device, StreamDevice
from lightning_protrain.device.recording import Lane, busy
from lightning_protrain.planner.explain import short_seconds
from lightning_protrain.planner.memory import format_bytes
from lightning_protrain.planner.memory_timeline import measured_alpha
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.prediction import Prediction
from lightning_protrain.planner.request import PlanRequest
from lightning_protrain.planner.step_time import Busy, micro_batch
from lightning_protrain.runtime.apply import Runtime
from lightning_protrain.strategy.profile_step import STEP_ERRORS, batch_to_plan_with, undisturbed, with_loss

# The first micro-batch learns the order of blocks, and the second one prefetches by it.
NUM_BATCHES = 2
# How often a better plan is searched for, and how often a smaller one.
ROUNDS, MOST_SHRINKS = 2, 8
# A plan is changed for one whose step takes at most this part.
WORTH_CHANGING = 0.97
# Part of the budget that is given up where the allocator does not say what it was asked for.
UNKNOWN_SHORT = 0.05
# Shapes of a batch that a message names.
MOST_SHAPES = 3
_COPIES: tuple[Lane, ...] = ("upload", "download", "swap_out", "swap_in")


@dataclass(frozen=True)
class Rehearsed:
    """Measured time and memory of the last of a few micro-batches.

    Attributes:
        seconds: From the beginning of its forward to the end of its backward.
        busy: Time in which each resource worked.
        peak_bytes: The most that the device has held; None if it does not count.
    """

    seconds: float
    busy: Busy
    peak_bytes: int | None


Shape = tuple[int, ...]
# Applies a plan in place of the present one, with bytes of the host to spare; returns what runs it.
Place = Callable[[Plan, int], tuple[Runtime, Device]]


def improve(trainer: Trainer, request: PlanRequest, plan: Plan, place: Place) -> tuple[PlanRequest, Plan]:
    """Apply a plan, rehearse it, and take a better one if what was measured leads to it.

    Args:
        trainer: Trainer within `Strategy.setup` of a fit.
        request: Request that the plan answers, on this node.
        plan: Plan that was searched for.
        place: Applies a plan.

    Returns:
        The request with what was measured, and the plan that is applied, with the prediction that follows from it.

    Raises:
        ValueError: The device is too small for any plan.
        RuntimeError: The step has changed weights.
    """
    rounds = shrinks = 0
    while True:
        placed = place(plan, request.spare_host_bytes(plan))
        if rounds == ROUNDS:
            return request, plan
        try:
            measured = rehearse(trainer, *placed)
        except NotRehearsed as why:
            rank_zero_info(f"The plan is not rehearsed: {why}")
            return request, plan
        except torch.OutOfMemoryError as error:
            if shrinks == MOST_SHRINKS:
                raise
            shrinks += 1
            request, plan = _smaller(request, plan, _peak(placed[1]), error)
            continue
        finally:  # Once the peak has been read.
            placed[1].forget_counters()
        rounds += 1
        told = request.expects(plan)
        request = _corrected(request, plan, measured)
        now = request.expects(plan)
        better = _better(request, plan, now)
        if better is None:
            rank_zero_info(f"The plan was rehearsed: {_compared(measured, now, told)}.")
            return request, replace(plan, prediction=now.with_advice(*_advice_of(plan)))
        assert better.prediction is not None
        rank_zero_info(
            f"The plan was rehearsed: {_compared(measured, now, told)}. Another plan is expected to take "
            f"{short_seconds(better.prediction.step_seconds)}, and is taken."
        )
        plan = better


def _corrected(request: PlanRequest, plan: Plan, measured: Rehearsed) -> PlanRequest:
    """Return the request with the rates and the fragmentation factor under which the plan takes what was measured."""
    problem, profile, workload = request.here(), request.workload.profile, request.workload
    assert profile is not None
    hardware = micro_batch(problem, plan).correct(request.node.measure(profile), measured.busy)
    if measured.peak_bytes is not None and problem.hardware.asynchronous:
        workload = replace(workload, measured_alpha=measured_alpha(problem, plan, measured.peak_bytes))
    return replace(request, workload=workload, node=replace(request.node, measure=lambda _: hardware))


def _better(request: PlanRequest, plan: Plan, now: Prediction) -> Plan | None:
    """Return a plan that is worth the change; None: the rehearsed one stays."""
    try:
        found = request.plan()
    except ValueError:  # By its models nothing fits, and the rehearsed one has run.
        return None
    if (found.chunks, found.blocks, found.num_chunk_buffers) == (plan.chunks, plan.blocks, plan.num_chunk_buffers):
        return None
    assert found.prediction is not None
    budget = request.budget()
    fits = budget is None or now.device_bytes <= budget
    return None if fits and found.prediction.step_seconds > WORTH_CHANGING * now.step_seconds else found


def _smaller(
    request: PlanRequest, plan: Plan, held: int | None, error: torch.OutOfMemoryError
) -> tuple[PlanRequest, Plan]:
    """Return the request with a budget that is lower by what was short, and its plan.

    Raises:
        ValueError: No plan fits that.
    """
    budget = request.budget()
    assert budget is not None
    less = _lowered(budget, held, error)
    rank_zero_info(
        f"The device ran out of memory as the plan was rehearsed: device_memory is {format_bytes(less)} in place of "
        f"{format_bytes(budget)}."
    )
    request = request.with_device_bytes(less)
    return request, request.plan()


def _lowered(budget: int, held: int | None, error: torch.OutOfMemoryError) -> int:
    """Return a budget that is lower by what was short."""
    asked = re.search(r"Tried to allocate ([0-9.]+ [KMGT]iB)", str(error))
    short = parse_bytes(asked[1]) if asked else int(UNKNOWN_SHORT * budget)
    return max(min(budget, held or budget) - short, 1)


def explain_out_of_memory(error: torch.OutOfMemoryError, plan: Plan, device: Device, shapes: Collection[Shape]) -> str:
    """Return what an error of training has to do with the plan, and what to set.

    Args:
        error: Error of PyTorch's allocator.
        plan: Plan that is applied.
        device: Device of this rank.
        shapes: Shapes of the tensors of the micro-batch.
    """
    held, prediction = _peak(device), plan.prediction
    found = f"The device held {format_bytes(held)} at most" if held else "The device ran out of memory"
    if prediction is None:
        return f'{found}, and the plan does not count activations. Give plan="auto", or smaller batches.'
    known = ((prediction.samples, "sample"), (prediction.tokens, "token"))
    made = " and ".join(plural(number, name) for number, name in known if number) or "unknown size"
    these = " and ".join(str(list(shape)) for shape in list(dict.fromkeys(shapes))[:MOST_SHAPES])
    return (
        f"{found}, {format_bytes(prediction.device_bytes)} were predicted for a micro-batch of {made}; this one has "
        f"tensors of {these}. Set device_memory to {format_bytes(_lowered(prediction.budget, held, error))}, or give "
        "the data module a method `largest_batch` to plan with, or smaller batches."
    )


def _compared(measured: Rehearsed, now: Prediction, told: Prediction) -> str:
    """Return what a step takes by what was measured, beside what was expected."""
    took = f"a step takes {short_seconds(now.step_seconds)}, {short_seconds(told.step_seconds)} were expected"
    if measured.peak_bytes is None:
        return took
    held, expected = format_bytes(measured.peak_bytes), format_bytes(told.device_bytes)
    return f"{took}; the device holds {held}, {expected} were expected"


def _advice_of(plan: Plan) -> tuple[str, ...]:
    return plan.prediction.advice if plan.prediction is not None else ()


class NotRehearsed(Exception):
    """The plan cannot be rehearsed; the message says why, as a sentence."""


def rehearse(trainer: Trainer, runtime: Runtime, device: Device) -> Rehearsed:
    """Run forward and backward of the largest batch, or of the first one, under the applied plan.

    Args:
        trainer: Trainer within `Strategy.setup` of a fit.
        runtime: Runtime of the applied plan.
        device: Device of this rank.

    Raises:
        NotRehearsed: There is no batch, or the step raises before the hooks of training have run.
        RuntimeError: The step has changed weights.
        torch.OutOfMemoryError: The device is too small for the plan.
    """
    model = trainer.lightning_module
    if not model.automatic_optimization:
        raise NotRehearsed("Under manual optimization the module calls backward itself.")
    batch = batch_to_plan_with(trainer)
    if batch is None or is_param_in_hook_signature(model.training_step, "dataloader_iter", explicit=True):
        raise NotRehearsed("No batch can be taken ahead of training.")
    batch = move_data_to_device(batch, device.torch_device)
    takes_index = is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2)
    own = partial(model.training_step, batch, *([0] if takes_index else []))
    step = partial(with_loss, own, trainer.accumulate_grad_batches)

    def in_context() -> Any:
        with trainer.precision_plugin.train_step_context():
            return step()

    device.trim()
    device.forget_peak()
    versions = {name: weight._version for name, weight in model.named_parameters()}
    found: Rehearsed | NotRehearsed
    try:
        with undisturbed(trainer, model, batch), _put_back(model, runtime):
            for _ in range(NUM_BATCHES):
                for parameter in model.parameters():
                    parameter.grad = None
                found = measure(in_context, runtime, device)
    except torch.OutOfMemoryError:
        raise
    except STEP_ERRORS as error:
        found = NotRehearsed(f"the step raises {type(error).__name__} ({error}).")
    changed = [name for name, weight in model.named_parameters() if weight._version != versions[name]]
    if changed:
        raise RuntimeError(
            f"`training_step` changes weights ({', '.join(changed[:3])}), so the rehearsal has changed them. Set "
            "rehearse=False, and make the module anew."
        )
    if isinstance(found, NotRehearsed):
        raise found
    return found


def measure(step: Callable[[], Any], runtime: Runtime, device: Device) -> Rehearsed:
    """Run one micro-batch and return what it took.

    Args:
        step: Runs the forward and returns a mapping with the loss as `"loss"`.
        runtime: Runtime of the applied plan.
        device: Device that the plan is applied on.

    Raises:
        NotRehearsed: The step returns no loss.
    """
    with device.recorded() as recording:
        with recording.span("compute"):
            outputs = runtime.run_step(step, (), {}, training=True)
        if outputs is None:
            raise NotRehearsed("`training_step` returns no loss.")
        with recording.span("compute"), runtime.backward():
            outputs["loss"].backward()
        del outputs
        spans = recording.spans()
    seconds = busy(spans, "compute")
    # Where copies do not run beside computation, it stands still meanwhile.
    idle = busy(spans, "stall") if isinstance(device, StreamDevice) else busy(spans, "stall", *_COPIES)
    up, down = busy(spans, "upload", "swap_in"), busy(spans, "download", "swap_out")
    return Rehearsed(seconds, Busy(seconds - idle, up, down), _peak(device))


def _peak(device: Device) -> int | None:
    """Return what the allocator has reserved at most, fragments included, or what is allocated if that is all."""
    return device.allocator_stats().get("reserved_peak_bytes", device.peak_bytes())


@contextmanager
def _put_back(model: LightningModule, runtime: Runtime) -> Iterator[None]:
    """Restore buffers, gradients and the runtime."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        runtime.reset()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
