"""Recomputed modules compute the same under the same names, and optimizers follow their parameters."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from lightning_protrain.fsdp_steps import evaluating, explained, let_recompute, point_to_parts
from tests.models import HIDDEN, Mlp


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


def test_optimizers_get_what_took_the_place_of_their_parameters() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=1.0)
    known = [(weakref.ref(parameter), name) for name, parameter in model.named_parameters()]
    point_to_parts([optimizer], model, known)
    assert optimizer.param_groups[0]["params"][0] is model.bias
    model.weight = nn.Parameter(torch.ones(2, 2))
    point_to_parts([optimizer], model, known)
    assert optimizer.param_groups[1]["params"][0] is model.weight
    stray = torch.optim.SGD([nn.Parameter(torch.ones(5))], lr=1.0)
    with pytest.raises(ValueError, match=r"SGD holds a tensor of shape \(5,\)"):
        point_to_parts([stray], model, known)


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
