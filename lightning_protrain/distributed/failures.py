"""Failures on all ranks if one rank fails, so that no rank waits for it; the message names the rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_protrain.rank_store import RankStore


class FirstRankRefused(Exception):
    """The `__cause__` of an error on another rank that rank 0 already shows to the user."""


@contextmanager
def failing_together(doing: str) -> Iterator[None]:
    """Raise an error on all ranks if the body of this context fails on one; every rank enters it.

    Args:
        doing: Activity of all ranks, for the message, such as `"Validation at step 4"`.

    Raises:
        FailedElsewhere: If another rank has failed or exited.
    """
    with RankStore.current().together(doing):
        yield


@contextmanager
def warning_together(doing: str) -> Iterator[None]:
    """Warn if the body of this context fails on a rank, and go on on all ranks; every rank enters it.

    It is for work that training does not need: code of users may raise anything there, and must not cost the model.

    Args:
        doing: Activity of all ranks, see `failing_together`.
    """
    try:
        with failing_together(doing):
            yield
    except BaseException as error:
        if not isinstance(error, Exception):  # The user or the system ends the process.
            raise
        rank_zero_warn(f"{doing} failed; the run goes on without. {type(error).__name__}: {error}")


def broadcast_buffers_once(model: nn.Module | None) -> None:
    """Broadcast DDP's buffers now instead of in the first forward without gradients.

    In that forward, ranks would wait for a rank that has no batch or has failed.

    Args:
        model: The model, which may be wrapped in DDP.
    """
    if isinstance(model, DistributedDataParallel):
        if model.will_sync_module_buffers():
            model._sync_buffers()
        model.require_forward_param_sync = False  # Until the next forward with gradients.


class SharedFailure(Callback):
    """A callback that ends validation and test on all ranks if one rank fails.

    Without it, the other ranks wait in the all-reduce of metrics until the process group times out. It costs one
    exchange of messages for each evaluation on several ranks.
    """

    def __init__(self) -> None:
        self._doing: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedFailure, ()  # Lightning binds `log` to the module, whose weights would be copied, too.

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a validation, in which other ranks wait for this one."""
        self._doing = f"Validation at step {trainer.global_step}"
        broadcast_buffers_once(trainer.strategy.model)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a test, in which other ranks wait for this one."""
        self._doing = "Test"

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise FailedElsewhere before metrics are reduced, if another rank has failed."""
        self._end(None)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise FailedElsewhere before metrics are reduced, if another rank has failed."""
        self._end(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report the error to the other ranks if they wait for this one."""
        self._end(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Show the other ranks no further signs of life."""
        RankStore.rest()

    def _end(self, error: BaseException | None) -> None:
        doing, self._doing = self._doing, None
        if doing is not None:
            RankStore.current().gather(None, doing, error=error)
