"""Installs the CheckpointIO of a Trainer, prepares the checkpoint folder, and computes the size of host copies."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import ceil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_protrain.checkpoint.atomic import check_space, check_writable, sweep
from lightning_protrain.checkpoint.consolidation import checkpoint_path
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.save import aligned
from lightning_protrain.checkpoint.serialize import DTYPES
from lightning_protrain.rank_store import RankStore

DEFAULT_RUN = "run"


def install_io(trainer: Trainer, run: str, exchange: RankStore) -> ProTrainCheckpointIO:
    """Install `ProTrainCheckpointIO` in the Trainer's strategy, and configure it for a run.

    Args:
        trainer: The Trainer.
        run: Name of the run.
        exchange: Exchange with the other ranks.

    Raises:
        ValueError: If the user chose another CheckpointIO, or one with other settings; or the checkpoint to load is
            something else.
        FileNotFoundError: If the checkpoint to load does not exist.
    """
    if trainer.ckpt_path and "://" not in str(trainer.ckpt_path):
        checkpoint_path(Path(trainer.ckpt_path), sharded=True)  # Before the model is loaded.
    checkpoints = trainer.strategy.checkpoint_io
    if type(checkpoints) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = checkpoints = ProTrainCheckpointIO()
    if not isinstance(checkpoints, ProTrainCheckpointIO):
        raise ValueError(
            f"ProTrainCheckpoint saves through ProTrainCheckpointIO, and the Trainer has "
            f"{type(checkpoints).__name__}. Remove that plugin, or use Lightning's ModelCheckpoint."
        )
    if checkpoints.layout != "folder":
        raise ValueError(
            f"ProTrainCheckpoint needs folders, and ProTrainCheckpointIO(layout={checkpoints.layout!r}) writes files. "
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


def prepare_folder(trainer: Trainer, nbytes: int, root: Path, exchange: RankStore) -> None:
    """Take the lock of the run, and check that checkpoints can be written; all ranks must call it.

    Args:
        trainer: Trainer after `install_io`.
        nbytes: Minimum size of a checkpoint, bytes.
        root: Folder of the checkpoints.
        exchange: Exchange with the other ranks.

    Raises:
        ValueError: If the folder cannot be written, or another process writes checkpoints of this run.
        OSError: If the free space on the disk is below `nbytes`.
    """
    with exchange.together(f"Preparing {root} for checkpoints"):
        if trainer.is_global_zero:
            checkpoints = installed_io(trainer)
            check_writable(root, checkpoints.run, checkpoints.files)
            checkpoints.hold(root)
            sweep(root, checkpoints.run, checkpoints.files)
            check_space(root, nbytes)


# Scalars of a parameter's optimizer state, and what aligning its parts may take, bytes.
_BESIDE_STATES = 256


def copy_of(module: nn.Module, left_out: Collection[str], optimizers: Iterable[Optimizer], state_bytes: float) -> int:
    """Return an upper bound of the size of a checkpoint's `Snapshot` after the first optimizer step, bytes.

    Every trainable parameter is assumed to have a gradient. States of other callbacks are not counted.

    Args:
        module: Module whose state dict is copied.
        left_out: Keys of the state dict that are not copied.
        optimizers: Optimizers whose states are copied.
        state_bytes: Optimizer state per parameter element, averaged over all optimizers, bytes.
    """
    tensors = {id(value): value for key, value in stored(module).items() if key not in left_out}
    weights = sum(aligned(tensor.nbytes) for tensor in tensors.values())
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    # Adagrad makes states in its constructor, even for frozen parameters.
    stepped = [p for optimizer, group in groups for p in group["params"] if p.requires_grad or p in optimizer.state]
    return weights + sum(aligned(ceil(state_bytes * p.numel())) + _BESIDE_STATES for p in stepped)


def stored(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's state dict that are written to files; tied weights are one object."""
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and _has_file(value)}


def _has_file(tensor: Tensor) -> bool:
    plain = type(tensor.detach()) is Tensor and tensor.layout is torch.strided
    return plain and tensor.dtype in DTYPES and not tensor.is_quantized
