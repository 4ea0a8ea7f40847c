"""Whole checkpoints of sharded weights and optimizer states, and a mark for partially stepped weights.

When a run ends, the plan is removed and the weights stay with the module. Another fit or `save_checkpoint` would take
partially stepped weights for valid ones. So the module keeps a mark until trained weights are loaded into it. See
[Note: Partial steps].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_protrain.connections import reader_of
from lightning_protrain.distributed.rank_sync import RankSync
from lightning_protrain.planner.plan import Plan
from lightning_protrain.quant_state import accepting_companions, packed_nbytes
from lightning_protrain.runtime.apply import Runtime
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.runtime.optim.bnb_optimizers import load_by_reference, mean_state_bytes
from lightning_protrain.runtime.optim.split_states import adapt, refuse_split_state
from lightning_protrain.runtime.optim.step import check_one_device, move_state_beside_parameters, reserve_states
from lightning_protrain.runtime.recompute import refuse_own_checkpointing

_REASON = "_protrain_torn"
_WATCHED = "_protrain_torn_watched"


def mark_partially_stepped(module: nn.Module | None, reason: str | None) -> None:
    """Mark a module as partially stepped until `load_state_dict` replaces all trained weights.

    Args:
        module: The module; None: do nothing.
        reason: Why its weights are partially stepped; None: they are whole.
    """
    if module is None or reason is None:
        return
    setattr(module, _REASON, why_partially_stepped(module) or reason)
    if _WATCHED not in vars(module):
        setattr(module, _WATCHED, True)
        module.register_load_state_dict_post_hook(_loaded)


def why_partially_stepped(module: nn.Module) -> str | None:
    """Return why the module is partially stepped; None if it is not."""
    reason: str | None = vars(module).get(_REASON)
    return reason


def refuse_partially_stepped(module: nn.Module | None) -> None:
    """Refuse to save or train a partially stepped module.

    Raises:
        RuntimeError: The module is partially stepped.
    """
    reason = why_partially_stepped(module) if module is not None else None
    if reason is not None:
        raise RuntimeError(
            f"The weights of this {type(module).__name__} are partially stepped by an earlier run: {reason}, so some "
            "are from before that step and some from after it. They can be neither saved nor trained on: resume from a "
            "checkpoint (`fit(..., ckpt_path=...)`), call `load_state_dict` of this module, or make it anew."
        )


def _loaded(module: nn.Module, incompatible: Any) -> None:
    """Remove the mark once all trained weights are loaded; frozen weights are never stepped."""
    missing = set(incompatible.missing_keys)
    if all(name not in missing for name, weight in module.named_parameters() if weight.requires_grad):
        vars(module).pop(_REASON, None)


def gather_states(optimizer: Optimizer, owners: Mapping[int, int], ranks: RankMesh) -> dict[str, Any]:
    """Return the `state_dict` of an optimizer with the states of all parameters, on rank 0; every rank calls it.

    Other ranks get only their own states, because only rank 0 saves.

    Args:
        optimizer: Optimizer, equal on all ranks except for the states of parameters that another rank owns.
        owners: Owner of each shared parameter, by `id` of the parameter, from `Runtime.owners`.
        ranks: The ranks.
    """
    whole = optimizer.state_dict()
    number, group = ranks.local_size, ranks.node
    if ranks.rank >= number:  # The ranks of the first node hold all states.
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
    """Drop the states of parameters that another rank owns, after all states have been loaded."""
    for parameter in list(optimizer.state):
        if owners.get(id(parameter), ranks.local_rank) != ranks.local_rank:
            del optimizer.state[parameter]


class _Missing:
    """Placeholder in a message for a tensor that is sent separately."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def _owned(optimizer: Optimizer, owners: Mapping[int, int]) -> dict[int, int]:
    """Return the owner of each parameter that has one, by its index in `optimizer.state_dict()`."""
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


def host_states(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the states in host memory, also while another thread makes some of them."""
    states = [state for it in optimizers for state in list(it.state.values()) if isinstance(state, Mapping)]
    values = [value for state in states for value in list(state.values())]
    return [it for it in values if type(it) is Tensor and it.device.type == "cpu" and it.layout is torch.strided]


class ShardedStates:
    """Makes whole checkpoints of states that ranks hold in parts.

    Args:
        sync: Connects the ranks.

    Attributes:
        owners: Owners of shared parameters, by `id` of the parameter; kept for a checkpoint after the run.
        reserved: Device memory of states that no step has made yet.
    """

    def __init__(self, sync: RankSync) -> None:
        self._sync = sync
        self.owners: dict[int, int] = {}
        self.reserved: list[torch.UntypedStorage] = []
        self._checkpoint: Mapping[str, Any] | None = None

    @staticmethod
    def refuse_untrainable(module: nn.Module) -> None:
        """Refuse an untrainable module before a fit.

        Raises:
            RuntimeError: The module is partially stepped.
            ValueError: The module checkpoints activations itself.
        """
        refuse_partially_stepped(module)
        refuse_own_checkpointing(module)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out reserved memory and a checkpoint that is being loaded, which belong to this process."""
        return {**self.__dict__, "reserved": [], "_checkpoint": None}

    def reserve(self, model: nn.Module, plan: Plan, optimizers: Iterable[Optimizer]) -> None:
        """Reserve the memory of the states of resident parameters, until `release` or until states are loaded.

        If it is not free, reserve nothing: a rehearsal or the first step says what is missing.
        """
        resident = [model.get_parameter(fqn) for chunk in plan.chunks if chunk.resident for fqn in chunk.parameters]
        try:
            for optimizer in optimizers:
                self.reserved += reserve_states(optimizer, mean_state_bytes([optimizer]), resident)
        except torch.OutOfMemoryError:
            self.release()

    @contextmanager
    def unreserved(self, model: nn.Module, plan: Plan, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Free reserved memory, and reserve it again when the context ends."""
        self.release()
        try:
            yield
        finally:
            self.reserve(model, plan, optimizers)

    def release(self) -> None:
        """Free reserved memory, right before the first step makes states."""
        self.reserved.clear()

    def begin(self, optimizers: Sequence[Optimizer], runtime: Runtime) -> None:
        """Move optimizer states to the devices of their parameters, after a plan has been applied.

        If chunks are offloaded, forked processes do not inherit the states on the host.

        Args:
            optimizers: Optimizers of the model.
            runtime: Runtime of the plan.

        Raises:
            ValueError: An optimizer steps parameters on several devices in one call.
        """
        self.owners = runtime.owners
        check_one_device(optimizers)
        move_state_beside_parameters(optimizers)
        runtime.keep_from_forks(lambda: host_states(optimizers))

    def read(
        self,
        path: Any,
        weights_only: bool | None,
        own: CheckpointIO,
        load: Callable[[Any, bool | None], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the content of a checkpoint of Lightning or of this package.

        Args:
            path: File or folder.
            weights_only: As in `torch.load`.
            own: The strategy's checkpoint plugin.
            load: Reads a checkpoint of Lightning.

        Raises:
            ValueError: The file is not a checkpoint of Lightning.
        """
        checkpoints = reader_of(path, own)
        if checkpoints is not own:
            return checkpoints.load_checkpoint(path, weights_only=weights_only)
        content = load(path, weights_only)
        if "pytorch-lightning_version" not in content:
            keys = ", ".join(map(str, list(content)[:4]))
            raise ValueError(f"{path} is not a checkpoint of Lightning: it has the keys {keys}.")
        return content

    def loading(self, module: nn.Module, checkpoint: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Let `load_state_dict` within this context accept the additional entries of quantised layers.

        Args:
            module: The module.
            checkpoint: Checkpoint dict, which is kept for `adapt`.
        """
        self._checkpoint = checkpoint
        return accepting_companions(module)

    def adapt(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Convert the loaded checkpoint, see [Note: Two forms of masters]; call it before a plan places the weights.

        Args:
            module: The module, in the dtype of the run.
            optimizers: Optimizers of the module; empty if it is not trained.
        """
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            adapt(checkpoint, module, optimizers)

    def finish(self, module: nn.Module | None, runtime: Runtime | None) -> None:
        """Finish pending steps before weights or states are saved, see [Note: Partial steps].

        Raises:
            RuntimeError: The weights are partially stepped.
        """
        refuse_partially_stepped(module)
        if runtime is not None:
            runtime.async_step.refuse_partially_stepped()  # Raise here: the pending steps would never finish.
            runtime.async_step.finish_all()
            runtime.async_step.refuse_partially_stepped()

    def gather(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return the optimizer state, whole on rank 0; None: every rank has all states. Every rank calls it."""
        if self._sync.mesh is None or not self.owners:
            return None
        return gather_states(optimizer, self.owners, self._sync.mesh)

    def load(self, optimizers: Iterable[Optimizer], states: Iterable[Mapping[str, Any]], is_applied: bool) -> None:
        """Load whole states, and drop states of parameters that another rank owns.

        Args:
            optimizers: Optimizers of the model.
            states: State of each optimizer.
            is_applied: True if a plan is applied, so that ranks own parts.

        Raises:
            ValueError: The states are those of another kind of optimizer.
        """
        self.release()
        self._checkpoint = None
        optimizers = list(optimizers)
        for optimizer, state in zip(optimizers, states, strict=False):
            refuse_split_state(optimizer, state)
            load_by_reference(optimizer, state)
            if self._sync.mesh is not None and is_applied:
                drop_states(optimizer, self.owners, self._sync.mesh)
        move_state_beside_parameters(optimizers)


def bytes_on(device: torch.device, model: nn.Module) -> int:
    """Return the bytes of a model's parameters, gradients and buffers that are on a device already."""
    tensors = [tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.device == device]
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    return sum(map(packed_nbytes, tensors)) + sum(gradient.nbytes for gradient in gradients)
