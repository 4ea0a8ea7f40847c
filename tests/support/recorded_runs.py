"""Runs that remember the batches that they were given."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.support.noisy_runs import Noisy


class Samples(Dataset):
    """Numbered samples, with noise from all generators of the process that makes them."""

    def __init__(self, count: int, noisy: bool = True) -> None:
        self.count, self.noisy = count, noisy

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.rand(1).item() + random.random() + np.random.rand() if self.noisy else 0.0  # noqa: NPY002
        return torch.full((4,), float(index)) + noise


class Recorded(Noisy):
    """A module that records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch["a"] + batch["b"][:1] if isinstance(batch, dict) else batch
        self.given.append([self.trainer.fit_loop.total_batch_idx, *batch[:, 0].tolist()])
        return super().training_step(batch, batch_idx)
