"""`Evaluator`: evaluates further data sets during training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torchmetrics import MetricCollection
from tqdm.auto import tqdm

from lightning_protrain.distributed.failures import broadcast_buffers_once, failing_together, warning_together
from lightning_protrain.trainer_events import CopyableCallback, EvaluationListener

Loader = Iterable[Any]


class Evaluator(CopyableCallback):
    """Evaluates data sets in addition to validation, and logs metrics such as `python_loss` for a data set "python".

    `ModelCheckpoint` and `EarlyStopping` can monitor the metrics. A data set without a trained token gets no metric.
    All ranks evaluate at the intervals of rank 0, and an error on one rank ends all ranks; after the last step it is a
    warning. Trained weights are bit-identical with and without evaluations.

    Args:
        data: Map from a name to a data module, whose validation data are used, or to a re-iterable of batches.
        every_n_steps: Number of optimizer steps between evaluations; None evaluates only at start or end.
        at_start: True evaluates before the first step.
        at_end: True evaluates after the last step.
        max_batches: Maximum number of batches of a data set on each rank; None means all.
        metrics: Name of the module's attribute with the `MetricCollection` that `validation_step` updates.

    Raises:
        ValueError: If there is nothing to do or a number is below 1. Hooks raise it if a metric name is already in use,
            the module has no such metrics, or a data set has no batch.
    """

    def __init__(
        self,
        data: dict[str, LightningDataModule | Loader],
        every_n_steps: int | None = None,
        at_start: bool = False,
        at_end: bool = True,
        max_batches: int | None = None,
        metrics: str = "val_metrics",
    ) -> None:
        if not data:
            raise ValueError("Evaluator has no data. Give at least one data set by name, or leave the callback out.")
        if every_n_steps is None and not at_start and not at_end:
            raise ValueError("Evaluator never evaluates: set every_n_steps, at_start or at_end.")
        for name, number in (("every_n_steps", every_n_steps), ("max_batches", max_batches)):
            if number is not None and number < 1:
                raise ValueError(f"{name}={number}: give at least 1, or None.")
        for name in data:
            if name == "train":
                raise ValueError("The data set name 'train' collides with the training metrics. Rename the data set.")
            if not name.isidentifier():
                raise ValueError(f"The data set name {name!r} is part of metric names: use letters, digits and '_'.")
        self.data = data
        self.every_n_steps = every_n_steps
        self.at_start = at_start
        self.at_end = at_end
        self.max_batches = max_batches
        self.metrics = metrics
        self._loaders: dict[str, Loader] = {}
        self._collections: dict[str, MetricCollection] = {}
        self._step = 0
        self._evaluated_at: int | None = None
        self._logged: set[str] = set()
        self._without_value: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Iterators and worker processes cannot be copied, and the trainer of the run should not be.
        data = {name: _without_trainer(loader) for name, loader in self.data.items()}
        return {**super().__getstate__(), "data": data, "_loaders": {}}

    @property
    def names(self) -> set[str]:
        """Names of all metrics that this callback logs, after `setup`."""
        return {str(key) for collection in self._collections.values() for key in collection.keys()}  # noqa: SIM118

    # --- hooks --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the names of the metrics."""
        if stage != "fit" or self._is_off(trainer):
            return
        own = _collection(pl_module, self.metrics)
        self._collections = {name: own.clone(prefix=f"{name}_") for name in self.data}
        taken: dict[str, str] = {}
        for name, child in pl_module.named_children():
            if isinstance(child, MetricCollection):
                _claim(child, f"the module's {name}", taken)
        for number, one in enumerate(each for each in _callbacks(trainer) if isinstance(each, Evaluator)):
            for name, collection in one._collections.items():
                _claim(collection, f"data set {name!r} of Evaluator {number + 1}", taken)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the loaders of this rank."""
        if self._is_off(trainer):
            rank_zero_info("Evaluator does nothing in a run with fast_dev_run or overfit_batches.")
            return
        self._evaluated_at = None
        # All ranks use the intervals of rank 0, so that they evaluate together without a collective in every step.
        cadence = (self.every_n_steps, self.at_start, self.at_end, self.max_batches)
        self.every_n_steps, self.at_start, self.at_end, self.max_batches = trainer.strategy.broadcast(cadence)
        with isolate_rng():
            with failing_together("Preparing the data of Evaluator"):
                for data in self.data.values():
                    _prepare(data, trainer)
            with failing_together("Loading the data of Evaluator"):
                self._loaders = {name: _loader(name, data, trainer) for name, data in self.data.items()}
                for data in self.data.values():  # A module of another class has no such check.
                    getattr(pl_module, "check_evaluated", str)(getattr(data, "objective", None))
        _refuse_empty(self._loaders, trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the evaluation before the first step."""
        self._step = trainer.global_step
        if self.at_start:
            self._evaluate_all(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate if this batch ends an optimizer step at the interval `every_n_steps`."""
        before, self._step = self._step, trainer.global_step
        # With several optimizers, a batch takes several steps and may pass a multiple of the interval.
        if self.every_n_steps is not None and self._step // self.every_n_steps > before // self.every_n_steps:
            self._evaluate_all(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate after the last step, unless an evaluation has run at this step."""
        if self.at_end and trainer.global_step != self._evaluated_at and not self._is_off(trainer):
            logged: dict[str, Tensor] = {}
            with warning_together(f"The evaluation after {trainer.global_step} steps"):
                logged = self._measure(trainer, pl_module)
            self._tell(trainer, logged)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the loaders and so end their worker processes."""
        self._loaders = {}

    def _is_off(self, trainer: Trainer) -> bool:
        return bool(getattr(trainer, "fast_dev_run", False) or getattr(trainer, "overfit_batches", 0))

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluate_all(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_off(trainer):
            self._tell(trainer, self._measure(trainer, pl_module))

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Tensor]:
        self._evaluated_at = trainer.global_step
        logged: dict[str, Tensor] = {}
        for name, loader in self._loaders.items():
            values = self._evaluate(name, loader, trainer, pl_module)
            for key in (values.keys() & trainer.callback_metrics.keys()) - self._logged:
                raise ValueError(f"Data set {name!r} and the module are both logged as {key!r}. Rename the data set.")
            self._logged |= values.keys()
            for key in values:  # Remove values of earlier evaluations, also if this one has none.
                trainer.callback_metrics.pop(key, None)
            logged |= {key: value for key, value in values.items() if value is not None}
            if not any(value is not None for value in values.values()) and name not in self._without_value:
                self._without_value.add(name)
                rank_zero_warn(f"Evaluator: data set {name!r} has no trained token, so it has no metric.")
        # `self.log` would drop values between the logger's steps, and is not available in `on_train_end`.
        trainer.callback_metrics.update(logged)
        for logger in trainer.loggers if logged else ():
            logger.log_metrics({key: float(value) for key, value in logged.items()}, step=trainer.global_step)
        return logged

    def _tell(self, trainer: Trainer, logged: Mapping[str, Tensor]) -> None:
        for callback in _callbacks(trainer):
            if isinstance(callback, EvaluationListener):
                callback.on_evaluated(trainer, logged.keys())

    def _evaluate(
        self, name: str, loader: Loader, trainer: Trainer, pl_module: LightningModule
    ) -> Mapping[str, Tensor | None]:
        collection = self._collections[name].to(pl_module.device)
        collection.reset()
        broadcast_buffers_once(trainer.strategy.model)
        doing = f"The evaluation of {name!r} at step {trainer.global_step}"
        with failing_together(doing), _aside(pl_module, self.metrics, collection):
            self._run(name, loader, trainer, pl_module)
        values: dict[str, Tensor | None] = collection.compute()
        return values

    def _run(self, name: str, loader: Loader, trainer: Trainer, pl_module: LightningModule) -> None:
        total = sized_len(loader)
        if self.max_batches is not None:
            total = self.max_batches if total is None else min(total, self.max_batches)
        batches = islice(loader, self.max_batches)
        for index, batch in enumerate(_with_bar(batches, f"Evaluating {name}", total, trainer)):
            converted = pl_module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
            trainer.strategy.validation_step(trainer.strategy.batch_to_device(converted, dataloader_idx=0), index)


def _with_bar(batches: Iterable[Any], description: str, total: int | None, trainer: Trainer) -> Iterator[Any]:
    bar = trainer.progress_bar_callback
    if bar is None or not trainer.is_global_zero or not getattr(bar, "is_enabled", True):
        yield from batches
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.progress.live.is_started:
        # Add a task to the display of Lightning's bar, which would hide the output of a second bar.
        task = bar.progress.add_task(description, total=float("inf") if total is None else total)
        try:
            for batch in batches:
                yield batch
                bar.progress.advance(task)
                bar.refresh()
        finally:
            bar.progress.remove_task(task)
    else:
        yield from tqdm(batches, description, total, leave=False)


@contextmanager
def _aside(module: LightningModule, attribute: str, collection: MetricCollection) -> Iterator[None]:
    """Isolate an evaluation from training within this context.

    The context replaces the module's metrics by `collection`, and disables gradients and `log`. At its end, it restores
    metrics, module modes, random states and `log`.
    """
    value = getattr(module, attribute)
    modes = {part: part.training for part in module.modules()}
    with isolate_rng(), torch.no_grad():
        module.eval()
        setattr(module, attribute, collection)
        module.__dict__["log"] = _not_logged
        try:
            yield
        finally:
            del module.__dict__["log"]
            setattr(module, attribute, value)
            for part, training in modes.items():
                part.training = training


def _not_logged(*_: Any, **__: Any) -> None:
    """Replace `LightningModule.log` during an evaluation, because no loop of the Trainer would store the results."""


def _collection(module: LightningModule, attribute: str) -> MetricCollection:
    collection = getattr(module, attribute, None)
    if not isinstance(collection, MetricCollection):
        raise ValueError(
            f"Evaluator needs the MetricCollection that `validation_step` of {type(module).__name__} updates, and its "
            f"{attribute!r} is {type(collection).__name__}. Name the attribute with `metrics`."
        )
    return collection


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    return callbacks


def _claim(collection: MetricCollection, owner: str, taken: dict[str, str]) -> None:
    for key in map(str, collection.keys()):
        if taken.setdefault(key, owner) != owner:
            raise ValueError(f"{owner} and {taken[key]} would both be logged as {key!r}. Rename the data set.")


def _without_trainer(data: LightningDataModule | Loader) -> LightningDataModule | Loader:
    if isinstance(data, LightningDataModule):
        data = copy.copy(data)
        data.trainer = None
    return data


def _prepare(data: LightningDataModule | Loader, trainer: Trainer) -> None:
    if isinstance(data, LightningDataModule):
        data.trainer = trainer
        if (trainer.local_rank if data.prepare_data_per_node else trainer.global_rank) == 0:
            data.prepare_data()


def _loader(name: str, data: LightningDataModule | Loader, trainer: Trainer) -> Loader:
    loader = data
    if isinstance(data, LightningDataModule):
        data.setup("validate")
        loader = data.val_dataloader()
    if isinstance(loader, Mapping) or not isinstance(loader, Iterable):
        raise ValueError(
            f"Evaluator: data set {name!r} gives {type(loader).__name__}. Give one loader of batches for each name."
        )
    if isinstance(loader, Iterator):
        raise ValueError(f"Evaluator: data set {name!r} can be read only once. Give a DataLoader or a list of batches.")
    return loader


def _refuse_empty(loaders: Mapping[str, Loader], trainer: Trainer) -> None:
    lengths = [sized_len(loader) for loader in loaders.values()]
    some = torch.tensor([length != 0 for length in lengths], dtype=torch.int64, device=trainer.strategy.root_device)
    for name, ranks in zip(loaders, trainer.strategy.reduce(some, reduce_op="sum").tolist(), strict=True):
        if not ranks:
            raise ValueError(f"Evaluator: data set {name!r} has no batch. Give it data, or leave it out.")
