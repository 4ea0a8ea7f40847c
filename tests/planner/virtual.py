"""Steps of the real runtime on the virtual clock, to hold predictions against."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.overlap import GPT, VOCABULARY
from lightning_protrain.device.recording import Span
from lightning_protrain.planner.memory import memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.packing import pack_chunks, with_residency
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, Plan
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout, ModelProfile, Segment
from lightning_protrain.report.plan_monitor import OPTIMIZER_STEP
from lightning_protrain.runtime.apply import RunOptions, Runtime, apply_plan
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.optim.step import fused_host_step
from tests.support.simulated.device import Rates, SimulatedDevice

KEEP, CHECKPOINT, SWAP = BlockPolicy.KEEP, BlockPolicy.CHECKPOINT, BlockPolicy.SWAP
FLOPS, MEMORY = 1e9, 1e10
STATE_BYTES = 8.0
Policies = Callable[[int], BlockPolicy]


@dataclass(frozen=True)
class Case:
    """A machine, a plan and a training loop.

    Attributes:
        training: The loop.
        resident: Number of resident chunks, from the first one on.
        num_buffers: Chunk buffers.
        policies: Returns the policy of a block from its index.
        link: Time to upload all chunks over the time that one forward computes.
        host: Time of the optimizer step on the host over the time that one micro-batch computes.
        num_blocks: Number of blocks of the model.
        num_tokens: Number of tokens of a micro-batch.
        chunk_bytes: The most bytes of a chunk.
        tied: Whether the head has the weights of the embedding.
        hold: Factor of what the runtime lets downloads hold on the device.
        gradient_buffers: Number of chunks whose gradients have host memory at the same time; 0: all.
        num_inputs: Number of checkpointed blocks whose inputs go to the host, from the first one on.
    """

    training: Training = field(default_factory=Training)
    resident: int = 0
    num_buffers: int = 3
    policies: Policies = lambda index: KEEP
    link: float = 0.5
    host: float = 0.5
    num_blocks: int = 8
    num_tokens: int = 16
    chunk_bytes: int | None = None
    tied: bool = False
    hold: int = 1
    gradient_buffers: int = 0
    num_inputs: int = 0


def model_of(case: Case) -> GPT:
    """The model with the same weights every time."""
    torch.manual_seed(0)
    gpt = GPT(case.num_blocks)
    if case.tied:
        gpt.head.weight = gpt.embedding.weight
    return gpt


def tokens(num_tokens: int) -> torch.Tensor:
    return torch.arange(num_tokens).remainder(VOCABULARY).view(1, num_tokens)


def to_the_end(profile: ModelProfile) -> ModelProfile:
    """Return the profile for recomputation that does not end early, as under `set_checkpoint_early_stop(False)`."""

    def whole(one: Segment) -> Segment:
        operations = tuple(replace(cost, is_idle=False) for cost in one.forward.operations)
        return replace(one, forward=replace(one.forward, operations=operations))

    return replace(profile, segments=tuple(map(whole, profile.segments)))


@cache
def profile_of(num_blocks: int, num_tokens: int, tied: bool) -> tuple[ModelLayout, ModelProfile]:
    """Return the layout and the profile of the model."""
    gpt = model_of(Case(num_blocks=num_blocks, tied=tied))
    layout = replace(describe_model(gpt), passes_gradients=True)
    return layout, profile_model(gpt, layout, lambda: gpt(tokens(num_tokens)))


def plan_of(case: Case, layout: ModelLayout, profile: ModelProfile) -> Plan:
    """The plan."""
    chunks = [
        with_residency(layout, chunk, index < case.resident)
        for index, chunk in enumerate(pack_chunks(layout, case.chunk_bytes))
    ]
    num_buffers = max(case.num_buffers, minimum_chunk_buffers(layout, chunks))
    swap_bytes, left = profile.swap_bytes(), case.num_inputs
    blocks = []
    for index, block in enumerate(layout.blocks):
        policy = case.policies(index)
        nbytes = swap_bytes[block.name] if policy is SWAP else 0
        if policy is CHECKPOINT and left:
            nbytes, left = profile.input_swap_bytes[block.name], left - 1
        blocks.append(BlockPlan(block.name, policy, nbytes))
    return Plan(
        chunks=tuple(chunks),
        blocks=tuple(blocks),
        num_chunk_buffers=num_buffers,
        memory=memory_terms(layout, chunks, num_buffers, STATE_BYTES, blocks),
        shapes={info.fqn: info.shape for info in layout.parameters},
        gradient_buffers=case.gradient_buffers,
    )


def problem_of(case: Case, **changes: Any) -> Problem:
    """Return the planner's problem for the case."""
    layout, profile = profile_of(case.num_blocks, case.num_tokens, case.tied)
    hardware = hardware_of(rates_of(case, layout, profile))
    problem = Problem(profile, layout, hardware, case.training, STATE_BYTES, None, None)
    return replace(problem, **changes)


def computing(profile: ModelProfile) -> tuple[float, float]:
    """Virtual seconds of forward and of backward."""

    def seconds(name: str) -> float:
        return sum(
            cost.count * max(cost.flops / FLOPS, cost.nbytes / MEMORY)
            for segment in profile.segments
            for cost in getattr(segment, name).operations
        )

    return seconds("forward"), seconds("backward")


def rates_of(case: Case, layout: ModelLayout, profile: ModelProfile) -> Rates:
    """A machine of the case's proportions."""
    forward, backward = computing(profile)
    nbytes = sum(info.nbytes for info in layout.parameters)
    link = nbytes / (case.link * forward)
    return Rates(link, link, FLOPS, MEMORY, 4 * nbytes / (case.host * (forward + backward)))


def hardware_of(rates: Rates) -> HardwareProfile:
    """Return the hardware profile of a machine with these rates."""
    return SimulatedDevice(rates).hardware_profile(("float32",), 1 << 40, 1 << 40)


def measure(case: Case, num_steps: int = 3) -> float:
    """Virtual seconds of one step when the run has settled: between the ends of the last two backwards.

    The third step takes what all later ones take.
    """
    layout, profile = profile_of(case.num_blocks, case.num_tokens, case.tied)
    return run(case, SimulatedDevice(rates_of(case, layout, profile)), num_steps)[0]


def run(case: Case, device: SimulatedDevice, num_steps: int = 3) -> tuple[float, list[Span]]:
    """Virtual seconds of the last step on any machine, and what the device has recorded of it."""
    layout, profile = profile_of(case.num_blocks, case.num_tokens, case.tied)
    gpt = model_of(case)
    plan = plan_of(case, layout, profile)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        runtime = apply_plan(gpt, plan, layout, device, RunOptions(print))
    device.hold_bytes *= case.hold
    resident = {fqn for chunk in plan.chunks if chunk.resident for fqn in chunk.parameters}
    groups = [[p for name, p in gpt.named_parameters() if (name in resident) is kind] for kind in (True, False)]
    for parameter in groups[0]:
        device.set_place(parameter, "device")  # Without streaming nothing has told the clock.
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], fused=True)
    ends = []
    with device:
        for index in range(num_steps):
            with device.recorded() if index == num_steps - 1 else nullcontext() as recording:
                _step(case, gpt, runtime, optimizer, device, bool(groups[0]))
                ends.append(device.compute_stream().time)
                spans = recording.spans() if recording is not None else []
        runtime.async_step.finish_all()
    runtime.remove()
    return ends[-1] - ends[-2], spans


def _step(
    case: Case,
    gpt: nn.Module,
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    device: SimulatedDevice,
    on_device: bool,
) -> None:
    training = case.training

    def forward_and_backward(first: bool) -> None:
        with device.span("compute"):
            loss = runtime.run_step(gpt, (tokens(case.num_tokens),), {}, True)
        if first:
            optimizer.zero_grad()
        with device.span("compute"), runtime.backward():
            loss.backward()

    def closure() -> None:
        forward_and_backward(training.accumulate == 1)
        if training.clips:
            runtime.async_step.clip_norm(gpt.parameters(), 1e-3)
            if on_device:
                # On a GPU the host reads the norm of what is there.
                device.compute_stream().record_event().synchronize()
        runtime.settle()
        stepping.enter_context(device.span("compute", OPTIMIZER_STEP))

    for index in range(training.accumulate - 1):
        forward_and_backward(index == 0)
    passes = case.gradient_buffers > 0
    runtime.async_step.arm(optimizer, Overlap(training.overlap), None, training.clips, lends=passes)
    with ExitStack() as stepping, fused_host_step(optimizer, closure, "cpu", runtime.async_step.launch) as final:
        optimizer.step(final)
    runtime.refresh()
