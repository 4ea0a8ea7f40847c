"""Tokens are cached: the next run reuses them, and one rank of a node makes them for all."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from lightning_protrain import ProTrainStrategy
from lightning_protrain.data import datamodule
from lightning_protrain.data.batches import token_cache
from lightning_protrain.data.batches.tokenizer import CHAT_TEMPLATE
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.data.sources.load import Source
from lightning_protrain.models.module import CausalLMModule
from tests.data.chat_runs import DATED, Recorder, set_today
from tests.data.conftest import conversation
from tests.support.ranks import kill_this_rank, run_ranks, trainer_on_rank, values

LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


@pytest.fixture
def folder(tokenizer: Any, tmp_path: Path) -> Path:
    """Save a tokenizer, and return its folder."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is tokenized."""
    names: list[str] = []
    encode = datamodule.encode_rows

    def encode_rows(rows: Any, encoder: Any, name: str) -> Any:
        names.append(name.rpartition(", ")[2])
        return encode(rows, encoder, name)

    monkeypatch.setattr(datamodule, "encode_rows", encode_rows)
    return names


def _ready(chats: Any, folder: Path, **options: Any) -> ChatDataModule:
    data = ChatDataModule(chats, str(folder), **{"cache_dir": "cache", "max_length": 64, "batch_size": 4, **options})
    data.setup("fit")
    return data


def _batches(data: ChatDataModule) -> list[Any]:
    batches = [*data.train_dataloader(), *data.val_dataloader()]
    return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in batches]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_the_next_run_reads_no_row_and_makes_no_token(
    suffix: str, rows: list[Any], folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weighted = [{"messages": [*row["messages"][:-1], {**row["messages"][-1], "weight": 0.5}]} for row in rows]
    name = f"chats.{suffix}"
    if suffix == "parquet":
        Dataset.from_list(weighted).to_parquet(name)
    else:
        Path(name).write_text(json.dumps(weighted) if suffix == "json" else "\n".join(map(json.dumps, weighted)))
    first = _ready(name, folder)
    monkeypatch.setattr(Source, "splits", property(lambda _: pytest.fail("rows are read")))
    second = _ready(name, folder)
    assert made == ["train", "validation"]
    assert second.reports == first.reports
    assert _batches(second) == _batches(first)
    assert second.show(1) == first.show(1)


def _append(chats: Path, folder: Path) -> None:
    with chats.open("a") as file:
        file.write(json.dumps(conversation("More?", "More.")) + "\n")


def _exchange(chats: Path, folder: Path) -> None:
    before = chats.stat()
    chats.write_text(chats.read_text().replace("Done", "Gone"))
    os.utime(chats, ns=(before.st_atime_ns, before.st_mtime_ns))


def _other_template(chats: Path, folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("message['content'] +", "message['content'] | trim +"))


@pytest.mark.parametrize("change", [_append, _exchange, _other_template])
def test_what_changes_on_disk_is_tokenized_again(
    change: Callable[[Path, Path], None], chats: str, folder: Path, made: list[str]
) -> None:
    _ready(chats, folder)
    change(Path(chats), folder)
    _ready(chats, folder)
    assert made == ["train", "validation"] * 2


@pytest.mark.parametrize(
    "options",
    [{"max_length": 32}, {"train_on": "last_turn"}, {"seed": 1}, {"val_fraction": 0.5}, {"train_on_eos": "none"}],
)
def test_other_settings_are_other_tokens(options: dict[str, Any], chats: str, folder: Path, made: list[str]) -> None:
    _ready(chats, folder)
    _ready(chats, folder, **options)
    assert made == ["train", "validation"] * 2


def test_other_code_makes_other_tokens(
    chats: str, folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _ready(chats, folder)
    monkeypatch.setattr(token_cache, "_code_digest", lambda: "of the next version")
    _ready(chats, folder)
    assert made == ["train", "validation"] * 2


@pytest.mark.parametrize("name", ["conversation.py", "batches/encode.py", "chat/mask.py", "sources/messages.py"])
def test_all_code_that_makes_tokens_is_in_the_digest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code_digest, read = token_cache._code_digest.__wrapped__, Path.read_bytes
    digest = code_digest()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * path.as_posix().endswith(f"data/{name}"))
    assert code_digest() != digest


@pytest.mark.parametrize(
    ("template", "variables", "times"),
    [
        (DATED, {}, 2),
        (CHAT_TEMPLATE, {}, 1),
        ("{% if not day is defined %}{% set day = strftime_now('%d') %}{% endif %}{{ day }}" + CHAT_TEMPLATE, {}, 2),
        (
            "{% if not day is defined %}{% set day = strftime_now('%d') %}{% endif %}{{ day }}" + CHAT_TEMPLATE,
            {"day": "9"},
            1,
        ),
        ("{% if tools %}{{ strftime_now('%d') }}{% endif %}" + CHAT_TEMPLATE, {}, 1),
    ],
)
def test_only_tokens_with_a_date_are_made_again_on_another_day(
    template: str,
    variables: dict[str, str],
    times: int,
    chats: str,
    folder: Path,
    made: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = []
    for day in ("2026-09-30", "2026-10-01", "2026-09-30"):
        set_today(monkeypatch, day)
        data = _ready(chats, folder, chat_template=template, chat_template_kwargs=variables)
        texts.append(data.tokenizer.decode(data.examples["train"][0][0].input_ids))
    assert made == ["train", "validation"] * times
    assert texts[0] == texts[2]
    assert (texts[0] != texts[1]) == (times == 2)


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"packing": True}, {"group_by_length": True}])
def test_what_changes_no_token_tokenizes_nothing(
    options: dict[str, Any], chats: str, folder: Path, made: list[str]
) -> None:
    _ready(chats, folder)
    Path(chats).rename("moved.jsonl")
    data = _ready({"path": "moved.jsonl", "repeat": 2}, folder, **options)
    assert made == ["train", "validation"]
    assert data.reports[0].name == "moved.jsonl, train"


@pytest.mark.parametrize("name", ["ids.npy", "lengths.npy", "report.json"])
def test_broken_tokens_are_made_again(name: str, chats: str, folder: Path, made: list[str]) -> None:
    before = _batches(_ready(chats, folder))
    for path in Path("cache", "tokens").glob(f"*/{name}"):
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(UserWarning, match=r"The cached tokens in .* are damaged \(.*\) and are made again"):
        assert _batches(_ready(chats, folder)) == before
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The tokens")
        assert _batches(_ready(chats, folder)) == before
    assert made == ["train", "validation"] * 2


def test_a_cache_that_cannot_be_written_ends_no_run(chats: str, folder: Path, made: list[str]) -> None:
    Path("file").touch()
    with pytest.warns(UserWarning, match=r"cannot be written to file/tokens \(.*set `cache_dir`"):
        data = _ready(chats, folder, cache_dir="file")
    assert len(_batches(data)) > 1
    assert made == ["train", "validation"]


def test_an_interrupted_write_leaves_nothing(chats: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _ready(chats, folder)
    assert not list(Path("cache", "tokens").iterdir())


def _fit(rank: int, chats: str, folder: Path, how: str) -> Any:
    counted: list[str] = []
    encode = datamodule.encode_rows

    def encode_rows(rows: Any, encoder: Any, name: str) -> Any:
        counted.append(name.rpartition(", ")[2])
        if how == "fails":
            raise MemoryError("no room for tokens")
        if how == "dies":
            kill_this_rank()
        return encode(rows, encoder, name)

    datamodule.encode_rows = encode_rows  # type: ignore[assignment]  # This process is forked, and ends.
    torch.manual_seed(0)
    data = ChatDataModule(chats, str(folder), cache_dir="cache", max_length=64, batch_size=4)
    model = CausalLMModule(config={**LLAMA, "num_attention_heads": 2, "vocab_size": 300}, warmup_steps=0)
    trainer = trainer_on_rank(rank, 2, ProTrainStrategy, max_steps=2, num_sanity_val_steps=0)
    trainer.fit(model, data)
    return counted, [len(part) for part in data.examples["train"]]


def _text_at_midnight(rank: int, chats: str, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        set_today(patch, ("2026-09-30", "2026-10-01")[rank])
        data = ChatDataModule(chats, str(folder), chat_template=DATED, cache_dir="cache", max_length=64)
        trainer_on_rank(rank, 2, max_steps=1, limit_val_batches=0).fit(Recorder(), data)
        return str(data.tokenizer.decode(data.examples["train"][0][0].input_ids))


def test_ranks_agree_on_the_date(chats: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    texts = values(run_ranks(_text_at_midnight, 2, tmp_path / "meeting", chats, folder))
    assert all("Today is 30 September 2026." in text for text in texts)


def test_one_rank_of_a_node_tokenizes_and_all_read(chats: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    first, second = values(run_ranks(_fit, 2, tmp_path / "meeting", chats, folder, "works"))
    assert (first[0], second[0]) == (["train", "validation"], [])
    assert first[1] == second[1]


@pytest.mark.parametrize(("how", "reason"), [("fails", "MemoryError: no room for tokens"), ("dies", "rank 0")])
def test_the_other_ranks_are_told_why_the_first_one_made_no_tokens(
    how: str, reason: str, chats: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "meeting").mkdir()
    first, second = run_ranks(_fit, 2, tmp_path / "meeting", chats, folder, how)
    assert first.error == ("killed" if how == "dies" else reason)
    assert second.error is not None
    assert reason in second.error
    assert second.error != "hangs"
