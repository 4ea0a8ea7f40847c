"""Trains a network on two GPUs and prints its losses: `python -m tests.cuda.two_ranks deberta [SHARDING OVERLAP]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import lightning as L

from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import QUIET
from tests.support.networks import module


def main(name: str, given: Sequence[Any]) -> None:
    """Train plainly, or streamed with a placement and an overlap; rank 0 prints the losses in a line."""
    strategy: Any = "ddp"
    if given:
        strategy = ProTrainStrategy(plan="offload", sharding=given[0], overlap_optimizer=given[1], monitor=False)
    one = module(name)
    options = {"use_distributed_sampler": False, **QUIET}
    trainer = L.Trainer(accelerator="cuda", devices=2, max_epochs=1, strategy=strategy, **options)
    L.seed_everything(0, verbose=False)
    trainer.fit(one)
    if trainer.is_global_zero:
        print("losses", *(loss.item() for loss in one.losses))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
