"""A copy is trusted as long as nobody has touched its weight since it was made, or can without being seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.apply import RunOptions, apply_plan
from lightning_protrain.runtime.shadow import ShadowWeight
from tests.runtime.applied import Applied, Net, batches, mean_square
from tests.runtime.test_chunk_low_precision import autocast, low_layout, low_plan, mixed


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
    """What a plain model of the same weights gives; to look at them is no touch here."""
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
