"""A model whose offloaded weights are divided among machines, as Lightning sees it: what is refused, saved and loaded.

[Note: Whole weights]
From set-up on `state_dict()` of the model gathers the rows of all machines, so every rank calls it; each gets whole
tensors. What a checkpoint saves comes to rank 0 alone, weight by weight. `load_state_dict` takes whole tensors, of
which each rank keeps its rows. After the run weights stay as they are: no machine may have room for all of them.
Another run on as many machines reads its weights from these rows, see [Note: Reading rows] in states.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.overlap import OverlapChoice
from lightning_protrain.runtime.comm import Ranks
from lightning_protrain.runtime.local_rows import refuse_optimizers
from lightning_protrain.runtime.rows import Rows


def refuse_combinations(
    module: LightningModule, trainer: Trainer, optimizers: Iterable[Optimizer], overlap: OverlapChoice
) -> None:
    """Refuses what cannot be done, or has not been built, with weights that machines divide.

    Raises:
        ValueError: Names it.
    """
    why = None
    if not module.automatic_optimization:
        why = "and under manual optimization nobody knows which fetches all ranks make"
    elif getattr(trainer.precision_plugin, "scaler", None) is not None:
        why = f"and precision={trainer.precision!r} scales gradients of whole weights"
    elif overlap not in ("auto", "off"):
        why = f"and overlap_optimizer={overlap!r} is not built for them"
    if why is not None:
        raise ValueError(
            f'shard_weights="world": each machine has some rows of each offloaded weight, {why}. Change that, or leave '
            "`shard_weights` out."
        )
    if any(isinstance(callback, SavePretrained) for callback in getattr(trainer, "callbacks", ())):
        raise ValueError(
            'SavePretrained writes weights that are whole on rank 0, and shard_weights="world" leaves each machine '
            "some rows. Remove the callback, and export a checkpoint after the run."
        )
    refuse_optimizers(optimizers)
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f'shard_weights="world": {name!r} has a hook on its gradient, of which no machine has all. Take it '
                "off, or leave `shard_weights` out."
            )


class WholeWeights:
    """Makes a model save and load whole weights, see [Note: Whole weights].

    Args:
        module: The model; what an earlier run has left on it is taken off.
        ranks: Who call `state_dict()` together.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.take_off(module)
        self._ranks = ranks
        self._handles: list[Any] = [module.register_state_dict_post_hook(self)]
        self._handles.append(module.register_load_state_dict_pre_hook(cut_on_load))

    def __call__(self, *given: Any) -> None:
        """After `state_dict()`."""
        self._ranks.meet("the state of weights that machines divide")  # Else who calls it alone would wait for ever.
        gather_on_save(*given)

    def remove(self) -> None:
        """Takes it off; may be called again."""
        while self._handles:
            self._handles.pop().remove()

    @classmethod
    def take_off(cls, module: nn.Module) -> None:
        """Takes off what is on a model, whichever run has put it there."""
        for hook in list(module._state_dict_hooks.values()):
            if isinstance(hook, cls):
                hook.remove()


def gather_on_save(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """A hook after `state_dict`: gives whole tensors; every rank calls it."""
    names, whole = _first_names(module, prefix), {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            first = names.get(name, name)
            if first not in whole:
                whole[first] = value.full_tensor()
            state[name] = whole[first]


def cut_on_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before `load_state_dict`: takes whole tensors, of which this rank keeps its rows."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:
            rows = Rows.of(parameter, parameter.device_mesh)
            state[prefix + name] = rows.shown(rows.cut(value).to("cpu", parameter.dtype).contiguous())


def whole_on_first(module: nn.Module, state: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """A state of which rank 0 has whole tensors in place of DTensors; every rank calls it.

    Args:
        module: Whose state it is.
        state: The same on all ranks but for rows.
        ranks: Who they are. The first of each machine sends its rows; others get what they have.

    Raises:
        RuntimeError: A rank does not call it.
    """
    ranks.meet("the state of weights that machines divide")
    found = dict(state)
    names, whole = _first_names(module, ""), {}
    for name, value in state.items():
        if isinstance(value, DTensor) and not ranks.local_rank:
            first = names.get(name, name)
            if first not in whole:
                whole[first] = _whole_on_first(value, ranks)
            found[name] = whole[first]
    return found


def _first_names(module: nn.Module, prefix: str) -> dict[str, str]:
    """The first name of each parameter, by all of its names."""
    firsts = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {prefix + name: prefix + firsts[id(parameter)] for name, parameter in every}


def _whole_on_first(value: DTensor, ranks: Ranks) -> Tensor:
    rows, local = Rows.of(value, value.device_mesh), value.to_local().detach()
    if ranks.rank:
        if local.numel():
            dist.send(local.contiguous(), 0, group=ranks.meeting)
        return value
    whole = torch.empty(value.shape, dtype=value.dtype)
    rows.cut(whole, 0).copy_(local)
    for machine in range(1, ranks.num_machines):
        part = rows.cut(whole, machine)
        if part.numel():
            dist.recv(part, machine * ranks.local_size, group=ranks.meeting)
    return whole
