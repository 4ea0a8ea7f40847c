"""A script as a user would start it: trains on two ranks with checkpoints, and rank 0 writes what came of it."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch

from lightning_protrain import ProTrainCheckpoint, ProTrainStrategy
from tests.support.rank_models import Module


def main(how: str, plan: str, path: Path) -> None:
    """Trains five steps; `plan` is a preset, or "ddp" for Lightning's own strategy."""
    torch.manual_seed(0)
    module = Module("tied")
    start = "spawn" if how == "spawn" else "popen"
    plain = "ddp_spawn" if how == "spawn" else "ddp"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=plain if plan == "ddp" else ProTrainStrategy(plan=plan, start_method=start),
        max_steps=5,
        logger=False,
        callbacks=ProTrainCheckpoint(path.with_suffix("")),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    if trainer.is_global_zero:
        torch.save(module.state_dict(), path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
