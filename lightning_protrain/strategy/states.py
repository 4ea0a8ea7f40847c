"""Saves and loads weights and optimizer states, whoever of the ranks steps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_protrain.distributed.owned_states import drop_states, gather_states
from lightning_protrain.distributed.rank_sync import RankSync
from lightning_protrain.runtime.apply import Runtime
from lightning_protrain.runtime.optim.bnb_optimizers import load_by_reference
from lightning_protrain.runtime.optim.step import move_state_beside_parameters
from lightning_protrain.strategy.checks import refuse_partially_stepped


class ShardedStates:
    """Makes whole checkpoints of states that ranks hold in parts.

    Args:
        sync: Who the ranks are.

    Attributes:
        owners: Who steps parameters that ranks share, by identity: a checkpoint may be saved after the run, too.
    """

    def __init__(self, sync: RankSync) -> None:
        self._sync = sync
        self.owners: dict[int, int] = {}

    def finish(self, module: nn.Module | None, runtime: Runtime | None) -> None:
        """Finish pending steps before weights or states are saved, see [Note: Partial steps].

        Raises:
            RuntimeError: Weights belong to no step.
        """
        refuse_partially_stepped(module)
        if runtime is not None:
            runtime.async_step.refuse_partially_stepped()  # Before it waits for what will never come.
            runtime.async_step.finish_all()
            runtime.async_step.refuse_partially_stepped()

    def gather(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return the state of an optimizer, whole on rank 0; None: each rank has all. Every rank calls it."""
        if self._sync.mesh is None or not self.owners:
            return None
        return gather_states(optimizer, self.owners, self._sync.mesh)

    def load(self, optimizers: Iterable[Optimizer], states: Iterable[Mapping[str, Any]], is_applied: bool) -> None:
        """Load whole states; what another rank owns is forgotten here.

        Args:
            optimizers: Of the model.
            states: One for each.
            is_applied: Whether there is a plan on the model, so that ranks own parts.
        """
        optimizers = list(optimizers)
        for optimizer, state in zip(optimizers, states, strict=False):
            load_by_reference(optimizer, state)
            if self._sync.mesh is not None and is_applied:
                drop_states(optimizer, self.owners, self._sync.mesh)
        move_state_beside_parameters(optimizers)
