"""Modules of ranks that load weights, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForSequenceClassification

from lightning_protrain import CausalLMModule, ProTrainStrategy
from lightning_protrain.models.loading import load_once
from tests.support.networks import networks

LORA = {"r": 2, "lora_dropout": 0.3, "target_modules": ["q_proj", "down_proj"]}


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "tied": {},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"lora": LORA},
    "dora": {"lora": {**LORA, "use_dora": True}, "dtype": "bfloat16"},
    "rows": {"vocab_size": 64},
    "nf4": {"lora": LORA, "quantization": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}},
    "random": {"config": {"model_type": "llama", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, **HEADS}},
}


class Classifier(L.LightningModule):
    """A user's module: a pretrained body, and a head that no checkpoint has."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def configure_model(self) -> None:
        config = AutoConfig.from_pretrained(self.folder, num_labels=3, pad_token_id=0)
        kind, dtype = AutoModelForSequenceClassification, torch.float32
        self.model = load_once(
            self._trainer,
            lambda: kind.from_pretrained(self.folder, config=config, dtype=dtype),
            lambda: kind.from_config(config, dtype=dtype),
        ).train()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"][:, 1] % 3).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Once(ProTrainStrategy):
    """Says whether this rank has loaded names and shapes alone."""

    loaded_outline = False

    def load_once(self, load: Callable[[], Any], outline: Callable[[], Any]) -> Any:
        made = super().load_once(load, outline)
        self.loaded_outline = all(parameter.is_meta for parameter in made.parameters())
        return made


class Everywhere(Once):
    """Every rank loads."""

    def load_once(self, load: Callable[[], Any], outline: Callable[[], Any]) -> Any:
        return load()


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Weights, what hangs on them, buffers, and what else modules keep."""
    found = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    found |= {f"buffer {name}": tensor.clone() for name, tensor in module.named_buffers()}
    for path, each in module.named_modules():
        found |= {f"{path}.{name}": value.clone() for name, value in vars(each).items() if isinstance(value, Tensor)}
    return found


def module_of(kind: str, folder: Path) -> L.LightningModule:
    if kind == "head":
        return Classifier(folder)
    options = KINDS[kind]
    given = options if "config" in options else {"model": str(folder), **options}
    return CausalLMModule(**given, learning_rate=1e-2, warmup_steps=0)


def save(kind: str, folder: Path) -> None:
    network = networks()["llama-tied" if kind == "tied" else "llama"].build()
    network.config.vocab_size = 40
    network.save_pretrained(folder)


def loader() -> DataLoader[Any]:
    tokens = torch.randint(1, 40, (32, 6), generator=torch.Generator().manual_seed(3))
    return DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=2)
