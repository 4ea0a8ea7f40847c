"""Runs a step of training under an applied plan, measures it, and restores everything.

Forward and backward run as in training. The run's optimizer steps the resident weights, and the step is taken back; on
the host it steps a scratch weight. So weights and optimizer states do not change. Buffers, gradients and random states
are restored, and so is the state of the module, as far as [Note: Reach] goes.

[Note: Rehearsal of ranks]
All ranks rehearse at the same time, so that they share the links and cores of their node as in training. But no rank
waits for another one during the rehearsal: a rank that runs out of memory would leave the others waiting in a
collective. So a backward averages no gradients, as in a micro-batch that ends no optimizer step, and DDP does not exist
yet. Collectives of the user's step are answered as in a profile, see [Note: One rank]. The rates of the network were
measured before the search, by all ranks together, with sums as large as the largest unit.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from threading import Event
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import AdamW, Optimizer

from lightning_protrain.device.device import Device, StreamDevice
from lightning_protrain.device.recording import Lane, busy
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.step_time import Busy, micro_batch
from lightning_protrain.profiler.one_rank import on_one_rank
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.progress import waiting
from lightning_protrain.runtime.apply import Runtime
from lightning_protrain.runtime.optim.host_step import HostStep, ParamUpdate, hyperparameters, kernel_of, trial_step
from lightning_protrain.runtime.optim.step import steps_parameters_alone
from lightning_protrain.strategy.profile_step import (
    STEP_ERRORS,
    NoBatchError,
    batch_to_plan_with,
    undisturbed,
    with_loss,
)

# The first micro-batch records the order of blocks, by which the second one prefetches; the allocator still grows then
# (on an H100, the second micro-batch of an 8B model took 1.39 s, and a step of the training that followed 1.03 s).
# Micro-batches run until one takes at least STEADY of the fastest one's time.
MOST_BATCHES, STEADY = 6, 0.97
# Minimum and maximum number of elements of the weight that is made to time the host's optimizer step, and least number
# of timed steps. A smaller weight would fit the caches of the host.
LEAST_ELEMENTS, MOST_ELEMENTS, NUM_STEPS = 1 << 20, 32 << 20, 3
# Bytes of the scratch weight for each element: weight, gradient and two moments, in float32.
_STEP_BYTES = 16
# Timed steps of resident weights, of which the fastest counts, after the one that makes the states. On a GPU, fewer
# elements take about as long as the launches of their step.
_DEVICE_STEPS, _LEAST_ON_GPU = 2, 64 << 20
# Least and largest factor by which rehearsals correct a rate that was measured on this machine. A rate that is higher
# by far has not been measured right. One that is lower by far may be that of small operations, or of a busy machine.
LEAST_FACTOR, LARGEST_FACTOR = 0.5, 2.0
# Rates of each resource; one factor corrects all of them.
RATES = {
    "computation": ("memory", "flops"),
    "uploads": ("upload", "upload_beside"),
    "downloads": ("download", "download_beside"),
    "the optimizer on the host": ("host_step", "host_memory"),
    "the optimizer on the device": ("device_step",),
}
# Returns a context without the device memory that is reserved for optimizer states.
Unreserved = Callable[[], AbstractContextManager[None]]
_COPIES: tuple[Lane, ...] = ("upload", "download", "swap_out", "swap_in")


@dataclass(frozen=True)
class Rehearsed:
    """Measured time of the fastest micro-batch of a rehearsal, and memory of all.

    Attributes:
        seconds: Time from the beginning of its forward to the end of its backward.
        busy: Busy time of each resource.
        peak_bytes: Peak device memory; None if the device does not count it.
        host_step: Elements per second of a fused optimizer step on the host; None if it was not measured.
        device_step: Elements per second of the optimizer step on the device; None if it was not measured.
        steps: True if `peak_bytes` is also that of the optimizer step.
    """

    seconds: float
    busy: Busy
    peak_bytes: int | None
    host_step: float | None = None
    device_step: float | None = None
    steps: bool = False

    @classmethod
    def of_ranks(cls, each: Sequence[Rehearsed]) -> Rehearsed:
        """Combine the ranks: the slowest of each resource, because a step ends when all ranks have ended."""
        resources = {
            name: max(getattr(rehearsed.busy, name) for rehearsed in each) for name in ("compute", "upload", "download")
        }
        peaks = [rehearsed.peak_bytes for rehearsed in each if rehearsed.peak_bytes is not None]
        host, device = (
            min((rate for rehearsed in each if (rate := getattr(rehearsed, name)) is not None), default=None)
            for name in ("host_step", "device_step")
        )
        seconds = max(rehearsed.seconds for rehearsed in each)
        steps = all(rehearsed.steps for rehearsed in each)
        return cls(seconds, Busy(**resources), max(peaks, default=None), host, device, steps)

    def correct(self, problem: Problem, plan: Plan, hardware: HardwareProfile) -> HardwareProfile:
        """Return the rates from which these measurements would have been predicted.

        Args:
            problem: Problem of the prediction.
            plan: Plan that was rehearsed.
            hardware: Rates of the problem for one rank with PyTorch's AdamW.
        """
        hardware = micro_batch(problem, plan).correct(hardware, self.busy)
        if self.device_step is not None:
            hardware = replace(hardware, device_step=self.device_step)
        if self.host_step is None:
            return hardware
        factor = self.host_step / hardware.host_step
        return replace(
            hardware,
            host_step=factor * hardware.host_step,
            host_memory=factor * hardware.host_memory,
            host_beside=1.0,  # Copies have run beside the measured steps, too.
        )


def within_bounds(
    measured: HardwareProfile | None, before: HardwareProfile, corrected: HardwareProfile
) -> tuple[HardwareProfile, dict[str, float]]:
    """Return the corrected rates for this run, and by resource the factor of each correction that is out of bounds.

    Args:
        measured: Rates that were measured on this machine, without corrections of earlier rehearsals; None: no bounds.
        before: Rates before the correction, which stay in use where the corrected ones are far higher.
        corrected: Corrected rates.
    """
    odd = dict[str, float]()
    for resource, names in RATES.items() if measured is not None else ():
        factor = getattr(corrected, names[0]) / getattr(measured, names[0])
        if not LEAST_FACTOR <= factor <= LARGEST_FACTOR:
            odd[resource] = factor
        if factor > LARGEST_FACTOR:
            corrected = replace(corrected, **{name: getattr(before, name) for name in names})
    return corrected, odd


class NotRehearsed(Exception):
    """The plan cannot be rehearsed; the message says why, as a sentence."""


@waiting("Rehearsing the plan")
def rehearse(
    trainer: Trainer, runtime: Runtime, device: Device, unreserved: Unreserved, spare_host_bytes: int
) -> Rehearsed:
    """Run micro-batches with the batch of `batch_to_plan_with` under the applied plan; every rank calls it.

    Args:
        trainer: Trainer within `Strategy.setup` of a fit.
        runtime: Runtime of the applied plan.
        device: Device of this rank.
        unreserved: Returns a context without the memory that is reserved for optimizer states.
        spare_host_bytes: Host memory that this rank may use in addition to the plan.

    Raises:
        NotRehearsed: There is no batch, or the step raises because training hooks have not run.
        RuntimeError: The training step has changed weights.
        torch.OutOfMemoryError: The device is too small for the plan.
    """
    model = trainer.lightning_module
    if not model.automatic_optimization:
        raise NotRehearsed("Under manual optimization the module calls backward itself.")
    if trainer.world_size > 1 and trainer.accumulate_grad_batches == 1:
        _refuse_own_gradients(runtime, spare_host_bytes)
    if is_param_in_hook_signature(model.training_step, "dataloader_iter", explicit=True):
        raise NotRehearsed("`training_step` takes batches itself, from `dataloader_iter`.")
    try:
        batch = batch_to_plan_with(trainer, everywhere=True)
    except NoBatchError as error:
        raise NotRehearsed(str(error)) from error
    batch = move_data_to_device(batch, device.torch_device)
    takes_index = is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2)
    own = partial(model.training_step, batch, *([0] if takes_index else []))
    step = partial(with_loss, own, trainer.accumulate_grad_batches)

    def in_context() -> Any:
        with trainer.precision_plugin.train_step_context():
            return step()

    device.forget_peak()
    versions = {name: weight._version for name, weight in model.named_parameters()}
    found: Rehearsed | NotRehearsed
    try:
        with undisturbed(trainer, model, batch), _put_back(model, runtime):
            trial = _Trial(in_context, model, runtime, device, trainer.accumulate_grad_batches == 1)
            found = _measure_steady(trial.run)
            found = replace(found, host_step=trial.host_step(trainer.optimizers, spare_host_bytes))
            with unreserved():
                found = trial.with_device_step(found, trainer.optimizers, spare_host_bytes)
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


def _refuse_own_gradients(runtime: Runtime, spare_host_bytes: int) -> None:
    """Refuse a rehearsal if each rank would need memory for gradients that in training only the owners hold."""
    plan = runtime.plan
    own = sum(chunk.nbytes for chunk in plan.chunks if chunk.trainable and not chunk.resident)
    if plan.sharding is Sharding.SHARD and own > spare_host_bytes:
        raise NotRehearsed("Each rank would hold all gradients, for which the host has no memory.")


@dataclass(frozen=True)
class _Trial:
    """Micro-batches of a plan, before training.

    Attributes:
        step: Runs the forward and returns a mapping with the loss as `"loss"`.
        zeroes: True if gradients of the previous micro-batch are freed before backward; False: they are added to.
    """

    step: Callable[[], Any]
    model: nn.Module
    runtime: Runtime
    device: Device
    zeroes: bool

    def run(self, index: int = 1) -> tuple[Rehearsed, bool]:
        """Run micro-batch number `index` as training does; return its measurements and whether it asked other ranks.

        Gradients of the previous micro-batch take memory until forward has ended, as in Lightning's loop.
        """
        if index:
            return measure(self.step, self.runtime, self.device, self._zero_gradients), False
        with on_one_rank() as ranks:  # It intercepts every operation, which takes time.
            found = measure(self.step, self.runtime, self.device, self._zero_gradients)
        return found, ranks is not None and ranks.has_answered

    def host_step(self, optimizers: Sequence[Optimizer], spare_host_bytes: int) -> float | None:
        """Return the rate of the host's optimizer step beside a micro-batch; None if the host steps too little."""
        num_elements = min(sum(self._stepped()), spare_host_bytes // (2 * _STEP_BYTES), MOST_ELEMENTS)
        if num_elements < LEAST_ELEMENTS:
            return None
        # Where copies run beside computation, so does the host's step. Both read and write host memory: beside an H100,
        # steps took 1.36 times as long in training as alone.
        beside = self.run if isinstance(self.device, StreamDevice) else None
        return host_step_rate(optimizers, self.device, num_elements, beside)

    def with_device_step(self, found: Rehearsed, optimizers: Sequence[Optimizer], spare_host_bytes: int) -> Rehearsed:
        """Return the measurements with those of the optimizer step of the resident weights."""
        resident = (name for chunk in self.runtime.plan.chunks if chunk.resident for name in chunk.parameters)
        weights = [weight for name in resident if (weight := self.model.get_parameter(name)).grad is not None]
        if not weights:
            return replace(found, steps=True)
        seconds = device_step_seconds(optimizers, weights, self.device, spare_host_bytes)
        if seconds is None:
            return found
        numel = sum(weight.numel() for weight in weights)
        least = _LEAST_ON_GPU if isinstance(self.device, StreamDevice) else LEAST_ELEMENTS
        rate = numel / seconds if seconds and numel >= least else None
        return replace(found, peak_bytes=peak_of(self.device), steps=True, device_step=rate)

    def _zero_gradients(self) -> None:
        for parameter in self.model.parameters() if self.zeroes else ():
            parameter.grad = None

    def _stepped(self) -> Iterator[int]:
        """Yield the number of elements that the host steps in each chunk."""
        numel = {name: weight.numel() for name, weight in self.model.named_parameters() if weight.requires_grad}
        for chunk in self.runtime.plan.chunks:
            if not chunk.resident:
                yield sum(numel.get(name, 0) for name in chunk.parameters)


def _measure_steady(run: Callable[..., tuple[Rehearsed, bool]]) -> Rehearsed:
    """Run micro-batches until they get no faster; return the time of the fastest one and the memory of all."""
    found, asks = run(index=0)
    fastest = None
    for _ in range(MOST_BATCHES - 1):
        found, _ = run(index=0 if asks else 1)
        steady = fastest is not None and found.seconds >= STEADY * fastest.seconds
        if fastest is None or found.seconds < fastest.seconds:
            fastest = found
        if steady:
            break
    assert fastest is not None
    return replace(fastest, peak_bytes=found.peak_bytes)


def measure(
    step: Callable[[], Any], runtime: Runtime, device: Device, between: Callable[[], object] = lambda: None
) -> Rehearsed:
    """Run one micro-batch, and return its measurements.

    Args:
        step: Runs the forward and returns a mapping with the loss as `"loss"`.
        runtime: Runtime of the applied plan.
        device: Device that the plan is applied on.
        between: Called between forward and backward.

    Raises:
        NotRehearsed: The step returns no loss.
    """
    with device.recorded() as recording:
        with recording.span("compute"):
            outputs = runtime.run_step(step, (), {}, training=True)
        if outputs is None:
            raise NotRehearsed("`training_step` returns no loss.")
        between()
        with recording.span("compute"), runtime.backward():
            outputs["loss"].backward()
        del outputs
        spans = recording.spans()
    seconds = busy(spans, "compute")
    # If copies do not run beside computation, computation waits during copies.
    idle = busy(spans, "stall") if isinstance(device, StreamDevice) else busy(spans, "stall", *_COPIES)
    up, down = busy(spans, "upload", "swap_in"), busy(spans, "download", "swap_out")
    return Rehearsed(seconds, Busy(seconds - idle, up, down), peak_of(device))


def host_step_rate(
    optimizers: Sequence[Optimizer], device: Device, num_elements: int, beside: Callable[[], object] | None = None
) -> float:
    """Measure the elements per second of a fused optimizer step on the host, with a scratch weight.

    An optimizer without a fused kernel is measured beside AdamW before the search, see `host_slowdown`. So AdamW takes
    its place here.

    Args:
        optimizers: Optimizers of the run; their states do not change.
        device: Device with the host's worker.
        num_elements: Number of elements of the scratch weight.
        beside: Runs on this thread while the worker steps; None: nothing runs beside the steps.

    Returns:
        The median rate beside `beside`, the best one alone.
    """
    optimizer, dtype = optimizers[0], optimizers[0].param_groups[0]["params"][0].dtype
    if kernel_of(optimizer, optimizer.param_groups[0], fuse=True) is None:
        optimizer, dtype = AdamW([torch.empty(1)], fused=True), torch.float32
    own = object.__new__(type(optimizer))
    vars(own).update(vars(optimizer), state=defaultdict(dict))
    group = hyperparameters(optimizer.param_groups[0])
    host = HostStep(device.worker.threads, fuse=device.torch_device.type != "cpu")
    seconds: list[float] = []
    jobs = deque[Any]()
    ended = Event()
    with closing(host), closing(device.new_host_memory()) as memory:
        like = torch.empty(num_elements, dtype=dtype, device="meta")
        weight: Tensor = nn.Parameter(memory.empty_like(like).fill_(1.0))
        update = ParamUpdate(weight, memory.empty_like(like).fill_(1e-3), None)

        def work() -> None:
            began = device.host_clock()
            host.step(own, [(group, [update])])
            seconds.append(device.host_clock() - began)
            if len(seconds) <= NUM_STEPS or not ended.is_set():
                jobs.append(device.worker.submit(work))  # Jobs of `beside` run in between.

        jobs.append(device.worker.submit(work))
        try:
            if beside is not None:
                beside()
        finally:
            ended.set()
            while jobs:
                jobs.popleft().result()
    timed = seconds[1:]  # The first step also creates the states.
    return num_elements / (min(timed) if beside is None else median(timed))


def device_step_seconds(
    optimizers: Sequence[Optimizer], weights: Sequence[Tensor], device: Device, spare_host_bytes: int
) -> float | None:
    """Return the seconds of an optimizer step of these weights, which are the same bits afterwards.

    Args:
        optimizers: Optimizers of the run; neither they nor their states change.
        weights: Weights on the device, with gradients.
        device: The device.
        spare_host_bytes: Host memory for a copy of the weights.

    Returns:
        None if the host has no memory for the copy, if the class of an optimizer is neither PyTorch's nor
        bitsandbytes' (its step might change more than its parameters, or wait for other ranks), or if its step raises.

    Raises:
        torch.OutOfMemoryError: The device is too small for the step.
    """
    if sum(weight.nbytes for weight in weights) > spare_host_bytes or not all(map(steps_parameters_alone, optimizers)):
        return None
    before = [weight.detach().to("cpu", copy=True) for weight in weights]
    steps = [trial_step(optimizer, {id(weight) for weight in weights}) for optimizer in optimizers]
    taken = []
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(weights)):
        try:
            for _ in range(1 + _DEVICE_STEPS):
                with device.recorded() as recording:
                    with recording.span("compute"):
                        for step in steps:
                            step()
                    taken.append(busy(recording.spans(), "compute"))
        except torch.OutOfMemoryError:
            raise
        except STEP_ERRORS:
            return None
        finally:
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)
    return min(taken[1:])


def peak_of(device: Device) -> int | None:
    """Return the peak of the allocator's reserved bytes, or of allocated bytes if reserved bytes are unknown."""
    return device.allocator_stats().get("reserved_peak_bytes", device.peak_bytes())


@contextmanager
def _put_back(model: LightningModule, runtime: Runtime) -> Iterator[None]:
    """Reset the runtime and restore buffers and gradients when the context ends."""
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
