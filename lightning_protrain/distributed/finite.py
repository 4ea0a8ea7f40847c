"""Detection of NaN and infinite losses, which stops a fit before it saves useless weights.

Reading a loss on a GPU would wait for all queued kernels. So each loss is copied to the host asynchronously, and read
when the copy has ended, a few batches later. A batch with a NaN or infinite loss causes a warning; the run stops if the
next batch has such a loss too. Weights can become NaN while losses are finite, so checkpoints with trained weights that
are not finite are refused.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_protrain.config import OnNonFinite

# Maximum number of running copies of losses; with more, the host waits for the oldest one.
MAX_WAITING = 64


@dataclass(frozen=True)
class _Loss:
    """A loss that is being copied to the host.

    Attributes:
        arrived: Event after the copy; None if the loss is on the host.
        number: Number of the batch in the fit.
    """

    value: Tensor
    arrived: torch.Event | None
    number: int
    batch: str


class FiniteLosses:
    """Checks that the losses of a fit are finite.

    Args:
        action: `"stop"` ends the fit after two consecutive batches without a finite loss; `"warn"` only warns.

    Attributes:
        watches: True during a fit.

    Raises:
        ValueError: If the action is unknown.
    """

    def __init__(self, action: OnNonFinite = "stop") -> None:
        if action not in get_args(OnNonFinite):
            raise ValueError(f'on_nonfinite={action!r}: give "stop" or "warn".')
        self._action = action
        self._waiting: deque[_Loss] = deque()
        self._last_bad = -1
        self._repeated = ""
        self.watches = False

    def begin(self, trainer: Trainer) -> None:
        """Start checking at the begin of a fit, except for a learning-rate search, which itself stops at divergence."""
        self.end()
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self.watches = not any(isinstance(callback, _LRCallback) for callback in callbacks)

    def end(self) -> None:
        """Stop checking, and drop all recorded losses."""
        self._waiting.clear()
        self._last_bad, self._repeated, self.watches = -1, "", False

    def watch(self, loss: Tensor, trainer: Trainer) -> None:
        """Record the loss of a backward pass.

        Args:
            loss: The loss before a gradient scaler multiplies it.
            trainer: The Trainer.
        """
        if not self.watches or loss.numel() != 1:
            return
        value, arrived = loss.detach(), None
        if value.device.type != "cpu":
            value = value.to("cpu", non_blocking=True)
            arrived = torch.Event(loss.device)
            arrived.record()
        progress = trainer.fit_loop.epoch_loop.batch_progress
        batch = f"batch {progress.current.ready - 1} of epoch {trainer.current_epoch} (step {trainer.global_step})"
        self._waiting.append(_Loss(value.reshape(()), arrived, progress.total.ready, batch))

    def why_to_stop(self, wait: bool = False) -> str:
        """Return a message why the fit must end; empty if it may continue.

        Args:
            wait: True waits for all running copies of losses.
        """
        while self._waiting:
            oldest = self._waiting[0]
            if oldest.arrived is not None and not oldest.arrived.query():
                if not wait and len(self._waiting) <= MAX_WAITING:
                    break
                oldest.arrived.synchronize()
            self._read(self._waiting.popleft())
        return self._repeated

    def why_not_to_save(self, checkpoint: Mapping[str, Any], trained: Collection[str]) -> str:
        """Return a message why a checkpoint must not be written; empty if it may be written.

        Args:
            checkpoint: Checkpoint dict of Lightning.
            trained: Names of the trained parameters.
        """
        if self._action == "warn":
            return ""
        weights: Mapping[str, Any] = checkpoint.get("state_dict", {})
        spoiled = next((name for name in trained if not _is_finite(weights.get(name))), None)
        if spoiled is None:
            return ""
        self.why_to_stop(wait=True)
        return self._repeated or (
            f"{spoiled!r} has NaN or infinite values, so the checkpoint is not written. {_REMEDY}"
        )

    def _read(self, loss: _Loss) -> None:
        value = float(loss.value)
        if math.isfinite(value) or loss.number == self._last_bad:
            return
        repeats, self._last_bad = loss.number == self._last_bad + 1 and self._last_bad >= 0, loss.number
        if self._action == "stop" and repeats:
            self._repeated = f"The loss is {value} in {loss.batch}, as in the batch before. Training stops. {_REMEDY}"
        elif not repeats:
            then = "" if self._action == "warn" else " Training stops if the loss of the next batch is not finite too."
            warnings.warn(f"The loss is {value} in {loss.batch}.{then}", stacklevel=2)


_REMEDY = (
    "Lower the learning rate, set gradient_clip_val, or inspect the batch; the last checkpoint is good. With "
    'on_nonfinite="warn", training continues.'
)


def _is_finite(weight: Any) -> bool:
    """Return True if all values are finite; their sum is checked first, because that is faster."""
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return True
    return math.isfinite(float(weight.sum(dtype=torch.float32))) or bool(weight.isfinite().all())
