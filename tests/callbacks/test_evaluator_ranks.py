"""Evaluations on several ranks: unequal shares, and a failing rank, which ends all ranks soon and is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lightning_protrain import rank_store
from lightning_protrain.callbacks.evaluator import Evaluator
from lightning_protrain.distributed.failures import SharedFailure, broadcast_buffers_once, failing_together
from lightning_protrain.models.metrics import TokenLoss
from tests.callbacks.evaluated import Data, Sums
from tests.support.ranks import Outcome, kill_this_rank, run_ranks, trainer_on_rank, values


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
    assert "hangs" not in (first.error, second.error)


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
        assert each.error != "hangs"


class Failing(LightningModule):
    """Rank 1 raises, or dies, in its second batch of the given stage."""

    def __init__(self, stage: str, how: str, shared: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("buffer", torch.ones(1))  # data parallelism broadcasts it in a forward
        self.metric = TokenLoss()
        self.stage, self.how, self.shared = stage, how, shared

    def configure_callbacks(self) -> list[Callback]:
        return [SharedFailure()] if self.shared else []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.trainer.global_rank == 1 and batch_idx == 1 and self.how != "none":
            if self.how == "dies":
                kill_this_rank()
            raise ValueError("a bad row")
        self.metric.update(batch.sum(), batch.numel())

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.log("loss", self.metric)

    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluate(rank: int, stage: str, how: str, world_size: int, shared: bool = True) -> Any:
    loader: Any = DataLoader(torch.ones(8, 1))
    trainer = trainer_on_rank(rank, world_size, use_distributed_sampler=False, max_steps=2, val_check_interval=1)
    module = Failing(stage, how, shared)
    if stage == "fit":
        trainer.fit(module, loader, loader)
    else:
        getattr(trainer, stage)(module, loader, verbose=False)
    return trainer.callback_metrics["loss"].item()


@pytest.mark.parametrize("stage", ["test", "fit"])
def test_the_others_end_with_the_name_of_the_rank(stage: str, tmp_path: Path) -> None:
    outcomes = run_ranks(evaluate, 3, tmp_path, stage, "raises", 3)
    _all_end(outcomes)
    assert outcomes[1].error == "ValueError: a bad row"
    for each in (outcomes[0], outcomes[2]):
        assert "failed on rank 1 (ValueError: a bad row)" in str(each.error)


def test_a_rank_that_is_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "BOUND", 3.0)
    outcomes = run_ranks(evaluate, 2, tmp_path, "validate", "dies", 2)
    _all_end(outcomes)
    assert outcomes[1].error == "killed"
    assert "rank 1 has not responded for 3 s" in str(outcomes[0].error)


def test_without_the_exchange_other_ranks_do_not_learn_the_error(tmp_path: Path) -> None:
    outcomes = run_ranks(evaluate, 2, tmp_path, "validate", "raises", 2, False)
    assert outcomes[0].error
    assert "bad row" not in outcomes[0].error


def test_nothing_fails_and_nothing_changes(tmp_path: Path) -> None:
    assert values(run_ranks(evaluate, 2, tmp_path, "fit", "none", 2)) == [1.0, 1.0]


class Unreadable(Dataset[Tensor]):
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        if self.fails:
            raise OSError("bad block")
        return torch.ones(1)


def evaluate_unreadable(rank: int, sanity: bool) -> None:
    trainer = trainer_on_rank(
        rank, 2, use_distributed_sampler=False, max_steps=2, val_check_interval=1, num_sanity_val_steps=2 * sanity
    )
    trainer.fit(Failing("fit", "none"), DataLoader(torch.ones(8, 1)), DataLoader(Unreadable(rank == 1)))  # type: ignore[arg-type]


@pytest.mark.parametrize("sanity", [True, False])
def test_a_rank_that_fails_before_its_first_forward(sanity: bool, tmp_path: Path) -> None:
    outcomes = run_ranks(evaluate_unreadable, 2, tmp_path, sanity)
    _all_end(outcomes)
    assert outcomes[1].error == "OSError: bad block"
    assert "failed on rank 1 (OSError: bad block)" in str(outcomes[0].error)


def forwards(rank: int, num: int) -> list[float]:
    """Rank 1 runs no forward without gradients, and has another value in the buffer."""
    module = nn.BatchNorm1d(1, momentum=1.0)
    model = DistributedDataParallel(module)
    model(torch.tensor([[1.0], [3.0]]) * (1 + rank)).sum().backward()
    broadcast_buffers_once(model)
    after = module.running_mean.item()  # type: ignore[operator, union-attr]
    model.eval()
    with torch.no_grad():
        for _ in range(num if rank == 0 else 0):
            model(torch.ones(2, 1))
    model.train()
    model(torch.tensor([[1.0], [3.0]]) * (1 + rank)).sum().backward()
    model(torch.ones(2, 1)).sum().backward()
    return [after, float(module.running_mean.item())]  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("num", [0, 1, 3])
def test_buffers_are_broadcast_once_whoever_runs_a_forward(num: int, tmp_path: Path) -> None:
    assert values(run_ranks(forwards, 2, tmp_path, num)) == [[2.0, 1.0], [2.0, 1.0]]


def alone_and_failing(rank: int) -> None:
    if rank == 1:
        kill_this_rank()
    with failing_together("Saving"):
        raise OSError("disk 0")


def test_the_own_error_is_seen_even_if_nobody_is_left_to_tell(tmp_path: Path) -> None:
    assert run_ranks(alone_and_failing, 2, tmp_path)[0].error == "OSError: disk 0"


def together(rank: int, failing: list[int]) -> int:
    with failing_together("Saving"):
        if rank in failing:
            raise OSError(f"disk {rank}")
    return rank


@pytest.mark.parametrize("failing", [[], [1], [0, 1]])
def test_failing_together(failing: list[int], tmp_path: Path) -> None:
    errors = [each.error for each in run_ranks(together, 2, tmp_path, failing)]
    message = "FailedElsewhere: Saving failed on rank 1 (OSError: disk 1); rank 0 stops with it."
    assert (
        errors
        == {0: [None, None], 1: [message, "OSError: disk 1"], 2: ["OSError: disk 0", "OSError: disk 1"]}[len(failing)]
    )


def _all_end(outcomes: list[Outcome]) -> None:
    assert all(each.error not in (None, "hangs") for each in outcomes)
