"""A rank that fails, dies, or has nothing left to train under FSDP2: all leave soon; rank and batch are named."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain.fsdp2.strategy import ProTrainFSDP2Strategy
from tests.support.faulty_ranks import AT_END, GONE, ONGOING, TOKENS, UNEVEN, Faulty
from tests.support.ranks import run_ranks, trainer_on_rank
from tests.support.terminated_ranks import PLACES, Told

# Blocks are units, so that each batch gathers in its forward and in its backward.
KIND = partial(ProTrainFSDP2Strategy, policy="transformer")


class Sharded(Faulty):
    """A module that can also fail in epoch 1, on rank 1."""

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor | None:  # type: ignore[override]
        if self.rank == 1 and self.fault == "raise in epoch 1" and (self.current_epoch, batch_idx) == (1, 2):
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


def _train(rank: int, fault: str, options: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = trainer_on_rank(rank, 2, KIND, **{"max_epochs": 1, **options})
    trainer.fit(Sharded(rank, fault))
    return trainer.global_step


HERE = "Training at step 3 in batch 3 of epoch 0 ends on rank 0"
BOOM = "rank 1 failed (training at step {} in batch {} of epoch {}) with ValueError: boom"
ACCUMULATES, LIMITED = {"accumulate_grad_batches": 2}, {"limit_train_batches": 100}
CLIPS, TWO = {"gradient_clip_val": 0.1}, {"max_epochs": 2}
# With its last batch a rank steps, while others may add gradients up.
ENDS, GOES_ON = "batch 4 of epoch 0 with a step", "batch 4 of epoch 0 without a step"
# By fault, and a word on options: how it is trained, and what is found in the error of either rank.
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "raise": ({}, (f"FailedElsewhere: {HERE}: {BOOM.format(3, 3, 0)}",), ("ValueError: boom",)),
    "raise in epoch 1": (
        {"max_epochs": 2, "limit_train_batches": 4},
        ("Training at step 6 in batch 2 of epoch 1 ends on rank 0", BOOM.format(6, 2, 1)),
        ("ValueError: boom",),
    ),
    "raise after backward": (
        CLIPS,
        ("FailedElsewhere: Training at step 2 in batch 2 of epoch 0 ends on rank 0", BOOM.format(2, 2, 0)),
        ("ValueError: boom",),
    ),
    "kill": ({}, (f"FailedElsewhere: {HERE}: {GONE}",), ("killed",)),
    "kill after backward": ({}, ("Training at step ", " of epoch 0 ends on rank 0", GONE), ("killed",)),
    "skip": ({}, (HERE, "with RuntimeError: Skipping"), ("RuntimeError: Skipping",)),
    "uneven": ({}, (UNEVEN,), (UNEVEN,)),
    "stream longer": ({}, ("diverged", AT_END, ONGOING), (AT_END, ONGOING)),
    "stream shorter": (TWO, ("diverged", "rank 1: the end of epoch 0"), ("rank 0: batch 5 of epoch 0",)),
    "stream longer, accumulated": (ACCUMULATES, (f"rank 0: {ENDS}, rank 1: {GOES_ON}",), (f"rank 1: {GOES_ON}",)),
    "stream shorter, accumulated": (ACCUMULATES, (f"rank 0: {GOES_ON}, rank 1: {ENDS}",), (f"rank 1: {ENDS}",)),
    "stream longer, limited": (LIMITED, (f"{AT_END}, rank 1: batch 5 of epoch 0 with a step",), (AT_END,)),
    "stream shorter, limited": (LIMITED, ("rank 0: batch 5 of epoch 0 with a step",), ("rank 1: the end of epoch 0",)),
    "raise, accumulated": (ACCUMULATES, ("in batch 3 of epoch 0 ends on rank 0", BOOM.format(1, 3, 0)), ("boom",)),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_leave_and_name_who_is_missing(fault: str, tmp_path: Path) -> None:
    options, *expected = FAULTS[fault]
    outcomes = run_ranks(_train, 2, tmp_path, fault.partition(",")[0], options)
    for outcome, texts in zip(outcomes, expected, strict=True):
        assert outcome.error != "hangs", outcomes
        for text in texts:
            assert text in str(outcome.error), outcomes


class Evaluated(Faulty):
    """A module whose evaluation steps compute the training loss."""

    def validation_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor | None:
        return self.training_step(batch, batch_idx)

    test_step = predict_step = validation_step


def _evaluate(rank: int, how: str) -> None:

    torch.set_num_threads(1)
    for policy in ("transformer", "size", "none"):
        kind = partial(ProTrainFSDP2Strategy, policy=policy)
        trainer = trainer_on_rank(rank, 2, kind, num_sanity_val_steps=0, use_distributed_sampler=False)
        getattr(trainer, how)(Evaluated(0, ""), DataLoader(TensorDataset(TOKENS[: 4 + rank]), batch_size=1))
        assert trainer.state.finished, policy


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
def test_evaluations_of_different_lengths_end_on_all_ranks(how: str, tmp_path: Path) -> None:
    for outcome in run_ranks(_evaluate, 2, tmp_path, how):
        assert outcome.error is None, outcome


def _train_told(rank: int, who: int, place: str) -> Any:
    torch.set_num_threads(1)
    module = Told(rank == who, place)
    options = {"limit_train_batches": 6, "limit_val_batches": 2, "val_check_interval": 3, "max_epochs": 2}
    trainer = trainer_on_rank(rank, 2, KIND, **options)
    try:
        trainer.fit(module)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the test wants to see it)
        return type(error).__name__, module.num_batches
    return "none", module.num_batches


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_to_one_rank_ends_all_before_the_same_batch(place: str, tmp_path: Path) -> None:
    outcomes = run_ranks(_train_told, 2, tmp_path, 1, place)
    batches = {"validation": 3, "last batch": 6}.get(place, 5)
    assert [outcome.value for outcome in outcomes] == [("SIGTERMException", batches)] * 2
    assert "hangs" not in [outcome.error for outcome in outcomes]
