"""The shipped config for preferences, from its rows to adapters that answer, on one rank and on two."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.whole_runs import support

ARGUMENTS = (
    *("--config=configs/preferences.yaml", "--model.dtype=float32", "--model.learning_rate=0.01"),
    *("--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.max_epochs=1"),
    *("--trainer.limit_train_batches=4", "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=1.0"),
    *("--trainer.strategy.device_memory=2MiB", "--trainer.accumulate_grad_batches=1"),
)
RANKS = {1: ("--trainer.devices=1", "--data.batch_size=4"), 2: ("--trainer.devices=2", "--data.batch_size=2")}


def _logged(folder: Path) -> dict[str, float]:
    """Return the last value of each metric of validation."""
    (path,) = folder.rglob("metrics.csv")
    rows = [*csv.DictReader(path.open(encoding="utf-8"))]
    return {name: float(row[name]) for row in rows for name in row if name.startswith("val_") and row[name]}


@pytest.mark.slow
@pytest.mark.usefixtures("_furnished")
def test_preferences_are_trained_alike_on_one_rank_and_on_two() -> None:
    logged = {}
    for ranks, options in RANKS.items():
        folder = f"--trainer.logger.save_dir=logs-{ranks}"
        callbacks = [{"class_path": "SavePretrained", "init_args": {"dirpath": f"adapters-{ranks}"}}]
        words = (*ARGUMENTS, *options, folder, f"--trainer.callbacks={json.dumps(callbacks)}")
        ended = support.run(support.COMMAND, "fit", *words)
        assert ended.status == 0, ended.output
        assert "206 pairs" in ended.output
        assert Path(f"adapters-{ranks}", "adapter_model.safetensors").is_file()
        logged[ranks] = _logged(Path(f"logs-{ranks}"))
    assert logged[1].keys() >= {"val_loss", "val_rewards_accuracy", "val_rewards_margin", "val_logps_chosen"}
    assert logged[1]["val_loss"] < 0.69
    assert logged[2] == pytest.approx(logged[1], rel=1e-3, abs=1e-4)
