"""Modules that fail in their part of an overlapped step."""

from __future__ import annotations

import time

import lightning as L
import torch
from torch import Tensor

from tests.support.rank_models import Module

# The batch at which something happens.
AT = 3


class Saving(L.Callback):
    """When the run breaks off, keeps what could be saved, or why it could not."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] | str = ""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        try:
            state = trainer.strategy.lightning_module_state_dict()
            self.found = {name: value.detach().clone() for name, value in state.items()}
        except RuntimeError as error:
            self.found = str(error)


class Faulty(Module):
    """Fails on rank 1, in one of several ways."""

    fault, rank = "", 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        fails = self.rank == 1 and batch_idx == AT
        if fails and self.fault == "raise in forward":
            time.sleep(0.2)  # The other one is in its forward.
            raise ValueError("boom")
        (tokens,) = batch
        hidden = self.model.embedding(tokens[:, :-1])
        if fails and self.fault == "raise in backward":
            hidden.register_hook(self._raise)
        for layer in self.model.layers:
            hidden = layer(hidden)
        return torch.nn.functional.cross_entropy(self.model.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())

    def _raise(self, gradient: Tensor) -> None:
        raise ValueError("boom")
