"""A module that counts its steps, runs of it with checkpoints, and what those hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.verification import verify
from tests.support.trainers import SILENT

BATCHES = 4


class Counter(L.LightningModule):
    """One weight that counts steps; its validation losses are given, one for each evaluation; None: it logs none."""

    def __init__(self, losses: Sequence[float | None] = (), train: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.losses = losses
        self.train_metric = train
        self.evaluated: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.train_metric:
            self.log("train_loss", float(abs(self.trainer.global_step - 5)))
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.evaluated.append(self.trainer.global_step)
            number = self.trainer.global_step // 2 - 1
            loss = self.losses[number] if number < len(self.losses) else None
            if loss is not None:
                self.log("val_loss", loss, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, maximize=True)  # The weight is the number of steps.

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(BATCHES, 1), batch_size=1)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(1, 1)) if self.losses else []


def _fit(
    folder: Path, losses: Sequence[float | None] = (), *, epochs: int = 2, module: Counter | None = None, **options: Any
) -> tuple[L.Trainer, ProTrainCheckpoint]:
    """Validates after every second step."""
    of_trainer = ("max_steps", "accumulate_grad_batches", "val_check_interval", "callbacks", "strategy", "plugins")
    given = {name: options.pop(name) for name in of_trainer if name in options}
    path = options.pop("ckpt_path", None)
    saver = ProTrainCheckpoint(folder, **{"monitor": "val_loss" if losses else None, **options})
    given = {"max_epochs": epochs, "val_check_interval": 2, **SILENT, **given}
    trainer = L.Trainer(accelerator="cpu", devices=1, **{**given, "callbacks": [*given.get("callbacks", []), saver]})
    trainer.fit(module or Counter(losses), ckpt_path=path)
    return trainer, saver


def _steps(folder: Path, run: str = "run") -> list[int]:
    assert all(verify(each.path) == [] for each in find_checkpoints(folder, run).found)
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    return sorted(each.manifest.step for each in find_checkpoints(folder, run).found)


def _names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder; links to them are left out."""
    return sorted(path.name for path in folder.iterdir() if not path.is_symlink())


def _weight(path: str | Path) -> float:
    return ProTrainCheckpointIO().load_checkpoint(path)["state_dict"]["layer.weight"].item()


LOSSES = (5.0, 2.0, 3.0, 4.0)  # After 2, 4, 6 and 8 steps.


class Steps(L.Callback):
    """Calls a function at a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act()
