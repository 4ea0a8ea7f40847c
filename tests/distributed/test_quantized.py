"""Weights and optimizer states of few bits on two ranks: what DDP gives, whoever holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.support.quantised import QuantisedLanguageModel
from tests.support.quantised import module as quantised_module
from tests.support.rank_models import strategy_of
from tests.support.ranks import run_ranks, trainer_on_rank, values

PLACEMENTS = ("replicate", "shard", "shard half")


class Module(L.LightningModule):
    """Trains with states of 8 bits; those of the embedding, the head and the adapters are large enough."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = quantised_module(kind)
        assert isinstance(self.inner.network, QuantisedLanguageModel)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.inner.loss(batch[0], batch_idx)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return bnb.optim.AdamW8bit(trained, lr=0.01, min_8bit_size=256)

    def train_dataloader(self) -> Any:
        return self.inner.train_dataloader()


class State(L.Callback):
    """Keeps what would be saved of the optimizer at the end."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[Any, ...], Any] = {}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        saved = trainer.strategy.optimizer_state(trainer.optimizers[0])
        for index, state in saved["state"].items():
            for name, value in state.items():
                for inner, each in value.items() if isinstance(value, dict) else [("", value)]:
                    self.tensors[index, name, inner] = each


def train(rank: int, world_size: int, kind: str, placement: str) -> dict[Any, Any]:
    module, state = Module(kind), State()
    planned: nn.Module = Module(kind).to("cpu")
    options: dict[str, Any] = {"max_steps": 4, "callbacks": [state]}
    if placement != "ddp":
        options["kind"] = lambda **process: strategy_of(placement, planned, **process)
    trainer_on_rank(rank, world_size, **options).fit(module)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return weights | (state.tensors if rank == 0 else {})  # only rank 0 saves


def differences(rank: int, world_size: int, kind: str) -> list[str]:
    torch.set_num_threads(1)
    expected = train(rank, world_size, kind, "ddp")
    wrong = []
    for placement in PLACEMENTS:
        found = train(rank, world_size, kind, placement)
        wrong += [f"{placement}: {key}" for key in expected.keys() ^ found.keys()]
        for key, value in expected.items():
            same = torch.equal(value, found[key]) if isinstance(value, Tensor) else value == found[key]
            wrong += [] if same else [f"{placement}: {key}"]
    return wrong


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_parity(kind: str, tmp_path: Path) -> None:
    found = values(run_ranks(differences, 2, tmp_path, 2, kind))
    assert found == [[], []]
