"""Conversion of checkpoints between float32 weights of AdamW and bfloat16 weights of SplitAdamW.

[Note: Two forms of masters]
AdamW trains float32 weights (`precision="bf16-mixed"`), which are in a checkpoint's state dict. SplitAdamW splits a
weight into its bfloat16 value, which is in the state dict, and the remainder, which is in the optimizer's state. So a
conversion needs the state dict and the optimizer's state. Both forms hold the same masters bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_protrain.runtime.optim.split_adamw import SplitAdamW, float32_moment, master_of
from lightning_protrain.runtime.optim.split_numbers import split, sums_of

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Entries of a state that only SplitAdamW makes.
_OWN = ("remainder", "sums", "exp_avg_scale", "exp_avg_sq_scale")


@torch.no_grad()
def adapt(checkpoint: Mapping[str, Any], module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Convert the masters of a checkpoint into the form of this run, see [Note: Two forms of masters].

    Write those parameters of the module whose checkpoint has the other form, and replace their states in the checkpoint
    one by one. Call this after the weights have been loaded, and before the optimizer states are.

    Args:
        checkpoint: Checkpoint dict of Lightning; without optimizer states nothing happens.
        module: Module with the weights of the checkpoint, not yet placed by a plan.
        optimizers: Optimizers of the module, with its parameters in the order of the checkpoint.
    """
    weights, names = checkpoint.get("state_dict", {}), {id(each): name for name, each in module.named_parameters()}
    for optimizer, saved in zip(optimizers, checkpoint.get("optimizer_states") or (), strict=False):
        states: MutableMapping[int, Any] = saved["state"]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        order = [index for group in saved["param_groups"] for index in group["params"]]
        for index, parameter in zip(order, parameters, strict=False):
            weight = weights.get(names.get(id(parameter)))
            if not isinstance(weight, Tensor) or weight.shape != parameter.shape:
                continue
            if state := _adapted(optimizer, parameter, weight, states.get(index) or {}):
                states[index] = state
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=False):
            if isinstance(optimizer, AdamW) and "amsgrad" not in group:  # Groups of SplitAdamW lack such options.
                group.update({name: value for name, value in own.items() if name not in group})


def _adapted(optimizer: Optimizer, parameter: Tensor, weight: Tensor, state: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(optimizer, SplitAdamW):
        unsplit = (weight.dtype, parameter.dtype) == (torch.float32, torch.bfloat16) and "remainder" not in state
        if not optimizer.masters or not unsplit:
            return state
        rounded, remainder = split(weight)
        rounded = rounded.to(parameter.device)
        # Loading rounds a tie to even, where the remainder needs the other neighbour.
        if not torch.equal(parameter, rounded):
            parameter.copy_(rounded)
        # A parameter that has had no gradient yet has no state, but a master.
        begun = state or {"step": torch.zeros(()), **{name: torch.zeros_like(weight) for name in _MOMENTS}}
        return {**begun, "remainder": remainder, "sums": sums_of(rounded)}
    if not isinstance(optimizer, AdamW) or not _is_split(state):
        return state
    if "remainder" in state and parameter.dtype == torch.float32:
        parameter.copy_(master_of(weight, state))
    return float32_state(state)


def _is_split(state: Mapping[str, Any]) -> bool:
    return any(name in state for name in _OWN)


def float32_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of AdamW for a state of SplitAdamW."""
    others = {name: value for name, value in state.items() if name not in _OWN}
    return others | {name: float32_moment(state, name) for name in _MOMENTS}


def refuse_split_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse to load states of SplitAdamW, unless `adapt` has converted them, into another optimizer.

    Raises:
        ValueError: The optimizer cannot continue them.
    """
    if not isinstance(optimizer, SplitAdamW) and any(map(_is_split, saved["state"].values())):
        raise ValueError(
            f"The checkpoint has optimizer states of SplitAdamW, which {type(optimizer).__name__} cannot load. Resume "
            "with SplitAdamW, or with AdamW of torch.optim."
        )
