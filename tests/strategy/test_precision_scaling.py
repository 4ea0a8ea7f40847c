"""Scaled gradients are unscaled with a scale that is there already, and all ranks hear of one that is infinite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.strategy.precision import ProTrainPrecision


class Far(Tensor):
    """A scale that stands for one on a GPU."""

    def cpu(self, *_: Any) -> Tensor:  # type: ignore[override]
        return self.detach().as_subclass(Tensor).clone()


class Watched(torch.amp.GradScaler):
    """Notes where its scale is while it unscales."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.was_far = isinstance(self._scale, Far)
        super().unscale_(optimizer)


def scaled(gradient: float) -> tuple[Watched, torch.optim.Optimizer, nn.Parameter]:
    """A scaler on a GPU, so to say, and one weight whose gradient is scaled."""
    scaler, weight = Watched("cpu", init_scale=8.0), nn.Parameter(torch.ones(2))
    scaler.scale(torch.zeros(()))
    scaler._scale = scaler._scale.as_subclass(Far)
    weight.grad = torch.full((2,), 8.0 * gradient)
    return scaler, torch.optim.SGD([weight], lr=1.0), weight


def test_gradients_are_unscaled_with_a_scale_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch copies it from a GPU to gradients on the host without waiting for the copy."""
    scaler, optimizer, weight = scaled(0.25)
    there = scaler._scale
    precision = ProTrainPrecision("16-mixed", scaler)
    monkeypatch.setattr(precision, "_after_closure", lambda *_: None)  # It calls hooks of a trainer.
    precision.optimizer_step(optimizer, SimpleNamespace(automatic_optimization=False), lambda: None)
    assert not scaler.was_far
    assert scaler._scale is there
    assert weight.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("elsewhere", [0.0, 1.0])
@pytest.mark.parametrize("here", [0.5, float("inf")])
def test_an_infinite_gradient_is_one_on_every_rank(here: float, elsewhere: float) -> None:
    scaler, optimizer, weight = scaled(here)
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    updates: Any = object.__new__(AsyncStep)
    updates._sharing = SimpleNamespace(sum_of_node=lambda mine: mine + elsewhere)
    updates.agree_on_overflow(found)
    scaler.step(optimizer)
    skipped = weight.tolist() == [1.0, 1.0]
    assert skipped is bool(elsewhere or here == float("inf"))
