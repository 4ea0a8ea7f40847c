"""Runs of models with adapters, and what is changed in their weights."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

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
