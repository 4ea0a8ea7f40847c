"""Evaluation of a user's own data counts each sample once on any number of ranks, and no rank waits for another."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler
from torchmetrics import MeanMetric

from lightning_protrain import ProTrainFSDP2Strategy, ProTrainStrategy
from tests.support.ranks import run_ranks, trainer_on_rank, values


class Squares(Dataset[Tensor]):
    """Sample number i is i * i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index * index)])


class Stream(IterableDataset[Tensor]):
    def __init__(self, first: int, last: int) -> None:
        self.samples = range(first, last)

    def __iter__(self) -> Any:
        return (torch.tensor([float(index * index)]) for index in self.samples)


class Batches(BatchSampler):
    """Lightning takes a plain one for batches of one sample."""


class Mean(L.LightningModule):
    """Says the mean of all samples in every way that users have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.metric = MeanMetric()
        self.seen: list[float] = []
        self.num_ended = 0

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).sum() * 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        values = self.layer(batch)
        self.metric.update(values)
        self.log("metric", self.metric, on_epoch=True)
        self.log("mean", values.mean(), on_epoch=True, on_step=True, sync_dist=True)
        self.log("sum", values.sum(), sync_dist=True, reduce_fx="sum")
        self.log("max", values.max(), sync_dist=True, reduce_fx="max")
        self.seen += values.flatten().tolist()
        return values

    test_step = validation_step

    def on_validation_batch_end(self, outputs: Tensor, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.num_ended += len(batch)

    on_test_batch_end = on_validation_batch_end

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch)


class Case(NamedTuple):
    size: int
    batch_size: int
    how: str = ""


def loader(case: Case, rank: int, world_size: int) -> DataLoader[Any]:
    data = Squares(case.size)
    if case.how == "sampler":
        sampler = DistributedSampler(data, world_size, rank, shuffle=True, seed=1) if world_size > 1 else None
        return DataLoader(data, case.batch_size, sampler=sampler)
    if case.how == "batch sampler":
        return DataLoader(data, batch_sampler=Batches(SequentialSampler(data), case.batch_size, drop_last=False))
    return DataLoader(data, case.batch_size)


CASES = [
    *(Case(size, batch_size) for size in (1, 2, 5, 7) for batch_size in (1, 2, 3)),
    *(Case(7, 2, how) for how in ("sampler", "batch sampler")),
]


def evaluate(rank: int, world_size: int) -> list[Any]:
    """Returns what is logged, what the module holds and how many samples have ended, for each case."""
    found = []
    for case in CASES:
        module = Mean()
        trainer = trainer_on_rank(rank, world_size, kind=lambda **process: ProTrainStrategy(monitor=False, **process))
        run = trainer.test if case.size == 5 else trainer.validate
        (logged,) = run(module, loader(case, rank, world_size), verbose=False)
        found.append((dict(logged), sorted(module.seen), module.num_ended))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_sample_counts_once_on_any_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    alone = evaluate(0, 1)
    ranks = values(run_ranks(evaluate, world_size, tmp_path, world_size))
    for index, case in enumerate(CASES):
        logged, seen, num_ended = alone[index]
        assert len(seen) == num_ended == case.size
        for rank in ranks:
            assert rank[index][0] == pytest.approx(logged), case
        assert sorted(chain.from_iterable(rank[index][1] for rank in ranks)) == seen, case
        assert sum(rank[index][2] for rank in ranks) == case.size, case


def validate_in_fit(rank: int, world_size: int) -> list[float]:
    """Returns the mean of two loaders after a fit that validates before, within and after its epochs."""
    module = Mean()
    train = DataLoader(Squares(8), 2)
    validation = [loader(Case(size, 2), rank, world_size) for size in (7, 5)]
    trainer = trainer_on_rank(
        rank,
        world_size,
        kind=lambda **process: ProTrainStrategy(monitor=False, **process),
        max_epochs=2,
        val_check_interval=0.5,
    )
    trainer.fit(module, train, validation)
    return [float(trainer.callback_metrics[f"mean_epoch/dataloader_idx_{index}"]) for index in range(2)]


def test_validations_of_a_fit_count_each_sample_of_each_loader_once(tmp_path: Path) -> None:
    for found in values(run_ranks(validate_in_fit, 2, tmp_path, 2)):
        assert found == pytest.approx([91 / 7, 30 / 5])


def evaluate_together(rank: int, how: str) -> tuple[dict[str, float], list[float]]:
    """Returns what is logged of all 9 samples, and what is predicted of them, where all ranks make each forward."""
    parts = [(0, 6), (6, 7), (7, 9)]
    strategy: Any = ProTrainFSDP2Strategy
    module = Mean()
    trainer = trainer_on_rank(rank, 3, kind=lambda **process: strategy(policy="size", min_num_params=1, **process))
    sets: list[Dataset[Any]] = [Stream(*parts[rank]) if how == "stream" else Squares(9)]
    if how == "own shares":
        sets = [torch.utils.data.Subset(sets[0], range(*parts[rank]))]
    elif how == "two loaders":
        sets = [torch.utils.data.Subset(Squares(9), range(*parts[each])) for each in (rank, (rank + 1) % 3)]
    loaders = [DataLoader(each, 2) for each in sets]
    if how != "dealt out":
        trainer._accelerator_connector.use_distributed_sampler = False
    logged = [dict(each) for each in trainer.validate(module, loaders, verbose=False)]
    predicted = trainer.predict(module, loaders[0])
    return logged, torch.cat(predicted).flatten().tolist()


@pytest.mark.parametrize("how", ["dealt out", "own shares", "stream", "two loaders"])
def test_ranks_that_run_out_go_on_without_counting_where_forwards_are_collective(how: str, tmp_path: Path) -> None:
    found = values(run_ranks(evaluate_together, 3, tmp_path, how))
    for logged, _ in found:
        for each in logged:
            (mean,) = (value for name, value in each.items() if name.startswith("mean_epoch"))
            (highest,) = (value for name, value in each.items() if name.startswith("max"))
            assert mean == pytest.approx(sum(i * i for i in range(9)) / 9)
            assert highest == 64
    assert sorted(chain.from_iterable(predicted for _, predicted in found)) == [i * i for i in range(9)]
