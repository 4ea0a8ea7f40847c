"""Weights in low precision under a dispatch mode, which runs again what autograd does by itself."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_protrain.strategy.protrain import ProTrainStrategy

SIZES = {"n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 32, "vocab_size": 128}
# Blocks that are checkpointed, and that are swapped.
PLANS = {"kept": (0, 0), "checkpointed": (3, 0), "swapped": (0, 2)}


class Nothing(TorchDispatchMode):
    """Runs every operation as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Gpt2(L.LightningModule):
    """Its layers are Conv1D: `addmm` of a weight that autograd saves as it is."""

    def __init__(self, within: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = GPT2LMHeadModel(GPT2Config(**SIZES, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))
        self.within = within
        self.mode = Nothing()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(input_ids=batch, labels=batch, use_cache=False).loss

    def on_train_start(self) -> None:
        if self.within:
            self.mode.__enter__()

    def on_train_end(self) -> None:
        if self.within:
            self.mode.__exit__(None, None, None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def train(module: Gpt2, strategy: Any) -> dict[str, Tensor]:
    batches: Any = torch.randint(128, (3, 2, 32), generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision="bf16-mixed",
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.state_dict()


@pytest.mark.filterwarnings("ignore:Knobs that were not given")
@pytest.mark.parametrize("plan", PLANS)
def test_training_under_a_mode_is_plain_training(plan: str) -> None:
    plain = train(Gpt2(), "auto")
    num_checkpoint, num_swap = PLANS[plan]
    strategy = ProTrainStrategy(
        num_persistent_chunks=0,
        num_checkpoint_blocks=num_checkpoint,
        num_swap_blocks=num_swap,
        num_chunk_buffers=4,
        monitor=False,
    )
    streamed = train(Gpt2(within=True), strategy)
    assert strategy.plan is not None
    assert any(chunk.streamed_dtype == "bfloat16" for chunk in strategy.plan.chunks)
    assert all(torch.equal(streamed[name], plain[name]) for name in plain)
