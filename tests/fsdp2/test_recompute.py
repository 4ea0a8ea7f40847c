"""Recomputed modules compute the same under the same names, and optimizers follow their parameters."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_protrain.fsdp2.refusals import explained
from lightning_protrain.fsdp2.strategy import evaluating, let_recompute, release_parameters
from tests.support.models import HIDDEN, Mlp


def gradients(module: nn.Module, value: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    module(value).square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def test_it_recomputes_under_the_same_names() -> None:
    module, value = nn.Sequential(Mlp(), nn.Dropout(0.5)), torch.randn(2, HIDDEN)
    calls = []
    module[0].up.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    torch.manual_seed(0)
    expected, names = gradients(module, value), [name for name, _ in module.named_modules()]
    undo = let_recompute(module, "module")
    torch.manual_seed(0)
    assert all(torch.equal(one, other) for one, other in zip(gradients(module, value), expected, strict=True))
    assert [name for name, _ in module.named_modules()] == names
    assert len(calls) == 3
    with torch.no_grad():
        module(value)
    assert len(calls) == 4
    undo()
    gradients(module, value)
    assert len(calls) == 5
    assert "forward" not in vars(module)


def test_an_own_forward_of_the_instance_is_put_back() -> None:
    module = Mlp()
    module.forward = own = lambda value: value + 1  # type: ignore[method-assign]
    undo = let_recompute(module, "module")
    assert torch.equal(module(torch.zeros(2)), torch.ones(2))
    undo()
    assert module.forward is own


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_let_go_of_parameters_and_get_what_took_their_place(kind: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = kind([{"params": [model.bias]}, {"params": [model.weight]}], lr=1.0)
    before, kept = weakref.ref(model.weight), len(optimizer.state)
    put_back = release_parameters([optimizer], model)
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert before() is None
    put_back()
    assert [group["params"][0] for group in optimizer.param_groups] == [model.bias, model.weight]
    assert [*optimizer.state] == ([model.bias, model.weight] if kept else [])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_an_optimizer_of_another_model_is_refused() -> None:
    stray = torch.optim.SGD([nn.Parameter(torch.ones(5))], lr=1.0)
    with pytest.raises(ValueError, match=r"SGD holds a tensor of shape \(5,\)"):
        release_parameters([stray], nn.Linear(2, 2))


def test_evaluation_makes_no_inference_tensors() -> None:
    with torch.inference_mode(), evaluating():
        value = torch.ones(2, requires_grad=True) * 2
    assert not value.is_inference()
    assert not value.requires_grad


def test_only_the_error_of_a_weight_that_is_not_gathered_is_explained() -> None:
    with pytest.raises(RuntimeError, match="used while it was not gathered") as caught, explained():
        raise RuntimeError("aten.mm.default: got mixed torch.Tensor and DTensor, need to convert")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="another"), explained():
        raise RuntimeError("another")
