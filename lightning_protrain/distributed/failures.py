"""Makes a failure on one rank fail on all ranks, with the number of the rank, so that no rank waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_protrain.runtime.comm.rank_health import naming_wait


def share_failure(error: BaseException | None, doing: str) -> None:
    """Tell the other ranks if this one failed; every rank calls it once at the same point, whether it failed or not.

    Args:
        error: Error of this rank; None if it has none.
        doing: Activity of all ranks, for the message: `"Validation at step 4"`.

    Raises:
        RuntimeError: This rank did not fail, but another rank failed or is gone.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    texts: list[str | None] = [None] * dist.get_world_size()
    mine = None if error is None else f"{type(error).__name__}: {error}"
    try:
        with naming_wait(f"the other ranks ({doing[0].lower()}{doing[1:]})"):
            dist.all_gather_object(texts, mine)
    except RuntimeError as gone:
        if error is not None:  # Raise this rank's own error.
            return
        raise RuntimeError(
            f"{doing} cannot be ended on rank {dist.get_rank()}: another rank does not answer any more. Its own "
            "message, if it could leave one, is in the log of that rank."
        ) from gone
    failed = [f"rank {rank} ({text})" for rank, text in enumerate(texts) if text is not None]
    if failed and error is None:
        raise RuntimeError(f"{doing} failed on {', '.join(failed)}; rank {dist.get_rank()} stops with it.")


@contextmanager
def failing_together(doing: str) -> Iterator[None]:
    """Raise an error on all ranks if the body of this context manager fails on one; every rank enters it.

    Args:
        doing: The activity for the message, see `share_failure`.

    Raises:
        RuntimeError: Another rank failed or is gone.
    """
    try:
        yield
    except BaseException as error:
        share_failure(error, doing)
        raise
    share_failure(None, doing)


def broadcast_buffers_once(model: nn.Module | None) -> None:
    """Broadcast buffers on all ranks at this point, as DDP would in the first forward without gradients.

    Otherwise a rank without a batch, or one that fails before that forward, would leave the others waiting.

    Args:
        model: The model as the strategy runs it.
    """
    if isinstance(model, DistributedDataParallel):
        if model.will_sync_module_buffers():
            model._sync_buffers()
        model.require_forward_param_sync = False  # until the next forward with gradients


class SharedFailure(Callback):
    """Ends validation and test on all ranks if one rank fails, before metrics are reduced.

    Without it, the other ranks wait in the reduction of the metrics until the process group times out. It costs one
    small collective for each evaluation on several ranks, and nothing on one rank.
    """

    def __init__(self) -> None:
        self._doing: str | None = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the other ranks wait for this one from now on."""
        self._doing = f"Validation at step {trainer.global_step}"
        broadcast_buffers_once(trainer.strategy.model)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the other ranks wait for this one from now on."""
        self._doing = "Test"

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share failures before the metrics are reduced.

        Raises:
            RuntimeError: Another rank failed.
        """
        self._end(None)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share failures before the metrics are reduced.

        Raises:
            RuntimeError: Another rank failed.
        """
        self._end(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the other ranks about the failure, if they wait for this one."""
        self._end(exception)

    def _end(self, error: BaseException | None) -> None:
        doing, self._doing = self._doing, None
        if doing is not None:
            share_failure(error, doing)
