"""Every kind of data set that a name can mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tqdm
from datasets import Dataset, DatasetDict

from lightning_protrain.data import sources
from lightning_protrain.data.sources import load_splits
from tests.data.conftest import conversation

ROWS = [conversation(str(i), "x") for i in range(3)]


@pytest.fixture(autouse=True)
def _no_monitor_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bars of `datasets` would leave the monitor thread of tqdm behind."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


def test_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "stdlib_conversations", lambda: ROWS)
    assert load_splits("stdlib") == {"train": ROWS}


def test_a_jsonl_file(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert load_splits(str(path)) == {"train": ROWS}


def test_a_saved_dataset(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).add_column("id", [1, 2, 3]).save_to_disk(tmp_path / "saved")
    assert load_splits(str(tmp_path / "saved")) == {"train": ROWS}


def test_a_saved_dataset_with_splits_keeps_those_it_knows(tmp_path: Path) -> None:
    parts = {"train": ROWS[:1], "validation": ROWS[1:2], "test": ROWS[2:], "extra": ROWS}
    DatasetDict({name: Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(tmp_path / "saved")
    assert load_splits(str(tmp_path / "saved")) == {name: parts[name] for name in ("train", "validation", "test")}


def test_splits_without_train_are_refused(tmp_path: Path) -> None:
    DatasetDict({"sft": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"splits \['sft'\], none of them is called \"train\""):
        load_splits(str(tmp_path / "saved"))


def test_a_bad_row_is_named_with_its_split(tmp_path: Path) -> None:
    bad = {"messages": [{"role": "bot", "content": "x"}]}
    DatasetDict({"train": Dataset.from_list([*ROWS, bad])}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="split train, row 3, message 0: the role is 'bot'"):
        load_splits(str(tmp_path / "saved"))


@pytest.mark.parametrize("name", ["no/such/file.jsonl", "wikitext", "data.csv"])
def test_an_unknown_name_is_refused(name: str) -> None:
    Path("data.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=f'No data set {name!r}. Give "stdlib"'):
        load_splits(name)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"was not written by `datasets.Dataset.save_to_disk`"):
        load_splits(str(tmp_path))
