"""Trains as Lightning does (forward, zero_grad, backward, clip, step), with the host's steps overlapped or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.optim.step import fused_host_step
from tests.runtime.applied import Applied, StepFunction, adam, batches, mean_square

CLIPPINGS: dict[str, dict[str, float]] = {"unclipped": {}, "norm": {"norm": 0.05}, "value": {"value": 0.001}}


def train(
    model: nn.Module,
    state: Applied | None = None,
    overlap: Overlap = Overlap.OFF,
    step: StepFunction = mean_square,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    accumulate: int = 1,
    num_steps: int = 4,
    norm: float | None = None,
    value: float | None = None,
    look: Callable[[nn.Module, int], Any] | None = None,
    lends: bool = False,
) -> dict[str, Tensor]:
    """Trains and returns everything that must be equal: losses, what `look` saw after each step, and the state dict.

    Args:
        model: The model to train.
        state: The plan applied to it; None trains without a plan.
        overlap: Phase during which the host steps the optimizer.
        step: Gives the loss.
        optimizer: Makes the optimizer; it has a scheduler, too.
        accumulate: Micro-batches for each step.
        num_steps: Steps.
        norm: Bound of the norm of all gradients.
        value: Bound of the values of gradients; at most one of `norm` and `value` is given.
        look: Called after each step.
        lends: Whether gradients may lie in the memory of copies.
    """
    torch.manual_seed(3)
    stepper = optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.9)
    updates = state.runtime.async_step if state is not None else None
    seen: dict[str, Any] = {}

    def closure(index: int, batch: Tensor, zero: bool) -> None:
        loss = step(model, batch, index) if state is None else state.step(step, model, batch, index)
        if zero:
            stepper.zero_grad()
        if loss is None:
            return
        seen[f"loss {index}"] = loss.detach().clone()
        loss.backward()

    def clipped(index: int, batch: Tensor, zero: bool) -> None:
        closure(index, batch, zero)
        if norm is not None:
            (updates.clip_norm if updates else torch.nn.utils.clip_grad_norm_)(model.parameters(), norm)
        if value is not None:
            (updates.clip_value if updates else torch.nn.utils.clip_grad_value_)(model.parameters(), value)
        if state is not None:
            state.runtime.settle()

    for index, batch in enumerate(batches(num_steps * accumulate)):
        zero = index % accumulate == 0
        if (index + 1) % accumulate:
            closure(index, batch, zero)
            continue
        whole = partial(clipped, index, batch, zero)
        if state is None:
            stepper.step(whole)
        else:
            state.runtime.async_step.arm(stepper, overlap, value, norm is not None, lends)
            with fused_host_step(stepper, whole, "cpu", updates.launch) as final:
                stepper.step(final)
            state.runtime.refresh()
        scheduler.step()
        if look is not None:
            seen[f"look {index}"] = look(model, index)
    return seen | {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
