"""Pretrained folders, and modules that are trained and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from lightning_protrain.models.module import CausalLMModule
from tests.data import llava
from tests.support.module_runs import LLAMA

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 16}


def make(config: dict[str, Any] | None = None, **options: Any) -> CausalLMModule:
    torch.manual_seed(0)
    return CausalLMModule(config=config, warmup_steps=0, learning_rate=1e-2, **options)


def pretrained(folder: Path, config: dict[str, Any] | None = None) -> str:
    """A model with a tokenizer and settings for generation."""
    module = make(config or LLAMA)
    module.configure_model()
    assert module.model is not None
    module.model.generation_config = GenerationConfig(max_new_tokens=7, eos_token_id=1)
    module.model.save_pretrained(folder)
    llava.processor().tokenizer.save_pretrained(folder)
    return str(folder)
