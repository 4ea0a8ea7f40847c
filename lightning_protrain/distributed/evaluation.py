"""Evaluation on several ranks that counts each sample once.

[Note: Each sample once]
Lightning's `DistributedSampler` repeats samples until all ranks have the same number, so a mean counts some samples
twice. Here a rank skips the repeated sample. If it then has one batch less than another rank, it *attends* the last
batch. It runs the step on the repeated sample, because the step may have collectives, but drops the result. Logged
values, metrics and the module's state are restored, and hooks of the batch do not run.

With FSDP2 every forward is a collective, and ranks may have different numbers of batches. So ranks agree before each
batch on the dataloader that it comes from, and a rank without further batches attends with an old batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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

# Types of module attributes whose content is restored, and attributes of nn.Module itself, which are not.
_PLAIN, _TABLES = (list, dict, set), vars(nn.Module()).keys()
# Index of a rank without further batches, larger than any index of a dataloader.
_NO_LOADER = 1 << 30


class EachOnce(Sampler[Any]):
    """A sampler without the samples that a `DistributedSampler` repeats, see [Note: Each sample once].

    Args:
        sampler: The original sampler.
        batch_size: Number of samples in a batch.
        drop_last: True drops a last batch with fewer samples.

    Attributes:
        attends: True if this rank only attends the last batch.
    """

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int, drop_last: bool) -> None:
        self.sampler = sampler
        total: int = len(sampler.dataset)  # type: ignore[arg-type]
        rows, most = len(range(sampler.rank, total, sampler.num_replicas)), -(-total // sampler.num_replicas)
        add = 0 if drop_last else batch_size - 1
        self.attends = (rows + add) // batch_size < (most + add) // batch_size
        self._length = most if self.attends else rows

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        yield from list(self.sampler)[: self._length]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of a shuffling sampler."""
        self.sampler.set_epoch(epoch)


def each_once(loader: Any, trainer: Trainer) -> Any:
    """Return a dataloader for an evaluation without the samples that its `DistributedSampler` repeats."""
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
    """A data fetcher that yields batches until no rank has further batches.

    Attributes:
        attends: True if this rank only attends the last yielded batch.
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
        lowest = torch.tensor([mine])
        work = dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self._ranks.meeting, async_op=True)
        self._ranks.store.wait(work, "the next batch of an evaluation")
        loader = int(lowest)
        if loader == _NO_LOADER:
            raise StopIteration
        self.attends = loader != mine
        if self._next is not None and not self.attends:
            batch, self._next = self._next, None
            return batch
        if self._batch is None:
            raise ValueError(
                f"Rank {self._ranks.rank} has no batch to evaluate, but all ranks must run every forward together. "
                "Give every rank data."
            )
        return self._batch, 0, loader


def patch(owner: object, name: str, value: object) -> Callable[[], None]:
    """Set an attribute of an object, and return a function that puts back what was there before.

    The function does nothing if the attribute has been set to something else in the meantime.
    """
    held = vars(owner)
    before = {name: held[name]} if name in held else {}
    held[name] = value

    def put_back() -> None:
        if held.get(name) is value:
            del held[name]
            held.update(before)

    return put_back


def evaluate_each_once(trainer: Trainer, together: RankMesh | None, patches: ExitStack) -> None:
    """Patch the running evaluation loop to drop the results of attended batches.

    Args:
        trainer: Trainer that validates, tests or predicts.
        together: Ranks, if every forward is a collective; None if ranks run forwards independently.
        patches: Undoes the patch when it is closed.
    """
    loop: Any = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    if together is not None and not isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
        loop._data_fetcher = _Together(loop._data_fetcher, together)
    name = "_predict_step" if trainer.predicting else "_evaluation_step"
    if not isinstance(own := getattr(loop, name), _EvaluationStep):
        patches.callback(patch(loop, name, _EvaluationStep(loop, own)))


class _EvaluationStep:
    """The step of an evaluation loop, around the loop's own, which drops the results of attended batches."""

    def __init__(self, loop: Any, own: Any) -> None:
        self._loop, self._own = loop, own

    def __call__(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        loop = self._loop
        loader = loop._combined_loader.flattened[dataloader_idx]
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
        is_last = isinstance(sampler, EachOnce) and sampler.attends and batch_idx == len(loader) - 1
        fetcher = loop._data_fetcher
        if dataloader_iter is not None or not (is_last or (isinstance(fetcher, _Together) and fetcher.attends)):
            self._own(batch, batch_idx, dataloader_idx, dataloader_iter)
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
    """Restore logged values, metrics and attributes of the module at the end of the context.

    A value that is logged for the first time is kept with zero samples, because all ranks reduce it at the end.
    """
    held, logged = dict(vars(module)), dict(results)
    contents = [(each, copy.copy(each)) for name, each in held.items() if type(each) in _PLAIN and name not in _TABLES]
    metrics = [*(each for each in module.modules() if isinstance(each, Metric)), *results.values()]
    states = [(vars(metric), dict(vars(metric))) for metric in metrics]
    for metric in metrics:
        # Metrics may change their states in place. A metric around another one shows the states of that one, too.
        for name in metric._defaults.keys() & vars(metric).keys():
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
