"""Events of a fit that callbacks share: evaluations, and the ends of optimizer steps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer


@runtime_checkable
class EvaluatesOutsideValidation(Protocol):
    """A callback that evaluates in addition to validation, such as `Evaluator`."""

    @property
    def names(self) -> Collection[str]:
        """Names of the metrics that only this callback logs, once it is set up."""


@runtime_checkable
class EvaluationListener(Protocol):
    """A callback that is told when such an evaluation has ended, such as `ProTrainCheckpoint`."""

    def on_evaluated(self, trainer: Trainer, names: Collection[str]) -> None:
        """Handle new values of the metrics `names` in `trainer.callback_metrics`."""


def is_from_evaluator(name: str | None, trainer: Trainer) -> bool:
    """Return True if a metric comes from an evaluation outside validation, so that validation does not update it."""
    callbacks = getattr(trainer, "callbacks", [])
    return any(isinstance(each, EvaluatesOutsideValidation) and name in each.names for each in callbacks)


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Return True if the trainer runs with `fast_dev_run`."""
    return bool(getattr(trainer, "fast_dev_run", False))


def accumulates(trainer: Trainer) -> bool:
    """Return True if the batch that ends now is not the last one of its optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def validates(trainer: Trainer) -> bool:
    """Return True if this fit runs validation."""
    return trainer.enable_validation and sum(trainer.num_val_batches) > 0


def validates_next(trainer: Trainer) -> bool:
    """Return True if a validation follows the batch that ends now."""
    fetcher = trainer.fit_loop._data_fetcher
    return validates(trainer) and fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
