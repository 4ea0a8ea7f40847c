"""Interfaces between callbacks, their copies, and functions that read the state of a Trainer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, Trainer


class CopyableCallback(Callback):
    """A callback that can be copied and pickled at any time of a run; a copy has no part in that run."""

    def __getstate__(self) -> dict[str, Any]:
        # Lightning binds `log` to the module, whose weights would be copied, too.
        return {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}


@runtime_checkable
class EvaluatesOutsideValidation(Protocol):
    """A callback that evaluates in addition to validation, such as `Evaluator`."""

    @property
    def names(self) -> Collection[str]:
        """Names of the metrics that this callback logs, after `setup`."""


@runtime_checkable
class EvaluationListener(Protocol):
    """A callback with a hook for the end of such an evaluation, such as `ProTrainCheckpoint`."""

    def on_evaluated(self, trainer: Trainer, names: Collection[str]) -> None:
        """Handle new values in `trainer.callback_metrics`; `names` are the metrics that have changed."""


def is_from_evaluator(name: str | None, trainer: Trainer) -> bool:
    """Return True if an `Evaluator` logs the metric, rather than validation."""
    callbacks = getattr(trainer, "callbacks", [])
    return any(isinstance(callback, EvaluatesOutsideValidation) and name in callback.names for callback in callbacks)


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Return True if the trainer runs with `fast_dev_run`."""
    return bool(getattr(trainer, "fast_dev_run", False))


def accumulates(trainer: Trainer) -> bool:
    """Return True if the optimizer does not step after the batch that has just ended."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def validates(trainer: Trainer) -> bool:
    """Return True if this fit runs validation."""
    return trainer.enable_validation and sum(trainer.num_val_batches) > 0


def validates_next(trainer: Trainer) -> bool:
    """Return True if validation runs after the batch that has just ended."""
    fetcher = trainer.fit_loop._data_fetcher
    return validates(trainer) and fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
