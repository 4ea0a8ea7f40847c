"""Evaluation on several ranks: counts each sample once, and lets ranks without further samples join collectives.

[Note: Each sample once]
Lightning divides the samples of an evaluation by a `DistributedSampler`, which repeats samples until all ranks have
equally many, so a mean counts some samples twice. Here a rank leaves out the repeated sample. If it then has one batch
less than another rank, it *attends*: it runs the step on the repeated sample, because the step may have collectives.
The result does not count. Logged values, metrics and the state of the module are restored, and no batch hooks run.

If ranks gather weights from each other, every forward is a collective. Then ranks agree before each batch on its
loader, and a rank without batches joins with an old batch. So ranks may have different numbers of batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.data import _update_dataloader
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from torchmetrics import Metric

from lightning_protrain.runtime.comm.collectives import RankMesh

# Types of module attributes whose content is restored, and attributes in which modules keep weights and hooks.
_PLAIN, _TABLES = (list, dict, set), vars(nn.Module()).keys()
# The index of a loader after the last one.
_NO_LOADER = 1 << 30


class EachOnce(Sampler[Any]):
    """The indices of one rank, without those that a `DistributedSampler` repeats, see [Note: Each sample once].

    Args:
        sampler: Distributes the samples among ranks.
        batch_size: Number of samples in a batch.
        drop_last: True to leave out a last batch with fewer samples.

    Attributes:
        attends: True if the last batch only takes part in collectives and does not count.
    """

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int, drop_last: bool) -> None:
        self.sampler = sampler
        total: int = len(sampler.dataset)  # type: ignore[arg-type]
        own, most = len(range(sampler.rank, total, sampler.num_replicas)), -(-total // sampler.num_replicas)
        add = 0 if drop_last else batch_size - 1
        self.attends = (own + add) // batch_size < (most + add) // batch_size
        self._length = most if self.attends else own

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        yield from list(self.sampler)[: self._length]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler, which determines its order."""
        self.sampler.set_epoch(epoch)


def each_once(loader: Any, trainer: Trainer) -> Any:
    """Return a loader for validation or test without the samples that its `DistributedSampler` repeats."""
    stage = trainer.state.stage
    if not isinstance(loader, DataLoader) or stage is None or not stage.evaluating:
        return loader
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    size = 1 if batches is None else getattr(batches, "batch_size", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last or not isinstance(size, int):
        return loader
    if len(sampler.dataset) % sampler.num_replicas == 0:  # type: ignore[arg-type]
        return loader
    return _update_dataloader(loader, EachOnce(sampler, size, getattr(batches, "drop_last", False)), stage)


class _Together:
    """Yields batches until no rank has one left.

    Args:
        fetcher: Yields the batches of this rank.
        ranks: The ranks that take part.

    Attributes:
        attends: True if the latest batch only takes part in collectives and does not count.
    """

    def __init__(self, fetcher: _DataFetcher, ranks: RankMesh) -> None:
        self._fetcher, self._ranks = fetcher, ranks
        self._next: tuple[Any, int, int] | None = None
        self._batch: Any = None
        self._has_ended = False
        self.attends = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def __next__(self) -> tuple[Any, int, int]:
        if self._next is None and not self._has_ended:
            self._next = next(self._fetcher, None)
            self._has_ended = self._next is None
            self._batch = self._batch if self._next is None else self._next[0]
        mine = _NO_LOADER if self._next is None else self._next[2]
        told = torch.tensor([mine])
        work = dist.all_reduce(told, dist.ReduceOp.MIN, group=self._ranks.meeting, async_op=True)
        self._ranks.rank_health.wait(work, "the next batch of an evaluation")
        loader = int(told)
        if loader == _NO_LOADER:
            raise StopIteration
        self.attends = loader != mine
        if self._next is not None and not self.attends:
            found, self._next = self._next, None
            return found
        if self._batch is None:
            raise ValueError(
                f"Rank {self._ranks.rank} has no batch to evaluate, but all ranks must run every "
                f"forward together. Give every rank "
                "data."
            )
        return self._batch, 0, loader


def evaluate_each_once(trainer: Trainer, together: RankMesh | None) -> None:
    """Let an evaluation run batches that do not count without results; `evaluate_as_ever` ends this.

    Args:
        trainer: Trainer that validates, tests or predicts.
        together: Ranks whose forwards are collectives; None: each rank needs no other.
    """
    loop: Any = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    if together is not None and not isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
        loop._data_fetcher = _Together(loop._data_fetcher, together)
    name = "_predict_step" if trainer.predicting else "_evaluation_step"
    setattr(loop, name, _EvaluationStep(loop, getattr(type(loop), name)))


def evaluate_as_ever(trainer: Trainer) -> None:
    """Restore the loops of a Trainer."""
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        vars(loop).pop("_evaluation_step", None)
    vars(trainer.predict_loop).pop("_predict_step", None)


class _EvaluationStep:
    """The step of an evaluation loop; the results of a batch that does not count are dropped.

    Args:
        loop: Loop of the evaluation.
        own: The loop's original method that runs a step.
    """

    def __init__(self, loop: Any, own: Any) -> None:
        self._loop, self._own = loop, own

    def __call__(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        loop = self._loop
        loader = loop._combined_loader.flattened[dataloader_idx]
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
        is_last = isinstance(sampler, EachOnce) and sampler.attends and batch_idx == len(loader) - 1
        fetcher = loop._data_fetcher
        if dataloader_iter is not None or not (is_last or (isinstance(fetcher, _Together) and fetcher.attends)):
            self._own(loop, batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        trainer = loop.trainer
        module, log = trainer.lightning_module, trainer._logger_connector
        batch = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)
        several = len(loop._combined_loader.flattened) > 1 and loop._combined_loader._mode == "sequential"
        place = dataloader_idx if several else None
        name = "predict_step" if trainer.predicting else "test_step" if trainer.testing else "validation_step"
        arguments = loop._build_step_args_from_hook_kwargs(loop._build_kwargs(batch, batch_idx, place), name)
        if not trainer.predicting:
            log.on_batch_start(batch, place)
        with _uncounted(module, {} if trainer._results is None else trainer._results):
            call._call_strategy_hook(trainer, name, *arguments)
        if not trainer.predicting:
            log.on_batch_end()


@contextmanager
def _uncounted(module: LightningModule, results: dict[str, Any]) -> Iterator[None]:
    """Undo all that a step logs, adds to metrics and changes in attributes of the module.

    A value that was never logged before stays, with zero samples, because all ranks reduce it at the end.
    """
    held, logged = dict(vars(module)), dict(results)
    contents = [(each, copy.copy(each)) for name, each in held.items() if type(each) in _PLAIN and name not in _TABLES]
    metrics = [*(each for each in module.modules() if isinstance(each, Metric)), *results.values()]
    states = [(vars(metric), dict(vars(metric))) for metric in metrics]
    for metric in metrics:
        for name in metric._defaults:  # Metrics may change their states in place.
            value = vars(metric)[name]
            vars(metric)[name] = value.clone() if isinstance(value, Tensor) else list(value)
    try:
        yield
    finally:
        for now, before in [(vars(module), held), *states, *contents]:
            now.clear()
            (now.extend if isinstance(now, list) else now.update)(before)
    for name, metric in results.items():
        if name not in logged and metric.is_tensor:
            metric.reset()
            metric.has_reset = False
