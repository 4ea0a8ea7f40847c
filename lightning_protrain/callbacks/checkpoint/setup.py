"""Finds the CheckpointIO of a Trainer that saves folders, and the host memory that copies take."""

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
    """Has the Trainer save folders of this run.

    Args:
        trainer: Whose strategy saves.
        run: Name of the run.
        exchange: With the other ranks.

    Raises:
        ValueError: It was given something else to save with.
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
    """What `install_io` has installed."""
    checkpoints = trainer.strategy.checkpoint_io
    assert isinstance(checkpoints, ProTrainCheckpointIO)
    return checkpoints


def prepare_folder(trainer: Trainer, nbytes: int, root: Path, exchange: Rendezvous) -> None:
    """Takes the lock of the run, and sees to it that checkpoints can be written; all ranks call it.

    Args:
        trainer: Whose strategy saves.
        nbytes: The least that a checkpoint takes.
        root: The folder.
        exchange: With the other ranks.

    Raises:
        ValueError: They cannot, or another process is writing this run.
        OSError: The disk has not even room for the weights.
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
    """A callback with a copy of states in host memory; `ProTrainCheckpoint` is one."""

    def copied_bytes(self, trainer: Trainer, optimizers: Collection[Optimizer], state_bytes: float) -> int:
        """Bytes of it, on the rank that has it."""


def copied_bytes(trainer: Trainer, optimizers: Collection[Optimizer], state_bytes: float) -> int:
    """Bytes of host memory that copies of states take in a fit, on the rank that has them.

    Args:
        trainer: About to fit; its module is complete, and may have no values yet.
        optimizers: Those of the module.
        state_bytes: Of the states of an element, where they are not known any better.
    """
    keepers = [each for each in getattr(trainer, "callbacks", []) if isinstance(each, HoldsHostCopy)]
    return sum(each.copied_bytes(trainer, optimizers, state_bytes) for each in keepers)


def copy_of(module: nn.Module, left_out: Collection[str], optimizers: Iterable[Optimizer], state_bytes: float) -> int:
    """What a `Snapshot` of a checkpoint takes once the optimizers have stepped, to the byte.

    But for tensors in the states of other callbacks, and for parameters that get no gradient.

    Args:
        module: Whose state dict is copied.
        left_out: Keys of it that are not.
        optimizers: Whose states are copied; none: only weights are.
        state_bytes: Of the states of an element, for optimizers that are none of PyTorch's.
    """
    tensors = {id(value): value for key, value in stored(module).items() if key not in left_out}
    weights = sum(aligned(tensor.nbytes) for tensor in tensors.values())
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    return weights + sum(_group_bytes(optimizer, group, state_bytes) for optimizer, group in groups)


def stored(module: nn.Module) -> dict[str, Tensor]:
    """What files of tensors would have of its state dict; tied ones are one object, values may be missing."""
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
        if state := optimizer.state.get(parameter):  # Adagrad makes them when it is made, for frozen ones too.
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
    """The states of a parameter after a step without values; None: there is no such step."""
    # Unwrapped, so that no hook on all optimizers and no profiler takes the probe for a step.
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
    except (RuntimeError, NotImplementedError, TypeError):  # It looks at values, or wants a closure.
        return None
    return dict(trial.state[probe])
