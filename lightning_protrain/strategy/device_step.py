"""Steps the resident weights in a rehearsal as training does, and takes the step back.

So what the optimizer needs on the device, its states and temporaries, is allocated before training. The rate of the
step is that of the optimizer's own class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from lightning_protrain.device.device import Device
from lightning_protrain.device.recording import busy
from lightning_protrain.planner.plan import Plan
from lightning_protrain.runtime.optim.bnb_optimizers import trial_of
from lightning_protrain.runtime.optim.host_step import class_step
from lightning_protrain.strategy.profile_step import STEP_ERRORS

# Timed steps, of which the fastest counts, after the one that makes the states.
_REPEATS = 2


def resident_with_gradients(model: nn.Module, plan: Plan) -> list[Tensor]:
    """Return the resident weights that have gradients."""
    resident = (model.get_parameter(fqn) for chunk in plan.chunks if chunk.resident for fqn in chunk.parameters)
    return [weight for weight in resident if weight.grad is not None]


def device_step_seconds(
    optimizers: Sequence[Optimizer], weights: Sequence[Tensor], device: Device, spare_host_bytes: int
) -> float | None:
    """Return the seconds of an optimizer step of these weights, which are the same bits afterwards.

    Args:
        optimizers: Optimizers of the run; neither they nor their states change.
        weights: Weights on the device, with gradients.
        device: The device.
        spare_host_bytes: Host memory for a copy of the weights.

    Returns:
        None if the host has no memory for the copy, or if the step raises, as it will in training.

    Raises:
        torch.OutOfMemoryError: The device is too small for the step.
    """
    if sum(weight.nbytes for weight in weights) > spare_host_bytes:
        return None
    before = [weight.detach().to("cpu", copy=True) for weight in weights]
    steps = [_trial_step(optimizer, {id(weight) for weight in weights}) for optimizer in optimizers]
    taken = []
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(weights)):
        try:
            for _ in range(1 + _REPEATS):
                with device.recorded() as recording:
                    with recording.span("compute"):
                        for step in steps:
                            step()
                    taken.append(busy(recording.spans(), "compute"))
        except torch.OutOfMemoryError:
            raise
        except STEP_ERRORS:
            return None
        finally:
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)
    return min(taken[1:])


def _trial_step(optimizer: Optimizer, ids: set[int]) -> Callable[[], object]:
    """Return a step of the optimizer's class on the parameters with these `id`s, with states of its own."""
    trial: Any = trial_of(optimizer)
    groups = [{**group, "params": [it for it in group["params"] if id(it) in ids]} for group in trial.param_groups]
    trial.param_groups = [group for group in groups if group["params"]]
    vars(trial).update(initialized=False)  # Of bitsandbytes: its first step applies overrides.
    return class_step(trial)
