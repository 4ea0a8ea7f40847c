"""What happens when in a fit: evaluations, the ends of steps, and who tells whom."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer


@runtime_checkable
class EvaluatesOutsideValidation(Protocol):
    """A callback that evaluates beside the validation; `Evaluator` is one."""

    @property
    def names(self) -> Collection[str]:
        """Of the metrics that it alone logs, once it is set up."""


@runtime_checkable
class EvaluationListener(Protocol):
    """A callback that wants to know when one has ended; `ProTrainCheckpoint` is one."""

    def on_evaluated(self, trainer: Trainer, names: Collection[str]) -> None:
        """The metrics of these names have just been measured, and are in `trainer.callback_metrics`."""


def is_from_evaluator(name: str | None, trainer: Trainer) -> bool:
    """Whether a metric comes from an evaluation beside the validation, so that no validation measures it anew."""
    callbacks = getattr(trainer, "callbacks", [])
    return any(isinstance(each, EvaluatesOutsideValidation) and name in each.names for each in callbacks)


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Whether it is a run with `fast_dev_run`."""
    return bool(getattr(trainer, "fast_dev_run", False))


def accumulates(trainer: Trainer) -> bool:
    """Whether the batch that ends now is not the last one of its optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def validates(trainer: Trainer) -> bool:
    """Whether there is a validation in this fit."""
    return trainer.enable_validation and sum(trainer.num_val_batches) > 0


def validates_next(trainer: Trainer) -> bool:
    """Whether a validation follows on the batch that ends now."""
    fetcher = trainer.fit_loop._data_fetcher
    return validates(trainer) and fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
