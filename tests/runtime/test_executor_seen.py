"""What users see while a model is streamed: true weights, their own hooks, and optimizer steps at any time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.applied import PLANS, Applied, Net, applied, batches, differences, mean_square, train
from tests.runtime.cases import Nested

each_plan = pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)


@each_plan
def test_true_weights_are_seen_outside_of_blocks(make: Any) -> None:
    seen: list[list[str]] = []

    def step(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        hidden = model.inp(batch)
        for block in model.blocks:
            hidden = block(hidden)
            check()
        return model.head(hidden).square().mean()

    torch.manual_seed(0)
    with applied(Net(), make) as state:
        model = state.model
        truth = {name: value.clone() for name, value in model.state_dict().items()}
        objects = dict(model.named_parameters())

        def check(*_: Any) -> None:
            seen.append(differences(truth, dict(model.state_dict())))
            assert all(objects[name] is parameter for name, parameter in model.named_parameters())

        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: check())
            block.register_forward_hook(lambda *_: check())
        loss = state.step(step, model, batches()[0], 0)
        loss.register_hook(check)
        model.inp.weight.register_hook(check)
        check()
        loss.backward()
        check()
        assert len(seen) >= 15
        assert not any(seen)


@each_plan
def test_true_weights_are_seen_inside_of_blocks(make: Any) -> None:
    """What the block itself holds is the twin; everything else, and all values, are as ever."""
    seen: list[list[str]] = []
    with applied(Net(), make) as state:
        model = state.model
        truth = {name: value.clone() for name, value in model.state_dict().items()}

        def look(module: nn.Module, inputs: Any) -> None:
            seen.append(differences(truth, dict(model.state_dict())))

        model.blocks[2].up.register_forward_pre_hook(look)
        state.step(mean_square, model, batches()[0], 0).backward()
        assert seen
        assert not any(seen)


@each_plan
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradient_hooks_of_the_user_fire_once_with_the_right_values(make: Any, accumulate: int) -> None:
    def run(state: Applied | None, model: nn.Module) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        turn = iter(range(1000))

        def on_gradient(gradient: Tensor, name: str = "") -> Tensor:
            seen[f"{next(turn):03} gradient {name}"] = gradient.clone()
            return gradient * 2

        def on_accumulated(parameter: Tensor, name: str = "") -> None:
            assert isinstance(parameter, nn.Parameter)
            seen[f"{next(turn):03} accumulated {name}"] = parameter.grad.clone()

        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: on_gradient(gradient, name))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: on_accumulated(p, name))
        return seen | train(model, mean_square, state, accumulate=accumulate)

    torch.manual_seed(0)
    expected = run(None, Net())
    torch.manual_seed(0)
    with applied(Net(), make) as state:
        found = run(state, state.model)
    assert len([name for name in expected if "accumulated" in name]) == 4 * len(list(Net().parameters()))
    assert differences(expected, found) == []


def test_hooks_come_and_go_in_mid_run() -> None:
    seen: list[int] = []
    with applied(Net()) as state:
        model = state.model
        handle = None
        for index, batch in enumerate(batches(4)):
            if index == 1:
                handle = model.blocks[0].up.weight.register_hook(lambda gradient: seen.append(1))
            if index == 3:
                handle.remove()
            state.step(mean_square, model, batch, index).backward()
    assert seen == [1, 1]


@each_plan
def test_a_hook_set_between_forward_and_backward_fires(make: Any) -> None:
    seen: list[Tensor] = []
    with applied(Net(), make) as state:
        loss = state.step(mean_square, state.model, batches()[0], 0)
        state.model.blocks[0].up.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        loss.backward()
        assert len(seen) == 1
        assert torch.equal(seen[0], state.model.blocks[0].up.weight.grad)


@each_plan
def test_an_optimizer_inside_backward(make: Any) -> None:
    """Steps each parameter as soon as its gradient is there, and drops the gradient."""

    def run(state: Applied | None, model: nn.Module) -> dict[str, Tensor]:
        steppers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            steppers[parameter].step()
            steppers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        return train(model, mean_square, state, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.0))

    torch.manual_seed(0)
    expected = run(None, Net())
    torch.manual_seed(0)
    with applied(Net(), make) as state:
        assert differences(expected, run(state, state.model)) == []


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("through_data", [True, False])
def test_a_step_inside_the_step_is_seen_by_the_root(fused: bool, through_data: bool) -> None:
    """The root's own weights are live all through a step; an optimizer step inside it must reach them."""

    def run(state: Applied | None, model: Nested) -> dict[str, Tensor]:
        parameters = list(model.parameters())
        stepper = torch.optim.AdamW(parameters, lr=0.1, fused=fused)

        def step(model: nn.Module, batch: Tensor, index: int) -> None:
            for part in (batch, batch.flip(0)):
                mean_square(model, part, index).backward()
                if through_data:
                    for parameter in parameters:
                        parameter.data.sub_(parameter.grad, alpha=0.01)
                else:
                    stepper.step()
                if state is not None:
                    state.runtime.refresh()
                stepper.zero_grad()

        for index, batch in enumerate(batches()):
            if state is None:
                step(model, batch, index)
            else:
                state.step(step, model, batch, index)
        return {name: value.clone() for name, value in model.state_dict().items()}

    torch.manual_seed(0)
    expected = run(None, Nested())
    torch.manual_seed(0)
    with applied(Nested()) as state:
        assert differences(expected, run(state, state.model)) == []
