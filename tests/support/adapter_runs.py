"""Runs of models with adapters, and what is changed in their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig

from lightning_protrain.models.export import merge
from lightning_protrain.models.loading import auto_class
from lightning_protrain.models.module import CausalLMModule
from tests.support.exported_models import LORA, make


class Stop(Callback):
    """Ends a run before its schedule does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.step


def adapted(base: str, **options: Any) -> CausalLMModule:
    return make(model=base, lora=LORA, **options)


def one_bit(module: CausalLMModule) -> str:
    """Turns the lowest bit of one element of a frozen weight."""
    module.configure_model()
    name, weight = next((name, each) for name, each in module.named_parameters() if not each.requires_grad)
    weight.data.view(torch.uint8).view(-1)[0] ^= 1
    return name


IDS = torch.arange(5, 25)[None]


@torch.no_grad()
def changed(base: str, **options: Any) -> CausalLMModule:
    """A module in eval mode, each of whose trainable elements has been moved."""
    torch.manual_seed(1)
    module = CausalLMModule(model=base, **options)
    module.configure_model()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return module.eval()


def pretrained_logits(folder: str | Path, **options: Any) -> Tensor:
    """The logits of a folder, as transformers reads it."""
    return read(folder, **options)(input_ids=IDS).logits.detach()


def read(folder: str | Path, **options: Any) -> Any:
    return auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, **options).eval()


@torch.no_grad()
def written_logits(module: CausalLMModule, folder: Path, num_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """The logits of the merged model, and of the base with the adapters alone, which are written from a `.ckpt`."""
    dtype = module.model.dtype
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}, folder / "a.ckpt")
    merge(folder / "a.ckpt", folder / "merged", adapter=folder / "adapter")
    base = read(module.hparams["model"], dtype=dtype)
    if num_rows is not None:
        base.resize_token_embeddings(num_rows)
    alone = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    return pretrained_logits(folder / "merged", dtype=dtype), alone(input_ids=IDS).logits
