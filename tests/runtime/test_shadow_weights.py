"""Shadow copies give the bits of autocast, and stay current while their weights are not accessed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.planner.plan import Plan, check_plan, chunk_offsets
from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.apply import RunOptions, apply_plan
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.shadow import ShadowWeight
from tests.runtime.applied import Applied, Net, batches, differences, in_turns, mean_square
from tests.runtime.cases import CASES
from tests.runtime.low_precision import CASES_BY_DEVICE, assert_parity, autocast, low_layout, low_plan, mixed, run
from tests.runtime.overlapped import CLIPPINGS, train
from tests.support.plans import preset
from tests.support.simulated.device import SimulatedDevice
from tests.support.simulated.streams import RaceError


@pytest.mark.sample(5)
@pytest.mark.parametrize(("case", "accumulate"), in_turns((1, 2), CASES_BY_DEVICE), ids=str)
def test_parity_with_autocast(case: tuple[str, str], accumulate: int) -> None:
    name, kind = case
    build, step, _ = CASES[name]
    assert_parity(build, step, kind, accumulate=accumulate)


WAYS = [way for way in itertools.product(Overlap, CLIPPINGS) if way != (Overlap.BACKWARD, "norm")]


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", ["cpu", "simulated"])
@pytest.mark.parametrize(("overlap", "clipping"), WAYS)
def test_parity_of_overlapped_steps(overlap: Overlap, clipping: str, kind: str) -> None:
    assert_parity(Net, mean_square, kind, overlap, accumulate=2, **CLIPPINGS[clipping])


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
    state = assert_parity(Net, resident=lambda index: index % 2 == 0)
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

    assert_parity(Net, overlap=overlap, look=look)


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize("looks", [True, False])
def test_a_step_that_writes_copies_spares_the_cast(
    overlap: Overlap, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    casts: list[ShadowWeight] = []
    renew = ShadowWeight.renew
    monkeypatch.setattr(ShadowWeight, "renew", lambda shadow: (casts.append(shadow), renew(shadow))[1])
    look = (lambda model, index: model.head.weight.data.sum()) if looks else None
    state = assert_parity(Net, overlap=overlap, look=look)
    low = sum(len(chunk.parameters) for chunk in state.plan.chunks if chunk.streamed_dtype)
    # The first of four steps is not overlapped: what it has stepped is cast for the second. A weight that is looked at
    # behind the other two is cast again, and no other one.
    assert len(casts) == (4 * low if overlap is Overlap.OFF else 2 * low + 2 * looks)


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
    renew = Chunk.renew_copies
    done: set[int] = set()

    def once(self: Chunk) -> None:
        if id(self) not in done:
            renew(self)
        done.add(id(self))

    monkeypatch.setattr(Chunk, "renew_copies", once)
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
            monkeypatch.setattr(device, "wait_host", lambda fence: None)
            runtime.async_step.shadows.invalidate(chunk.params)
            with pytest.raises(RaceError, match="up may still read"):
                chunk.fetch()
            return
        other.fetch()
        runtime.async_step.shadows.invalidate(chunk.params)
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


@contextmanager
def trusting(build: Callable[[], nn.Module] = Net) -> Iterator[tuple[Applied, list[str]]]:
    """An applied plan in low precision that trusts copies, and the names of the weights that are cast."""
    torch.manual_seed(0)
    model = build()
    layout = low_layout(model, mean_square)
    plan, device = low_plan(model, layout), CPUDevice(torch.device("cpu"))
    runtime = apply_plan(model, plan, layout, device, RunOptions(lambda sentence: None))
    casts: list[str] = []
    kinds = [type(parameter) for parameter in model.parameters()]
    renew = ShadowWeight.renew
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShadowWeight, "renew", lambda shadow: (casts.append(shadow.uses.fqn), renew(shadow))[1])
        yield Applied(model, plan, runtime, device), casts
    runtime.remove()
    assert [type(parameter) for parameter in model.parameters()] == kinds


def low_names(state: Applied) -> list[str]:
    return [name for chunk in state.plan.chunks if chunk.streamed_dtype for name in chunk.parameters]


def forward(state: Applied, training: bool = False) -> Tensor:
    with torch.no_grad():
        return state.step(mixed(mean_square), state.model, batches()[0], 0, training=training)


def expected(model: nn.Module) -> Tensor:
    """Return the output of a plain model with the same weights; reading them here does not count as an access."""
    plain = Net()
    with below_guard(), torch.no_grad():
        for to, of in zip(plain.parameters(), model.parameters(), strict=True):
            to.copy_(of)
        return mixed(mean_square)(plain, batches()[0], 0)


@pytest.mark.parametrize("training", [True, False])
def test_what_nobody_touches_is_cast_once(training: bool) -> None:
    with trusting() as (state, casts):
        for _ in range(3):
            forward(state, training)
        assert casts == low_names(state)


def test_what_is_touched_is_cast_alone() -> None:
    with trusting() as (state, casts):
        forward(state)
        casts.clear()
        state.model.blocks[1].up.weight.data.mul_(2)
        loss = forward(state)
        assert casts == ["blocks.1.up.weight"]
        assert torch.equal(loss, expected(state.model))


@pytest.mark.parametrize("where", ["before its block", "behind its block"])
def test_a_touch_in_a_scope_counts(where: str) -> None:
    def step(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        hidden = model.inp(batch)
        if where == "before its block":
            model.head.weight.data.mul_(2)
        for block in model.blocks:
            hidden = block(hidden)
        loss = model.head(hidden).square().mean()
        if where == "behind its block":
            model.inp.weight.data.mul_(2)
        return loss

    with trusting() as (state, _), torch.no_grad(), autocast():
        plain = Net()
        plain.load_state_dict(state.model.state_dict())
        for _ in range(3):
            found = state.step(step, state.model, batches()[0], 0, training=False)
            assert torch.equal(found, step(plain, batches()[0], 0))


def test_kinds_of_scopes_in_turns() -> None:
    with trusting() as (state, casts):
        for training in (True, False, True):
            forward(state, training)
        assert casts == low_names(state)


HOLDERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda weight: weight.data,
    "detach": lambda weight: weight.detach(),
    "a part": lambda weight: weight.detach()[1:],
    "an array": lambda weight: weight.detach().numpy(),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_memory_that_is_held_under_another_name_is_cast_in_every_scope(hold: Callable[[nn.Parameter], Any]) -> None:
    with trusting() as (state, casts):
        memory = hold(state.model.blocks[1].up.weight)
        forward(state)
        casts.clear()
        for _ in range(2):
            memory *= 2
            assert torch.equal(forward(state), expected(state.model))
        assert casts == ["blocks.1.up.weight"] * 2
        del memory
        forward(state)
        assert casts == ["blocks.1.up.weight"] * 2


def call_a_block(state: Applied) -> None:
    with torch.no_grad(), autocast():
        state.model.blocks[0](batches()[0])


@pytest.mark.parametrize(
    "interrupt", [call_a_block, lambda state: state.runtime.reset()], ids=["a call outside of scopes", "an exception"]
)
def test_nothing_is_trusted_behind_what_is_not_known(interrupt: Callable[[Applied], Any]) -> None:
    """Memory that was taken before is not watched."""
    with trusting() as (state, _):
        memory = state.model.blocks[2].up.weight.data
        forward(state)
        interrupt(state)
        memory.mul_(2)
        assert torch.equal(forward(state), expected(state.model))


def test_steps_that_nobody_can_watch_distrust() -> None:
    with trusting() as (state, casts):
        memory = [parameter.data for parameter in state.model.parameters()]
        forward(state)
        casts.clear()
        state.runtime.settle()
        for each in memory:
            each.mul_(0.5)
        state.runtime.refresh()
        assert torch.equal(forward(state), expected(state.model))
        assert casts == low_names(state)


class Odd(nn.Parameter):
    """A class of parameters that nobody knows."""


def odd_net() -> Net:
    model = Net()
    model.blocks[0].up.weight = Odd(model.blocks[0].up.weight.detach())
    return model


def test_what_cannot_be_watched_is_cast_in_every_scope() -> None:
    with trusting(odd_net) as (state, casts):
        for _ in range(3):
            state.model.blocks[0].up.weight.data.mul_(2)
            assert torch.equal(forward(state), expected(state.model))
        assert len(casts) == len(low_names(state)) + 2
        assert casts.count("blocks.0.up.weight") == 3
