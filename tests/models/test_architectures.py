"""Models that are built for training; one that reads images trains on the assistant's turns only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from lightning_protrain import CausalLMModule, ChatDataModule, ProTrainStrategy
from lightning_protrain.models.loading import (
    auto_class,
    dtype_called,
    names_vocab_size,
    read_config,
    vocab_size_of,
)
from tests.data import llava
from tests.support.trainers import QUIET


@pytest.mark.parametrize(
    ("model_type", "reads_images"),
    [("llama", False), ("gpt2", False), ("llava", True), ("gemma3", True), ("qwen2_vl", True)],
)
def test_models_that_read_images_are_built_so(model_type: str, reads_images: bool) -> None:
    config = AutoConfig.for_model(model_type)
    assert auto_class(config) is (AutoModelForImageTextToText if reads_images else AutoModelForCausalLM)
    assert vocab_size_of(config) == config.get_text_config().vocab_size


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such", r"^The model 'no/such' is not in the cache .*, or give a path\."),
        ("no/such/folder", r"^There is no folder 'no/such/folder'\. Correct the path"),
    ],
)
def test_a_model_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(name)


@pytest.mark.parametrize("name", ["bf16", "nn", "32"])
def test_what_is_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"dtype='{name}' is not a dtype of torch. Give one of float32"):
        dtype_called(name)


@pytest.mark.parametrize(
    ("config", "named"),
    [({"vocab_size": 3}, True), ({"text_config": {"vocab_size": 3}}, True), ({"text_config": {}}, False), ({}, False)],
)
def test_parts_of_a_config_that_name_a_vocabulary(config: dict[str, Any], named: bool) -> None:
    assert names_vocab_size(config) is named


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> ChatDataModule:
    folder = llava.save(tmp_path / "model")
    rows = []
    for number, color in enumerate(("red", "green", "blue", "white") * 3):
        Image.new("RGB", (20 + number, 24), color).save(tmp_path / f"{number}.png")
        parts = [{"type": "image"}] * (1 + number % 2) + [{"type": "text", "text": "Which color?"}]
        answer = {"role": "assistant", "content": f"It is {color}."}
        again = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}] * (number % 3 == 0)
        images = [f"{number}.png"] * (1 + number % 2)
        rows.append({"messages": [{"role": "user", "content": parts}, answer, *again], "images": images})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ChatDataModule(
        str(tmp_path / "chats.jsonl"), tokenizer=folder, batch_size=3, val_fraction=0.2, max_length=128
    )


def _module() -> CausalLMModule:
    torch.manual_seed(0)
    return CausalLMModule(
        config=llava.config(llava.processor()), learning_rate=1e-2, warmup_steps=0, loss_chunk_tokens=None
    )


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.seen.append(outputs["loss"].detach().clone())


def _fit(module: CausalLMModule, data: ChatDataModule, strategy: Any) -> list[Tensor]:
    losses = Losses()
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=3, callbacks=[losses], **QUIET)
    trainer.fit(module, datamodule=data)
    return losses.seen


def test_only_what_the_assistant_says_has_a_gradient(data: ChatDataModule) -> None:
    data.prepare_data()
    data.setup("fit")
    module = _module()
    module.configure_model()
    assert module.model is not None
    logits: list[Tensor] = []
    module.model.lm_head.register_forward_hook(lambda _, __, output: (output.retain_grad(), logits.append(output))[0])
    for batch in data.train_dataloader():
        logits.clear()
        module.training_step(batch).backward()
        (seen,) = logits
        assert seen.grad is not None
        contributes = seen.grad.ne(0).any(-1)
        expected = torch.zeros_like(contributes)
        expected[:, :-1] = batch["labels"][:, 1:] != -100
        assert torch.equal(contributes, expected)
        for ids, trained in zip(batch["input_ids"], batch["labels"] != -100, strict=True):
            text = data.tokenizer.decode(ids[trained].tolist())  # type: ignore[union-attr]
            assert text.replace("<|im_end|>", "|") in [
                f"It is {color}.|{more}" for color in ("red", "green", "blue", "white") for more in ("", "Yes.|")
            ]


def test_images_train_the_same_when_they_are_streamed(data: ChatDataModule) -> None:
    plain = _fit(_module(), data, "auto")
    streamed = _fit(_module(), data, ProTrainStrategy(plan="offload"))
    assert len(plain) == len(streamed) > 6
    assert all(torch.equal(one, other) for one, other in zip(plain, streamed, strict=True))
    assert plain[-1] < plain[0]


def test_pixels_matter(data: ChatDataModule) -> None:
    data.prepare_data()
    data.setup("fit")
    module = _module()
    module.configure_model()
    batch = next(iter(data.train_dataloader()))
    changed = {**batch, "pixel_values": batch["pixel_values"] + 1}
    assert module.training_step(batch) != module.training_step(changed)
