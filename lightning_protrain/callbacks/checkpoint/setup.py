"""Finds the CheckpointIO of a Trainer, prepares its folder, and computes the host memory of copies."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterable
from math import ceil
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_protrain.callbacks.checkpoint.rendezvous import Rendezvous
from lightning_protrain.checkpoint.atomic import check_space, check_writable, sweep
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.save import aligned
from lightning_protrain.checkpoint.serialize import DTYPES

DEFAULT_RUN = "run"


def install_io(trainer: Trainer, run: str, exchange: Rendezvous) -> ProTrainCheckpointIO:
    """Let the Trainer save folders of this run.

    Args:
        trainer: Trainer whose strategy saves.
        run: Name of the run.
        exchange: Connection to the other ranks.

    Raises:
        ValueError: If the Trainer has another CheckpointIO.
    """
    checkpoints = trainer.strategy.checkpoint_io
    if type(checkpoints) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = checkpoints = ProTrainCheckpointIO()
    if not isinstance(checkpoints, ProTrainCheckpointIO):
        raise ValueError(
            f"ProTrainCheckpoint saves through ProTrainCheckpointIO, and the Trainer has "
            f"{type(checkpoints).__name__}. Take that plugin away, or use Lightning's ModelCheckpoint."
        )
    if checkpoints.layout != "folder":
        raise ValueError(
            f"ProTrainCheckpoint keeps folders, and ProTrainCheckpointIO(layout={checkpoints.layout!r}) writes files. "
            "Leave `layout` out, or use Lightning's ModelCheckpoint."
        )
    if checkpoints.run not in (DEFAULT_RUN, run):
        raise ValueError(
            f"ProTrainCheckpoint(run={run!r}) and ProTrainCheckpointIO(run={checkpoints.run!r}): one Trainer "
            "writes one run."
        )
    checkpoints.run = run
    checkpoints.rank = trainer.global_rank
    checkpoints.together = exchange.together
    return checkpoints


def installed_io(trainer: Trainer) -> ProTrainCheckpointIO:
    """Return the CheckpointIO from `install_io`."""
    checkpoints = trainer.strategy.checkpoint_io
    assert isinstance(checkpoints, ProTrainCheckpointIO)
    return checkpoints


def prepare_folder(trainer: Trainer, nbytes: int, root: Path, exchange: Rendezvous) -> None:
    """Take the lock of the run, and check that checkpoints can be written; all ranks call it.

    Args:
        trainer: Trainer whose strategy saves.
        nbytes: Minimum size of a checkpoint, bytes.
        root: Folder of the checkpoints.
        exchange: Connection to the other ranks.

    Raises:
        ValueError: If they cannot be written, or another process is writing this run.
        OSError: If the disk has not even room for the weights.
    """
    with exchange.together(f"Preparing {root} for checkpoints"):
        if trainer.is_global_zero:
            checkpoints = installed_io(trainer)
            check_writable(root, checkpoints.run, checkpoints.files)
            checkpoints.hold(root)
            sweep(root, checkpoints.run, checkpoints.files)
            check_space(root, nbytes)


@runtime_checkable
class HoldsHostCopy(Protocol):
    """A callback with a copy of states in host memory, such as `ProTrainCheckpoint`."""

    def copied_bytes(self, trainer: Trainer, optimizers: Collection[Optimizer], state_bytes: float) -> int:
        """Return the bytes of the copy on the rank that holds it."""


def copied_bytes(trainer: Trainer, optimizers: Collection[Optimizer], state_bytes: float) -> int:
    """Return the bytes of host memory that callbacks use for copies of states, on the rank that holds them.

    Args:
        trainer: Trainer that is about to fit; its module is complete, but may have no values yet.
        optimizers: Optimizers of the module.
        state_bytes: Optimizer state per element, bytes; used if it cannot be determined.
    """
    keepers = [each for each in getattr(trainer, "callbacks", []) if isinstance(each, HoldsHostCopy)]
    return sum(each.copied_bytes(trainer, optimizers, state_bytes) for each in keepers)


def copy_of(module: nn.Module, left_out: Collection[str], optimizers: Iterable[Optimizer], state_bytes: float) -> int:
    """Return the exact size of a checkpoint's `Snapshot` once the optimizers have stepped, bytes.

    Tensors in the states of other callbacks are not counted. Parameters without a gradient are counted as if they had
    one.

    Args:
        module: Module whose state dict is copied.
        left_out: Keys of the state dict that are not copied.
        optimizers: Optimizers whose states are copied; empty if only weights are.
        state_bytes: State per element, bytes, for optimizers that are not PyTorch's.
    """
    tensors = {id(value): value for key, value in stored(module).items() if key not in left_out}
    weights = sum(aligned(tensor.nbytes) for tensor in tensors.values())
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    return weights + sum(_group_bytes(optimizer, group, state_bytes) for optimizer, group in groups)


def stored(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a state dict that get a place in a file.

    Tied ones are one object, values may be missing.
    """
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and _has_file(value)}


def _has_file(tensor: Tensor) -> bool:
    plain = type(tensor.detach()) is Tensor and tensor.layout is torch.strided
    return plain and tensor.dtype in DTYPES and not tensor.is_quantized


def _group_bytes(optimizer: Optimizer, group: dict[str, Any], state_bytes: float) -> int:
    made: dict[tuple[Any, ...], int] = {}
    total = 0
    for parameter in group["params"]:
        kind = parameter.shape, parameter.dtype
        if state := optimizer.state.get(
            parameter
        ):  # Adagrad makes states in its constructor, even for frozen parameters.
            total += _nbytes(state)
        elif parameter.requires_grad:
            if kind not in made:
                state = _after_step(optimizer, group, parameter)
                made[kind] = aligned(ceil(state_bytes * parameter.numel())) if state is None else _nbytes(state)
            total += made[kind]
    return total


def _nbytes(state: dict[str, Any]) -> int:
    return sum(aligned(value.nbytes) for value in state.values() if isinstance(value, Tensor))


def _after_step(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Any] | None:
    """Return the states of a parameter after a step without values, or None if no such step is possible."""
    # Unwrapped, so that global optimizer hooks and profilers do not see the probe.
    step = inspect.unwrap(type(optimizer).step)
    if not type(optimizer).__module__.startswith("torch.optim") or not inspect.isfunction(step):
        return None
    probe = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    probe.grad = torch.empty_like(probe)
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [probe], "fused": None, "foreach": False, "capturable": False}]
    try:
        with torch.no_grad():
            step(trial)
    except (RuntimeError, NotImplementedError, TypeError):  # The step reads values, or needs a closure.
        return None
    return dict(trial.state[probe])
