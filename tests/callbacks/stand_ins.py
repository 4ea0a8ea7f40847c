"""A module that speaks and a strategy that has a plan: what the callbacks ask for, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_protrain.data.batches.tokenizer import PAD, train_tokenizer
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.device.device import TransferCounters
from lightning_protrain.planner.plan import Plan
from lightning_protrain.strategy.overlap import OverlapPlan
from tests.data.conftest import conversation


class Speaker(LightningModule):
    """A module with validation losses 8, 4, 2, ..., which answers every prompt with the prompt's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.frozen = nn.Dropout().eval()
        self.validations = 0
        self.generated_in_training_mode: list[bool] = []
        self.max_new_tokens: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.layer(torch.ones(1))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", 8.0 / 2**self.validations, batch_size=1)

    def on_validation_epoch_end(self) -> None:
        self.validations += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def generate(self, input_ids: Tensor, max_new_tokens: int, eos_token_id: int | None = None) -> Tensor:
        assert not torch.is_grad_enabled()
        self.generated_in_training_mode.append(any(module.training for module in self.modules()))
        self.max_new_tokens.append(max_new_tokens)
        return torch.cat([input_ids, input_ids], dim=1)


class PlannedStrategy(SingleDeviceStrategy):
    """Plain training that claims to have a plan and counts one upload a step, and two swaps if a block swaps."""

    def __init__(self, plan: Plan | None, budget: int | None, overlap: OverlapPlan | None = None) -> None:
        super().__init__(device=torch.device("cpu"))
        self.plan = plan
        self.budget = budget
        self.counters = TransferCounters()
        self.overlap = overlap or OverlapPlan()
        self.peers = self.device = None
        self.session = SimpleNamespace(request=None)
        self.measured_peak_bytes: int | None = None
        self.allocator_stats: dict[str, int] = {}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.counters.uploaded_bytes += 3000
        self.counters.downloaded_bytes += 1000
        if self.plan is not None and any(block.swap_bytes for block in self.plan.blocks):
            self.counters.swapped_out_bytes += 200
            self.counters.swapped_in_bytes += 100
        self.counters.uploads += 1
        self.counters.prefetch_hits += 1
        self.counters.live_bytes = 500
        self.counters.peak_live_bytes = 700
        return super().training_step(*args, **kwargs)


def tokenizer_folder(folder: Path, template: Any, name: str = "tokenizer") -> str:
    """Save a small tokenizer with this chat template, whose end-of-sequence token is the padding."""
    made = train_tokenizer([conversation("Question 1?", "Answer 1.")], vocab_size=280)
    made.chat_template, made.eos_token = template, PAD
    made.save_pretrained(folder / name)
    return str(folder / name)


def chat_data(folder: Path, **options: Any) -> ChatDataModule:
    """Twelve short conversations, the tokenizer cached in `folder`."""
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(conversation(f"Question {i}?", f"Answer {i}.")) + "\n" for i in range(12)))
    return ChatDataModule(str(path), vocab_size=280, batch_size=2, cache_dir=str(folder / "cache"), **options)


def fit(module: LightningModule, data: ChatDataModule | None, *callbacks: Callback, **options: Any) -> Trainer:
    """Trains two steps, unless told otherwise, with a validation after each."""
    defaults = {"max_steps": 2, "val_check_interval": 1, "log_every_n_steps": 1, "logger": False}
    defaults["enable_checkpointing"] = False
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{**defaults, **options},
    )
    trainer.fit(module, datamodule=data)
    return trainer
