"""Runs that draw random numbers everywhere, and the comparison of what they save."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

BATCHES, EPOCHS = 10, 2


class Batches:
    """A loader with another order in each epoch and noise from the global generators; it resumes at its position."""

    def __init__(self) -> None:
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        if self.position == BATCHES:  # Lightning takes as many as there are, and does not ask for the end.
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(BATCHES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.position < BATCHES:
            number = order[self.position]
            self.position += 1
            noise = torch.rand(1).item() + random.random() + np.random.rand()  # noqa: NPY002
            yield torch.full((2, 4), float(number)) + noise


class Data(L.LightningDataModule):
    """Saves its position; after the last batch that is the beginning of the next epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = Batches()

    def train_dataloader(self) -> Batches:
        return self.batches

    def state_dict(self) -> dict[str, int]:
        turn, position = divmod(self.batches.position, BATCHES)
        return {"epoch": self.batches.epoch + turn, "position": position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches.epoch, self.batches.position = state["epoch"], state["position"]


class Noisy(L.LightningModule):
    """Draws random numbers in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.losses: list[tuple[int, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.network(batch).square().mean() * (1 + random.random() + np.random.rand())  # noqa: NPY002
        self.losses.append((int(self.trainer.fit_loop.total_batch_idx), loss.item()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _differences(one: Any, other: Any, path: str = "") -> list[str]:
    if isinstance(one, Tensor):
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [path]
        return [what for key in one for what in _differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [path]
        return [what for key, item in enumerate(one) for what in _differences(item, other[key], f"{path}.{key}")]
    return [] if one == other else [f"{path}: {one} {other}"]


def _unexplained(one: Any, other: Any) -> list[str]:
    # Resumed after the last batch of an epoch, Lightning counts that epoch as begun once less; nothing depends on it.
    begun = (".loops.fit_loop.epoch_progress.total.", ".loops.fit_loop.epoch_progress.current.")
    found = _differences(one, other)
    return [
        each for each in found if not (each.startswith(begun) and each.split(":")[0].endswith(("ready", "started")))
    ]
