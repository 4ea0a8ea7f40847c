"""What a Trainer saves with is made ready before training, or refused."""

from __future__ import annotations

import os
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from lightning_protrain.callbacks.checkpoint.rendezvous import Rendezvous
from lightning_protrain.callbacks.checkpoint.setup import install_io, installed_io, prepare_folder
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO


def _trainer(*plugins: object) -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, plugins=list(plugins))


@pytest.mark.parametrize("given", [None, "run", "a"])
def test_folders_of_the_run_are_saved(given: str | None) -> None:
    trainer = _trainer(*([] if given is None else [ProTrainCheckpointIO(given)]))
    checkpoints = install_io(trainer, "a", exchange := Rendezvous(None))
    assert installed_io(trainer) is trainer.strategy.checkpoint_io is checkpoints
    assert (checkpoints.run, checkpoints.rank, checkpoints.together) == ("a", 0, exchange.together)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (AsyncCheckpointIO(), "the Trainer has AsyncCheckpointIO"),
        (ProTrainCheckpointIO(layout="file"), r"ProTrainCheckpointIO\(layout='file'\) writes files"),
        (ProTrainCheckpointIO("b"), r"ProTrainCheckpoint\(run='a'\) and ProTrainCheckpointIO\(run='b'\)"),
    ],
)
def test_what_saves_something_else_is_refused(plugin: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        install_io(_trainer(plugin), "a", Rendezvous(None))


def test_the_folder_is_made_locked_and_swept(tmp_path: Path) -> None:
    trainer, module = _trainer(), L.LightningModule()
    module.layer = nn.Linear(1, 1)
    checkpoints = install_io(trainer, "a", exchange := Rendezvous(None))
    root = tmp_path / "made"
    prepare_folder(trainer, 1, root, exchange)
    assert os.listdir(root) == [".a.lock"]
    other = ProTrainCheckpointIO("a")
    with pytest.raises(ValueError, match="is being written by process"):
        other.hold(root)
    checkpoints.teardown()
    other.hold(root)
    other.teardown()
    assert os.listdir(root) == []
