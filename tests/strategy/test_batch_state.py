"""Loaders, datasets, collating functions and data modules that hold a state are as they were after the first batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.support.first_batches import LENGTH, QUIET, Ahead, Tokens
from tests.support.models import token_batches, zoo
from tests.support.parity import Result, differences, snapshot


class Masking:
    """Collates, and replaces random tokens by what it counts."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.counts = {"batches": 0}

    def __call__(self, items: list[Any]) -> list[Tensor]:
        self.counts["batches"] += 1
        tokens = torch.stack([item[0] for item in items])
        masked = torch.rand(tokens.shape, generator=self.generator) < 0.3
        return [tokens.where(~masked, self.counts["batches"])]


class Indexed(Dataset):
    """Counts how often it is read, and opens what it reads at the first item."""

    def __init__(self) -> None:
        self.reads = 0
        self.opened: list[Tensor] | None = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor]:
        self.reads += 1
        self.opened = self.opened or [torch.full((8,), self.reads) for _ in range(LENGTH)]
        return ((self.opened[index] + self.reads) % 32,)


class Warmed(L.LightningDataModule):
    """Changes batches on their way by what it holds, and in place."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make
        self.generator = np.random.default_rng(1)
        self.seen: list[int] = []

    def train_dataloader(self) -> Any:
        return self.make()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append(len(self.seen))
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        for tokens in batch:
            tokens.add_(len(self.seen) + int(self.generator.integers(5))).remainder_(32)
        return batch


HOLDING: dict[str, Callable[[], Any]] = {
    "collate_fn": lambda: DataLoader(Tokens(), 4, collate_fn=Masking()),
    "collate_fn of workers": lambda: DataLoader(Tokens(), 4, collate_fn=Masking(), num_workers=1),
    "dataset": lambda: DataLoader(Indexed(), 4),
    "not batched": lambda: DataLoader([[row.view(1, -1)] for (row,) in token_batches().dataset], batch_size=None),
}


@pytest.mark.parametrize("name", HOLDING)
def test_loaders_and_data_modules_that_hold_a_state(name: str) -> None:
    runs = []
    for take in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        module, ahead = zoo()["reused"](), Ahead(take)
        data = Warmed(HOLDING[name])
        trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[ahead], **QUIET)
        trainer.fit(module, datamodule=data)
        runs.append((Result(tuple(module.losses), snapshot(module)), data.seen, ahead))
    assert differences(runs[0][0], runs[1][0]) == []
    assert runs[0][1] == runs[1][1]
    assert torch.equal(ahead.ahead[0], runs[0][2].seen[0][0]) or "not" in name
