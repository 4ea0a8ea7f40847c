"""A profile leaves nothing behind in what a step counts, and leaves room for what the run then saves."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import SEQUENCE, VOCABULARY, LanguageModel, Mlp, ParityModule
from tests.support.parity import Result, differences, snapshot
from tests.support.profiled_runs import QUIET, Profiling, batches, train

pytestmark = pytest.mark.filterwarnings("ignore:Knobs that were not given")


# --- what holds a state -----------------------------------------------------------------------------------------------


class Anneal:
    """A schedule that counts how often it was asked."""

    asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return 0.9**self.asked


class Scheduled(ParityModule):
    """Weighs its loss by what an object, generators and the data module say, and takes its batch apart."""

    def __init__(self) -> None:
        super().__init__(LanguageModel([Mlp(), Mlp()]))
        self.anneal = Anneal()
        self.generators = (random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        python, numpy, own = self.generators
        self.trainer.datamodule.steps += 1
        weight = self.anneal() + python.random() + numpy.random() + torch.rand(1, generator=own).item()
        loss = super().training_step([batch.pop()], batch_idx) * (weight / self.trainer.datamodule.steps)
        self.losses[-1] = loss.detach().clone()
        return loss


class Stepping(L.LightningDataModule):
    """Counts steps."""

    steps = 0

    def train_dataloader(self) -> DataLoader:
        return batches()


@pytest.mark.parametrize("caching", [False, True])
def test_what_modules_and_data_modules_hold_is_put_back(caching: bool) -> None:
    runs = []
    for callbacks in ([], [Profiling("this=1")]):
        torch.manual_seed(0)
        module, data = Scheduled(), Stepping()
        module.network.config = SimpleNamespace(use_cache=caching)
        trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, **QUIET)
        trainer.fit(module, datamodule=data)
        runs.append(Result(tuple(module.losses), snapshot(module)))
        assert module.anneal.asked == data.steps == len(batches())
        assert module.network.config.use_cache is caching
    assert differences(*runs) == []
    assert callbacks[0].profile is not None


class Warming(ParityModule):
    """Sets learning rates in its step, by way of the trainer."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9
            group["warmed"] = True
        return super().training_step(batch, batch_idx)


def test_settings_of_optimizers_are_put_back() -> None:
    runs = []
    for callbacks in ([], [Profiling("this=1")]):
        torch.manual_seed(0)
        module = Warming(LanguageModel([Mlp(), Mlp()]))
        runs.append(train(module, callbacks=callbacks))
        assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9 ** len(batches()))
    assert differences(*runs) == []
    assert callbacks[0].profile is not None


# --- what is swapped --------------------------------------------------------------------------------------------------


class NeoX(ParityModule):
    """A model of transformers that keeps other tensors for backward with its cache on."""

    def __init__(self, use_cache: bool) -> None:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=64, use_cache=use_cache, **sizes)
        super().__init__(GPTNeoXForCausalLM(config))

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        mask = torch.ones_like(tokens)
        mask[0, SEQUENCE // 2 :] = 0
        return self.network(input_ids=tokens, attention_mask=mask).logits


@pytest.mark.parametrize(("use_cache", "num_checkpointed"), [(False, 1), (True, 0), (True, 1)])
def test_what_a_cache_changes_fits(use_cache: bool, num_checkpointed: int) -> None:
    results = []
    for strategy in ("auto", ProTrainStrategy(num_swap_blocks=2, num_checkpoint_blocks=num_checkpointed)):
        torch.manual_seed(0)
        results.append(train(NeoX(use_cache), strategy))
    assert differences(*results) == []
    assert strategy.counters.swapped_out_bytes > 0


class Thawing(BaseFinetuning):
    """Trains the blocks from the second epoch on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        if self.first:
            self.freeze(pl_module.network.blocks)

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if self.first and epoch == self.first:
            self.unfreeze_and_add_param_group(pl_module.network.blocks, optimizer, lr=0.01)


def test_blocks_that_are_unfrozen_need_another_plan(caplog: pytest.LogCaptureFixture) -> None:
    class Module(ParityModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)

    caplog.set_level("INFO")
    swapping = {"num_swap_blocks": 2, "num_checkpoint_blocks": 0}
    results = []
    for strategy in ("auto", ProTrainStrategy(**swapping)):
        torch.manual_seed(0)
        module = Module(LanguageModel([Mlp() for _ in range(3)]))
        results.append(train(module, strategy, callbacks=[Thawing(1)], max_epochs=2))
    assert differences(*results) == []
    said = [record.message for record in caplog.records if "saves more than planned" in record.message]
    assert len(said) == 1
    assert "unfrozen them): begin another fit once they are unfrozen, which plans again" in said[0]
    caplog.clear()
    module.network.requires_grad_(True)
    strategy = ProTrainStrategy(**swapping)
    train(module, strategy, callbacks=[Thawing(0)], max_epochs=2)
    assert strategy.counters.swapped_out_bytes > 0
    assert not any("saves more than planned" in record.message for record in caplog.records)
