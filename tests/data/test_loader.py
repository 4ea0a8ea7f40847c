"""The training loader: what it counts, and that a resumed fit sees exactly the batches that were left."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_protrain.data.batches.loader import WEIGHT_UNITS, Batch, Collator, TrainLoader, count_trained
from lightning_protrain.data.batches.pack import Blocks, pack, single_blocks
from lightning_protrain.data.batches.sampler import EpochSampler
from tests.support.encoded_rows import encoded
from tests.support.trainers import SILENT

EXAMPLES = [encoded(3 + index % 11, index) for index in range(43)]
LENGTHS = np.array([len(example) for example in EXAMPLES])


def loader(blocks: Blocks | None = None, batch_size: int = 4, **options: Any) -> TrainLoader:
    sampler = EpochSampler(single_blocks(LENGTHS) if blocks is None else blocks, batch_size, seed=1)
    return TrainLoader(EXAMPLES, sampler, Collator(0, 16), **options)


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(left, right, strict=True)
    )


class Chats(LightningDataModule):
    """Keeps the state of the loader, as a data module does."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.loader: TrainLoader | None = None
        self.state: dict[str, Any] | None = None

    def train_dataloader(self) -> TrainLoader:
        self.loader = loader(trainer=self.trainer, **self.options)
        if self.state is not None:
            self.loader.load_state_dict(self.state)
        return self.loader

    def val_dataloader(self) -> DataLoader[int]:
        return DataLoader([0])

    def state_dict(self) -> dict[str, Any]:
        return {} if self.loader is None else self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class Recorder(LightningModule):
    """Keeps the batches that it was trained on, and the number of optimizer steps before each."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[Batch] = []
        self.steps: list[int] = []
        self.fails_at = fails_at

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if len(self.seen) == self.fails_at:
            raise RuntimeError("broken")
        self.seen.append(batch)
        self.steps.append(self.global_step)
        return self.layer(torch.ones(1))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Makes the training data before the state of the loops is read.
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data: Chats, module: Recorder | None = None, ckpt_path: Path | None = None, **options: Any) -> Recorder:
    module = Recorder() if module is None else module
    options = {"max_epochs": 2, "enable_checkpointing": "callbacks" in options, "limit_val_batches": 0, **options}
    trainer = Trainer(accelerator="cpu", devices=1, **SILENT, **options)
    trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)
    return module


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    train = loader(num_workers=workers)
    assert len(train) == 11
    batches = [list(train) for _ in range(2)]
    assert equal(batches[0], list(loader()))
    assert equal(batches[0], batches[1])
    train.sampler.set_epoch(1)
    assert not equal(batches[0], list(train))
    if workers:
        train._iterator._shutdown_workers()


def test_without_a_trainer_it_goes_on_by_its_state() -> None:
    first, second = loader(), loader()
    whole = list(loader())
    iterator = iter(first)
    assert equal([next(iterator) for _ in range(3)], whole[:3])
    second.load_state_dict(first.state_dict())
    assert equal(list(second), whole[3:])


@pytest.mark.parametrize(("accumulate", "limit"), [(1, 1.0), (3, 1.0), (3, 7), (20, 1.0)])
def test_the_count_is_that_of_the_optimizer_step(accumulate: int, limit: float) -> None:
    run = fit(Chats(), accumulate_grad_batches=accumulate, limit_train_batches=limit)
    for step in set(run.steps):
        window = [batch for batch, at in zip(run.seen, run.steps, strict=True) if at == step]
        assert {int(batch["trained_tokens"]) for batch in window} == {count_trained(window)}
        assert {batch["trained_tokens"].dtype for batch in window} == {torch.int64}
    assert len(run.seen) == 2 * (11 if limit == 1.0 else limit)


def test_the_window_may_change_between_epochs() -> None:
    run = fit(Chats(), callbacks=[GradientAccumulationScheduler({0: 2, 1: 4})])
    counts = [int(batch["trained_tokens"]) for batch in run.seen]
    starts = [index for index, (one, other) in enumerate(pairwise(run.steps), start=1) if one != other]
    assert starts == [2, 4, 6, 8, 10, 11, 15, 19]
    assert counts[11] == count_trained(run.seen[11:15])


def test_weights_are_counted_instead_of_tokens() -> None:
    batch = {
        "labels": torch.tensor([[5, 5, -100, 5]]),
        "loss_weights": torch.tensor([[9, 1, 9, 8]]) * (WEIGHT_UNITS // 4),
    }
    assert count_trained([batch, batch]) == 2 * 2.25 * WEIGHT_UNITS
    with pytest.raises(KeyError):
        count_trained([batch, {"labels": batch["labels"]}])


@pytest.mark.parametrize(
    ("packed", "accumulate", "workers", "workers_after"),
    [(False, 1, 0, 0), (False, 3, 1, 2), (False, 3, 2, 0), (True, 1, 2, 0), (True, 3, 0, 0), (True, 3, 1, 2)],
)
def test_a_resumed_fit_sees_the_batches_that_were_left(
    tmp_path: Path, packed: bool, accumulate: int, workers: int, workers_after: int
) -> None:
    options: dict[str, Any] = {"blocks": pack(LENGTHS, 16) if packed else None, "batch_size": 3 if packed else 4}
    whole = fit(Chats(**options), accumulate_grad_batches=accumulate)
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    data = Chats(**options, num_workers=workers)
    fit(data, accumulate_grad_batches=accumulate, callbacks=[saving])
    files = sorted(tmp_path.glob("*.ckpt"), key=lambda file: int(file.stem.removeprefix("step=")))
    # In the middle of an epoch, then after most of the last one.
    for file in (files[0], files[-1]):
        state = torch.load(file, weights_only=True)
        resumed = Chats(**options, num_workers=workers_after)
        rest = fit(resumed, ckpt_path=file, accumulate_grad_batches=accumulate)
        assert equal(rest.seen, whole.seen[len(whole.seen) - len(rest.seen) :])
        assert rest.steps == whole.steps[len(whole.steps) - len(rest.steps) :]
        assert rest.steps == [step for step in whole.steps if step >= state["global_step"]]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "when",
    [{"every_n_epochs": 1, "save_on_train_epoch_end": True}, {"every_n_epochs": 1}, {"every_n_train_steps": 1}],
)
def test_resuming_after_validation_and_between_epochs(tmp_path: Path, when: dict[str, Any], accumulate: int) -> None:
    validating = {"val_check_interval": 5, "limit_val_batches": 1, "accumulate_grad_batches": accumulate}
    whole = fit(Chats(), **validating)
    saving = ModelCheckpoint(tmp_path, filename="{epoch}-{step}", save_top_k=-1, **when)
    fit(Chats(), **validating, callbacks=[saving])
    files = list(tmp_path.glob("*.ckpt"))
    assert len(files) >= 2
    for file in files:
        batches = torch.load(file, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
        rest = fit(Chats(), ckpt_path=file, **validating)
        left = whole.seen[batches["processed"] :]
        assert len(rest.seen) == len(left)
        for one, other in zip(rest.seen, left, strict=True):
            assert torch.equal(one["input_ids"], other["input_ids"])


def test_a_batch_that_failed_is_seen_again(tmp_path: Path) -> None:
    whole = fit(Chats())
    saving = ModelCheckpoint(tmp_path, save_on_exception=True)
    with pytest.raises(RuntimeError, match="broken"):
        fit(Chats(num_workers=1), Recorder(fails_at=4), callbacks=[saving])
    (file,) = tmp_path.glob("*.ckpt")
    assert equal(fit(Chats(), ckpt_path=file).seen, whole.seen[4:])


def test_in_the_middle_of_a_window_what_is_left_of_it_is_counted(tmp_path: Path) -> None:
    """The gradients of the first batches of the window are gone: no checkpoint holds them."""
    saving = ModelCheckpoint(tmp_path, save_on_exception=True)
    with pytest.raises(RuntimeError, match="broken"):
        fit(Chats(), Recorder(fails_at=4), callbacks=[saving], accumulate_grad_batches=3)
    (file,) = tmp_path.glob("*.ckpt")
    rest = fit(Chats(), ckpt_path=file, accumulate_grad_batches=3)
    assert rest.steps[:6] == [1, 1, 2, 2, 2, 3]
    counts = [int(batch["trained_tokens"]) for batch in rest.seen[:5]]
    assert counts == [count_trained(rest.seen[:2])] * 2 + [count_trained(rest.seen[2:5])] * 3


def test_overfitting_repeats_the_same_batches() -> None:
    with pytest.warns(UserWarning, match="overfit"):
        run = fit(Chats(), overfit_batches=3)
    assert equal(run.seen[:3], run.seen[3:])
