"""What was trained leaves a checkpoint bit for bit, and is read by those who know nothing of this package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.file_commands import file_command
from lightning_protrain.models import export
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.exported_models import LORA, make, pretrained
from tests.support.module_runs import LLAMA, VOCAB, Sequences
from tests.support.tiny_networks import tiny_config

CONFIGS: dict[str, dict[str, Any]] = {
    name: tiny_config(kind, vocab_size=VOCAB, **more)
    for name, kind, more in (
        ("llama", "llama", {}),
        ("tied", "llama", {"tie_word_embeddings": True}),
        ("gpt2", "gpt2", {}),
        ("experts", "qwen3_moe", {}),
        ("mamba", "mamba", {}),
    )
}


def train(module: CausalLMModule, folder: Path, stock: bool = False, strategy: Any = "auto") -> Path:
    """Two steps, and the checkpoint of the last one."""
    saver = ProTrainCheckpoint(folder / "checkpoints", every_n_train_steps=2)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=2, strategy=strategy, callbacks=[] if stock else [saver], logger=False,
        enable_checkpointing=not stock, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=Sequences())
    if stock:
        trainer.save_checkpoint(folder / "last.ckpt")
        return folder / "last.ckpt"
    return next((folder / "checkpoints").glob("*.ckpt"))


def assert_weights(found: Any, wanted: Any) -> None:
    theirs: dict[str, Tensor] = wanted.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    for name, value in found.state_dict().items():
        assert value.dtype == theirs[name].dtype
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_trained_model_is_read_by_transformers(name: str, stock: bool, tmp_path: Path) -> None:
    module = make(CONFIGS[name])
    checkpoint = train(module, tmp_path, stock, ProTrainStrategy(plan="offload", monitor=False))
    assert file_command(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    assert_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), module.model)
    assert {each.name for each in tmp_path.glob("out*")} == {"out"}


def test_tokenizer_and_generation_come_from_where_the_model_came_from(tmp_path: Path) -> None:
    module = make(model=pretrained(tmp_path / "base"), vocab_size=VOCAB + 8)
    checkpoint = train(module, tmp_path)
    file_command(["export", str(checkpoint), str(tmp_path / "out")])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_weights(found, module.model)
    assert found.config.vocab_size == VOCAB + 8
    assert found.generation_config.max_new_tokens == 7
    wanted = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == wanted.get_vocab()


def test_another_tokenizer_and_another_dtype(tmp_path: Path) -> None:
    module = make(LLAMA)
    checkpoint = train(module, tmp_path)
    pretrained(tmp_path / "base")
    command = ["export", str(checkpoint), str(tmp_path / "out"), f"--tokenizer={tmp_path / 'base'}"]
    file_command([*command, "--dtype=bfloat16"])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert module.model is not None
    assert_weights(found, module.model.to(torch.bfloat16))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "tokenizer_config.json").exists()


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_merged_and_read_back_by_both(more: dict[str, Any], dtype: Any, tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base")
    module = make(model=base, lora={**LORA, **more}, dtype=dtype)
    checkpoint = train(module, tmp_path, strategy=ProTrainStrategy(plan="offload", monitor=False))
    file_command(["merge", str(checkpoint), str(tmp_path / "out"), f"--adapter={tmp_path / 'adapter'}"])
    assert module.model is not None
    module.model.eval()
    read: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)), tmp_path / "adapter"
    )
    trained = {name: value for name, value in module.model.state_dict().items() if "lora_" in name}
    assert trained
    assert all(torch.equal(read.state_dict()[name], value) for name, value in trained.items())
    ids = torch.arange(12)[None]
    assert torch.equal(read(input_ids=ids).logits, module.model(input_ids=ids).logits)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_weights(merged, module.model.merge_and_unload())
    assert merged.config.dtype == getattr(torch, dtype)
    assert merged.generation_config.max_new_tokens == 7
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()


def test_the_folder_of_a_run_is_exported_and_it_is_said_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = make(model=pretrained(tmp_path / "base"), lora=LORA)
    checkpoint = train(module, tmp_path)
    out, adapter = tmp_path / "out", tmp_path / "adapter"
    assert file_command(["merge", str(checkpoint.parent), str(out), "--take=last", f"--adapter={adapter}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in said] == [f"Wrote {out}", f"Wrote {adapter}"]
    assert all(f"from {checkpoint}: " in line for line in said)
    assert "model.safetensors" in said[0]
    assert "adapter_model.safetensors" in said[1]


def test_adapters_are_exported_alone(tmp_path: Path) -> None:
    module = make(LLAMA, lora=LORA)
    file_command(["export", str(train(module, tmp_path)), str(tmp_path / "out")])
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    whole, target = train(make(LLAMA), tmp_path, stock=True), tmp_path / "out"
    other = tmp_path / "other.ckpt"
    content = torch.load(whole, weights_only=True)
    torch.save({"state_dict": content["state_dict"]}, other)
    less = tmp_path / "less.ckpt"
    content["state_dict"].popitem()
    torch.save(content, less)
    torn = tmp_path / "torn.ckpt"
    torn.write_bytes(whole.read_bytes()[:1000])
    for arguments, message in (
        (["export", whole, tmp_path], "is there already"),
        (["export", whole, tmp_path / "no" / "out"], "its folder does not exist"),
        (["merge", whole, target], "has no adapters to merge"),
        (["merge", whole, target, f"--adapter={tmp_path}"], "is there already"),
        (["export", other, target], "was not trained with CausalLMModule"),
        (["export", less, target], "lm_head.weight is missing"),
        (["export", torn, target], "is torn"),
        (["export", tmp_path / "nothing.ckpt", target], "nothing.ckpt"),
        (["export", whole, target, "--tokenizer=nowhere"], "No tokenizer could be loaded from 'nowhere'"),
        (["export", whole, target, "--dtype=int8"], "invalid choice: 'int8'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            file_command([str(each) for each in arguments])
    assert {each.name for each in tmp_path.glob("out*")} == set()


@pytest.mark.parametrize("command", ["export", "merge"])
def test_a_disk_that_is_too_full_is_told_before_anything_is_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = {"lora": LORA, "model": pretrained(tmp_path / "base")} if command == "merge" else {"config": LLAMA}
    checkpoint = train(make(**lora), tmp_path)
    monkeypatch.setattr(export, "free_bytes", lambda folder: 1 << 20)
    with pytest.raises(ValueError, match=r"its disk has 0\.001 GiB \(1048576 bytes\) free. Nothing was written"):
        file_command([command, str(checkpoint), str(tmp_path / "out")])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]
