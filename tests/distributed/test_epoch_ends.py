"""Ranks meet before each batch and behind the last one of an epoch; what follows waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_protrain.distributed.rank_sync import length_is_known, meet_in_epochs, meet_no_more, validation_place

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Speaker(BoringModel):
    """Notes what happens when."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def on_train_start(self) -> None:
        meet_in_epochs(self.trainer, lambda: self.notes.append("before"), self.notes.append)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.notes.append("trains")
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.notes.append(validation_place(self.trainer))

    def on_train_epoch_end(self) -> None:
        self.notes.append("ends")


def _fit(**options: Any) -> tuple[Speaker, Trainer]:
    model = Speaker()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, limit_train_batches=2, **QUIET, **options)
    trainer.fit(model)
    return model, trainer


def test_ranks_meet_before_hooks_that_may_wait_for_others() -> None:
    model, trainer = _fit(limit_val_batches=1)
    first = ["trains", "trains", "validation after batch 2 of epoch 0", "the end of epoch 0", "ends"]
    second = ["trains", "trains", "validation after batch 2 of epoch 1", "the end of epoch 1", "ends"]
    assert model.notes == ["", *first, *second]  # The check before the first batch is nowhere.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()  # One process has no need of it.
    assert model.notes[-1] == "before"
    meet_no_more(trainer)
    assert not {"on_advance_end", "_broadcast_sigterm_tensor"} & {
        *vars(trainer.fit_loop),
        *vars(trainer.fit_loop.epoch_loop),
    }
    meet_no_more(trainer)


def test_a_validation_by_itself_is_nowhere() -> None:
    model = Speaker()
    Trainer(accelerator="cpu", devices=1, limit_val_batches=1, **QUIET).validate(model, verbose=False)
    assert model.notes == [""]


class Stream(IterableDataset[Tensor]):
    """Nobody knows before how many rows."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(4, 32))


@pytest.mark.parametrize("limit", [1, 1.0])
@pytest.mark.parametrize("is_known", [True, False])
def test_one_loader_of_several_without_a_length_leaves_it_unknown(is_known: bool, limit: float) -> None:
    model, found = BoringModel(), []
    known = model.train_dataloader()

    def training_step(batch: dict[str, Tensor], batch_idx: int) -> Any:
        found.append(length_is_known(model.trainer))
        return BoringModel.training_step(model, batch["a"], batch_idx)

    model.training_step = training_step  # type: ignore[method-assign]
    loaders = {"a": known, "b": known if is_known else DataLoader(Stream())}
    Trainer(accelerator="cpu", devices=1, max_steps=1, limit_train_batches=limit, **QUIET).fit(model, loaders)
    assert found == [is_known]
