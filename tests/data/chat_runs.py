"""Runs and batches of a `ChatDataModule`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from transformers.utils import chat_template_utils

from lightning_protrain.data.batches.tokenizer import CHAT_TEMPLATE
from lightning_protrain.data.datamodule import ChatDataModule


def _data(chats: Any, **options: Any) -> ChatDataModule:
    options = {"vocab_size": 300, "max_length": 64, "batch_size": 4, "val_fraction": 0.2, **options}
    return ChatDataModule(chats, cache_dir="cache", **options)


DATED = "{{ '<|im_start|>system<|im_sep|>Today is ' + strftime_now('%-d %B %Y') + '.<|im_end|>' }}" + CHAT_TEMPLATE


def set_today(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    """Let transformers see this date, in ISO format."""

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromisoformat(day)

    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)


def _batches(loader: Any) -> list[dict[str, Tensor]]:
    return list(loader)


class Recorder(LightningModule):
    """Keeps the batches of every epoch, and the size of the tokenizer that `configure_model` finds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[dict[str, Tensor]]] = []
        self.tested = 0

    def configure_model(self) -> None:
        self.vocab_size = len(self.trainer.datamodule.tokenizer)
        self.layer = nn.Linear(1, 1)

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if not self.seen:  # an epoch that is gone on with does not start
            self.seen.append([])
        self.seen[-1].append(batch)
        return self.layer(torch.ones(1))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert set(batch) == {"input_ids", "attention_mask", "labels"}

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.tested += len(batch["input_ids"])

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return batch["input_ids"].sum(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trainer(**options: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu", enable_checkpointing=bool(options.get("callbacks")), **quiet, **{"devices": 1, **options}
    )
