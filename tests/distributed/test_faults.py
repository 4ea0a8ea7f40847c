"""A rank that fails, dies or has nothing left to train: all leave soon, and rank and step are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_protrain import ProTrainStrategy
from tests.support.faulty_ranks import AT_END, GONE, ONGOING, TOKENS, UNEVEN, Faulty
from tests.support.rank_models import Module, strategy_of
from tests.support.ranks import BOUND, kill_this_rank, run_ranks, trainer_on_rank, values


def _train(rank: int, placement: str, fault: str, epochs: int) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Faulty(rank, fault)
    trainer = trainer_on_rank(
        rank, 2, kind=lambda **process: strategy_of(placement, module, **process), max_epochs=epochs
    )
    trainer.fit(module)
    return trainer.global_step


# By fault: epochs, and what is found in the error of either rank.
FAULTS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "raise": (
        1,
        ("Training at step 3 ends on rank 0: rank 1 failed (training at step 3) with ValueError: boom",),
        ("ValueError: boom",),
    ),
    "raise after backward": (
        1,
        ("Training at step ", " ends on rank 0: rank 1 failed (training at step 2) with ValueError: boom"),
        ("ValueError: boom",),
    ),
    "kill": (1, ("Training at step 3 ends on rank 0", GONE), ("killed",)),
    "kill after backward": (1, ("Training at step ", GONE), ("killed",)),
    "skip": (1, ("rank 1 failed (training at step 3) with RuntimeError: Skipping",), ("RuntimeError: Skipping",)),
    "uneven": (1, (UNEVEN,), (UNEVEN,)),
    "stream longer": (1, (AT_END, ONGOING), (AT_END, ONGOING)),
    "stream shorter": (2, ("come apart", "rank 1: the end of epoch 0"), ("rank 0: batch 5 of epoch 0",)),
}


# What is the same code under every placement need not be seen under each of them every time.
QUICK = {"raise", "raise after backward", "kill"}
CASES = [
    pytest.param(placement, fault, marks=() if placement == "shard" or fault in QUICK else (pytest.mark.slow,))
    for placement in ("shard", "replicate", "resident")
    for fault in FAULTS
]


@pytest.mark.parametrize(("placement", "fault"), CASES)
def test_all_ranks_leave_and_name_who_is_missing(placement: str, fault: str, tmp_path: Path) -> None:
    epochs, *expected = FAULTS[fault]
    outcomes = run_ranks(_train, 2, tmp_path, placement, fault, epochs)
    for outcome, texts in zip(outcomes, expected, strict=True):
        assert outcome.seconds < BOUND, outcomes
        for text in texts:
            assert text in str(outcome.error), outcomes


SETTINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sharding: rank 0 has 'shard', rank 1 has 'replicate'", {"sharding": "replicate"}, {}),
    ("reduce_dtype: rank 0 has None, rank 1 has 'bfloat16'", {"reduce_dtype": "bfloat16"}, {}),
    ("adapter_grad_sync: rank 0 has 'auto', rank 1 has 'flat'", {"adapter_grad_sync": "flat"}, {}),
    ("static_graph: rank 0 has False, rank 1 has True", {"static_graph": True}, {}),
    ("ddp_comm_hook: rank 0 has none, rank 1 has one", {"ddp_comm_hook": print}, {}),
    ("gradient_clip_val: rank 0 has None, rank 1 has 0.1", {}, {"gradient_clip_val": 0.1}),
    ("accumulate_grad_batches: rank 0 has 1, rank 1 has 3", {}, {"accumulate_grad_batches": 3}),
]


def _set_up(rank: int) -> list[str]:
    torch.set_num_threads(1)
    said = []
    for _, ours, options in SETTINGS:
        torch.manual_seed(0)
        module = Module("full")
        given = {"sharding": "shard", "plan": "offload", "monitor": False, **(ours if rank else {})}
        trainer = trainer_on_rank(
            rank,
            2,
            kind=lambda given=given, **process: ProTrainStrategy(**given, **process),
            max_steps=1,
            **(options if rank else {}),
        )
        with pytest.raises(ValueError, match="The ranks have different") as raised:
            trainer.fit(module)
        said.append(str(raised.value))
    return said


def test_ranks_with_different_settings_are_refused(tmp_path: Path) -> None:
    for said in values(run_ranks(_set_up, 2, tmp_path)):
        for message, (setting, *_) in zip(said, SETTINGS, strict=True):
            assert f"The ranks have different values of {setting}." in message


class Talkative(Faulty):
    """Ranks gather by themselves what they have measured: at the end of a validation, and of an epoch."""

    def __init__(self, rank: int, fault: str, validates: bool) -> None:
        super().__init__(rank, fault)
        self.validates = validates
        self.mean = MeanMetric()

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(TOKENS[: 4 if self.validates else 0]), batch_size=2)

    def validation_step(self, batch: list[Tensor]) -> None:
        if self.fault == "kill in validation" and self.rank == 1:
            kill_this_rank()
        self.mean.update(Module.training_step(self, batch))
        self.log("mean", self.mean)

    def on_train_epoch_end(self) -> None:
        self.all_gather(torch.ones(1))


def _train_talkative(rank: int, fault: str, validates: bool) -> list[str]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Talkative(rank, fault, validates)
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0}
    trainer = trainer_on_rank(rank, 2, kind=lambda **process: strategy_of("shard", module, **process), **options)
    try:
        trainer.fit(module)
    except RuntimeError as error:
        return [str(error), *getattr(error, "__notes__", [])]
    return []


@pytest.mark.parametrize(("fault", "longer"), [("stream longer", 1), ("stream shorter", 0)])
@pytest.mark.parametrize("validates", [True, False])
def test_ranks_that_gather_behind_their_last_batch_come_apart(
    fault: str, longer: int, validates: bool, tmp_path: Path
) -> None:
    place = "validation after batch 5 of epoch 0" if validates else "the end of epoch 0"
    for outcome in run_ranks(_train_talkative, 2, tmp_path, fault, validates):
        assert outcome.seconds < BOUND
        assert f"rank {longer}: batch 5 of epoch 0" in outcome.value[0]
        assert f"rank {1 - longer}: {place}" in outcome.value[0]


def test_who_is_missing_in_a_collective_of_users_is_noted(tmp_path: Path) -> None:
    first, second = run_ranks(_train_talkative, 2, tmp_path, "kill in validation", True)
    assert first.seconds < BOUND
    assert second.error == "killed"
    assert first.value[1].startswith(f"Training at step 4 ends on rank 0: {GONE}"), first
