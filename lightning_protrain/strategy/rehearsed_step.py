"""Runs forward and backward of a batch under an applied plan, measures them, and puts everything back.

No optimizer steps, so weights and optimizer states stay as they are; buffers, gradients and random states are put back,
and so is the state of the module, as far as [Note: Reach] goes. The optimizer of the run steps a scratch weight on the
host instead.

[Note: Rehearsal of ranks]
All ranks rehearse at the same time, so that they share the links and cores of their node as in training. But none waits
for another in the middle: one that runs out of memory could not tell the others, which would wait for it in a
collective. So a backward averages nothing, as in a micro-batch that ends no optimizer step, and DDP does not exist yet.
Collectives of the user's step are answered as in a profile, see [Note: One rank]. The rates of the network are those
that all ranks have measured together before the search, with sums as large as those of the largest unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_protrain.device.device import Device, StreamDevice
from lightning_protrain.device.recording import Lane, busy
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.step_time import Busy, micro_batch
from lightning_protrain.profiler.one_rank import on_one_rank
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.progress import waiting
from lightning_protrain.runtime.apply import Runtime
from lightning_protrain.runtime.optim.host_step import HostStep, ParamUpdate, hyperparameters
from lightning_protrain.strategy.profile_step import STEP_ERRORS, batch_to_plan_with, undisturbed, with_loss

# The first micro-batch learns the order of blocks, and the second one prefetches by it.
NUM_BATCHES = 2
# Elements of the scratch weight that the host steps: fewer say nothing of larger ones. Times that it is stepped.
LEAST_ELEMENTS, MOST_ELEMENTS, NUM_STEPS = 1 << 20, 32 << 20, 3
# Bytes of the scratch weight for each element: it, its gradient and two moments, in float32.
_STEP_BYTES = 16
_COPIES: tuple[Lane, ...] = ("upload", "download", "swap_out", "swap_in")


@dataclass(frozen=True)
class Rehearsed:
    """Measured time and memory of the last of a few micro-batches.

    Attributes:
        seconds: From the beginning of its forward to the end of its backward.
        busy: Time in which each resource worked.
        peak_bytes: The most that the device has held; None if it does not count.
        host_step: Elements per second of the optimizer on the host; None if it was not measured.
    """

    seconds: float
    busy: Busy
    peak_bytes: int | None
    host_step: float | None = None

    @classmethod
    def of_ranks(cls, each: Sequence[Rehearsed]) -> Rehearsed:
        """Return what the slowest of the ranks has taken of each resource: a step ends when all have ended."""
        resources = {name: max(getattr(one.busy, name) for one in each) for name in ("compute", "upload", "download")}
        peaks = [one.peak_bytes for one in each if one.peak_bytes is not None]
        rates = [one.host_step for one in each if one.host_step is not None]
        seconds = max(one.seconds for one in each)
        return cls(seconds, Busy(**resources), max(peaks, default=None), min(rates, default=None))

    def correct(self, problem: Problem, plan: Plan, hardware: HardwareProfile) -> HardwareProfile:
        """Return rates under which this would have been expected.

        Args:
            problem: Problem that predicts.
            plan: Plan that was rehearsed.
            hardware: Rates of the problem, as one rank has them with PyTorch's AdamW.
        """
        hardware = micro_batch(problem, plan).correct(hardware, self.busy)
        if self.host_step is None:
            return hardware
        factor = self.host_step * problem.sharers / problem.hardware.host_step
        return replace(hardware, host_step=factor * hardware.host_step, host_memory=factor * hardware.host_memory)


class NotRehearsed(Exception):
    """The plan cannot be rehearsed; the message says why, as a sentence."""


@waiting("Rehearsing the plan")
def rehearse(trainer: Trainer, runtime: Runtime, device: Device, spare_host_bytes: int) -> Rehearsed:
    """Run forward and backward of the largest batch, or of the first one, under the applied plan; every rank calls it.

    Args:
        trainer: Trainer within `Strategy.setup` of a fit.
        runtime: Runtime of the applied plan.
        device: Device of this rank.
        spare_host_bytes: Host memory that the plan leaves to this rank.

    Raises:
        NotRehearsed: There is no batch, or the step raises before the hooks of training have run.
        RuntimeError: The step has changed weights.
        torch.OutOfMemoryError: The device is too small for the plan.
    """
    model = trainer.lightning_module
    if not model.automatic_optimization:
        raise NotRehearsed("Under manual optimization the module calls backward itself.")
    if trainer.world_size > 1 and trainer.accumulate_grad_batches == 1:
        _refuse_own_gradients(runtime, spare_host_bytes)
    batch = batch_to_plan_with(trainer, everywhere=True)
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
            found = _measure_last(in_context, model, runtime, device)
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
    num_elements = min(_largest_step(runtime, model), spare_host_bytes // (2 * _STEP_BYTES), MOST_ELEMENTS)
    rate = host_step_rate(trainer.optimizers, device, num_elements) if num_elements >= LEAST_ELEMENTS else None
    return Rehearsed(found.seconds, found.busy, found.peak_bytes, rate)


def _refuse_own_gradients(runtime: Runtime, spare_host_bytes: int) -> None:
    """Refuse a rehearsal in which each rank would hold gradients that the owners of weights hold in training."""
    plan = runtime.plan
    own = sum(chunk.nbytes for chunk in plan.chunks if chunk.trainable and not chunk.resident)
    if plan.sharding is Sharding.SHARD and own > spare_host_bytes:
        raise NotRehearsed("Each rank would hold all gradients, for which the host has no memory.")


def _measure_last(step: Callable[[], Any], model: nn.Module, runtime: Runtime, device: Device) -> Rehearsed:
    """Run a few micro-batches, and return what the last one took."""
    answers = False
    for index in range(NUM_BATCHES):
        for parameter in model.parameters():
            parameter.grad = None
        if index and not answers:
            return measure(step, runtime, device)
        with on_one_rank() as ranks:  # It looks at every operation, which takes time.
            found = measure(step, runtime, device)
        answers = ranks is not None and ranks.has_answered
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
    return Rehearsed(seconds, Busy(seconds - idle, up, down), peak_of(device))


def host_step_rate(optimizers: Sequence[Optimizer], device: Device, num_elements: int) -> float | None:
    """Return the elements per second that the first optimizer steps on the host, on a scratch weight.

    Args:
        optimizers: Optimizers of the run; their states do not change.
        device: Device with the host's worker.
        num_elements: Elements of the scratch weight.

    Returns:
        The rate; None if no fused kernel steps the optimizer.
    """
    optimizer = optimizers[0]
    own = object.__new__(type(optimizer))
    vars(own).update(vars(optimizer), state=defaultdict(dict))
    group = hyperparameters(optimizer.param_groups[0])
    host = HostStep(device.worker.threads, fuse=device.torch_device.type != "cpu")
    if host.kernel(own, group) is None:
        return None
    found = []
    with closing(device.new_host_memory()) as memory:
        like = torch.empty(num_elements, dtype=optimizer.param_groups[0]["params"][0].dtype, device="meta")
        weight: Tensor = nn.Parameter(memory.empty_like(like).fill_(1.0))
        update = ParamUpdate(weight, memory.empty_like(like).fill_(1e-3), None)

        def work() -> None:
            for _ in range(1 + NUM_STEPS):
                began = device.host_clock()
                host.step(own, group, [update])
                found.append(device.host_clock() - began)

        try:
            device.worker.submit(work).result()
        finally:
            host.close()
    return num_elements / min(found[1:])  # The first one makes the states.


def _largest_step(runtime: Runtime, model: nn.Module) -> int:
    """Return the most elements of one chunk that the host steps."""
    numel = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
    stepped = (chunk.parameters for chunk in runtime.plan.chunks if not chunk.resident)
    return max((sum(numel.get(name, 0) for name in names) for names in stepped), default=0)


def peak_of(device: Device) -> int | None:
    """Return the most that the allocator has reserved, fragments included, or what is allocated if that is all."""
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
