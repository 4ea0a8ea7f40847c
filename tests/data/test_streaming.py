"""Streams: rows are read, encoded and packed while training, and a resumed run continues bit for bit."""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from lightning_protrain import CausalLMModule, ProTrainCheckpoint, ProTrainStrategy
from lightning_protrain.data.batches import stream
from lightning_protrain.data.batches.encode import Encoded
from lightning_protrain.data.batches.loader import Batch, count_trained
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.data.sources import load
from lightning_protrain.data.sources.spec import DatasetSpec
from lightning_protrain.data.sources.tables import ArrowShard, first_rows, open_shard, open_table
from tests.data.chat_runs import Recorder, _trainer
from tests.data.conftest import conversation
from tests.support.machines import CPU
from tests.support.ranks import quiet_trainer, run_ranks, trainer_on_rank, values
from tests.support.tiny_networks import tiny_config

SIZES = [13, 7, 19, 1]
NUM_ROWS = sum(SIZES)
IMAGE = {
    "messages": [
        {"role": "user", "content": [{"type": "image", "path": "a.png"}]},
        {"role": "assistant", "content": "A"},
    ]
}
UNTRAINED = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "train": False}]}
SAVERS = [ModelCheckpoint, ProTrainCheckpoint]


@pytest.fixture(scope="session")
def saved_tokenizer(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WINDOW_ROWS", 11)
    monkeypatch.setattr(load, "FIRST_ROWS", 5)


def rows_from(first: int, size: int) -> list[Any]:
    """Return rows with consecutive numbers and various lengths."""
    return [conversation(f"What is {i}?", "It is " + "so " * (i % 7) + ".") for i in range(first, first + size)]


def write(folder: Path, sizes: list[int], suffix: str = ".parquet", first: int = 0, name: str = "part") -> str:
    """Write a file for each size; return a glob of all files in the folder."""
    folder.mkdir(exist_ok=True)
    for index, size in enumerate(sizes):
        rows, path = rows_from(first, size), folder / f"{name}-{index}{suffix}"
        if suffix == ".parquet":
            Dataset.from_list(rows).to_parquet(path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        first += size
    return str(folder / f"*{suffix}")


@pytest.fixture(params=[".parquet", ".jsonl"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Forty rows in four files."""
    return write(tmp_path / "rows", SIZES, request.param)


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    return write(tmp_path / "rows", SIZES)


def streamed(path: Any, tokenizer: str | None, **options: Any) -> ChatDataModule:
    dataset = {"path": path, "streaming": True} if isinstance(path, str) else path
    return ChatDataModule(dataset, tokenizer, **{"max_length": 64, "batch_size": 4, "cache_dir": "cache", **options})


def ready(path: Any, tokenizer: str | None, **options: Any) -> ChatDataModule:
    """Return a data module whose loaders begin at the beginning."""
    data = streamed(path, tokenizer, **options)
    data.setup("fit")
    return data


def numbers(data: ChatDataModule, batches: list[Batch]) -> Counter[int]:
    """Count how often each row was trained."""
    texts = (data.tokenizer.decode(row) for batch in batches for row in batch["input_ids"])
    return Counter(int(number) for text in texts for number in re.findall(r"What is (\d+)\?", text))


def epoch(train: Any) -> list[Batch]:
    """Return the batches of the first epoch of a stream."""
    batches = []
    for batch in train:
        batches.append(batch)
        if train.state_dict()["states"][len(batches)]["places"][0][0]:
            return batches
    raise AssertionError


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_shard_begins_at_any_row(tmp_path: Path, suffix: str) -> None:
    """A Parquet file is read a thousand rows at a time."""
    write(tmp_path / "rows", [1100], suffix)
    path = tmp_path / "rows" / f"part-0{suffix}"
    table = open_table(path)
    expected = [table.decode(raw, "") for raw in table.raws()]
    assert expected == rows_from(0, 1100)
    shard = open_shard(path)
    for start in (0, 1, 999, 1000, 1001, 1099, 1100):
        assert [shard.decode(raw, "") for raw in shard.raws(start)] == expected[start:]
    assert [len(head) for head in first_rows([shard, shard], 1150)] == [1100, 50]


@pytest.mark.parametrize(("packing", "workers"), [(False, 0), (True, 1)])
def test_every_row_is_trained_once_per_epoch(shards: str, saved_tokenizer: str, packing: bool, workers: int) -> None:
    data = ready(shards, saved_tokenizer, packing=packing, num_workers=workers)
    batches = epoch(data.train_dataloader())
    assert numbers(data, batches) == Counter(range(NUM_ROWS))
    places = "position_ids" if packing else "attention_mask"
    assert {tuple(batch) for batch in batches} == {("input_ids", "labels", places, "trained_tokens")}
    assert [int(batch["trained_tokens"]) for batch in batches] == [count_trained([batch]) for batch in batches]
    largest = data.largest_batch()
    assert largest.keys() == batches[0].keys()
    assert all(batch["input_ids"].numel() <= largest["input_ids"].numel() == 4 * 64 for batch in batches)
    assert packing or (largest["attention_mask"] == 0).any()


def test_the_order_depends_on_seed_and_epoch_only(parquet: str, saved_tokenizer: str) -> None:
    data = ready(parquet, saved_tokenizer)
    with_worker = ready(parquet, saved_tokenizer, num_workers=1)
    batches = list(islice(data.train_dataloader(), 20))
    assert equal(batches, list(islice(with_worker.train_dataloader(), 20)))
    first = epoch(data.train_dataloader())
    second = batches[len(first) : 2 * len(first)]
    assert not equal(first[:1], second[:1])
    assert not equal(batches[:1], list(islice(ready(parquet, saved_tokenizer, seed=1).train_dataloader(), 1)))


@pytest.mark.parametrize("packing", [False, True])
def test_the_position_is_exact_after_every_batch(shards: str, saved_tokenizer: str, packing: bool) -> None:
    """In the middle of windows, at their ends, and beyond the end of the stream."""
    data = ready(shards, saved_tokenizer, packing=packing, max_length=128 if packing else 64, batch_size=2)
    whole = list(islice(data.train_dataloader(), 40))
    train = data.train_dataloader()
    for number, _ in enumerate(islice(train, 36), 1):
        assert train.state_dict()["position"] == number
        if number % 3:
            continue
        resumed = data.train_dataloader()
        torch.save(train.state_of_ranks(), "state.pt")
        resumed.load_state_dict(torch.load("state.pt", weights_only=True))
        assert equal(list(islice(resumed, 4)), whole[number : number + 4])


def test_sizes_are_planned_without_reading_rows(
    parquet: str, saved_tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ready(parquet, saved_tokenizer, batch_size="auto", packing=True)
    monkeypatch.setattr(ArrowShard, "raws", None)
    assert data.open_sizes() == {"batch_size": (1, stream.MOST_ROWS)}
    data.try_size("batch_size", 7)
    batch = data.largest_batch()
    assert {tensor.shape for name, tensor in batch.items() if name != "trained_tokens"} == {(7, 64)}
    assert (batch["position_ids"] == 0).sum(1).tolist() == [2] * 7
    assert int(batch["trained_tokens"]) == count_trained([batch]) == 7 * 62
    data.take_size("batch_size", 3)
    assert (data.batch_size, data.longest_row(), data.open_sizes()) == (3, 64, {})


def test_the_preview_shows_the_first_rows(parquet: str, saved_tokenizer: str) -> None:
    data = streamed(parquet, saved_tokenizer)
    assert [shown.title.split(", ")[-1] for shown in data.show(2)] == ["conversation 1", "conversation 2"]
    (report,) = data.reports
    assert report.name.endswith("first rows of train")
    assert report.num_kept == 5
    assert len(data.end_ids) == 1


@pytest.mark.parametrize("sizes", [SIZES, SIZES[:3], [NUM_ROWS]])
def test_ranks_share_the_rows(
    tmp_path: Path, saved_tokenizer: str, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    data = ready(write(tmp_path / "rows", sizes), saved_tokenizer)
    data.trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_steps=99)
    monkeypatch.setattr(Trainer, "world_size", 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(Trainer, "global_rank", rank)
        train = data.train_dataloader()
        assert len(train) == 99
        shares.append(numbers(data, epoch(train)))
    assert shares[0] + shares[1] == Counter(range(sum(sizes)))
    if len(sizes) % 2:  # All ranks read all files.
        assert abs(shares[0].total() - shares[1].total()) <= len(sizes)


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path, saved_tokenizer: str) -> None:
    data = ready(write(tmp_path / "rows", [400, 400]), saved_tokenizer)
    alive = []
    for number, _ in enumerate(islice(data.train_dataloader(), 200)):
        if number % 20 == 0:
            alive.append(sum(isinstance(item, Encoded) for item in gc.get_objects()))
    assert max(alive) <= 2 * 11
    assert not list(Path("cache").glob("**/*.npy"))


def test_data_sets_with_weights_are_interleaved(tmp_path: Path, saved_tokenizer: str) -> None:
    paths = [write(tmp_path / str(first), [20, 20], first=first) for first in (0, 1000)]
    weighted = zip(paths, (3, 1), strict=True)
    specs = [DatasetSpec(path=path, streaming=True, weight=weight) for path, weight in weighted]
    data = ready(specs, saved_tokenizer)
    whole = list(islice(data.train_dataloader(), 90))
    counts = numbers(data, whole)
    assert {number // 1000 for number in counts} == {0, 1}
    assert 0.65 < sum(count for number, count in counts.items() if number < 1000) / counts.total() < 0.85
    train, resumed = data.train_dataloader(), data.train_dataloader()
    list(islice(train, 70))
    resumed.load_state_dict(train.state_of_ranks())
    assert equal(list(islice(resumed, 10)), whole[70:80])


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    ("bad", "option", "message"),
    [
        ({"messages": []}, "on_malformed", r"part-0{suffix}, row 8: no `messages` .*`on_malformed: skip`"),
        (UNTRAINED, "on_untrainable", r"part-0{suffix}, row 8: no token is trained"),
    ],
)
def test_a_bad_row_is_named_or_counted(
    tmp_path: Path, saved_tokenizer: str, suffix: str, bad: Any, option: str, message: str
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [*rows_from(0, 8), bad, *rows_from(8, 8)]
    if suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(folder / "part-0.parquet")
    else:
        (folder / "part-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {"path": str(folder), "streaming": True}
    strict = ready({**spec, option: "error"}, saved_tokenizer)
    with pytest.raises(ValueError, match=message.format(suffix=re.escape(suffix))):
        list(islice(strict.train_dataloader(), 5))
    lenient = ready({**spec, option: "skip" if option == "on_malformed" else "drop"}, saved_tokenizer)
    train = lenient.train_dataloader()
    with pytest.warns(UserWarning, match=r"Left out a row of .*row 8"):
        batches = epoch(train)
    assert numbers(lenient, batches) == Counter(range(16))
    assert re.search(r"train: 16 rows read; left out: 1 ", train.close()[0])


def test_every_rank_tells_what_it_leaves_out(
    tmp_path: Path, saved_tokenizer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows_from(0, 9), UNTRAINED]))
    data = ready(str(tmp_path / "a.jsonl"), saved_tokenizer)
    monkeypatch.setattr(ChatDataModule, "_place", (1, 2))
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with pytest.warns(UserWarning, match=r"Left out a row of .*train on rank 1, and all further .*row 9: no token"):
        epoch(data.train_dataloader())
    with caplog.at_level("INFO"):
        data.teardown("fit")
    assert "train on rank 1: 4 rows read; left out: 1 no token is trained." in caplog.text


def test_windows_of_long_rows_have_few_tokens(
    parquet: str, saved_tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have the tokens of some characters more than the limit."""
    monkeypatch.setattr(stream, "WINDOW_ROWS", 40)
    monkeypatch.setattr(stream, "WINDOW_TOKENS", 100)
    monkeypatch.setattr(stream, "_CHARACTERS_AT_ONCE", 200)
    data = ready(parquet, saved_tokenizer, batch_size=1)
    assert numbers(data, epoch(data.train_dataloader())) == Counter(range(NUM_ROWS))
    source = data._stream()
    reader = stream._WindowReader(source.data, source.order, source.start)
    assert all(sum(map(len, reader.window())) < 100 + 200 for _ in range(9))


def test_a_stream_without_trainable_rows_ends(tmp_path: Path, saved_tokenizer: str) -> None:
    path = write(tmp_path / "rows", [30])
    data = ready(path, saved_tokenizer)
    data.settings = [replace(settings, max_length=3) for settings in data.settings]
    with pytest.warns(UserWarning, match="Left out"), pytest.raises(ValueError, match="nothing to train on"):
        next(iter(data.train_dataloader()))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ({}, {"group_by_length": True}, "cannot be sorted by length"),
        ({}, {"max_length": "auto"}, "its longest row is unknown"),
        ({}, {"num_workers": 2}, "one process of each rank reads it, and num_workers is 2"),
        ({}, {"tokenizer": None}, "no tokenizer can be trained on its rows"),
        ({"repeat": 2}, {}, "repeat=2, but a stream begins again"),
        ({"images_dir": "a"}, {}, "images_dir='a', but only text is streamed"),
        ({"streaming": "yes"}, {}, "streaming='yes': give true or false"),
    ],
)
def test_options_that_need_all_rows_are_refused(dataset: Any, options: Any, message: str) -> None:
    arguments = {"tokenizer": "mine", **options}
    with pytest.raises(ValueError, match=message):
        streamed({"path": "rows.jsonl", "streaming": True, **dataset}, arguments.pop("tokenizer"), **arguments)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"path": "b.jsonl"}, r"'a.jsonl' is streamed, but 'b.jsonl' is not. Set `streaming: true`"),
        ({"path": "b.jsonl", "streaming": True}, r"with 1 other data set: give each a `weight`"),
    ],
)
def test_mixtures_are_refused(others: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        streamed([{"path": "a.jsonl", "streaming": True}, others], "mine")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_epochs": 1}, "max_epochs=1 and no max_steps. Give max_steps"), ({"overfit_batches": 2}, "repeats batches")],
)
def test_a_trainer_that_needs_a_length_is_refused(
    parquet: str, saved_tokenizer: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _trainer(**options).fit(Recorder(), datamodule=streamed(parquet, saved_tokenizer))


def test_media_are_refused(tmp_path: Path, saved_tokenizer: str) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for name, rows in (("first", [IMAGE]), ("later", [*rows_from(0, 8), IMAGE])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"first rows of train: images, audio and video are not streamed"):
        ready(str(tmp_path / "first.jsonl"), saved_tokenizer)
    data = ready(str(tmp_path / "later.jsonl"), saved_tokenizer)
    with pytest.raises(ValueError, match=r"later.jsonl, row 8 has images, .* Set `streaming: false`"):
        next(iter(data.train_dataloader()))


def test_validation_rows_are_those_of_the_split(tmp_path: Path, saved_tokenizer: str) -> None:
    folder = tmp_path / "rows"
    write(folder, [10], name="train")
    path = str(folder)
    data = ready(path, saved_tokenizer, val_fraction=0.5)
    assert not data.validates
    assert data.val_dataloader() == []
    write(folder, [6], first=100, name="validation")
    data = ready({"path": path, "streaming": True, "max_rows": 5}, saved_tokenizer, val_fraction=0.5)
    assert numbers(data, list(data.val_dataloader())) == Counter(range(100, 105))
    assert numbers(data, epoch(data.train_dataloader())) == Counter(range(10))


def test_a_data_set_of_the_hub(tmp_path: Path, saved_tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "train_sft": write(tmp_path / "a", SIZES),
        "test_sft": write(tmp_path / "b", [4, 4], first=100),
    }
    really = datasets.load_dataset

    def load_dataset(path: str, **options: Any) -> Any:
        assert (path, options) == ("someone/chats", {"name": None, "revision": None, "split": None, "streaming": True})
        return really("parquet", data_files=files, streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    spec = {"path": "someone/chats", "streaming": True, "split": {"train": "train_sft", "validation": "test_sft"}}
    data = ready({**spec, "max_rows": 6}, saved_tokenizer)
    assert numbers(data, epoch(data.train_dataloader())) == Counter(range(NUM_ROWS))
    assert numbers(data, list(data.val_dataloader())) == Counter(range(100, 106))
    with pytest.raises(ValueError, match=r"no split 'sft', but \['test_sft', 'train_sft'\]"):
        ready({**spec, "split": {"train": "sft"}}, saved_tokenizer)


@pytest.mark.parametrize("reloads", [True, False])
def test_a_trainer_goes_on_in_the_stream_with_a_new_loader(parquet: str, saved_tokenizer: str, reloads: bool) -> None:
    """It has a new one in each epoch, or in a further fit; another Trainer begins at the first row."""
    whole, run, again = Recorder(), Recorder(), Recorder()
    options: dict[str, Any] = {"limit_train_batches": 5, "max_epochs": 4}
    _trainer(**options).fit(whole, datamodule=streamed(parquet, saved_tokenizer))
    data = streamed(parquet, saved_tokenizer)
    trainer = _trainer(**{**options, "max_epochs": 4 if reloads else 2}, reload_dataloaders_every_n_epochs=int(reloads))
    trainer.fit(run, datamodule=data)
    if not reloads:
        trainer.fit_loop.max_epochs = 4
        trainer.fit(run, datamodule=data)
    _trainer(**options).fit(again, datamodule=data)
    batches = [list(chain.from_iterable(recorder.seen)) for recorder in (whole, run, again)]
    assert len(batches[0]) == 20
    assert equal(batches[1], batches[0])
    assert equal(batches[2], batches[0])


class FailingRecorder(Recorder):
    """Fails in the batch with this number."""

    fails_at = -1

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fails_at:
            raise RuntimeError("broken")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("fails_at", [4, 7])
def test_a_batch_that_failed_is_trained_again(
    parquet: str, saved_tokenizer: str, tmp_path: Path, fails_at: int
) -> None:
    """In the middle of an accumulation window, what is left of it is counted."""
    options: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 3}
    whole, failing, resumed = Recorder(), FailingRecorder(), Recorder()
    _trainer(**options).fit(whole, datamodule=streamed(parquet, saved_tokenizer))
    failing.fails_at = fails_at
    trainer = _trainer(**options, callbacks=[ModelCheckpoint(tmp_path / "saved", save_on_exception=True)])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(failing, datamodule=streamed(parquet, saved_tokenizer))
    (file,) = (tmp_path / "saved").glob("*.ckpt")
    _trainer(**options).fit(resumed, datamodule=streamed(parquet, saved_tokenizer), ckpt_path=file)
    (left,), (seen,) = [whole.seen[0][fails_at:]], resumed.seen
    assert [batch["input_ids"].tolist() for batch in seen] == [batch["input_ids"].tolist() for batch in left]
    first = 3 - fails_at % 3
    assert {int(batch["trained_tokens"]) for batch in seen[:first]} == {count_trained(seen[:first])}
    assert equal(seen[first:], left[first:])


@pytest.mark.parametrize(
    ("saver", "options"),
    [(ModelCheckpoint, {"limit_train_batches": 5, "max_epochs": 4}), (ProTrainCheckpoint, {})],
)
def test_a_resumed_run_may_be_longer(
    parquet: str, saved_tokenizer: str, tmp_path: Path, saver: Any, options: dict[str, Any]
) -> None:
    """An epoch of the Trainer may also be a number of batches."""
    whole, first, second = Recorder(), Recorder(), Recorder()
    _trainer(**{"max_steps": 20, **options}).fit(whole, datamodule=streamed(parquet, saved_tokenizer, num_workers=1))
    saving = saver(tmp_path / "saved", every_n_train_steps=7)
    _trainer(max_steps=7, **options, callbacks=[saving]).fit(first, datamodule=streamed(parquet, saved_tokenizer))
    (file,) = (tmp_path / "saved").glob("*.ckpt")
    resuming = saver(tmp_path / "saved") if saver is ProTrainCheckpoint else []
    _trainer(max_steps=20, **options, callbacks=resuming).fit(
        second, datamodule=streamed(parquet, saved_tokenizer), ckpt_path=file
    )
    batches = [list(chain.from_iterable(run.seen)) for run in (whole, first, second)]
    assert equal(batches[1] + batches[2], batches[0])
    assert len(batches[0]) == 20


def test_a_changed_stream_is_refused(parquet: str, saved_tokenizer: str) -> None:
    data = ready(parquet, saved_tokenizer)
    train = data.train_dataloader()
    next(iter(train))
    state = train.state_of_ranks()
    other = ready(parquet, saved_tokenizer, batch_size=2)
    with pytest.raises(ValueError, match=r"written after batch 1 of a stream, .* batch_size was 4 and is 2"):
        other.train_dataloader().load_state_dict(state)
    with pytest.raises(ValueError, match="positions of 2 ranks in the stream, and this run has 1"):
        data.train_dataloader().load_state_dict({**state, "num_ranks": 2})
    with pytest.raises(ValueError, match=r"with `streaming: false`, and this run has `streaming: true`"):
        data.load_state_dict({"position": 3, "num_batches": 5})
    with pytest.raises(ValueError, match="has no rows for rank 1 of 2"):
        _rank_without_rows(data)


def _rank_without_rows(data: ChatDataModule) -> None:
    only = replace(data._stream().data[0], shards=data._stream().data[0].shards[3:])
    order = stream.StreamOrder(4, 64, rank=1, num_ranks=2)
    next(iter(stream.BatchStream([only], order, data._collator("train"))))


def fit_twice(rank: int, world_size: int, path: str, tokenizer: str, folder: Path, saver: Any) -> bool:
    """Train a run, resume it from its middle, and return True if both give the same bits."""
    weights = []
    for ckpt_path in (None, folder / "step=4.ckpt"):
        torch.manual_seed(0)
        module = CausalLMModule(config=tiny_config("llama", vocab_size=300), warmup_steps=1)
        data = streamed(path, tokenizer, packing=world_size == 1, batch_size=2)
        saving = saver(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        options: dict[str, Any] = {
            "max_steps": 8,
            "accumulate_grad_batches": 3,
            "callbacks": [saving],
            "enable_checkpointing": True,
        }
        if world_size == 1:
            strategy = ProTrainStrategy(device_memory="4MiB", hardware=CPU)
            trainer = quiet_trainer(devices=1, strategy=strategy, **options)
        else:
            trainer = trainer_on_rank(rank, world_size, _strategy, **options)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        assert trainer.global_step == 8
        weights.append([weight.detach().clone() for weight in module.parameters()])
    return all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def _strategy(**options: Any) -> ProTrainStrategy:
    return ProTrainStrategy(device_memory="4MiB", hardware=CPU, **options)


@pytest.mark.slow
@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_fit_has_the_same_bits(tmp_path: Path, saved_tokenizer: str, world_size: int, saver: Any) -> None:
    """Of two ranks, one has four times as many rows as the other."""
    path = write(tmp_path / "rows", SIZES)
    for name in ("ranks", "saved"):
        (tmp_path / name).mkdir()
    arguments = world_size, path, saved_tokenizer, tmp_path / "saved", saver
    if world_size == 1:
        assert fit_twice(0, *arguments)
    else:
        assert values(run_ranks(fit_twice, world_size, tmp_path / "ranks", *arguments)) == [True, True]
