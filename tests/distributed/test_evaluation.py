"""Evaluation counts each sample once on any number of ranks, and no rank waits for another."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler
from torchmetrics import MeanMetric

from lightning_protrain import ProTrainFSDP2Strategy, ProTrainStrategy
from lightning_protrain.callbacks.evaluator import Evaluator
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.models.module import CausalLMModule
from tests.data.conftest import conversation
from tests.support.ranks import kill_this_rank, run_ranks, trainer_on_rank, values

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NAMES = {"val_loss", "val_perplexity", "val_accuracy"}


def chats(folder: Path, number: int, batch_size: int) -> ChatDataModule:
    """Conversations of many lengths, about half of them for validation."""
    path = folder / "chats.jsonl"
    lines = [json.dumps(conversation(f"Question {i}?", "word " * (1 + i % 7))) + "\n" for i in range(2 * number)]
    path.write_text("".join(lines))
    return ChatDataModule(
        str(path), vocab_size=280, batch_size=batch_size, val_fraction=0.5, cache_dir=str(folder / "cache")
    )


def module() -> CausalLMModule:
    torch.manual_seed(0)
    return CausalLMModule(config=LLAMA, warmup_steps=0)


CASES = [(number, batch_size) for number in (1, 5, 8) for batch_size in (1, 3, 20)]


def validate_all(rank: int, world_size: int, folder: Path) -> list[dict[str, float]]:
    results = []
    for number, batch_size in CASES:
        data = chats(folder / str(number), number, batch_size)
        results.append(dict(trainer_on_rank(rank, world_size).validate(module(), data, verbose=False)[0]))
    return results


@pytest.fixture(scope="module")
def by_world(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[dict[str, float]]]]:
    """All cases on all ranks, one start for each number of ranks."""
    folder = tmp_path_factory.mktemp("chats")
    for number in {number for number, _ in CASES}:
        (folder / str(number)).mkdir()
        chats(folder / str(number), number, 1).setup("validate")  # the tokenizer is made once, and kept
    return {
        size: values(run_ranks(validate_all, size, tmp_path_factory.mktemp("ranks"), size, folder))
        for size in (1, 2, 3)
    }


@pytest.mark.sample(13)
@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_is_that_of_one_process(
    by_world: dict[int, list[list[dict[str, float]]]], world_size: int, case: int
) -> None:
    same_rows = next(index for index, (number, _) in enumerate(CASES) if number == CASES[case][0])
    alone = by_world[1][0][same_rows]
    assert set(alone) == NAMES
    for results in by_world[world_size]:
        assert results[case] == pytest.approx(alone, rel=1e-6)


class Sharded(CausalLMModule):
    """Its weights are gathered for every forward: all ranks have to run as many."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            assert self.model is not None
            base: Any = self.model
            for layer in [*base.model.layers, base.model, base.lm_head]:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def validate_sharded(rank: int, world_size: int, folder: Path, number: int) -> dict[str, float]:
    torch.manual_seed(0)
    trainer = trainer_on_rank(rank, world_size, ModelParallelStrategy)
    found = trainer.validate(Sharded(config=LLAMA, warmup_steps=0), chats(folder, number, 2), verbose=False)
    return dict(found[0])


@pytest.mark.parametrize("number", [1, 5])
def test_ranks_that_run_out_take_part_in_forwards_that_gather_weights(tmp_path: Path, number: int) -> None:
    """Three ranks: with five rows some have one batch less of their own, with one row two have none."""
    chats(tmp_path, number, 1).setup("validate")
    folders = [tmp_path / name for name in ("alone", "sharded")]
    for folder in folders:
        folder.mkdir()
    (alone,) = values(run_ranks(validate, 1, folders[0], 1, tmp_path, number))
    for each in values(run_ranks(validate_sharded, 3, folders[1], 3, tmp_path, number)):
        assert each == pytest.approx(alone, rel=1e-6)


def validate(rank: int, world_size: int, folder: Path, number: int) -> dict[str, float]:
    return dict(trainer_on_rank(rank, world_size).validate(module(), chats(folder, number, 2), verbose=False)[0])


def fit(rank: int, folder: Path, how: str) -> dict[str, float]:
    data, extra = chats(folder, 5, 2), chats(folder, 5, 3)

    class Failing(CausalLMModule):
        def validation_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
            if rank == 1 and batch_idx == 1 and self.global_step == 2:
                if how == "raises":
                    raise ValueError("a bad row")
                if how == "dies":
                    kill_this_rank()
            super().validation_step(batch, batch_idx)

    torch.manual_seed(0)
    trainer = trainer_on_rank(
        rank,
        2,
        max_steps=3,
        val_check_interval=1,
        callbacks=[Evaluator({"extra": extra}, every_n_steps=1)],
        num_sanity_val_steps=0,
    )
    trainer.fit(Failing(config=LLAMA, warmup_steps=0), data)
    logged = trainer.callback_metrics
    return {name: float(value) for name, value in logged.items() if name.startswith(("val_", "extra_"))}


def test_validation_and_evaluator_agree_in_a_fit_on_two_ranks(tmp_path: Path) -> None:
    chats(tmp_path, 5, 2).setup("fit")
    first, second = values(run_ranks(fit, 2, tmp_path, tmp_path, "goes on"))
    assert first == second
    assert {first[name] for name in NAMES} == {first[name.replace("val", "extra")] for name in NAMES}


@pytest.mark.parametrize(("how", "error"), [("raises", "ValueError: a bad row"), ("dies", "killed")])
def test_a_rank_that_fails_in_validation_ends_the_run(tmp_path: Path, how: str, error: str) -> None:
    chats(tmp_path, 5, 2).setup("fit")
    first, second = run_ranks(fit, 2, tmp_path, tmp_path, how)
    assert second.error == error
    assert first.error is not None
    assert "rank" in first.error
    assert "hangs" not in (first.error, second.error)


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


OWN_CASES = [
    *(Case(size, batch_size) for size in (1, 2, 5, 7) for batch_size in (1, 2, 3)),
    *(Case(7, 2, how) for how in ("sampler", "batch sampler")),
]


def evaluate(rank: int, world_size: int) -> list[Any]:
    """Returns what is logged, what the module holds and how many samples have ended, for each case."""
    found = []
    for case in OWN_CASES:
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
    for index, case in enumerate(OWN_CASES):
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
