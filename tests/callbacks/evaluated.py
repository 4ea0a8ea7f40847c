"""Modules and data that the tests of `Evaluator` train and evaluate."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection

from lightning_protrain.distributed.failures import SharedFailure
from lightning_protrain.models.metrics import TokenLoss
from lightning_protrain.models.module import CausalLMModule

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "attention_dropout": 0.2,
}
Rows = list[dict[str, Tensor]]


def rows(seed: int, number: int = 6, labelled: bool = True) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(64, (number, 12), generator=generator)
    return [{"input_ids": each, "labels": each if labelled else each.new_full((12,), -100)} for each in ids]


def rows_in_batches(seed: int) -> list[dict[str, Tensor]]:
    return [{name: value.unsqueeze(0) for name, value in row.items()} for row in rows(seed)]


class Data(LightningDataModule):
    def __init__(self, seed: int, batch_size: int = 2) -> None:
        super().__init__()
        self.seed, self.batch_size = seed, batch_size
        self.prepared: list[str] = []

    def prepare_data(self) -> None:
        self.prepared.append("prepare")

    def setup(self, stage: str) -> None:
        self.prepared.append(stage)

    def train_dataloader(self) -> Any:
        return DataLoader(rows(self.seed), batch_size=self.batch_size, shuffle=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(rows(self.seed), batch_size=self.batch_size)  # type: ignore[arg-type]


def fit(
    *callbacks: Callback, strategy: Any = "auto", kind: type[CausalLMModule] = CausalLMModule, **options: Any
) -> Trainer:
    torch.manual_seed(0)
    module = kind(config=LLAMA, warmup_steps=0)
    defaults = {"max_steps": 6, "logger": False, "enable_checkpointing": False, "limit_val_batches": 0}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=list(callbacks),
        enable_model_summary=False,
        **{"enable_progress_bar": False, **defaults, **options},
    )
    trainer.fit(module, Data(0))
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    module = trainer.lightning_module
    return {name: value.clone() for name, value in module.state_dict().items()}


class Sums(LightningModule):
    """Its loss on a batch is the sum of the batch; rank 1 may fail."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.val_metrics = MetricCollection({"loss": TokenLoss()}, compute_groups=False)
        self.fails = fails

    def configure_callbacks(self) -> list[Callback]:
        return [SharedFailure()]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.fails and self.trainer.global_rank == 1:
            raise ValueError("a bad row")
        self.val_metrics.update(batch.sum(), batch.numel())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
