"""`InitialValidation`: validates before the first step, and says at the end how far the loss came."""

from __future__ import annotations

import math

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console


class InitialValidation(Callback):
    """Measures a validation metric before training and prints "val_loss 8.41 -> 4.92" after it.

    The first measurement is Lightning's sanity check, run over all validation batches; it is also logged, at step 0.
    A resumed training has no sanity check and prints only the last value.

    Args:
        monitor: Name of the metric that the module logs in validation.
    """

    def __init__(self, monitor: str = "val_loss") -> None:
        self.monitor = monitor
        self.first: float | None = None
        self.last: float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Extends the sanity check to all validation batches that the trainer's limit allows."""
        if stage == "fit":
            trainer.num_sanity_val_steps = math.inf

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps and logs the first value; Lightning itself forgets what a sanity check logs."""
        self.first = self._metric(trainer)
        for logger in trainer.loggers:
            logger.log_metrics({self.monitor: self.first}, step=0)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the last value."""
        if not trainer.sanity_checking:
            self.last = self._metric(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints both, on rank zero."""
        if trainer.is_global_zero:
            Console().print(self.summary(), highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """One line with the first and the last value, as far as they are known."""
        if self.last is None:
            return f"{self.monitor}: no validation ran during training."
        if self.first is None:
            return f"{self.monitor} {self.last:.4f}"
        return f"{self.monitor} {self.first:.4f} -> {self.last:.4f} ({100 * self.last / self.first:.0f} %)"

    def _metric(self, trainer: Trainer) -> float:
        if self.monitor not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise ValueError(f"InitialValidation monitors {self.monitor!r}, but validation logged {logged}.")
        return float(trainer.callback_metrics[self.monitor])
