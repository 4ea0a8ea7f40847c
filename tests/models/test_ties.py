"""Embedding and head with weights of their own stay apart, whatever the config of the pretrained model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from lightning_protrain.commands.file_commands import file_command
from lightning_protrain.models.loading import StoredModel
from lightning_protrain.models.lora import save_model
from lightning_protrain.models.module import CausalLMModule
from tests.support.adapter_runs import IDS, changed, pretrained_logits, written_logits
from tests.support.exported_models import pretrained
from tests.support.module_runs import LLAMA, VOCAB

TIED = {**LLAMA, "tie_word_embeddings": True}
ROWS = {"model.embed_tokens": [3, 4], "lm_head": [5, 6]}


def called_tied(folder: Path, equal: bool = False) -> str:
    """A folder whose config ties embedding and head, and whose files have both."""
    pretrained(folder, TIED if equal else LLAMA)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def says_tied(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text())["tie_word_embeddings"]


class Untied(CausalLMModule):
    """Gives the head of a tied model a weight of its own."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            model: Any = self.model
            model.config.tie_word_embeddings = False
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


@pytest.mark.parametrize("more", [{}, {"vocab_size": VOCAB + 8}])
@pytest.mark.parametrize("kind", [CausalLMModule, Untied])
@torch.no_grad()
def test_a_whole_model_is_written_with_its_own_head(kind: Any, more: dict[str, Any], tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base", TIED) if kind is Untied else called_tied(tmp_path / "base")
    module = kind(model=base, **more)
    module.configure_model()
    module.model.lm_head.weight.mul_(2)
    wanted = module.eval().model(input_ids=IDS).logits
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}, tmp_path / "a.ckpt")
    file_command(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "exported")])
    save_model(module.model, tmp_path / "saved")
    for folder in (tmp_path / "exported", tmp_path / "saved"):
        assert torch.equal(pretrained_logits(folder), wanted)
        assert not says_tied(folder)


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"target_modules": ["q_proj", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": ROWS},
    ],
)
def test_adapters_are_merged_into_a_model_with_its_own_head(lora: dict[str, Any], tmp_path: Path) -> None:
    module: Any = changed(called_tied(tmp_path / "base"), lora={"r": 4, **lora})
    wanted = module.model(input_ids=IDS).logits
    for found in written_logits(module, tmp_path):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert not says_tied(tmp_path / "merged")


@pytest.mark.parametrize("vocab_size", [None, VOCAB + 8])
@pytest.mark.parametrize("equal", [True, False])
def test_every_rank_ties_what_is_equal_in_the_files(equal: bool, vocab_size: int | None, tmp_path: Path) -> None:
    base = called_tied(tmp_path / "base", equal)
    loaded: Any = StoredModel(base, AutoConfig.from_pretrained(base), "bfloat16", vocab_size=vocab_size).load()
    with torch.device("meta"):
        outline: Any = StoredModel(base, AutoConfig.from_pretrained(base), "bfloat16", vocab_size=vocab_size).outline()
    names, others = ([name for name, _ in model.named_parameters()] for model in (loaded, outline))
    assert names == others
    assert ("lm_head.weight" in names) is not equal
    assert loaded.config.tie_word_embeddings is outline.config.tie_word_embeddings is equal
    stored = load_file(Path(base) / "model.safetensors")["lm_head.weight"]
    assert torch.equal(loaded.lm_head.weight[:VOCAB], stored.bfloat16())
