"""Modules whose training step is profiled, and runs of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.records import ModelProfile
from lightning_protrain.strategy.profile_step import profile_training_step
from tests.support.models import (
    SEQUENCE,
    VOCABULARY,
    ParityModule,
    fit,
)
from tests.support.parity import Result, snapshot


class Augmented(Dataset):
    """Sequences of which random tokens are replaced by random ones."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[Tensor]:
        tokens = (torch.arange(SEQUENCE) * (index + 1)) % VOCABULARY
        return (tokens.where(torch.rand(SEQUENCE) < 0.8, torch.randint(VOCABULARY, (SEQUENCE,))),)


def batches(num_workers: int = 0) -> DataLoader:
    """Four batches of which a hidden state takes four pages."""
    return DataLoader(Augmented(), 32, shuffle=True, num_workers=num_workers)


def train(module: ParityModule, strategy: Any = "auto", num_workers: int = 0, **options: Any) -> Result:
    """Trains `module` on batches of pages."""
    module.train_dataloader = lambda: batches(num_workers)
    fit(module, strategy=strategy, **options)
    return Result(tuple(module.losses), snapshot(module))


class Profiling(L.Callback):
    """Profiles where the strategy would, before anything is placed."""

    def __init__(self, needed_for: str = "") -> None:
        self.needed_for = needed_for
        self.profile: ModelProfile | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        layout = describe_model(pl_module)
        self.profile = profile_training_step(trainer, layout, self.needed_for)
