"""The user's gradients and optimizers of parameters that machines divide: DTensors outside, plain rows inside.

[Note: Local rows]
The gradient and the optimizer state of a divided parameter are DTensors, like itself, over the memory of the rows that
this machine has. A step is your own `optimizer.step()`; for the time of it the optimizer has the plain rows, with their
gradients and states, in place of DTensors: the same kernels as ever, nothing is sent, and rows whose averages come to
another rank have no gradient here. That is exact for optimizers that treat each element alone, so only those that are
known to do so are taken.

Between backward and step the DTensor's `grad` is what counts: a hook may scale it, put another one there, or drop it.
While micro-batches are accumulated it is this rank's own part of a mean, of the whole shape (`Partial`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_protrain.runtime.rows import Rows
from lightning_protrain.runtime.slot import Site, Slot

# Known to treat each element alone, with states that begin with the first step.
ELEMENTWISE = (SGD, Adam, AdamW)


class LocalRows:
    """Stands between the user's DTensors and the rows of this machine, see [Note: Local rows].

    Args:
        slots: All offloaded parameters; those that are not divided are left alone.

    Attributes:
        slots: The divided ones, by the identity of the DTensor.
        identities: Of their plain rows.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.slots = {id(slot.divided): slot for slot in slots if slot.divided is not None}
        self.identities = frozenset(id(slot.host) for slot in self.slots.values())

    def take(self) -> None:
        """What the user has done to gradients, and to what is trained, counts."""
        for slot in self.slots.values():
            slot.take_gradient()

    def show(self) -> None:
        """After a backward: the user sees its gradients."""
        for slot in self.slots.values():
            slot.show_gradient()

    def of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Plain rows in place of DTensors, with the gradients that count now."""
        self.take()
        return [slot.host if (slot := self.slots.get(id(each))) is not None else each for each in parameters]

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Within it an optimizer has plain rows in place of DTensors."""
        if not self.slots:
            yield
            return
        whole = [(group, list(group["params"])) for group in optimizer.param_groups]
        found = [slot for _, parameters in whole for each in parameters if (slot := self.slots.get(id(each)))]
        for group, parameters in whole:
            group["params"] = self.of(parameters)
        for slot in found:
            self._exchange(optimizer, slot.registered, slot.host, _local)
        try:
            yield
        finally:
            for group, parameters in whole:
                group["params"] = parameters
            for slot in found:
                rows = slot.rows
                assert rows is not None
                self._exchange(optimizer, slot.host, slot.registered, lambda value, rows=rows: _shown(value, rows))

    def divide_states(self, optimizer: Optimizer) -> None:
        """After whole states have been loaded: this rank keeps those of its rows."""
        for parameter, state in list(optimizer.state.items()):
            slot = self.slots.get(id(parameter))
            if slot is not None and slot.rows is not None:
                optimizer.state[parameter] = {name: _cut(value, slot.rows) for name, value in state.items()}

    @staticmethod
    def _exchange(optimizer: Optimizer, old: Tensor, new: Tensor, change: Any) -> None:
        state = optimizer.state.pop(old, None)
        if state:
            optimizer.state[new] = {name: change(value) for name, value in state.items()}


def register_divided(
    model: nn.Module, slots: Iterable[Slot], parameters: Mapping[str, nn.Parameter]
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Puts DTensors in the places of parameters that machines divide.

    Args:
        model: Whose modules have the places.
        slots: All offloaded parameters.
        parameters: Those that the model has had, by first name.

    Returns:
        What was a parameter, and the DTensor.
    """
    divided = [slot for slot in slots if slot.divided is not None]
    exchange_parameters(model, {id(parameters[slot.fqn]): slot.registered for slot in divided})
    return [(parameters[slot.fqn], slot.registered) for slot in divided]


def exchange_parameters(model: nn.Module, new: Mapping[int, Any]) -> None:
    """Puts other parameters in all places of some.

    Args:
        model: Whose modules have the places.
        new: Those that take the places, by the identity of what is there.
    """
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and (other := new.get(id(parameter))) is not None:
                Site(module, name).exchange(parameter, other)


def replace_parameters(optimizers: Iterable[Optimizer], replaced: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Gives optimizers the DTensors that have taken the place of their parameters.

    Args:
        optimizers: Fresh ones: nothing has been stepped.
        replaced: What was a parameter, and the DTensor.
    """
    new = {id(old): now for old, now in replaced}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [new.get(id(each), each) for each in group["params"]]


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuses what is not known to step each element alone.

    Raises:
        ValueError: Another class than those of `ELEMENTWISE`, or one that has states already.
    """
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind not in ELEMENTWISE or optimizer.defaults.get("differentiable") or optimizer.state:
            names = ", ".join(each.__name__ for each in ELEMENTWISE)
            raise ValueError(
                f'shard_weights="world" gives an optimizer some rows of each weight, and {kind.__module__}.'
                f"{kind.__name__} is not known to step each element alone from an empty state. Take one of {names} of "
                'torch.optim, or leave `shard_weights` out (shard_optimizer="world" divides steps of whole weights).'
            )


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _shown(value: Any, rows: Rows) -> Any:
    """A state of rows as one of the whole; a counter stays as it is."""
    return rows.shown(value) if isinstance(value, Tensor) and value.dim() == len(rows.shape) else value


def _cut(value: Any, rows: Rows) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == rows.shape:
        return rows.shown(rows.cut(value).clone(memory_format=torch.contiguous_format))
    return value
