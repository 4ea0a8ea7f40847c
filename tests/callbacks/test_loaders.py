"""Loaders find their place again: which way, and what it takes; whole runs are in test_checkpoint_data.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_protrain.callbacks.checkpoint.loaders import ResumableLoader, ResumableSource


class Stateful(list):
    def state_dict(self) -> dict[str, int]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(100))


class Saves(L.LightningDataModule):
    def state_dict(self) -> dict[str, int]:
        return {"x": 1}


def _trainer(trained: int = 0, epoch: int = 0, data: Any = None) -> Any:
    batches = SimpleNamespace(current=SimpleNamespace(ready=trained), is_last_batch=False)
    epochs = SimpleNamespace(current=SimpleNamespace(processed=epoch))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches), epoch_progress=epochs)
    return SimpleNamespace(fit_loop=loop, datamodule=data, strategy=SimpleNamespace(root_device=torch.device("cpu")))


PLAIN = DataLoader(range(6))


@pytest.mark.parametrize(
    ("loaders", "options", "kind"),
    [
        (PLAIN, {}, "replayed"),
        ([1, 2, 3], {}, "replayed"),
        ({"a": PLAIN, "b": [1]}, {}, "replayed"),
        (PLAIN, {"data": Saves()}, "placed"),
        (PLAIN, {"data": L.LightningDataModule()}, "replayed"),
        (PLAIN, {"data": Saves(), "replay": True}, "replayed"),
        (PLAIN, {"replay": False}, "placed"),
        (Stateful([1]), {}, "stateful"),
        (Stateful([1]), {"data": Saves()}, "stateful"),
        (Stateful([1]), {"replay": True}, "replayed"),
        ([Stateful([1]), PLAIN], {}, "nowhere"),
        (DataLoader(Stream()), {}, "nowhere"),
        (DataLoader(Stream()), {"replay": True}, "nowhere"),
    ],
)
def test_what_is_done_depends_on_the_loaders(loaders: Any, options: dict[str, Any], kind: str) -> None:
    trainer = _trainer(data=options.get("data"))
    assert ResumableLoader(loaders, trainer, None, options.get("replay")).kind == kind


def _numbers(loader: ResumableLoader, count: int) -> list[int]:
    iter(loader)
    return [int(next(loader)[0]) for _ in range(count)]


@pytest.mark.parametrize("trained", [1, 4])
def test_the_rest_of_an_epoch_is_given_with_the_random_numbers_as_they_are(trained: int) -> None:
    torch.manual_seed(1)
    whole = ResumableLoader(DataLoader(range(6), shuffle=True), _trainer(), None, None)
    expected = _numbers(whole, 6)
    torch.manual_seed(2)
    resumed = ResumableLoader(DataLoader(range(6), shuffle=True), _trainer(trained), whole.place(), None)
    before = torch.get_rng_state()
    assert _numbers(resumed, 6 - trained) == expected[trained:]
    assert torch.equal(torch.get_rng_state(), before)
    # What it says of its place then is what the first one would have said.
    assert resumed.place()["begun"] == whole.place()["begun"] or all(
        torch.equal(one["random"]["torch"], other["random"]["torch"])
        for one, other in zip(resumed.place()["begun"], whole.place()["begun"], strict=True)
    )


def test_a_new_epoch_begins_with_the_random_numbers_of_the_moment() -> None:
    saved = ResumableLoader(DataLoader(range(6), shuffle=True), _trainer(), None, None)
    _numbers(saved, 6)
    torch.manual_seed(5)
    expected = _numbers(ResumableLoader(DataLoader(range(6), shuffle=True), _trainer(), None, None), 6)
    resumed = ResumableLoader(DataLoader(range(6), shuffle=True), _trainer(0, 1), saved.place(), None)
    iter(resumed)
    torch.manual_seed(5)
    assert [int(next(resumed)[0]) for _ in range(6)] == expected


def test_a_sampler_of_epochs_is_in_the_right_one() -> None:
    class Sampler(list):
        def set_epoch(self, epoch: int) -> None:
            self[:] = [epoch, epoch + 1, epoch + 2]

    saved = ResumableLoader(DataLoader(range(20), sampler=Sampler([0, 1, 2])), _trainer(), None, None)
    _numbers(saved, 1)
    resumed = ResumableLoader(DataLoader(range(20), sampler=Sampler([0, 1, 2])), _trainer(1, 7), saved.place(), None)
    assert _numbers(resumed, 2) == [8, 9]


def test_positions_are_those_of_this_rank_and_not_what_lightning_has_of_rank_0() -> None:
    loader = Stateful([1, 2])
    resumed = ResumableLoader(loader, _trainer(1), {"begun": [], "generators": [], "positions": [{"x": 5}]}, None)
    resumed._load_state_dicts([{"x": 9}])
    _numbers(resumed, 1)
    assert loader.loaded == {"x": 5}
    stock = ResumableLoader(loader, _trainer(1), None, None)
    stock._load_state_dicts([{"x": 9}])
    assert loader.loaded == {"x": 9}


def test_nothing_is_made_before_the_first_batch() -> None:
    class Counted(list):
        begun = 0

        def __iter__(self) -> Any:
            self.begun += 1
            return super().__iter__()

    loader = Counted([torch.tensor(3)] * 5)
    resumed = ResumableLoader(loader, _trainer(2), {"begun": [], "generators": [], "positions": []}, None)
    iter(resumed)
    assert (len(resumed), loader.begun) == (5, 0)


def test_at_the_end_of_an_epoch_others_are_told_no_position() -> None:
    trainer = _trainer(2)
    loader = ResumableLoader(Stateful([1, 2]), trainer, None, None)
    assert loader._state_dicts() == [{"x": 1}]
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
    assert loader._state_dicts() == []


def test_a_source_gives_what_the_user_has_given_and_resumes_once() -> None:
    source = ResumableSource(_DataLoaderSource({"a": PLAIN}, "train_dataloader"), _trainer(), None)
    source.saved = {"begun": [], "generators": [], "positions": []}
    first = source.dataloader()
    assert first.iterables == {"a": PLAIN}
    assert (first._saved is not None, source.dataloader()._saved, source.made is first) == (True, None, False)
    source.instance = CombinedLoader([PLAIN], "min_size")
    assert source.dataloader()._mode == "min_size"
