"""Runs of `CausalLMModule` on sequences of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from tests.support.tiny_networks import tiny_config

VOCAB = 64


LLAMA = tiny_config("llama", vocab_size=VOCAB)


class Sequences(LightningDataModule):
    """Counting sequences: token t + 1 follows token t."""

    def __init__(self, num_tokens: int | None = VOCAB, batch_size: int = 4, length: int = 32) -> None:
        super().__init__()
        self.tokenizer = None if num_tokens is None else range(num_tokens)
        self.batch_size = batch_size
        rows = [(torch.arange(12) + start) % 31 for start in range(length)]
        self.rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.rows[:7], self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


def trainer(folder: Path, **arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(**{"default_root_dir": folder, "enable_checkpointing": False, "max_steps": 4, **quiet, **arguments})
