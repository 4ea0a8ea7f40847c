"""A run on any loader that was interrupted after any step ends with the very bits of one that was not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.loaders import ResumableLoader, ResumableSource
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.inspection import inspect
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.callbacks.stand_ins import chat_data
from tests.support.noisy_runs import EPOCHS, _differences, _unexplained
from tests.support.ranks import run_ranks, trainer_on_rank, values
from tests.support.recorded_runs import Recorded, Samples
from tests.support.trainers import SILENT


class Stateful(list):
    def state_dict(self) -> dict[str, int]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


class Hundred(IterableDataset):
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
        (Stateful([1]), {}, "stateful"),
        (Stateful([1]), {"data": Saves()}, "stateful"),
        ([Stateful([1]), PLAIN], {}, "nowhere"),
        (DataLoader(Hundred()), {}, "nowhere"),
    ],
)
def test_what_is_done_depends_on_the_loaders(loaders: Any, options: dict[str, Any], kind: str) -> None:
    trainer = _trainer(data=options.get("data"))
    assert ResumableLoader(loaders, trainer, None).kind == kind


def _numbers(loader: ResumableLoader, count: int) -> list[int]:
    iter(loader)
    return [int(next(loader)[0]) for _ in range(count)]


def test_a_sampler_of_epochs_is_in_the_right_one() -> None:
    class Sampler(list):
        def set_epoch(self, epoch: int) -> None:
            self[:] = [epoch, epoch + 1, epoch + 2]

    saved = ResumableLoader(DataLoader(range(20), sampler=Sampler([0, 1, 2])), _trainer(), None)
    _numbers(saved, 1)
    resumed = ResumableLoader(DataLoader(range(20), sampler=Sampler([0, 1, 2])), _trainer(1, 7), saved.place())
    assert _numbers(resumed, 2) == [8, 9]


def test_positions_are_those_of_this_rank_and_not_what_lightning_has_of_rank_0() -> None:
    loader = Stateful([1, 2])
    resumed = ResumableLoader(loader, _trainer(1), {"begun": [], "generators": [], "positions": [{"x": 5}]})
    resumed._load_state_dicts([{"x": 9}])
    _numbers(resumed, 1)
    assert loader.loaded == {"x": 5}
    stock = ResumableLoader(loader, _trainer(1), None)
    stock._load_state_dicts([{"x": 9}])
    assert loader.loaded == {"x": 9}


def test_nothing_is_made_before_the_first_batch() -> None:
    class Counted(list):
        begun = 0

        def __iter__(self) -> Any:
            self.begun += 1
            return super().__iter__()

    loader = Counted([torch.tensor(3)] * 5)
    resumed = ResumableLoader(loader, _trainer(2), {"begun": [], "generators": [], "positions": []})
    iter(resumed)
    assert (len(resumed), loader.begun) == (5, 0)


def test_at_the_end_of_an_epoch_others_are_told_no_position() -> None:
    trainer = _trainer(2)
    loader = ResumableLoader(Stateful([1, 2]), trainer, None)
    assert loader._state_dicts() == [{"x": 1}]
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
    assert loader._state_dicts() == []


def test_a_source_gives_what_the_user_has_given_and_resumes_once() -> None:
    source = ResumableSource(_DataLoaderSource({"a": PLAIN}, "train_dataloader"), _trainer())
    source.saved = {"begun": [], "generators": [], "positions": []}
    first = source.dataloader()
    assert first.iterables == {"a": PLAIN}
    assert (first._saved is not None, source.dataloader()._saved, source.made is first) == (True, None, False)
    source.instance = CombinedLoader([PLAIN], "min_size")
    assert source.dataloader()._mode == "min_size"


BATCHES, BATCH_SIZE = 10, 2
# What a run is made of: accumulation, worker processes, kind of loader.
Case = tuple[int, int, str]
CASES: list[Case] = [(1, 0, "plain"), (1, 2, "stateful"), (4, 0, "stateful"), (4, 2, "plain")]


def _loader(kind: str, workers: int, ranks: int = 1) -> Any:
    count = BATCHES * BATCH_SIZE * ranks
    given: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": workers}
    if kind == "stateful":
        stateful = pytest.importorskip("torchdata.stateful_dataloader")
        # Worker processes begin with new random numbers: a position says nothing of them.
        return stateful.StatefulDataLoader(Samples(count, noisy=workers == 0), shuffle=True, **given)
    if kind == "own generator":
        given["generator"] = torch.Generator().manual_seed(99)
    if kind == "two":
        return {"a": DataLoader(Samples(count), shuffle=True, **given), "b": DataLoader(Samples(6), shuffle=True)}
    return DataLoader(Samples(count), shuffle=kind != "in order", **given)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def _run(
    root: Path,
    case: Case,
    path: Path | str | None = None,
    every: int = 1,
    *,
    ranks: int = 1,
    rank: int = 0,
    **more: Any,
) -> tuple[Recorded, dict[str, Any]]:
    """Train to the end, and return the module and the last checkpoint."""
    accumulate, workers, kind = case
    of_saver = {name: more.pop(name) for name in ("allow_drift", "weights_and_counters_only") if name in more}
    saver = ProTrainCheckpoint(root, every_n_train_steps=every, save_top_k=-1, **of_saver)
    options = {"accumulate_grad_batches": accumulate, "callbacks": [saver], "max_epochs": EPOCHS, **SILENT, **more}
    module, loader = options.pop("module", None) or Recorded(), options.pop("loader", None)
    data = options.pop("data", None)
    if ranks == 1:
        trainer = L.Trainer(accelerator="cpu", devices=1, **options)
    else:
        trainer = trainer_on_rank(rank, ranks, **{**options, "enable_checkpointing": True})
    _seed(rank + (1 if path is None else 12345))
    loader = None if data else _loader(kind, workers, ranks) if loader is None else loader
    trainer.fit(module, loader, datamodule=data, ckpt_path=path)
    last = ProTrainCheckpointIO().load_checkpoint(saver.last_model_path) if saver.last_model_path else {}
    return module, last


def _resumes(root: Path, case: Case, cuts: Sequence[int] | None = None, **options: Any) -> None:
    module, expected = _run(root / "whole", case, **options)
    steps = [each.manifest.step for each in find_checkpoints(root / "whole").found]
    assert steps == list(range(steps[0], 0, -1))
    for each in find_checkpoints(root / "whole").found[1:]:
        step = each.manifest.step
        if cuts is None or step in cuts:
            resumed, last = _run(root / str(step), case, each.path, every=steps[0], **options)
            assert resumed.given == module.given[-len(resumed.given) :], step
            assert len(resumed.given) == len(module.given) - module.given.index(resumed.given[0]), step
            assert resumed.losses == module.losses[-len(resumed.losses) :], step
            assert _unexplained(last, expected) == [], step


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_resumed_from_some_steps_ends_with_the_same_bits(tmp_path: Path, case: Case) -> None:
    # In the first epoch, at its end, in the second epoch.
    cuts = (3, 10, 17) if case[0] == 1 else (2, 3, 5)
    _resumes(tmp_path, case, cuts if case[1] == 0 else cuts[1:])


def test_a_checkpoint_of_the_first_format_goes_on_where_it_was(tmp_path: Path) -> None:
    # Saved after step 3 of this run by the version before format 2, on a branch of its own.
    with ZipFile(Path(__file__).parents[1] / "checkpoint" / "format_1.zip") as archive:
        archive.extractall(tmp_path)
    resumed, last = _run(tmp_path, (1, 0, "plain"), "last", every=20)
    assert [batch[0] for batch in resumed.given] == list(range(3, 20))
    assert resumed.given[0] == pytest.approx([3, 8.54710865020752, 7.781067848205566])
    assert last["global_step"] == 20
    assert inspect(tmp_path, check=True)[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", [(1, 2, "plain"), (1, 0, "stateful"), (4, 0, "plain"), (4, 2, "stateful")], ids=str)
def test_a_run_resumed_from_every_step_ends_with_the_same_bits(tmp_path: Path, case: Case) -> None:
    _resumes(tmp_path, case)


def _run_rank(rank: int, root: Path, case: Case, path: Any, every: int) -> tuple:
    module, _ = _run(root, case, path, every, ranks=2, rank=rank)
    # The process ends right here: nothing that shares memory may be handed out.
    return module.given, module.losses, [value.tolist() for value in module.state_dict().values()]


def _resumes_on_two_ranks(folder: Path, case: Case, cuts: Sequence[int] | None = None) -> None:
    def run(name: str, path: Path | None, every: int) -> list:
        (folder / f"meet{name}").mkdir()
        return values(run_ranks(_run_rank, 2, folder / f"meet{name}", folder / name, case, path, every))

    whole = run("whole", None, 1)
    assert whole[0][0][0] != whole[1][0][0]
    found = find_checkpoints(folder / "whole").found
    for each in found[1:]:
        step = each.manifest.step
        if cuts is None or step in cuts:
            resumed = run(str(step), each.path, len(found))
            for (given, losses, weights), expected in zip(resumed, whole, strict=True):
                assert 0 < len(given) < 2 * BATCHES
                assert given == expected[0][-len(given) :], step
                assert losses == expected[1][-len(given) :], step
                assert weights == expected[2], step


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", [(1, 0, "plain"), (4, 2, "plain"), (1, 0, "stateful")], ids=str)
def test_two_ranks_end_with_the_same_bits(tmp_path: Path, case: Case) -> None:
    _resumes_on_two_ranks(tmp_path, case, (4, 13) if case[0] == 1 else (4,))


@pytest.mark.slow
@pytest.mark.parametrize("case", [(1, 2, "stateful"), (4, 0, "plain")], ids=str)
def test_two_ranks_end_with_the_same_bits_from_every_step(tmp_path: Path, case: Case) -> None:
    _resumes_on_two_ranks(tmp_path, case)


@pytest.mark.parametrize("kind", ["in order", "own generator", "two"])
def test_whatever_makes_the_order(tmp_path: Path, kind: str) -> None:
    _resumes(tmp_path, (1, 0, kind), (4, 10, 16))


def test_an_evaluation_in_between_changes_nothing(tmp_path: Path) -> None:
    class Validated(Recorded):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.network(batch).mean() + torch.rand(1))

        def val_dataloader(self) -> DataLoader:
            return DataLoader(Samples(4), batch_size=2)

    def run(name: str, path: Path | None, every: int) -> tuple[Recorded, dict[str, Any]]:
        more = {"module": Validated(), "val_check_interval": 4, "num_sanity_val_steps": 1}
        return _run(tmp_path / name, (1, 0, "plain"), path, every, **more)

    module, expected = run("whole", None, 1)
    for step in (4, 6, 10, 14):
        path = next(each.path for each in find_checkpoints(tmp_path / "whole").found if each.manifest.step == step)
        resumed, last = run(str(step), path, 20)
        assert resumed.given == module.given[step:]
        assert _differences(last["state_dict"], expected["state_dict"]) == []


def test_a_schedule_that_asks_for_the_number_of_steps_changes_nothing(tmp_path: Path) -> None:
    class Asks(Recorded):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            total = int(self.trainer.estimated_stepping_batches)  # Makes the loader, long before it is time.
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total)}]

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return _loader("stateful", 0)

    for kind in ("plain", "stateful"):
        options = {"data": Data() if kind == "stateful" else None}
        whole, expected = _run(tmp_path / kind, (1, 0, kind), module=Asks(), **options)
        for step in (3, 10, 13):
            path = next(each.path for each in find_checkpoints(tmp_path / kind).found if each.manifest.step == step)
            options = {"data": Data() if kind == "stateful" else None}
            resumed, last = _run(tmp_path / f"{kind}{step}", (1, 0, kind), path, 20, module=Asks(), **options)
            assert resumed.given == whole.given[step:]
            assert _differences(last["state_dict"], expected["state_dict"]) == []


def test_without_a_position_a_resumed_run_sees_other_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = _run(tmp_path / "whole", (1, 0, "plain"))
    monkeypatch.setattr(ResumableLoader, "__iter__", CombinedLoader.__iter__)
    monkeypatch.setattr(ResumableLoader, "__next__", CombinedLoader.__next__)
    path = find_checkpoints(tmp_path / "whole").found[16].path
    resumed, _ = _run(tmp_path / "resumed", (1, 0, "plain"), path, 20)
    assert resumed.given != module.given[4:]


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield torch.rand(4)


def _stream() -> DataLoader:
    return DataLoader(Endless(), batch_size=2)


def test_endless_data_without_a_position_is_refused_in_the_middle_of_it(tmp_path: Path) -> None:
    _run(tmp_path / "a", (1, 0, "endless"), loader=_stream(), max_steps=3, max_epochs=-1)
    path = find_checkpoints(tmp_path / "a").found[0].path
    module = Recorded()
    with pytest.raises(ValueError, match=r"saved after batch 3 of an epoch.*neither a length.*nor a state"):
        _run(tmp_path / "b", (1, 0, "endless"), path, loader=_stream(), max_steps=5, max_epochs=-1, module=module)
    assert module.given == []
    anew, _ = _run(
        tmp_path / "b",
        (1, 0, "endless"),
        path,
        loader=_stream(),
        max_steps=5,
        max_epochs=-1,
        weights_and_counters_only=True,
    )
    assert len(anew.given) == 2


def test_data_that_is_limited_has_a_length(tmp_path: Path) -> None:
    options = {"limit_train_batches": 10, "max_epochs": 2}
    whole, expected = _run(tmp_path / "a", (1, 0, "endless"), loader=_stream(), **options)
    path = find_checkpoints(tmp_path / "a").found[-4].path
    resumed, last = _run(tmp_path / "b", (1, 0, "endless"), path, 20, loader=_stream(), **options)
    assert resumed.given == whole.given[4:]
    assert _unexplained(last, expected) == []


class Unsized:
    """An iterable of which nothing is known."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.rand(2, 4) for _ in range(self.count))


class Sized(Unsized):
    """An iterable of which the length is all that is known."""

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize(
    ("before", "now", "step", "options", "message"),
    [
        (Sized(10), Sized(6), 8, {}, r"data \[0\]\.batches: saved 10, now 6"),
        (Sized(10), Sized(11), 4, {}, r"data \[0\]\.batches: saved 10, now 11"),
        (Sized(10), Sized(10), 8, {"limit_train_batches": 7}, "after batch 8 of an epoch.*run ends after 7"),
        (
            DataLoader(Samples(19), batch_size=2),
            DataLoader(Samples(19), batch_size=2, drop_last=True),
            4,
            {},
            "after batch 4 of an epoch of 10 batches, and the data of this run has 9",
        ),
        (Unsized(10), Unsized(5), 8, {"limit_train_batches": 10}, "after batch 8 of this epoch.*ends after 5"),
    ],
    ids=["shorter", "longer", "limited", "drop_last", "without a length"],
)
def test_data_of_another_length_is_refused_with_both_numbers(
    tmp_path: Path, before: Any, now: Any, step: int, options: dict[str, Any], message: str
) -> None:
    limits = {"limit_train_batches": 10}
    _run(tmp_path / "a", (1, 0, ""), loader=before, max_steps=step, **limits)
    module = Recorded()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        _run(tmp_path / "b", (1, 0, ""), tmp_path / "a" / f"epoch=0-step={step}.ckpt", loader=now, module=module,
             **{**limits, **options})  # fmt: skip
    assert module.given == []


def test_at_the_end_of_training_no_batch_is_drawn(tmp_path: Path) -> None:
    class Counting(Samples):
        read = 0

        def __getitem__(self, index: int) -> Tensor:
            Counting.read += 1
            return super().__getitem__(index)

    loader = DataLoader(Counting(20), batch_size=2)
    _run(tmp_path, (1, 0, "counting"), loader=loader, max_steps=5)
    assert Counting.read == 10
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    _run(tmp_path, (1, 0, "counting"), "last", loader=loader, max_steps=5)
    assert Counting.read == 10
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


class Reads(L.LightningModule):
    """A module that trains on conversations, and records a sum of the token ids of each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = nn.Sequential(nn.Embedding(300, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.given: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.given.append(int(batch["input_ids"].sum()))
        return self.network(batch["input_ids"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_our_own_data_goes_on_where_it_was(tmp_path: Path) -> None:
    def run(name: str, path: Path | None) -> tuple[Any, dict[str, Any]]:
        strategy = ProTrainStrategy(plan="offload", blocks=[nn.Linear, nn.Embedding])
        data = chat_data(tmp_path)
        return _run(tmp_path / name, (2, 0, "ours"), path, 1, module=Reads(), data=data, strategy=strategy)

    module, expected = run("whole", None)
    count = len(module.given)
    for found in find_checkpoints(tmp_path / "whole").found[1:]:
        trained = ProTrainCheckpointIO().load_checkpoint(found.path)["loops"]["fit_loop"]
        total = trained["epoch_loop.batch_progress"]["total"]["ready"]
        resumed, last = run(f"from{found.manifest.step}", found.path)
        assert resumed.given == module.given[total:]
        assert 0 < len(resumed.given) < count
        assert _differences(last["state_dict"], expected["state_dict"]) == []


class Stream(IterableDataset):
    """An iterable dataset without a length, which saves and restores its position."""

    def __init__(self, count: int = 20) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Any:
        while self.at < self.count:
            self.at += 1
            noise = torch.rand(1).item() + random.random()
            yield torch.full((4,), float(self.at)) + noise
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_stream_of_unknown_length_loses_no_batch(
    tmp_path: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ahead:
        monkeypatch.setattr(ResumableLoader, "_has_no_length", False)
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def run(name: str, path: Path | None, every: int) -> tuple[Recorded, dict[str, Any]]:
        loader = stateful.StatefulDataLoader(Stream(), batch_size=2)
        return _run(tmp_path / name, (1, 0, "stream"), path, every, loader=loader)

    module, expected = run("whole", None, 1)
    assert len(module.given) == 2 * BATCHES
    for step in (1, 4, 9, 10, 13) if ahead else (4,):
        path = next(each.path for each in find_checkpoints(tmp_path / "whole").found if each.manifest.step == step)
        resumed, last = run(str(step), path, 20)
        assert (resumed.given == module.given[step:]) is ahead, step
        # With a batch lost there is no last step.
        assert (_differences(last.get("state_dict"), expected["state_dict"]) == []) is ahead, step
