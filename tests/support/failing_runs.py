"""Runs that fail in the middle of an overlapped step, and runs that go on from their checkpoints."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_protrain import ProTrainStrategy
from tests.support.models import ParityModule, token_batches
from tests.support.overlapped_runs import network
from tests.support.parity import snapshot
from tests.support.trainers import QUIET


class Failing(ParityModule):
    """Breaks off at a batch, in the forward or in the middle of the backward."""

    at, where, block = -1, "forward", 1
    error: BaseException = KeyError("broken")

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        hidden = self.network.embedding(tokens)
        for index, block in enumerate(self.network.blocks):
            hidden = block(hidden)
            if index == self.block and batch_idx == self.at and self.training:
                if self.where == "forward":
                    raise self.error
                hidden.register_hook(self._break)
        return self.network.head(self.network.norm(hidden))

    def _break(self, gradient: Tensor) -> None:
        raise self.error


def failing(at: int = -1, where: str = "forward", block: int = 1) -> Failing:
    module = Failing(network())
    module.at, module.where, module.block = at, where, block
    return module


def resumed(path: Path, at: int, overlap: str, loads_states: bool = True, **options: object) -> dict[str, Tensor]:
    """The weights after the batches that a run had left when it saved this checkpoint.

    Args:
        path: The checkpoint.
        at: Batches that it has trained on.
        overlap: Value of `overlap_optimizer`.
        loads_states: Whether the states of the optimizer are loaded.
        options: Arguments of the Trainer.
    """
    module, strategy = failing(), ProTrainStrategy(plan="offload", overlap_optimizer=overlap)  # type: ignore[arg-type]
    # Lightning does not restore the position in the data: the batches that are left are given.
    batches = DataLoader(list(token_batches())[at:], batch_size=None)
    options = {**QUIET, "limit_train_batches": 14 - at, **options}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, strategy=strategy, **options)  # type: ignore[arg-type]
    state = torch.load(path, weights_only=False)
    module.load_state_dict(state["state_dict"])
    if loads_states:
        module.on_fit_start = lambda: strategy.load_optimizer_state_dict(state)  # type: ignore[method-assign]
    trainer.fit(module, batches)
    return snapshot(module)
