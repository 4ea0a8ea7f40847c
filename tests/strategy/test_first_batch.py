"""A batch is taken ahead of training or made for the model; whatever holds a state is as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.profiler.gpu_specs import gpu
from lightning_protrain.strategy.joint_plan import DryRun, Targets
from lightning_protrain.strategy.profile_step import SyntheticData, batch_to_plan_with
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.profiler.models import TEXT
from tests.support import police
from tests.support.first_batches import LENGTH, Ahead, Tokens
from tests.support.machines import CPU, GIB
from tests.support.models import ParityModule, fit, token_batches, variants, zoo
from tests.support.parity import Result, differences, snapshot
from tests.support.trainers import QUIET


class Shuffled:
    """Keeps the order of its only bucket between epochs, and shuffles that in place."""

    def __init__(self, order: Any) -> None:
        self.buckets = [order]
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        (order,) = self.buckets
        for first in range(len(order)):
            second = random.randrange(len(order))
            order[first], order[second] = int(order[second]), int(order[first])
        return iter(order)

    def __len__(self) -> int:
        return LENGTH


def _split() -> DataLoader:
    part, _ = random_split(Tokens(), [20, 8])
    return DataLoader(part, 4, shuffle=True)


def _own_generator() -> DataLoader:
    return DataLoader(Tokens(), 4, shuffle=True, generator=torch.Generator().manual_seed(5))


def _weighted() -> DataLoader:
    sampler = WeightedRandomSampler([1.0, 2.0] * 14, 12, generator=torch.Generator().manual_seed(5))
    return DataLoader(Tokens(), batch_sampler=BatchSampler(sampler, 4, drop_last=False))


def _shuffled(order: Any) -> DataLoader:
    return DataLoader(Tokens(), 4, sampler=Shuffled(order))


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": token_batches,
    "shuffled": lambda: DataLoader(Tokens(), 4, shuffle=True),
    "own generator": _own_generator,
    "weighted": _weighted,
    "list shuffled in place": lambda: _shuffled(list(range(LENGTH))),
    "array shuffled in place": lambda: _shuffled(np.arange(LENGTH)),
    "tensor shuffled in place": lambda: _shuffled(torch.arange(LENGTH)),
    "ranks": lambda: DataLoader(Tokens(), 4, sampler=DistributedSampler(Tokens(), 2, 0)),
    "hook draws": _split,
    "indices": lambda: DataLoader(Tokens(), batch_sampler=[[3, 1], [2, 0]]),
    "combined": lambda: CombinedLoader([DataLoader(Tokens(), 4)], "max_size"),
    "workers": lambda: DataLoader(Tokens(), 4, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(Tokens(), 4, shuffle=True, num_workers=2, persistent_workers=True),
}


class Draws(ParityModule):
    """Its batches are changed by random numbers and a counter on their way."""

    calls = 0

    def __init__(self, network: torch.nn.Module, make: Callable[[], Any]) -> None:
        super().__init__(network)
        self.make = make
        self.made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        return self.make()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls += 1
        return [tokens + self.calls for tokens in (batch[0] if isinstance(batch[0], list) else batch)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [(tokens + torch.randint(3, (1,))) % 32 for tokens in batch]


def _run(make: Callable[[], Any], ahead: Ahead, **options: Any) -> tuple[Result, Draws]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    module = Draws(zoo()["dropout"]().network, make)
    module.logits = lambda tokens, index: module.network(input_ids=tokens, use_cache=False).logits
    fit(module, max_epochs=2, callbacks=[ahead], **options)
    return Result(tuple(module.losses), snapshot(module)), module


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LOADERS)
def test_the_first_batch_and_no_trace(name: str) -> None:
    left_alone, ahead = Ahead(False), Ahead(True)
    processes = police.child_processes()
    plain, _ = _run(LOADERS[name], left_alone)
    found, module = _run(LOADERS[name], ahead)
    assert differences(plain, found) == []
    assert all(torch.equal(one[0], other[0]) for one, other in zip(left_alone.seen, ahead.seen, strict=True))
    assert module.made == 1
    assert module.calls == len(ahead.seen)
    assert torch.equal(ahead.ahead[0], ahead.seen[0][0])
    assert ahead.left == processes


# --- what else a loader may be ----------------------------------------------------------------------------------------
class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor]]:
        yield from ((tokens,) for tokens in token_batches().dataset.tensors[0])


class Stateful(DataLoader):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Iterating(DataLoader):
    def __iter__(self) -> Any:
        return super().__iter__()


class Loop:
    """Gives batches, and is no `DataLoader`."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class Continuing(Sampler):
    """Goes on where it was left."""

    def __init__(self) -> None:
        self.indices = iter(range(8))

    def __iter__(self) -> Iterator[int]:
        return self.indices


UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "iterable": (lambda: DataLoader(Stream(), 2), "Stream is an iterable dataset."),
    "stateful": (lambda: Stateful(token_batches().dataset, 2), "Stateful keeps a state, it has a `state_dict`."),
    "iterates itself": (lambda: Iterating(token_batches().dataset, 2), "Iterating iterates in a way of its own."),
    "no loader": (lambda: Loop(token_batches()), "Loop is no DataLoader."),
    "generator": (lambda: (batch for batch in token_batches()), "generator is no DataLoader."),
    "generator as a sampler": (
        lambda: DataLoader(token_batches().dataset, 2, sampler=(i for i in range(8))),
        "the sampler of DataLoader can be iterated only once.",
    ),
    "sampler that goes on": (
        lambda: DataLoader(token_batches().dataset, batch_sampler=BatchSampler(Continuing(), 2, False)),
        "the sampler of DataLoader can be iterated only once.",
    ),
    "one of two": (
        lambda: CombinedLoader([token_batches(), DataLoader(Stream(), 2)], "max_size"),
        "Stream is an iterable dataset.",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_known_is_left_alone(name: str) -> None:
    make, reason = UNKNOWN[name]
    results = []
    for take in (False, True):
        ahead = Ahead(take)
        results.append(_run(make, ahead)[0])
    assert ahead.refusal == f"No batch can be taken ahead of training: {reason}"
    assert differences(*results) == []


class Limited(L.LightningModule):
    """Is never asked for data."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, index: int) -> None:
        """Nothing to train."""

    def configure_optimizers(self) -> None:
        """Nothing to step."""

    def train_dataloader(self) -> Any:
        pytest.fail("asked for data")


def test_without_training_batches_no_hook_is_called() -> None:
    ahead = Ahead(True)
    fit(Limited(), callbacks=[ahead], limit_train_batches=0)
    assert ahead.ahead is None


def test_data_that_is_given_and_a_data_module() -> None:
    class Data(L.LightningDataModule):
        made = 0

        def train_dataloader(self) -> DataLoader:
            self.made += 1
            return token_batches(seed=5)

    expected = next(iter(token_batches(seed=5)))[0]
    data = Data()
    for options in ({"train_dataloaders": token_batches(seed=5)}, {"datamodule": data}):
        ahead = Ahead(True)
        trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=[ahead], **QUIET)
        trainer.fit(zoo()["reused"](), **options)
        assert torch.equal(ahead.ahead[0], expected)
        assert torch.equal(ahead.seen[0][0], expected)
    assert data.made == 1


def test_samples_that_are_not_batched_and_batches_by_name() -> None:
    tokens = token_batches().dataset.tensors[0]
    single = DataLoader(TensorDataset(tokens), batch_size=None)
    for make in (lambda: single, lambda: {"one": token_batches(), "two": single}):
        ahead = Ahead(True)
        module = zoo()["reused"]()
        module.train_dataloader = make
        module.training_step = lambda *arguments: None
        fit(module, callbacks=[ahead], max_steps=1, limit_train_batches=1)
        assert str(ahead.ahead) == str(ahead.seen[0])


def test_overfitting_takes_samples_in_order() -> None:
    ahead = Ahead(True)
    with pytest.warns(UserWarning, match="requested to overfit"):
        _run(LOADERS["own generator"], ahead, overfit_batches=2)
    assert torch.equal(ahead.ahead[0], ahead.seen[0][0])


# --- hooks ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("take", [False, True])
def test_reloading_asks_as_often_as_ever(take: bool) -> None:
    module = _run(LOADERS["shuffled"], Ahead(take), reload_dataloaders_every_n_epochs=1)[1]
    assert module.made == 2


def test_a_second_fit_asks_again() -> None:
    module = Draws(variants()["val"]().network, token_batches)
    trainer = fit(module, callbacks=[Ahead(True)])
    other = Draws(variants()["val"]().network, token_batches)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(other)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(other, train_dataloaders=token_batches())
    assert (module.made, other.made, trainer.global_step) == (1, 1, 3 * len(token_batches()))


def test_a_fit_after_one_that_was_refused_asks_for_its_own_data() -> None:
    class Refusing(Ahead):
        def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            super().setup(trainer, pl_module, stage)
            if isinstance(pl_module, Refused):
                raise ValueError("refused")

    class Refused(Draws):
        pass

    refused, other = (kind(variants()["val"]().network, token_batches) for kind in (Refused, Draws))
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[Refusing(True)], **QUIET)
    with pytest.raises(ValueError, match="refused"):
        trainer.fit(refused)
    trainer.fit(other)
    assert (refused.made, other.made, len(other.losses)) == (1, 1, len(token_batches()))


class Estimates(Draws):
    """Lightning makes the data when the optimizers are made."""

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_data_that_lightning_has_made_already() -> None:
    class Later(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.ahead = batch_to_plan_with(trainer)

    results = []
    for callbacks in ([], [Later()]):
        module = Estimates(variants()["val"]().network, LOADERS["shuffled"])
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        fit(module, callbacks=callbacks)
        results.append(Result(tuple(module.losses), snapshot(module)))
        assert module.made == 1
    assert differences(*results) == []
    assert callbacks[0].ahead[0].shape == (4, 8)


class Resized(ParityModule):
    """Makes batches of the size that a callback gives it."""

    batch_size = 2

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.arange(96).view(12, 8) % 32), self.batch_size)


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_plan_for_the_first_of_several_batch_sizes_is_said() -> None:
    plan = ProTrainStrategy(device_memory="1GiB", monitor=False)
    finder = BatchSizeFinder(max_trials=1, steps_per_trial=1)
    trainer = L.Trainer(strategy=plan, devices=1, accelerator="cpu", max_steps=1, callbacks=[finder], **QUIET)
    with pytest.warns(UserWarning, match="tries batch sizes under one plan, that of the size it begins with"):
        trainer.fit(Resized(zoo()["reused"]().network))


class Masking:
    """Collates, and replaces random tokens by what it counts."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.counts = {"batches": 0}

    def __call__(self, items: list[Any]) -> list[Tensor]:
        self.counts["batches"] += 1
        tokens = torch.stack([item[0] for item in items])
        masked = torch.rand(tokens.shape, generator=self.generator) < 0.3
        return [tokens.where(~masked, self.counts["batches"])]


class Indexed(Dataset):
    """Counts how often it is read, and opens what it reads at the first item."""

    def __init__(self) -> None:
        self.reads = 0
        self.opened: list[Tensor] | None = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor]:
        self.reads += 1
        self.opened = self.opened or [torch.full((8,), self.reads) for _ in range(LENGTH)]
        return ((self.opened[index] + self.reads) % 32,)


class Warmed(L.LightningDataModule):
    """Changes batches on their way by what it holds, and in place."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make
        self.generator = np.random.default_rng(1)
        self.seen: list[int] = []

    def train_dataloader(self) -> Any:
        return self.make()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append(len(self.seen))
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        for tokens in batch:
            tokens.add_(len(self.seen) + int(self.generator.integers(5))).remainder_(32)
        return batch


HOLDING: dict[str, Callable[[], Any]] = {
    "collate_fn": lambda: DataLoader(Tokens(), 4, collate_fn=Masking()),
    "collate_fn of workers": lambda: DataLoader(Tokens(), 4, collate_fn=Masking(), num_workers=1),
    "dataset": lambda: DataLoader(Indexed(), 4),
    "not batched": lambda: DataLoader([[row.view(1, -1)] for (row,) in token_batches().dataset], batch_size=None),
}


@pytest.mark.parametrize("name", HOLDING)
def test_loaders_and_data_modules_that_hold_a_state(name: str) -> None:
    runs = []
    for take in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        module, ahead = zoo()["reused"](), Ahead(take)
        data = Warmed(HOLDING[name])
        trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[ahead], **QUIET)
        trainer.fit(module, datamodule=data)
        runs.append((Result(tuple(module.losses), snapshot(module)), data.seen, ahead))
    assert differences(runs[0][0], runs[1][0]) == []
    assert runs[0][1] == runs[1][1]
    assert torch.equal(ahead.ahead[0], runs[0][2].seen[0][0]) or "not" in name


MACHINES: Targets = {
    "here": {Sharding.REPLICATE: None},
    "there": {Sharding.REPLICATE: gpu("RTX 3090", 64 * GIB, 8)},
}


def module() -> CausalLMModule:
    return CausalLMModule(config={"model_type": "llama", **TEXT})


def plans(model: L.LightningModule, data: SyntheticData) -> dict[str, Plan | ValueError]:
    strategy = ProTrainStrategy(device_memory="1GiB", hardware=CPU)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=1, **QUIET)
    with strategy.session.planning_only(DryRun(MACHINES)) as answers:
        trainer.fit(model, DataLoader(data, batch_size=None))
    return {name: found[Sharding.REPLICATE] for name, found in answers.items()}


@pytest.mark.parametrize(("sizes", "tokens"), [({}, 1024), ({"batch_size": 3, "length": 7}, 21)])
def test_a_plan_needs_no_data(sizes: dict[str, int], tokens: int) -> None:
    found = plans(module(), SyntheticData(**sizes))
    for plan in found.values():
        assert isinstance(plan, Plan)
        assert plan.prediction is not None
        assert plan.prediction.tokens_per_second == pytest.approx(tokens / plan.prediction.step_seconds)


def test_a_batch_has_samples_and_tokens() -> None:
    for name in ("batch_size", "length"):
        found = plans(module(), SyntheticData(**{name: 0}))
        assert all(f"{name}=0: give a positive integer" in str(answer) for answer in found.values())


class Seen(Exception):
    """Has the batch."""


class Looks(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        raise Seen(batch_to_plan_with(trainer))


def test_the_batch_is_that_of_the_model() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=[Looks()], **QUIET)
    with pytest.raises(Seen) as seen:
        trainer.fit(module(), DataLoader(SyntheticData(2, 9), batch_size=None))
    (batch,) = seen.value.args
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (2, 9)
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_nothing_is_trained_on_it() -> None:
    with pytest.raises(ValueError, match=r"for planning only\. Give data"):
        iter(DataLoader(SyntheticData(), batch_size=None)).__next__()


def test_no_batch_can_be_made_for_just_any_module() -> None:
    found = plans(zoo()["reused"](), SyntheticData())
    assert all("contains no model of transformers" in str(answer) for answer in found.values())
