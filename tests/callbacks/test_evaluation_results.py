"""Times of evaluation in a fit, and the use of scores, first values and last values."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from lightning_protrain import trainer_events
from lightning_protrain.callbacks.checkpoint.saving_points import EvaluationScores
from lightning_protrain.callbacks.samples import InitialValidation
from lightning_protrain.checkpoint.discover import Ranking
from tests.callbacks.stand_ins import Speaker, chat_data, fit
from tests.support.trainers import QUIET


class Note(L.Callback):
    """A callback that records what `trainer_events` says at the end of each batch."""

    def __init__(self) -> None:
        self.accumulates: list[bool] = []
        self.validates: list[bool] = []
        self.next: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.accumulates.append(trainer_events.accumulates(trainer))
        self.validates.append(trainer_events.validates(trainer))
        self.next.append(trainer_events.validates_next(trainer))


def _noted(**options: Any) -> Note:
    note = Note()
    L.Trainer(accelerator="cpu", devices=1, callbacks=[note], **{**QUIET, "max_epochs": 1, **options}).fit(
        BoringModel()
    )
    return note


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_last_batch_of_a_step(every: int) -> None:
    note = _noted(limit_train_batches=6, accumulate_grad_batches=every)
    assert note.accumulates == [index % every != every - 1 for index in range(6)]


@pytest.mark.parametrize(("interval", "expected"), [(2, [1, 3, 5]), (3, [2, 5]), (1.0, [5])])
def test_a_validation_follows(interval: float, expected: list[int]) -> None:
    note = _noted(limit_train_batches=6, limit_val_batches=1, val_check_interval=interval)
    assert [index for index, follows in enumerate(note.next) if follows] == expected
    assert all(note.validates)


def test_no_validation_at_all() -> None:
    note = _noted(limit_train_batches=4, limit_val_batches=0)
    assert not any(note.validates + note.next)


def test_first_and_last_value_are_printed_and_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = InitialValidation()
    module = Speaker()
    logger = CSVLogger(tmp_path, name="run", version=0)
    fit(module, chat_data(tmp_path), callback, logger=logger)
    assert (callback.first, callback.last) == (8.0, 2.0)
    assert capsys.readouterr().out.splitlines()[-1] == "val_loss 8.0000 -> 2.0000"
    with (tmp_path / "run" / "version_0" / "metrics.csv").open() as lines:
        logged = [(int(row["step"]), float(row["val_loss"])) for row in csv.DictReader(lines) if row["val_loss"]]
    assert logged == [(0, 8.0), (0, 4.0), (1, 2.0)]


def test_the_share_of_predicted_tokens_is_said_where_it_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Scoring(Speaker):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("val_accuracy", 0.123 * (1 + self.validations), batch_size=1)

    fit(Scoring(), chat_data(tmp_path), InitialValidation())
    loss, tokens = capsys.readouterr().out.splitlines()[-2:]
    assert loss == "val_loss 8.0000 -> 2.0000"
    assert tokens == "The model predicts 37 of 100 tokens; before training it was 12."


def test_all_validation_batches_count(tmp_path: Path) -> None:
    batches = []

    class Counting(Speaker):
        def on_validation_batch_start(self, *_: object) -> None:
            batches.append(self.validations)

    data = chat_data(tmp_path)
    data.val_fraction, data.batch_size = 0.5, 1
    fit(Counting(), data, InitialValidation(), max_steps=1)
    assert batches == [0] * 6 + [1] * 6


def test_a_metric_that_is_not_logged_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="monitors 'val_accuracy', but validation logged val_loss"):
        fit(Speaker(), chat_data(tmp_path), InitialValidation("val_accuracy"))


def test_a_metric_that_is_missing_after_training_does_not_end_the_run(tmp_path: Path) -> None:
    class Late(InitialValidation):
        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            self.monitor = "val_accuracy"

    callback = Late()
    with pytest.warns(UserWarning, match="monitors 'val_accuracy', but validation logged val_loss"):
        trainer = fit(Speaker(), chat_data(tmp_path), callback)
    assert trainer.state.finished
    assert callback.summary() == "val_accuracy: no validation ran during training."


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (8.0, 4.0, "val_loss 8.0000 -> 4.0000"),
        (None, 4.0, "val_loss 4.0000"),
        (8.0, None, "val_loss: no validation ran during training."),
    ],
)
def test_the_summary_says_what_is_known(first: float | None, last: float | None, expected: str) -> None:
    callback = InitialValidation()
    callback.first, callback.last = first, last
    assert callback.summary() == expected


def _trainer(step: int, **metrics: float) -> Any:
    return SimpleNamespace(
        global_step=step,
        callback_metrics={name: torch.tensor(value) for name, value in metrics.items()},
        is_global_zero=True,
        validating=False,
    )


def test_a_second_fit_begins_with_no_score_of_the_first() -> None:
    scores = EvaluationScores(Ranking("loss"))
    assert scores.note(_trainer(3, loss=2.0), None)
    scores.begin(known=True)
    assert scores.now(_trainer(3)) == (None, False)
