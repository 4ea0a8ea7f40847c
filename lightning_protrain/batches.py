"""Takes a training batch of a Trainer before training begins, and leaves no trace of it in the run.

[Note: Ahead of time]
What a step saves must be known before the model is placed, which is before Lightning makes the training data. So a
batch is taken ahead: the largest, if the data says which one that is (`HasLargestBatch`), else the first, from the
indices that the batch sampler would give first, with a sampler of its own. A loader that comes from a hook is made
early, once; Lightning gets the same one when it asks, with the random states as the hook leaves them, so every later
draw is that of a run that has not been profiled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from contextlib import ExitStack
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource, _request_dataloader
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from lightning_protrain.profiler.model import on_one_rank, synthetic_batch, unchanged

_CPU = torch.device("cpu")
_TRANSFER_HOOKS: tuple[tuple[str, tuple[torch.device, ...]], ...] = (
    ("on_before_batch_transfer", ()),
    ("transfer_batch_to_device", (_CPU,)),
    ("on_after_batch_transfer", ()),
)
# What a sampler may change while it is iterated.
_COPIED = (list, tuple, dict, str, np.ndarray, torch.Tensor)


@runtime_checkable
class HasLargestBatch(Protocol):
    """A data module, a module with loaders, a loader or its data set that knows which batch takes the most."""

    def largest_batch(self) -> Any | None:
        """A training batch with the most tokens (padding too) that any epoch can give; None: it is not known.

        As the loader gives it: collated, on the CPU, before the hooks of batch transfer. Of several such batches it is
        one for which a step does most: one with padding, if models leave out the attention mask of those without.
        Called after `setup`.
        """


class SyntheticData(IterableDataset[Any]):
    """Stands for training data that there is not: its one batch is made for the model, see [Note: Synthetic batches].

    It is good for planning only, e.g. `trainer.fit(model, DataLoader(SyntheticData(), batch_size=None))` within
    `ProTrainStrategy.planning_only`.

    Args:
        batch_size: Samples; None: one.
        length: Tokens of each; None: 1024, or as many as the model has positions for.
    """

    def __init__(self, batch_size: int | None = None, length: int | None = None) -> None:
        self.batch_size, self.length = batch_size, length

    def __len__(self) -> int:
        return 1  # Lightning fetches ahead what has no length, and asks for the number of steps before planning.

    def __iter__(self) -> Iterator[Any]:
        yield from self._refuse()

    def _refuse(self) -> Iterator[Any]:
        raise ValueError("There is no training data: a batch that is made for a model is for planning only. Give data.")


def batch_to_plan_with(trainer: Trainer) -> Any | None:
    """A training batch, on the CPU, as `training_step` will be given it, see [Note: Ahead of time].

    Every rank calls it, so that all make their loaders at the same time; it is rank 0 that plans with the batch. The
    others get it as the loader gives it: hooks of batch transfer run on rank 0 only, see [Note: One rank].

    It is made for the model where the data is `SyntheticData`; the largest if the training data has `largest_batch`;
    else the first. The items of the first batch are read from the dataset now, and again in training: by a worker
    process where the loader has workers, which ends before this returns, else in this process. The hooks of batch
    transfer run now, and again in training. Random states are put back, and what the module, the data module and the
    loaders hold (their datasets, samplers and `collate_fn` too), as far as [Note: Reach] goes. It is another batch of
    the same kind where Lightning or a hook draws random numbers before training begins, several loaders shuffle, a
    sampler is seeded by the epoch, or the run goes on from a checkpoint.

    Args:
        trainer: In `Strategy.setup` of a fit.

    Returns:
        The batch; None if that cannot be had without a trace: an iterable dataset, a loader that is no `DataLoader` or
        overrides its iteration or has a `state_dict`, a sampler that cannot be copied, no data. The largest batch is
        had without a loader.
    """
    if trainer.limit_train_batches == 0:
        return None
    if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        rank_zero_warn(
            "BatchSizeFinder tries batch sizes under one plan, that of the size it begins with: more may fit than it "
            "finds, and what it finds may take more than device_memory. Each `fit` plans anew for the size that it "
            "begins with, and `lightning-protrain plan` says what a size takes without trying it."
        )
    with ExitStack() as undo:
        undo.callback(_set_rng_states, _collect_rng_states())
        batch = _synthetic_batch(trainer)
        if batch is None:
            batch = _largest_batch(trainer, undo)
        if batch is None:
            batch = _first_batch(trainer, undo)
        if batch is None or trainer.global_rank:
            return batch
        # A sample that is not batched may be the dataset's own, and a hook may change it in place.
        batch = trainer.precision_plugin.convert_input(tree_map_only(torch.Tensor, torch.clone, batch))
        hooks: Any = trainer._data_connector._datahook_selector
        with on_one_rank():
            for hook, place in _TRANSFER_HOOKS:
                batch = getattr(hooks.get_instance(hook), hook)(batch, *place, 0)
    return batch


def _synthetic_batch(trainer: Trainer) -> dict[str, Any] | None:
    """What `SyntheticData` stands for; None where there is other data.

    Raises:
        ValueError: No batch can be made for the model.
    """
    source = trainer.fit_loop._data_source
    data = getattr(source.instance, "dataset", None)
    if not isinstance(data, SyntheticData):
        return None
    assert trainer.lightning_module is not None
    return synthetic_batch(trainer.lightning_module, 1 if data.batch_size is None else data.batch_size, data.length)


def _largest_batch(trainer: Trainer, undo: ExitStack) -> Any | None:
    """Return what the training data says: the module that makes loaders, or a loader that `fit` is given; else None."""
    given = trainer.fit_loop._data_source.instance
    data = next((each for each in (given, getattr(given, "dataset", None)) if isinstance(each, HasLargestBatch)), None)
    if data is None:
        return None
    with ExitStack() as own:
        own.callback(_set_rng_states, _collect_rng_states())
        own.enter_context(unchanged(trainer.lightning_module, trainer.datamodule, data))  # type: ignore[attr-defined]
        batch = data.largest_batch()
        if batch is not None:
            undo.enter_context(own.pop_all())
        return batch


def _first_batch(trainer: Trainer, undo: ExitStack) -> Any | None:
    """The first batch of the loader, or of its collection of loaders; `undo` gets to know what these hold."""
    in_order = trainer.overfit_batches > 0  # type: ignore[attr-defined]
    loaders, structure = tree_flatten(_train_loaders(trainer))
    if not loaders or not all(map(_is_plain, loaders)):
        return None
    undo.enter_context(unchanged(trainer.lightning_module, trainer.datamodule, *loaders))  # type: ignore[attr-defined]
    batches = [_first_of(loader, in_order) for loader in loaders]
    return None if any(batch is None for batch in batches) else tree_unflatten(batches, structure)


class _MadeSource(_DataLoaderSource):
    """A source of loaders whose hook has been called already: gives its result once, then calls it as ever.

    Where random states are as they were before the call, they become what the call made of them.

    Args:
        source: What calls the hook.
    """

    def __init__(self, source: _DataLoaderSource) -> None:
        super().__init__(source.instance, source.name)
        self._source = source
        before = _collect_rng_states()
        self._made = [(_request_dataloader(source), before, _collect_rng_states())]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "instance":  # another fit begins
            super().__setattr__("_made", [])
            if "_source" in vars(self):
                self._source.instance = value

    def peek(self) -> Any:
        """What the next call gives."""
        return self._made[0][0]

    def dataloader(self) -> Any:
        if not self._made:
            return self._source.dataloader()
        made, before, after = self._made.pop()
        pairs = zip(tree_leaves(_collect_rng_states()), tree_leaves(before), strict=True)
        if all(np.array_equal(one, other) for one, other in pairs):
            _set_rng_states(after)
        return made


def _train_loaders(trainer: Trainer) -> Any:
    """The loader of the fit, or its collection of loaders."""
    loop = trainer.fit_loop
    if loop._combined_loader is not None:  # a user asked for `estimated_stepping_batches`
        return loop._combined_loader.iterables
    if loop._data_source.is_module():
        loop._data_source = _MadeSource(loop._data_source)
        loaders = loop._data_source.peek()
    else:
        loaders = loop._data_source.instance
    return loaders.iterables if isinstance(loaders, CombinedLoader) else loaders


def _is_plain(loader: object) -> bool:
    """Whether the batches of `loader` are those of PyTorch's own `DataLoader` over a map-style dataset."""
    if not isinstance(loader, DataLoader) or hasattr(loader, "state_dict"):
        return False
    own = type(loader).__iter__ is DataLoader.__iter__ and type(loader)._get_iterator is DataLoader._get_iterator
    return own and not isinstance(loader.dataset, IterableDataset)


def _first_of(loader: DataLoader[Any], in_order: bool) -> Any | None:
    """The first batch of `loader`, drawn as an iterator of it would; None if its sampler gives nothing or no copy."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if in_order:  # Lightning replaces the sampler to overfit
        sampler = SequentialSampler(cast(Sized, loader.dataset))
        if loader.batch_size is not None:
            sampler = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    shared = {id(data): data for data in _data_of(sampler, loader.dataset)}
    try:
        own, generator = copy.deepcopy((sampler, loader.generator), shared)
    except TypeError:
        return None
    before = _collect_rng_states()
    iterator = iter(own)
    torch.empty((), dtype=torch.int64).random_(generator=generator)  # the seed of workers, which every iterator draws
    indices = next(iterator, None)
    if indices is None:
        return None
    if loader.num_workers:
        after = _collect_rng_states()
        _set_rng_states(before)
        batch = _read_in_worker(loader, indices)
        _set_rng_states(after)
        return batch
    return _read(loader, indices)


def _data_of(sampler: object, dataset: object) -> Iterator[object]:
    """What a sampler, and those inside it, look things up in: not to be copied."""
    yield dataset
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, Sampler):
            yield from _data_of(value, dataset)
        elif hasattr(value, "__getitem__") and (isinstance(value, np.memmap) or not isinstance(value, _COPIED)):
            yield value


def _read(loader: DataLoader[Any], indices: Any) -> Any:
    """The batch of these indices, or of one index where the loader does not batch."""
    assert loader.collate_fn is not None
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[indices])
    if hasattr(dataset, "__getitems__"):
        return loader.collate_fn(dataset.__getitems__(indices))
    return loader.collate_fn([dataset[index] for index in indices])


def _read_in_worker(loader: DataLoader[Any], indices: Any) -> Any:
    """The same, as the first worker of `loader` gives it."""
    which: dict[str, Any] = {"batch_sampler": [indices]}
    if loader.batch_sampler is None:
        which = {"batch_size": None, "sampler": [indices]}
    once: DataLoader[Any] = DataLoader(
        loader.dataset,
        num_workers=1,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=copy.deepcopy(loader.generator),
        timeout=loader.timeout,
        **which,
    )
    (batch,) = once  # to the end, which is when the worker ends
    return batch
