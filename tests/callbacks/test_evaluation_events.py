"""When things happen in a fit, and who hears of evaluations beside the validation."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_protrain.callbacks import trainer_events
from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.evaluator import Evaluator

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Note(L.Callback):
    """What is said at the end of each batch."""

    def __init__(self) -> None:
        self.accumulates: list[bool] = []
        self.validates: list[bool] = []
        self.next: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.accumulates.append(trainer_events.accumulates(trainer))
        self.validates.append(trainer_events.validates(trainer))
        self.next.append(trainer_events.validates_next(trainer))


def fit(**options: Any) -> Note:
    note = Note()
    L.Trainer(accelerator="cpu", devices=1, callbacks=[note], **{**QUIET, "max_epochs": 1, **options}).fit(
        BoringModel()
    )
    return note


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_last_batch_of_a_step(every: int) -> None:
    note = fit(limit_train_batches=6, accumulate_grad_batches=every)
    assert note.accumulates == [index % every != every - 1 for index in range(6)]


@pytest.mark.parametrize(("interval", "expected"), [(2, [1, 3, 5]), (3, [2, 5]), (1.0, [5])])
def test_a_validation_follows(interval: float, expected: list[int]) -> None:
    note = fit(limit_train_batches=6, limit_val_batches=1, val_check_interval=interval)
    assert [index for index, follows in enumerate(note.next) if follows] == expected
    assert all(note.validates)


def test_no_validation_at_all() -> None:
    note = fit(limit_train_batches=4, limit_val_batches=0)
    assert not any(note.validates + note.next)


@pytest.mark.parametrize("tries", [True, False])
def test_a_try(tries: bool) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, fast_dev_run=tries, **QUIET)
    assert trainer_events.is_fast_dev_run(trainer) == tries


def test_who_evaluates_and_who_hears_of_it() -> None:
    assert isinstance(Evaluator({"a": []}), trainer_events.EvaluatesOutsideValidation)
    assert isinstance(ProTrainCheckpoint("x"), trainer_events.EvaluationListener)
    assert not isinstance(ModelCheckpoint(), trainer_events.EvaluationListener)
    trainer = L.Trainer(accelerator="cpu", devices=1, callbacks=[Evaluator({"a": []})], **QUIET)
    assert not trainer_events.is_from_evaluator("a_loss", trainer)  # it is not set up
