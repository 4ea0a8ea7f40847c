"""Runs to which signals are sent, and what they leave."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.noisy_runs import Data, Noisy

# Exit code after SIGTERM, 128 + 15, which schedulers interpret as preemption.
EXIT_CODE = 143
PREEMPTED = f"SIGTERMException: {EXIT_CODE}"


class Validated(Noisy):
    """A noisy module with a validation step that draws no random numbers."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.network(batch).square().mean(), sync_dist=True)


class Both(Data):
    """Data for validation, too."""

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(4, 4), batch_size=2)


class Signals(L.Callback):
    """Sends signals to this process at a given hook, after a number of batches."""

    def __init__(self, place: str, batch: int, number: int = signal.SIGTERM, times: int = 1) -> None:
        self.place, self.batch, self.number, self.times = place, batch, number, times
        self.begun = 0

    def send(self, place: str) -> None:
        if (place, self.begun) == (self.place, self.batch) and self.times:
            self.times -= 1
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun += 1
        self.send("start")

    def on_before_backward(self, *_: Any) -> None:
        self.send("backward")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.send("step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.send("end")

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.send("validation")
