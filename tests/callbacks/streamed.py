"""A small model that streams its weights; as a program it is trained with W&B offline, in a given folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import WandbLogger

from lightning_protrain import ProTrainStrategy
from lightning_protrain.report.plan_monitor import PlanMonitor
from tests.support.machines import CPU
from tests.support.models import ParityModule, fit, zoo


def train(
    folder: Path, monitor: PlanMonitor, module: ParityModule | None = None, **options: Any
) -> tuple[L.Trainer, ParityModule]:
    """Trains a small model that streams its weights."""
    module = module or zoo()["dropout"]()
    budget = int(2.5 * sum(weight.nbytes for weight in module.parameters()))
    strategy = ProTrainStrategy(device_memory=budget, hardware=CPU, rehearse=False)
    return fit(module, strategy=strategy, default_root_dir=folder, callbacks=[monitor], **options), module


if __name__ == "__main__":
    at = Path(sys.argv[1])
    train(at, PlanMonitor(), max_epochs=1, logger=WandbLogger(save_dir=at, offline=True))
