"""The language models that ranks train, and the strategies of all placements."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain import ProTrainStrategy
from tests.support.plans import half

WIDTH, VOCABULARY = 16, 23


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Language(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Module(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = Language(tied=kind == "tied")
        if kind == "half frozen":
            for parameter in (*self.model.embedding.parameters(), *self.model.layers[:2].parameters()):
                parameter.requires_grad_(False)
        if kind == "lora":
            from peft import LoraConfig, inject_adapter_in_model  # Takes seconds, and scripts import this file.

            inject_adapter_in_model(LoraConfig(r=2, target_modules=["up", "down"]), self.model)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        return nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(VOCABULARY, (256, 9), generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(tokens), batch_size=2)


KINDS = ("full", "half frozen", "tied", "lora")


def strategy_of(placement: str, module: nn.Module, **process: Any) -> ProTrainStrategy:
    process = {"monitor": False, **process}  # Its tables take a third of the time.
    if placement == "ddp flat":
        return ProTrainStrategy(plan="resident", adapter_grad_sync="flat", **process)
    sharding, _, part = placement.partition(" ")
    if sharding == "resident":
        return ProTrainStrategy(sharding="resident", adapter_grad_sync="ddp", **process)
    plan: Any = half(module) if part else "offload"
    return ProTrainStrategy(sharding=sharding, plan=plan, adapter_grad_sync="ddp", **process)


class Same(Module):
    """A module with equal batches on all ranks, so that averages are bitwise those of one rank."""

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(tokens), batch_size=8)
