"""The largest batch of a run, taken ahead of training where the data knows it; the run is that without it."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_protrain.strategy import plan_session
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.first_batches import Ahead, Tokens
from tests.support.machines import CPU
from tests.support.models import ParityModule, fit, token_batches, zoo
from tests.support.parity import Result, differences, snapshot
from tests.support.trainers import QUIET


class Largest(L.LightningDataModule):
    """Says what its largest batch is, which draws random numbers and leaves traces; changes batches on their way."""

    def __init__(self, largest: Any) -> None:
        super().__init__()
        self.largest = largest
        self.asked: list[int] = []
        self.generator = torch.Generator().manual_seed(1)
        self.is_set_up = False

    def setup(self, stage: str) -> None:
        self.is_set_up = True

    def largest_batch(self) -> Any:
        assert self.is_set_up
        self.asked.append(int(torch.randint(8, (1,)) + torch.randint(8, (1,), generator=self.generator)))
        random.random()
        self.shown = True
        return self.largest

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Tokens(), 4, shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        noise = torch.randint(8, (1,), generator=self.generator)
        return [tokens.add_(noise + len(self.asked)).remainder_(32) for tokens in batch]


def _fit_with(data: Largest, ahead: Ahead, **options: Any) -> Result:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    module = zoo()["reused"]()
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[ahead], **QUIET, **options)
    trainer.fit(module, datamodule=data)
    return Result(tuple(module.losses), snapshot(module))


@pytest.mark.parametrize("known", [True, False])
def test_the_largest_batch_is_taken_where_the_data_knows_it(known: bool) -> None:
    results, seen = [], []
    for take in (False, True):
        largest = torch.arange(96).view(12, 8) % 32
        data, ahead = Largest([largest] if known else None), Ahead(take)
        results.append(_fit_with(data, ahead))
        seen.append(ahead.seen)
        assert data.asked == []
        assert not hasattr(data, "shown")
        assert torch.equal(largest, torch.arange(96).view(12, 8) % 32), "changed in place"
    assert differences(*results) == []
    (tokens,) = ahead.ahead
    if known:
        assert tokens.shape == (12, 8)
        # It has gone through the hook, which knows how often the batch was asked for.
        assert len(set(((tokens - largest) % 32).flatten().tolist())) == 1
    else:
        assert torch.equal(tokens, seen[0][0][0])


def test_the_largest_batch_is_converted_by_the_precision() -> None:
    ahead = Ahead(True)
    _fit_with(Largest([torch.ones(3, 8)]), ahead, precision="64-true", limit_train_batches=1)
    assert ahead.ahead[0].dtype == torch.float64


class Sizes(ParityModule):
    """Has its loader itself, and knows its largest batch."""

    def largest_batch(self) -> Any:
        return [torch.zeros(7, 8, dtype=torch.int64)]

    def train_dataloader(self) -> DataLoader:
        return token_batches()


def test_a_module_may_know_the_largest_batch_of_its_own_loader_and_of_no_other() -> None:
    for options, rows in (({}, 7), ({"train_dataloaders": token_batches()}, 2)):
        ahead, module = Ahead(True), Sizes(zoo()["reused"]().network)
        module.training_step = lambda *arguments: None
        trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=[ahead], **QUIET)
        trainer.fit(module, **options)
        assert ahead.ahead[0].shape == (rows, 8)


def test_without_training_batches_the_data_is_not_asked() -> None:
    ahead, data = Ahead(True), Largest(None)
    data.is_set_up = None
    data.largest_batch = lambda: pytest.fail("asked")
    trainer = L.Trainer(accelerator="cpu", devices=1, limit_train_batches=0, max_epochs=1, callbacks=[ahead], **QUIET)
    trainer.fit(zoo()["reused"](), datamodule=data)
    assert ahead.ahead is None


class Stream(IterableDataset):
    """Samples in order, of a source that may be read once."""

    def __init__(self) -> None:
        self.samples = iter(token_batches().dataset.tensors[0])

    def __iter__(self) -> Any:
        return ((tokens,) for tokens in self.samples)


class StreamOfKnownSize(Stream):
    def largest_batch(self) -> list[Tensor]:
        return [torch.zeros(2, 8, dtype=torch.int64)]


STREAMS: dict[str, Any] = {
    "iterable data set": lambda: DataLoader(Stream(), 2),
    "generator": lambda: (batch for batch in token_batches()),
    "one of two": lambda: [token_batches(), DataLoader(Stream(), 2)],
}


def budget_of(loader: Any, module: ParityModule | None = None, **options: Any) -> tuple[ProTrainStrategy, ParityModule]:
    """A fit under a budget that streams."""
    module = module or zoo()["reused"]()
    module.train_dataloader = lambda: loader
    strategy = ProTrainStrategy(device_memory=34_000, hardware=CPU, monitor=False)
    fit(module, strategy=strategy, **options)
    return strategy, module


@pytest.mark.parametrize("name", STREAMS)
def test_a_budget_is_refused_where_no_batch_is_known(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"device_memory=33\.20 KiB.* No batch can be taken.* a method `largest_batch`"
    ):
        budget_of(STREAMS[name]())


def test_an_error_of_the_step_is_the_error_of_the_run() -> None:
    module = zoo()["reused"]()
    module.logits = lambda tokens, index: module.network(tokens) * module.scale  # which a hook sets later
    with pytest.raises(AttributeError, match="no attribute 'scale'") as raised:
        budget_of(token_batches(), module)
    noted = " ".join(raised.value.__notes__)
    assert "ran for its shapes, before training and its hooks have begun" in noted
    assert "device_memory=33.20 KiB (34000 bytes) needs these shapes. If the step is right once training has" in noted
    assert 'set plan="offload" or "resident"' in noted


SKIPS = {
    "the first": (lambda tokens, index: index == 0, True),
    "by its tokens": (lambda tokens, index: torch.equal(tokens, next(iter(token_batches()))[0]), True),
    "all": (lambda tokens, index: True, False),
}


class Skipping(ParityModule):
    """Returns None for some batches, which Lightning skips."""

    def __init__(self, name: str) -> None:
        super().__init__(zoo()["reused"]().network)
        self.skips = SKIPS[name][0]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return None if self.skips(batch[0], batch_idx) else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", SKIPS)
def test_a_step_that_skips_batches_trains_under_a_budget(name: str) -> None:
    plain = Skipping(name)
    fit(plain)
    strategy, module = budget_of(token_batches(), Skipping(name))
    assert strategy.plan is not None
    is_known = SKIPS[name][1]
    assert (strategy.plan.prediction is not None) == is_known
    assert bool(module.losses) == is_known
    results = [Result(tuple(each.losses), snapshot(each)) for each in (plain, module)]
    assert differences(*results) == []


def test_a_step_without_gradients_ends_like_that_of_plain_lightning() -> None:
    module = zoo()["reused"]()
    module.logits = lambda tokens, index: module.network(tokens).detach()
    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
        budget_of(token_batches(), module)


class Elementwise(ParityModule):
    """Has complex weights, and no matrix products."""

    def __init__(self) -> None:
        super().__init__(nn.ParameterList(nn.Parameter(torch.linspace(0, 1, 512) * (1 + 2j)) for _ in range(3)))

    def loss(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return tokens.float().mean() * sum((weight * 1j).abs().pow(2).sum() for weight in self.network)


def test_a_model_without_matrix_products_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[torch.dtype]] = []
    monkeypatch.setattr(plan_session, "cached_profile", lambda _, dtypes, *__: measured.append(dtypes) or CPU)
    plain, module = Elementwise(), Elementwise()
    fit(plain)
    strategy = ProTrainStrategy(device_memory=40_000, monitor=False)
    fit(module, strategy=strategy)
    assert strategy.plan is not None
    assert strategy.plan.num_offloaded_chunks
    assert measured == [[torch.float32]]
    assert differences(*(Result(tuple(each.losses), snapshot(each)) for each in (plain, module))) == []


@pytest.mark.parametrize("given", ["to fit", "by the module"])
def test_a_stream_that_knows_its_largest_batch_is_planned_and_trained_whole(given: str) -> None:
    plain = zoo()["reused"]()
    plain.train_dataloader = lambda: DataLoader(Stream(), 2)
    fit(plain)
    loader, module = DataLoader(StreamOfKnownSize(), 2), zoo()["reused"]()
    strategy = ProTrainStrategy(device_memory=34_000, hardware=CPU, monitor=False)
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, **QUIET)
    torch.manual_seed(0)
    if given == "to fit":
        trainer.fit(module, loader)
    else:
        module.train_dataloader, module.largest_batch = lambda: loader, loader.dataset.largest_batch
        trainer.fit(module)
    assert strategy.plan is not None
    assert strategy.plan.num_offloaded_chunks
    assert strategy.plan.prediction.samples == 2
    assert differences(*(Result(tuple(each.losses), snapshot(each)) for each in (plain, module))) == []
