"""Optimizer states that are spread over the ranks of a node, or over all of them, as one, see [Note: Owners]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_protrain.runtime.comm import Ranks


def gather_states(optimizer: Optimizer, owners: Mapping[int, int], ranks: Ranks) -> dict[str, Any]:
    """The `state_dict` of an optimizer with the states of all parameters, on rank 0; every rank calls it.

    Other ranks get what they have themselves: nobody saves theirs.

    Args:
        optimizer: The same on all ranks, but for states of parameters that another rank owns.
        owners: Owner of each parameter that has one, as of `Runtime.owners`, by identity.
        ranks: Who they are.
    """
    if ranks.divides_weights:
        return _gather_rows(optimizer, owners, ranks)
    whole = optimizer.state_dict()
    number, group = (ranks.world_size, ranks.meeting) if ranks.divides_steps else (ranks.local_size, ranks.node)
    if ranks.rank >= number:  # The first node has everything.
        return whole
    owned = _owned(optimizer, owners)
    mine = {index: whole["state"].get(index, {}) for index, owner in owned.items() if owner == ranks.rank}
    told: list[Any] = [None] * number
    dist.gather_object(_describe(mine), told if ranks.rank == 0 else None, 0, group=group)
    if ranks.rank:
        for state in mine.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    dist.send(value.contiguous().cpu(), 0, group=group)
        return whole
    for rank in range(1, number):
        for index, state in told[rank].items():
            whole["state"][index] = {name: _receive(value, rank, group) for name, value in state.items()}
        whole["state"] = {index: state for index, state in whole["state"].items() if state}
    return whole


def _gather_rows(optimizer: Optimizer, owners: Mapping[int, int], ranks: Ranks) -> dict[str, Any]:
    """The same where each machine has the states of some rows, as DTensors, and all of what has none."""
    whole = optimizer.state_dict()
    mine = {}
    for index, owner in _owned(optimizer, owners).items():
        state = whole["state"].get(index, {}) if owner == ranks.local_rank else {}
        mine[index] = {name: value for name, value in state.items() if not ranks.machine or isinstance(value, DTensor)}
    told: list[Any] = [None] * ranks.world_size
    dist.gather_object(_describe(mine), told if ranks.rank == 0 else None, 0, group=ranks.meeting)
    if ranks.rank:
        for value in (value for state in mine.values() for value in state.values()):
            part = value.to_local() if isinstance(value, DTensor) else value
            if isinstance(part, Tensor) and part.numel():
                dist.send(part.contiguous().cpu(), 0, group=ranks.meeting)
        return whole
    states: dict[int, dict[str, Any]] = {}
    for rank, described in enumerate(told):
        for index, state in described.items():
            place = states.setdefault(index, {})
            for name, value in state.items():
                place[name] = _filled(place.get(name), mine[index][name] if rank == 0 else value, rank, ranks.meeting)
    whole["state"] = {index: state for index, state in {**whole["state"], **states}.items() if state}
    return whole


def _filled(whole: Tensor | None, value: Any, rank: int, group: Any) -> Any:
    """A state with what one more rank has of it."""
    if not isinstance(value, (_Missing, DTensor)):
        return value
    if isinstance(value, DTensor):
        value = _Missing(value, value.to_local())
    if whole is None:
        whole = torch.empty(value.whole, dtype=value.dtype)
    part = whole if value.first is None else whole[value.first : value.first + value.shape[0]]
    if value.local is not None:
        part.copy_(value.local)
    elif part.numel():
        dist.recv(part, rank, group=group)
    return whole


def drop_states(optimizer: Optimizer, owners: Mapping[int, int], ranks: Ranks) -> None:
    """Forgets the states of parameters that another rank owns, after all have been loaded."""
    own = ranks.rank if ranks.divides_steps else ranks.local_rank
    for parameter in list(optimizer.state):
        if owners.get(id(parameter), own) != own:
            del optimizer.state[parameter]


class _Missing:
    """Stands for a tensor that comes by itself."""

    def __init__(self, tensor: Tensor, local: Tensor | None = None) -> None:
        self.shape, self.whole, self.dtype = tensor.shape, tensor.shape, tensor.dtype
        self.first: int | None = None  # Of the rows that a machine has.
        self.local = local
        if isinstance(tensor, DTensor):
            most = -(-tensor.shape[0] // tensor.device_mesh.size())
            self.shape = tensor.to_local().shape
            self.first = min(tensor.device_mesh.get_local_rank() * most, tensor.shape[0])


def _owned(optimizer: Optimizer, owners: Mapping[int, int]) -> dict[int, int]:
    """Owners by the index that `state_dict` gives parameters: their place in all groups."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: owners[id(parameter)] for index, parameter in enumerate(parameters) if id(parameter) in owners}


def _describe(states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        index: {name: _Missing(value) if isinstance(value, Tensor) else value for name, value in state.items()}
        for index, state in states.items()
    }


def _receive(value: Any, rank: int, group: Any) -> Any:
    if not isinstance(value, _Missing):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype)
    dist.recv(tensor, rank, group=group)
    return tensor
