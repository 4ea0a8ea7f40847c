"""Streams: rows are read, encoded and packed while training, and a resumed run continues bit for bit."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_protrain import CausalLMModule, ProTrainCheckpoint
from lightning_protrain.data.batches import stream
from lightning_protrain.data.batches.loader import Batch, count_trained
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.data.sources.tables import TableHead, open_shard, open_table
from tests.data.chat_runs import Recorder, _trainer
from tests.data.conftest import conversation
from tests.support.ranks import run_ranks
from tests.support.tiny_networks import tiny_config

NUM_ROWS = 40


@pytest.fixture(scope="session")
def saved_tokenizer(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WINDOW_ROWS", 11)


def write(folder: Path, sizes: list[int], suffix: str = ".parquet", first: int = 0) -> str:
    """Write rows with consecutive numbers into a file for each size; return a glob of the files."""
    folder.mkdir(exist_ok=True)
    for index, size in enumerate(sizes):
        rows = [conversation(f"What is {first + i}?", "It is " + "so " * (i % 7) + ".") for i in range(size)]
        path = folder / f"part-{index}{suffix}"
        if suffix == ".parquet":
            Dataset.from_list(rows).to_parquet(path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        first += size
    return str(folder / f"*{suffix}")


@pytest.fixture(params=[".parquet", ".jsonl"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Forty rows in four files of different sizes."""
    return write(tmp_path / "rows", [13, 7, 19, 1], request.param)


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    return write(tmp_path / "rows", [13, 7, 19, 1])


def streamed(path: Any, tokenizer: str | None, **options: Any) -> ChatDataModule:
    spec = path if isinstance(path, dict | list) else {"path": path, "streaming": True}
    return ChatDataModule(spec, tokenizer, **{"max_length": 64, "batch_size": 4, "cache_dir": "cache", **options})


def loader(data: ChatDataModule) -> Any:
    data.setup("fit")
    return data.train_dataloader()


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


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_every_row_is_trained_once_per_epoch(
    shards: str, saved_tokenizer: str, packing: bool, workers: int
) -> None:
    data = streamed(shards, saved_tokenizer, packing=packing, num_workers=workers)
    batches = epoch(loader(data))
    assert numbers(data, batches) == Counter(range(NUM_ROWS))
    assert {tuple(batch) for batch in batches} == {
        ("input_ids", "labels", "position_ids" if packing else "attention_mask", "trained_tokens")
    }
    assert [int(batch["trained_tokens"]) for batch in batches] == [count_trained([batch]) for batch in batches]


@pytest.mark.parametrize("packing", [False, True])
def test_the_position_is_exact_after_every_batch(shards: str, saved_tokenizer: str, packing: bool) -> None:
    options = {"packing": packing, "max_length": 128 if packing else 64, "batch_size": 2}
    whole = list(islice(loader(streamed(shards, saved_tokenizer, **options)), 45 if packing else 55))
    train = loader(streamed(shards, saved_tokenizer, **options))
    states = [json.loads(json.dumps({**train.state_dict(), "states": []})) for _ in islice(train, len(whole))]
    assert [state["position"] for state in states] == list(range(1, len(whole) + 1))
    train = loader(streamed(shards, saved_tokenizer, **options))
    for number, batch in enumerate(islice(train, len(whole) - 5), 1):
        assert equal([batch], whole[number - 1 : number])
        resumed = loader(streamed(shards, saved_tokenizer, **options))
        resumed.load_state_dict(torch.load(_saved(train.state_of_ranks()), weights_only=True))
        assert equal(list(islice(resumed, 5)), whole[number : number + 5])


def _saved(state: Any) -> Path:
    torch.save(state, "state.pt")
    return Path("state.pt")
