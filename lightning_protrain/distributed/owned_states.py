"""Optimizer states that are spread over the ranks of a node, as one, see [Note: Owners]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.runtime.comm.collectives import RankMesh


def gather_states(optimizer: Optimizer, owners: Mapping[int, int], ranks: RankMesh) -> dict[str, Any]:
    """The `state_dict` of an optimizer with the states of all parameters, on rank 0; every rank calls it.

    Other ranks get what they have themselves: nobody saves theirs.

    Args:
        optimizer: The same on all ranks, but for states of parameters that another rank owns.
        owners: Owner of each parameter that has one, as of `Runtime.owners`, by identity.
        ranks: Who they are.
    """
    whole = optimizer.state_dict()
    number, group = ranks.local_size, ranks.node
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


def drop_states(optimizer: Optimizer, owners: Mapping[int, int], ranks: RankMesh) -> None:
    """Forgets the states of parameters that another rank owns, after all have been loaded."""
    for parameter in list(optimizer.state):
        if owners.get(id(parameter), ranks.local_rank) != ranks.local_rank:
            del optimizer.state[parameter]


class _Missing:
    """Stands for a tensor that comes by itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


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
