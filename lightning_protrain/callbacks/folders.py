"""The CheckpointIO of a Trainer that saves folders, and whether it can save them."""

from __future__ import annotations

from pathlib import Path

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer

from lightning_protrain.callbacks.exchange import Exchange
from lightning_protrain.checkpoint.atomic import check_space, check_writable, sweep
from lightning_protrain.checkpoint_io import ProTrainCheckpointIO

DEFAULT_RUN = "run"


def install_io(trainer: Trainer, run: str, exchange: Exchange) -> ProTrainCheckpointIO:
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


def io_of(trainer: Trainer) -> ProTrainCheckpointIO:
    """What `install_io` has installed."""
    checkpoints = trainer.strategy.checkpoint_io
    assert isinstance(checkpoints, ProTrainCheckpointIO)
    return checkpoints


def prepare_folder(trainer: Trainer, nbytes: int, root: Path, exchange: Exchange) -> None:
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
            checkpoints = io_of(trainer)
            check_writable(root, checkpoints.run, checkpoints.files)
            checkpoints.hold(root)
            sweep(root, checkpoints.run, checkpoints.files)
            check_space(root, nbytes)
