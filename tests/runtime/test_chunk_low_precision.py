"""Weights that are streamed in lower precision give the bits of autocast, and half the traffic."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.planner.memory import memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.packing import pack_chunks, with_residency
from lightning_protrain.planner.plan import Plan, check_plan, chunk_offsets
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import ModelLayout, castable
from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.apply import RunOptions, apply_plan
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.shadow import ShadowWeight
from tests.runtime.applied import Applied, Net, StepFunction, batches, differences, mean_square
from tests.runtime.cases import CASES
from tests.runtime.overlapped import CLIPPINGS, train
from tests.support.plans import STATE_BYTES, preset
from tests.support.simulated.device import SimulatedDevice
from tests.support.simulated.streams import RaceError


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


# In these a step reads floats, or has no loss in the first step: they cannot be traced.
TRACED = [name for name in CASES if name not in ("no loss", "reentrant", "two backwards")]


CASES_BY_DEVICE = [(name, "cpu") for name in TRACED]
# A step that writes to weights whose upload may be under way is right, but no fence orders the two.
CASES_BY_DEVICE += [(name, "simulated") for name in TRACED if name != "weights change in the step"]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("name", "kind"), CASES_BY_DEVICE)
def test_parity_with_autocast(name: str, accumulate: int, kind: str) -> None:
    build, step, _ = CASES[name]
    torch.manual_seed(0)
    expected = train(build(), step=mixed(step), accumulate=accumulate)
    found, _ = run(build, step, kind, accumulate=accumulate)
    assert differences(expected, found) == []


WAYS = [way for way in itertools.product(Overlap, CLIPPINGS) if way != (Overlap.BACKWARD, "norm")]


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
@pytest.mark.parametrize(("overlap", "clipping"), WAYS)
def test_parity_of_overlapped_steps(overlap: Overlap, clipping: str, kind: str) -> None:
    options = {"accumulate": 2, **CLIPPINGS[clipping]}
    torch.manual_seed(0)
    expected = train(Net(), step=mixed(mean_square), **options)
    found, _ = run(Net, mean_square, kind, overlap, **options)
    assert differences(expected, found) == []


def test_half_the_bytes_are_streamed() -> None:
    _, state = run(Net, mean_square)
    low = {name for chunk in state.plan.chunks if chunk.streamed_dtype for name in chunk.parameters}
    assert low == {name for name, _ in Net().named_parameters() if "norm" not in name}
    layout = low_layout(Net(), mean_square)
    for chunk in state.plan.chunks:
        sizes = [layout.parameter(name).nbytes // (2 if chunk.streamed_dtype else 1) for name in chunk.parameters]
        assert chunk.nbytes == chunk_offsets(sizes)[1]
    assert state.device.counters.uploaded_bytes % 256 == 0
    assert state.plan.memory.gradients_in_flight < preset(Net(), "offload").memory.gradients_in_flight


def test_resident_chunks_keep_their_dtype() -> None:
    torch.manual_seed(0)
    expected = train(Net(), step=mixed(mean_square))
    found, state = run(Net, mean_square, resident=lambda index: index % 2 == 0)
    assert differences(expected, found) == []
    assert all(chunk.streamed_dtype is None for chunk in state.plan.chunks if chunk.resident)


def test_masters_keep_their_memory_and_dtype() -> None:
    model = Net()
    layout = low_layout(model, mean_square)
    before = {name: (parameter.data_ptr(), parameter.dtype) for name, parameter in model.named_parameters()}
    device = CPUDevice(torch.device("cpu"))
    runtime = apply_plan(model, low_plan(model, layout), layout, device, RunOptions(lambda sentence: None))
    seen: list[torch.dtype] = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.append(module.weight.dtype)
        with below_guard():
            seen.append(module.weight.dtype)

    model.blocks[0].up.register_forward_hook(look)
    with torch.no_grad(), autocast():
        runtime.run_step(model, (batches()[0],), {}, False)
    assert seen == [torch.float32, torch.bfloat16]  # It says what the weight is.
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.float32
        if layout.parameter(name).streamed_dtype:
            assert (parameter.data_ptr(), parameter.dtype) == before[name]
    runtime.remove()


def scale(parameter: nn.Parameter) -> None:
    parameter.data.mul_(2)


def replace_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 2


@pytest.mark.parametrize("change", [scale, replace_data])
@pytest.mark.parametrize("overlap", list(Overlap))
def test_weights_that_the_user_changes_are_cast_again(overlap: Overlap, change: Callable[[nn.Parameter], None]) -> None:
    def look(model: nn.Module, index: int) -> Tensor:
        with torch.no_grad():
            change(model.blocks[1].up.weight)
            model.head.bias.add_(1.0)
        return torch.zeros(())

    torch.manual_seed(0)
    expected = train(Net(), step=mixed(mean_square), look=look)
    found, _ = run(Net, mean_square, overlap=overlap, look=look)
    assert differences(expected, found) == []


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize("looks", [True, False])
def test_a_step_that_writes_copies_spares_the_cast(
    overlap: Overlap, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    casts: list[ShadowWeight] = []
    renew = ShadowWeight.renew
    monkeypatch.setattr(ShadowWeight, "renew", lambda shadow: (casts.append(shadow), renew(shadow))[1])
    torch.manual_seed(0)
    look = (lambda model, index: model.head.weight.data.sum()) if looks else None
    expected = train(Net(), step=mixed(mean_square), look=look)
    found, state = run(Net, mean_square, overlap=overlap, look=look)
    assert differences(expected, found) == []
    low = sum(len(chunk.parameters) for chunk in state.plan.chunks if chunk.streamed_dtype)
    # The first of four steps is not overlapped: what it has stepped is cast for the second. A weight that is looked at
    # behind the other two is cast again, and no other one.
    assert len(casts) == (4 * low if overlap is Overlap.OFF else 2 * low + 2 * looks)


def frozen_net() -> Net:
    net = Net()
    net.blocks.requires_grad_(False)
    return net


@pytest.mark.parametrize("where", ["between", "before evaluation"])
@pytest.mark.parametrize("build", [Net, frozen_net])
def test_writing_to_data_is_seen(build: Callable[[], nn.Module], where: str) -> None:
    """No version tells of it, and nobody has said that it does not happen."""

    def outputs(model: nn.Module, state: Applied | None) -> list[Tensor]:
        seen = []
        for training in (True, where == "between"):
            step = mixed(mean_square)
            with torch.no_grad():
                seen.append(state.step(step, model, batches()[0], 0, training=training) if state is not None else
                            step(model, batches()[0], 0))  # fmt: skip
            model.blocks[1].up.weight.data.mul_(3)
        return [*seen, mixed(mean_square)(model, batches()[0], 0).detach()]

    torch.manual_seed(0)
    model = build()
    layout = low_layout(model, mean_square)
    expected = outputs(model, None)
    torch.manual_seed(0)
    model = build()
    device = CPUDevice(torch.device("cpu"))
    plan = low_plan(model, layout)
    runtime = apply_plan(model, plan, layout, device, RunOptions(lambda sentence: None))
    found = outputs(model, Applied(model, plan, runtime, device))
    runtime.remove()
    assert [value.item() for value in expected] == [value.item() for value in found]


def test_a_hook_on_a_gradient_is_refused_after_the_fact() -> None:
    def hooked(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        if index == 1:
            model.blocks[0].up.weight.register_hook(lambda gradient: gradient * 2)
        return mean_square(model, batch, index)

    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight.*has a gradient hook.*streamed in torch\.bfloat16"):
        run(Net, hooked)


def test_a_missing_cast_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    expected = train(Net(), step=mixed(mean_square))
    renew = Chunk._renew_copies
    done: set[int] = set()

    def once(self: Chunk) -> None:
        if id(self) not in done:
            renew(self)
        done.add(id(self))

    monkeypatch.setattr(Chunk, "_renew_copies", once)
    assert differences(expected, run(Net, mean_square)[0]) != []


@pytest.mark.parametrize("waits", [True, False])
def test_a_cast_waits_for_the_upload_of_its_own_copy_alone(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = Net(), SimulatedDevice()
    layout = low_layout(model, mean_square)
    with device:
        runtime = apply_plan(model, low_plan(model, layout, lambda index: False), layout, device, RunOptions(print))
        other, chunk = [chunk for chunk in runtime._chunks if chunk.plan.streamed_dtype][:2]
        chunk.fetch()
        chunk.release()
        if not waits:
            monkeypatch.setattr(device, "land", lambda fence: None)
            runtime.async_step.copies.invalidate(chunk.params)
            with pytest.raises(RaceError, match="up may still read"):
                chunk.fetch()
            return
        other.fetch()
        runtime.async_step.copies.invalidate(chunk.params)
        chunk.fetch()
        assert not other._fence.passed
        runtime.remove()


def test_a_plan_for_another_precision_is_refused() -> None:
    model = Net()
    layout = low_layout(model, mean_square)
    plan = low_plan(model, layout)
    for low_dtype in (None, "float16"):
        with pytest.raises(ValueError, match=r"in bfloat16, but the Trainer's precision computes in"):
            check_plan(plan, layout, low_dtype)
    assert Plan.from_json(plan.to_json()) == plan


def test_outside_of_autocast_a_block_computes_in_full_precision() -> None:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        expected = model(batches()[0])
        with autocast():
            cast = model(batches()[0])
    layout = low_layout(model, mean_square)
    device = CPUDevice(torch.device("cpu"))
    runtime = apply_plan(model, low_plan(model, layout), layout, device, RunOptions(lambda sentence: None))
    parameters = list(model.parameters())
    with torch.no_grad():
        assert torch.equal(model(batches()[0]), expected)
        assert torch.equal(runtime.run_step(model, (batches()[0],), {}, False), expected)
        with autocast():
            assert torch.equal(runtime.run_step(model, (batches()[0],), {}, False), cast)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r"streamed in torch\.bfloat16.*now trained outside of autocast"):
        runtime.run_step(model, (batches()[0],), {}, True)
    runtime.reset()
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    runtime.remove()
