"""Evaluations beside training on several ranks: unequal shares, empty ones, and ranks that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_protrain.callbacks.evaluator import Evaluator
from tests.callbacks.evaluated import Data, Sums
from tests.support.ranks import BOUND, run_ranks, trainer_on_rank, values


def fit_on_rank(rank: int, fails: bool, empty: int | None = None) -> float:
    """Rank 0 has the values 0, 2 and 4, rank 1 has 1 and 3, or one of them has nothing."""
    batches = [torch.tensor([[float(value)]]) for value in range(rank, 5, 2)]
    evaluator = Evaluator({"extra": [] if rank == empty else batches}, every_n_steps=1 + rank)  # rank 0 decides
    trainer = trainer_on_rank(rank, 2, max_steps=2, callbacks=[evaluator], limit_val_batches=0)
    module = Sums(fails)
    module.register_buffer("buffer", torch.ones(1))  # data parallelism broadcasts it in a forward
    trainer.fit(module, DataLoader(torch.ones(8, 1)))  # type: ignore[arg-type]
    return float(trainer.callback_metrics["extra_loss"])


@pytest.mark.parametrize("empty", [None, 0, 1])
def test_ranks_with_unequal_shares_log_the_true_mean(tmp_path: Path, empty: int | None) -> None:
    assert values(run_ranks(fit_on_rank, 2, tmp_path, False, empty)) == [2.0, 2.0]


def test_what_fails_on_one_rank_ends_all(tmp_path: Path) -> None:
    first, second = run_ranks(fit_on_rank, 2, tmp_path, True)
    assert second.error == "ValueError: a bad row"
    assert first.error is not None
    assert "'extra' at step 1 failed on rank 1 (ValueError: a bad row)" in first.error
    assert max(first.seconds, second.seconds) < BOUND


def data_on_rank(rank: int, fault: str) -> None:
    class Faulty(Data):
        def prepare_data(self) -> None:
            if fault == "prepare":
                raise OSError("no space")

        def setup(self, stage: str) -> None:
            if fault == "setup" and rank == 1:
                raise OSError("no file")

        def val_dataloader(self) -> Any:
            return [] if fault == "none" else [torch.ones(1, 1)]

    evaluator = Evaluator({"extra": Faulty(1), "more": Faulty(2)})
    trainer = trainer_on_rank(rank, 2, max_steps=2, callbacks=[evaluator], limit_val_batches=0)
    trainer.fit(Sums(False), DataLoader(torch.ones(8, 1)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "errors"),
    [
        ("prepare", ("OSError: no space", "Preparing the data of Evaluator failed on rank 0 (OSError: no space)")),
        ("setup", ("Loading the data of Evaluator failed on rank 1 (OSError: no file)", "OSError: no file")),
        ("none", ("'extra' has no batch", "'extra' has no batch")),
    ],
)
def test_data_that_fail_on_one_rank_or_on_all(fault: str, errors: tuple[str, str], tmp_path: Path) -> None:
    for each, error in zip(run_ranks(data_on_rank, 2, tmp_path, fault), errors, strict=True):
        assert each.error is not None
        assert error in each.error
        assert each.seconds < BOUND
