"""The first and the last validation, told and logged."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_protrain.callbacks.samples import InitialValidation
from tests.callbacks.stand_ins import Speaker, chat_data, fit


def test_first_and_last_value_are_printed_and_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = InitialValidation()
    module = Speaker()
    logger = CSVLogger(tmp_path, name="run", version=0)
    fit(module, chat_data(tmp_path), callback, logger=logger)
    assert (callback.first, callback.last) == (8.0, 2.0)
    assert capsys.readouterr().out.splitlines()[-1] == "val_loss 8.0000 -> 2.0000 (25 %)"
    with (tmp_path / "run" / "version_0" / "metrics.csv").open() as lines:
        logged = [(int(row["step"]), float(row["val_loss"])) for row in csv.DictReader(lines) if row["val_loss"]]
    assert logged == [(0, 8.0), (0, 4.0), (1, 2.0)]


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


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (8.0, 4.0, "val_loss 8.0000 -> 4.0000 (50 %)"),
        (None, 4.0, "val_loss 4.0000"),
        (8.0, None, "val_loss: no validation ran during training."),
    ],
)
def test_the_summary_says_what_is_known(first: float | None, last: float | None, expected: str) -> None:
    callback = InitialValidation()
    callback.first, callback.last = first, last
    assert callback.summary() == expected
