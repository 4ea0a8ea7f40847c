"""The largest batch of a run, taken ahead of training where the data knows it; the run is that without it."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.models import ParityModule, token_batches, zoo
from tests.parity import Result, differences, snapshot
from tests.test_batches import QUIET, Ahead, Tokens


class Largest(L.LightningDataModule):
    """Says what its largest batch is, which draws random numbers and leaves traces; changes batches on their way."""

    def __init__(self, largest: Any) -> None:
        super().__init__()
        self.largest = largest
        self.asked: list[int] = []
        self.generator = torch.Generator().manual_seed(1)
        self.is_set_up = False

    def setup(self, stage: str) -> None:
        self.is_set_up = True

    def largest_batch(self) -> Any:
        assert self.is_set_up
        self.asked.append(int(torch.randint(8, (1,)) + torch.randint(8, (1,), generator=self.generator)))
        random.random()
        self.shown = True
        return self.largest

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Tokens(), 4, shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        noise = torch.randint(8, (1,), generator=self.generator)
        return [tokens.add_(noise + len(self.asked)).remainder_(32) for tokens in batch]


def _fit_with(data: Largest, ahead: Ahead, **options: Any) -> Result:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    module = zoo()["reused"]()
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[ahead], **QUIET, **options)
    trainer.fit(module, datamodule=data)
    return Result(tuple(module.losses), snapshot(module))


@pytest.mark.parametrize("known", [True, False])
def test_the_largest_batch_is_taken_where_the_data_knows_it(known: bool) -> None:
    results, seen = [], []
    for take in (False, True):
        largest = torch.arange(96).view(12, 8) % 32
        data, ahead = Largest([largest] if known else None), Ahead(take)
        results.append(_fit_with(data, ahead))
        seen.append(ahead.seen)
        assert data.asked == []
        assert not hasattr(data, "shown")
        assert torch.equal(largest, torch.arange(96).view(12, 8) % 32), "changed in place"
    assert differences(*results) == []
    (tokens,) = ahead.ahead
    if known:
        assert tokens.shape == (12, 8)
        # It has gone through the hook, which knows how often the batch was asked for.
        assert len(set(((tokens - largest) % 32).flatten().tolist())) == 1
    else:
        assert torch.equal(tokens, seen[0][0][0])


def test_the_largest_batch_is_converted_by_the_precision() -> None:
    ahead = Ahead(True)
    _fit_with(Largest([torch.ones(3, 8)]), ahead, precision="64-true", limit_train_batches=1)
    assert ahead.ahead[0].dtype == torch.float64


class Sizes(ParityModule):
    """Has its loader itself, and knows its largest batch."""

    def largest_batch(self) -> Any:
        return [torch.zeros(7, 8, dtype=torch.int64)]

    def train_dataloader(self) -> DataLoader:
        return token_batches()


def test_a_module_may_know_the_largest_batch_of_its_own_loader_and_of_no_other() -> None:
    for options, rows in (({}, 7), ({"train_dataloaders": token_batches()}, 2)):
        ahead, module = Ahead(True), Sizes(zoo()["reused"]().network)
        module.training_step = lambda *arguments: None
        trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=[ahead], **QUIET)
        trainer.fit(module, **options)
        assert ahead.ahead[0].shape == (rows, 8)


def test_without_training_batches_the_data_is_not_asked() -> None:
    ahead, data = Ahead(True), Largest(None)
    data.is_set_up = None
    data.largest_batch = lambda: pytest.fail("asked")
    trainer = L.Trainer(accelerator="cpu", devices=1, limit_train_batches=0, max_epochs=1, callbacks=[ahead], **QUIET)
    trainer.fit(zoo()["reused"](), datamodule=data)
    assert ahead.ahead is None
