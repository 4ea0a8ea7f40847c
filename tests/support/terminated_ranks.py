"""Ranks that get SIGTERM at any place of a run."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.rank_models import Module

PLACES = ("before backward", "after backward", "validation", "last batch")


class Told(Module):
    """A module that sends SIGTERM to its own rank, if `told`, in the fifth batch or after it."""

    def __init__(self, told: bool, place: str) -> None:
        super().__init__("full")
        self.told, self.place, self.num_batches = told, place, 0

    def tell(self, place: str) -> None:
        if self.told and (place == self.place or (self.place == "last batch" and place == "before backward")):
            self.told = False
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.num_batches += 1
        if self.num_batches == (6 if self.place == "last batch" else 5):
            self.tell("before backward")
        return super().training_step(batch)

    def on_after_backward(self) -> None:
        if self.num_batches == 5:
            self.tell("after backward")

    def validation_step(self, batch: list[Tensor]) -> None:
        if not self.trainer.sanity_checking:
            self.tell("validation")

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()
