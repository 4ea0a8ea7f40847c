"""The part of a strategy that saves and loads weights and optimizer states, whoever of the ranks steps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

from lightning_protrain.distributed.owned_states import drop_states, gather_states
from lightning_protrain.runtime.apply import Runtime
from lightning_protrain.runtime.optim.bnb_optimizers import load_by_reference
from lightning_protrain.runtime.optim.step import move_state_beside_parameters
from lightning_protrain.strategy.checks import refuse_partially_stepped
from lightning_protrain.strategy.data_parallel import DataParallelStrategy


class StatesStrategy(DataParallelStrategy):
    """Checkpoints are the same whoever steps which weights.

    Args:
        arguments: As of `DataParallelStrategy`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._runtime: Runtime | None = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._finish_async_step()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer, whole on rank 0, whoever steps what; every rank calls it."""
        self._finish_async_step()
        owners = self._runtime.owners if self._runtime is not None else self._owners
        if self._ranks is None or not owners:
            return Strategy.optimizer_state(self, optimizer)
        return gather_states(optimizer, owners, self._ranks)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads whole states; what another rank owns is forgotten here."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_by_reference(optimizer, state)
            if self._ranks is not None and self._runtime is not None:
                drop_states(optimizer, self._runtime.owners, self._ranks)
        move_state_beside_parameters(self.optimizers)

    def _finish_async_step(self) -> None:
        """Before weights or states are saved; raises where they belong to no step, see [Note: Partial steps]."""
        refuse_partially_stepped(self.lightning_module)
        if self._runtime is not None:
            self._runtime.async_step.refuse_partially_stepped()  # Before it waits for what will never come.
            self._runtime.async_step.finish_all()
            self._runtime.async_step.refuse_partially_stepped()
