"""Runs modules whose offloaded weights are streamed in bfloat16, and the plans for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.planner.memory import memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.packing import pack_chunks, with_residency
from lightning_protrain.planner.plan import Plan, check_plan
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import ModelLayout, castable
from lightning_protrain.runtime.apply import RunOptions, apply_plan
from lightning_protrain.runtime.optim.async_step import Overlap
from tests.runtime.applied import Applied, StepFunction, batches, differences, mean_square
from tests.runtime.cases import CASES
from tests.runtime.overlapped import train
from tests.support.plans import STATE_BYTES, preset
from tests.support.simulated.device import SimulatedDevice

# In these a step reads floats, or has no loss in the first step: they cannot be traced.
TRACED = [name for name in CASES if name not in ("no loss", "reentrant", "two backwards")]
CASES_BY_DEVICE = [(name, "cpu") for name in TRACED]
# A step that writes to weights whose upload may be under way is right, but no fence orders the two.
CASES_BY_DEVICE += [(name, "simulated") for name in TRACED if name != "weights change in the step"]


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def mixed(step: StepFunction) -> StepFunction:
    def run(model: nn.Module, batch: Tensor, index: int) -> Tensor | None:
        with autocast():
            return step(model, batch, index)

    return run


def low_layout(model: nn.Module, step: StepFunction) -> ModelLayout:
    layout = describe_model(model)
    profile = profile_model(model, layout, lambda: step(model, batches()[0], 0), autocast)
    return layout.streaming(castable(profile, "bfloat16"), "bfloat16")


def low_plan(model: nn.Module, layout: ModelLayout, resident: Callable[[int], bool] = lambda index: False) -> Plan:
    chunks = [with_residency(layout, c, resident(i)) for i, c in enumerate(pack_chunks(layout))]
    buffers = minimum_chunk_buffers(layout, chunks) + 1
    terms = memory_terms(layout, chunks, buffers, STATE_BYTES)
    return replace(preset(model, "offload"), chunks=tuple(chunks), num_chunk_buffers=buffers, memory=terms)


def run(
    build: Callable[[], nn.Module],
    step: StepFunction,
    kind: str = "cpu",
    overlap: Overlap = Overlap.OFF,
    resident: Callable[[int], bool] = lambda index: False,
    **options: Any,
) -> tuple[dict[str, Tensor], Applied]:
    torch.manual_seed(0)
    model = build()
    layout = low_layout(model, step)
    plan = low_plan(model, layout, resident)
    check_plan(plan, layout, "bfloat16")
    device = SimulatedDevice() if kind == "simulated" else CPUDevice(torch.device("cpu"))
    with device if isinstance(device, SimulatedDevice) else nullcontext():
        runtime = apply_plan(model, plan, layout, device, RunOptions(lambda sentence: None))
        state = Applied(model, plan, runtime, device)
        found = train(model, state, overlap, step=mixed(step), **options)
        runtime.async_step.finish_all()
        runtime.remove()
    return found, state


def assert_parity(
    build: Callable[[], nn.Module], step: StepFunction = mean_square, *how: Any, **options: Any
) -> Applied:
    """Compare `run` with a plain run under autocast; `lends` and `resident` are options of `run` alone."""
    torch.manual_seed(0)
    plain = {name: value for name, value in options.items() if name not in ("lends", "resident")}
    expected = train(build(), step=mixed(step), **plain)
    found, state = run(build, step, *how, **options)
    assert differences(expected, found) == []
    return state
