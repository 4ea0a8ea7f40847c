"""Runs that fail in the middle of an overlapped step."""

from __future__ import annotations

from torch import Tensor

from tests.support.models import ParityModule
from tests.support.overlapped_runs import network


class Failing(ParityModule):
    """Breaks off at a batch, in the forward or in the middle of the backward."""

    at, where, block = -1, "forward", 1

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        hidden = self.network.embedding(tokens)
        for index, block in enumerate(self.network.blocks):
            hidden = block(hidden)
            if index == self.block and batch_idx == self.at and self.training:
                if self.where == "forward":
                    raise KeyError("broken")
                hidden.register_hook(self._break)
        return self.network.head(self.network.norm(hidden))

    def _break(self, gradient: Tensor) -> None:
        raise KeyError("broken")


def failing(at: int = -1, where: str = "forward", block: int = 1) -> Failing:
    module = Failing(network())
    module.at, module.where, module.block = at, where, block
    return module
