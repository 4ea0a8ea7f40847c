"""A module that fails on one rank in one of several ways, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.rank_models import VOCABULARY, Module
from tests.support.ranks import kill_this_rank

TOKENS = torch.randint(VOCABULARY, (20, 9), generator=torch.Generator().manual_seed(3))


class Stream(IterableDataset[Tensor]):
    """So many rows; nobody knows before how many."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[Tensor]:
        return iter(TOKENS[: self._length])


class Faulty(Module):
    """Fails on rank 1, in one of several ways."""

    def __init__(self, rank: int, fault: str) -> None:
        super().__init__("full")
        self.rank = rank
        self.fault = fault

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor | None:  # type: ignore[override]
        if self.rank == 1 and batch_idx == 3:
            if self.fault == "raise":
                raise ValueError("boom")
            if self.fault == "kill":
                kill_this_rank()
            if self.fault == "skip":
                return None
        return super().training_step(batch)

    def on_after_backward(self) -> None:
        if self.rank == 1 and self.trainer.global_step == 2:
            if self.fault == "raise after backward":
                raise ValueError("boom")
            if self.fault == "kill after backward":
                kill_this_rank()

    def train_dataloader(self) -> DataLoader[Any]:
        if self.fault == "uneven":
            return DataLoader(TensorDataset(TOKENS[: 12 - 4 * self.rank]), batch_size=2)
        if self.fault.startswith("stream"):
            length = 8 if (self.rank == 1) == (self.fault == "stream longer") else 5
            return DataLoader(Stream(length), batch_size=1, collate_fn=lambda rows: [torch.stack(rows)])
        return DataLoader(TensorDataset(TOKENS), batch_size=2)


UNEVEN = "ValueError: The ranks have different numbers of training batches (rank 0: 3, rank 1: 2)"


GONE = "rank 1 is gone without a word"


ONGOING, AT_END = "rank 1: batch 5 of epoch 0", "rank 0: the end of epoch 0"
