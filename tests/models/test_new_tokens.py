"""Tokens that a pretrained model does not have are added, trained, resumed and written, with adapters or without."""

from __future__ import annotations

import json
import logging
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
from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.data.chat.pipeline import ChatEncoders
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.models.export import merge
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.data import llava
from tests.data.conftest import conversation
from tests.data.templates import CHATML
from tests.data.tokenizers import byte_level
from tests.support.exported_models import make
from tests.support.tiny_networks import tiny_config
from tests.support.trainers import SILENT

NEW = ["<|im_start|>", "<|im_end|>"]
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}


def pretrained(folder: Path, kind: str = "llama", spare: int = 0, **config: Any) -> str:
    """A model whose tokenizer lacks the tokens of its chat template, with some rows that no token uses."""
    tokenizer = byte_level(CHATML, ("<|endoftext|>",), "<|endoftext|>")
    module = make(tiny_config(kind, vocab_size=len(tokenizer) + spare, **config))
    module.configure_model()
    module.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def chats(base: str, folder: Path, **options: Any) -> ChatDataModule:
    file = folder / "chats.jsonl"
    rows = [conversation(f"question {index}", f"answer {index * index}") for index in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ChatDataModule(
        str(file), tokenizer=base, batch_size=2, cache_dir=str(folder / "cache"), **{"new_tokens": NEW, **options}
    )


def fit(module: CausalLMModule, data: Any, *callbacks: Any, checkpoint: Path | None = None) -> dict[str, Tensor]:
    strategy = ProTrainStrategy(plan="offload", monitor=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=4,
        strategy=strategy,
        limit_val_batches=0,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(each, ProTrainCheckpoint) for each in callbacks),
        **SILENT,
    )
    trainer.fit(module, data, ckpt_path=checkpoint)
    return {name: value.clone() for name, value in module.state_dict().items()}


def layers(model: Any) -> list[Tensor]:
    return [model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()]


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "untied": ({}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "spare rows": ({"spare": 10}, {}),
    "more rows": ({}, {"vocab_size": 1344}),
    "whole head": ({}, {"lora": {**LORA, "modules_to_save": ["lm_head"]}}),
    "further rows": ({}, {"lora": {**LORA, "trainable_token_indices": [3, 4]}}),
    "gpt2": ({"kind": "gpt2", "tie_word_embeddings": True}, {}),
    "quantised": (
        {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True},
        {"quantization": {"load_in_8bit": True}},
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_the_rows_of_new_tokens(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, options = KINDS[kind]
    base = pretrained(tmp_path / "base", **config)
    saver = ProTrainCheckpoint(str(tmp_path / "checkpoints"), every_n_train_steps=2, save_top_k=-1)
    with caplog.at_level(logging.INFO):
        module = make(model=base, **{"lora": LORA, **options})
        trained = fit(module, chats(base, tmp_path), saver, SavePretrained(str(tmp_path / "adapter")))
    assert "The rows of 2 new tokens are trained: <|im_start|>, <|im_end|>." in caplog.text
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    ids = tokenizer.convert_tokens_to_ids(NEW)
    untrained = make(model=base, **{"lora": LORA, **options, "vocab_size": module.hparams["vocab_size"]})
    untrained.configure_model()
    for after, before in zip(layers(module.model), layers(untrained.model), strict=True):
        assert (after[ids] != before[ids]).any(1).all()
    # The adapters alone, on a base with a row for each token.
    rows = torch.tensor([[*ids, 5, 6, 7]])
    module.eval()
    wanted = module.model(input_ids=rows).logits[..., : len(tokenizer)]
    fresh = AutoModelForCausalLM.from_pretrained(base)
    if len(tokenizer) > fresh.config.vocab_size:
        fresh.resize_token_embeddings(len(tokenizer))
    alone = PeftModel.from_pretrained(fresh, str(tmp_path / "adapter")).eval()(input_ids=rows).logits
    tolerance = 0.05 if kind == "quantised" else 1e-5
    torch.testing.assert_close(alone[..., : len(tokenizer)], wanted, rtol=0, atol=tolerance)
    # The merged model, and a resumed run.
    last, first = sorted((tmp_path / "checkpoints").glob("*.ckpt"), key=lambda path: "step=2" in path.name)
    merge(last, tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").convert_tokens_to_ids(NEW) == ids
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=rows).logits
    torch.testing.assert_close(merged[..., : len(tokenizer)], wanted, rtol=0, atol=tolerance)
    again = make(model=base, **{"lora": LORA, **options})
    resumed = fit(again, chats(base, tmp_path), ProTrainCheckpoint(str(tmp_path / "more")), checkpoint=first)
    assert all(torch.equal(resumed[name], value) for name, value in trained.items())


def test_whole_models_train_the_rows_of_new_tokens(tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base")
    module = make(model=base)
    fit(module, chats(base, tmp_path), SavePretrained(str(tmp_path / "out")))
    read, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(base)
    for written, trained in zip(layers(read), layers(module.model), strict=True):
        assert len(written) == len(tokenizer) + 2
        assert torch.equal(written, trained)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids(NEW) == [
        len(tokenizer),
        len(tokenizer) + 1,
    ]


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows(tmp_path: Path, caplog: Any) -> None:
    base = pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(NEW, special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = chats(str(tmp_path / "tokenizer"), tmp_path, new_tokens=None)
    with pytest.raises(ValueError, match=f"Set vocab_size of the model to at least {len(tokenizer)}"):
        fit(make(model=base, lora=LORA), data)
    module = make(model=base, lora=LORA, vocab_size=len(tokenizer))
    with caplog.at_level(logging.INFO):
        fit(module, chats(str(tmp_path / "tokenizer"), tmp_path, new_tokens=None))
    assert "The rows of 2 new tokens are trained: <|im_start|>, <|im_end|>." in caplog.text
    rows = [len(tokenizer) - 2, len(tokenizer) - 1]
    assert module.hparams["lora"]["trainable_token_indices"] == {"model.embed_tokens": rows, "lm_head": rows}


@pytest.mark.parametrize(
    ("config", "lora", "message"),
    [
        ({"tie_word_embeddings": True}, {"modules_to_save": ["lm_head"]}, "names only one of them. Name both or none"),
        ({}, {"target_modules": ["q_proj", "embed_tokens"]}, "whose rows are trained too: those of new tokens"),
        ({"kind": "phi"}, {}, "drop the bias of 'lm_head'. Leave it out, and give the layer in `modules_to_save`"),
    ],
)
def test_settings_that_forbid_it(config: Any, lora: Any, message: str, tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base", **config)
    with pytest.raises(ValueError, match=message):
        fit(make(model=base, lora={**LORA, **lora}), chats(base, tmp_path))


@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_new_rows_are_the_mean_of_the_old_ones(kind: str, tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base", kind)
    old = AutoModelForCausalLM.from_pretrained(base)
    number = old.config.vocab_size
    module = CausalLMModule(model=base, vocab_size=number + 3)
    module.configure_model()
    for found, before in zip(layers(module.model), layers(old), strict=True):
        assert torch.equal(found[:number], before)
        assert torch.equal(found[number:], before.mean(0).expand(3, -1))
    bias = getattr(module.model.get_output_embeddings(), "bias", None)
    assert (bias is None) == (kind == "llama")
    if bias is not None:
        assert torch.equal(bias[number:], bias[:number].mean().expand(3))


def test_a_plan_without_weights_counts_the_new_rows(tmp_path: Path) -> None:
    module = CausalLMModule(model=pretrained(tmp_path / "base"), vocab_size=1400)
    with torch.device("meta"):
        module.configure_model()
    assert [len(weight) for weight in layers(module.model)] == [1400, 1400]


def test_the_data_is_encoded_with_the_new_tokens(tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base")
    for new in ([], NEW, NEW):  # The cache of the first run must not be used in the second.
        data = chats(base, tmp_path, new_tokens=new)
        data.prepare_data()
        data.setup("fit")
        ids = set(data.examples["train"][0][0].input_ids.tolist())
        assert ids.issuperset(data.tokenizer.convert_tokens_to_ids(NEW)) is bool(new)


@pytest.mark.parametrize("new", ["<|im_end|>", [""], [7], 7])
def test_new_tokens_are_a_list_of_texts(new: Any) -> None:
    with pytest.raises(ValueError, match=rf"new_tokens={re.escape(repr(new))}: give a list of texts"):
        ChatDataModule("chats.jsonl", new_tokens=new)


def test_the_processor_has_the_new_tokens(tmp_path: Path) -> None:
    llava.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(NEW, special_tokens=True)
    processor = ChatEncoders(tokenizer, str(tmp_path), NEW).processor({})
    assert processor.tokenizer.convert_tokens_to_ids(NEW) == tokenizer.convert_tokens_to_ids(NEW)
