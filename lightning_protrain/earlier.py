"""Weights that an earlier run has divided among machines: what the next run of the same model reads its own from."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_protrain.runtime.comm import Ranks
from lightning_protrain.runtime.local_rows import exchange_parameters


def divided_by_run(module: nn.Module) -> dict[str, DTensor]:
    """Weights that an earlier run has divided, by first name."""
    return {fqn: each for fqn, each in module.named_parameters() if isinstance(each, DTensor)}


def refuse_divided(module: nn.Module, num_machines: int) -> None:
    """Refuses weights that an earlier run has divided otherwise than this one does.

    Args:
        module: The model.
        num_machines: Among which this run divides weights; 1: it does not.

    Raises:
        ValueError: There is one.
    """
    for name, parameter in divided_by_run(module).items():
        if parameter.device_mesh.size() != num_machines:
            raise ValueError(
                f"{name!r} is a DTensor: an earlier run has divided the weights of this model among "
                f"{parameter.device_mesh.size()} machines, and they stay so. Run it on as many with "
                'shard_weights="world", or make the model anew and load a checkpoint into it (`ckpt_path`).'
            )


class EarlierRows:
    """What an earlier run has left of the weights, on all ranks of as many machines.

    Until they are read the model has parameters without values, as one that reads rows from files does. Each weight is
    let go of when it has been read: no machine may have room for its rows twice.

    Args:
        module: The model; its DTensors become parameters on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = divided_by_run(module)
        forget_values(module, self._weights)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._weights

    def read(self, fqn: str, divided: Collection[str], ranks: Ranks) -> Tensor:
        """Values of a weight, which can be read once.

        Args:
            fqn: Its name.
            divided: Names of weights that machines divide again: their rows are those of this machine. The others are
                whole, and every rank reads them, in one order.
            ranks: Who they are.

        Raises:
            RuntimeError: A rank does not read it.
        """
        weight = self._weights.pop(fqn)
        if fqn in divided:
            return weight.to_local()
        ranks.meet(f"the rows of {fqn}")
        return weight.full_tensor()

    def put_back(self, module: nn.Module) -> None:
        """After a set-up that has failed: the model has the DTensors again that were not read."""
        _exchange(module, self._weights)
        self._weights = {}


def forget_values(module: nn.Module, names: Collection[str]) -> None:
    """Gives parameters on the meta device in place of some: they have no values that may be believed.

    Args:
        module: The model.
        names: First names.
    """
    parameters = dict(module.named_parameters())
    bare = {}
    for fqn in names:
        old = parameters[fqn]
        memory = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="meta")
        bare[fqn] = nn.Parameter(memory, requires_grad=old.requires_grad)
    _exchange(module, bare)


def _exchange(module: nn.Module, new: Mapping[str, Tensor]) -> None:
    parameters = dict(module.named_parameters())
    exchange_parameters(module, {id(parameters[fqn]): each for fqn, each in new.items()})
