"""Modules whose first batch is taken ahead of training."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    Dataset,
)

from lightning_protrain.strategy.profile_step import NoBatchError, batch_to_plan_with
from tests.support import police

LENGTH = 28


class Tokens(Dataset):
    """Sequences that are moved by random numbers from everywhere."""

    def __init__(self) -> None:
        self.generators = {"torch": torch.Generator(), "numpy": np.random.default_rng(3), "old": random.Random(3)}
        self.older = [np.random.RandomState(3)]

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor]:
        noise = [
            torch.randint(8, (1,)).item() + torch.randint(8, (1,), generator=self.generators["torch"]).item(),
            random.randrange(8) + self.generators["old"].randrange(8),
            np.random.randint(8) + self.generators["numpy"].integers(8) + self.older[0].randint(8),  # noqa: NPY002
        ]
        return ((torch.arange(8) * (index + 1) + int(sum(noise))) % 32,)


class Ahead(L.Callback):
    """Takes the first batch where `Strategy.setup` would, and notes that of the run."""

    def __init__(self, take: bool) -> None:
        self.take = take
        self.seen: list[Any] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.take:
            self.ahead, self.refusal = None, ""
            try:
                self.ahead = batch_to_plan_with(trainer)
            except NoBatchError as error:
                self.refusal = str(error)
            self.left = police.child_processes()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        self.seen.append(batch)
