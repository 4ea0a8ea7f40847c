"""Takes a training batch of a Trainer and profiles one step, and leaves no trace of it in the run.

The planner must know what a step saves before the model is placed, and Lightning makes the training data after that. So
a batch is read early: the largest, if the data knows it (`HasLargestBatch`), else the first, with the indices that a
copy of the batch sampler gives. A loader that comes from a hook is made early, once. Lightning gets that loader when it
asks, with the random states as the hook left them, so later draws are the same as in a run without a profile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource, _request_dataloader
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler
from torchmetrics import Metric, MetricCollection

from lightning_protrain.profiler.fake_mode import UntraceableError
from lightning_protrain.profiler.gpu_specs import capability
from lightning_protrain.profiler.profile import on_one_rank, profile_model, synthetic_batch, unchanged
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout, ModelProfile, castable
from lightning_protrain.profiler.synthetic import size_of

_T = TypeVar("_T")
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
        """Return a training batch with the most tokens (padding included) that any epoch can give.

        None if that is unknown.

        The batch is as the loader gives it: collated, on the CPU, before the hooks of batch transfer. Among equally
        large batches return the most expensive one: one with padding, if models drop an attention mask that masks
        nothing. It is called after `setup`.
        """


class SyntheticData(IterableDataset[Any]):
    """Stands for training data that there is not: its one batch is made for the model, see [Note: Synthetic batches].

    It is good for planning only, e.g. `trainer.fit(model, DataLoader(SyntheticData(), batch_size=None))` within
    `PlanSession.planning_only`.

    Args:
        batch_size: Samples; None: one.
        length: Tokens of each; None: 1024, or as many as the model has positions for.
    """

    def __init__(self, batch_size: int | None = None, length: int | None = None) -> None:
        self.batch_size, self.length = batch_size, length

    def __len__(self) -> int:
        return 1  # With a length, Lightning draws no batch ahead, and the number of steps is finite.

    def __iter__(self) -> Iterator[Any]:
        yield from self._refuse()

    def _refuse(self) -> Iterator[Any]:
        raise ValueError("There is no training data: a batch that is made for a model is for planning only. Give data.")


def batch_to_plan_with(trainer: Trainer, everywhere: bool = False) -> Any | None:
    """Return a training batch on the CPU, as `training_step` will get it.

    Every rank calls it, so that all make their loaders at the same time. Rank 0 plans with the batch; unless it is
    needed `everywhere`, the other ranks get it as the loader gives it. Hooks of batch transfer run without the other
    ranks, see [Note: One rank].

    With `SyntheticData` the batch is made for the model. If the training data has `largest_batch`, it is that batch;
    else the first one. Items of the first batch are read from the dataset now, and again in training. If the loader has
    workers, a worker process reads them and ends before this function returns; else this process does. Hooks of batch
    transfer run now, and again in training. Afterwards random states are restored, and so is the state of the module,
    the data module and the loaders (with datasets, samplers and `collate_fn`), as far as [Note: Reach] goes.

    Training may begin with another batch of the same kind: if Lightning or a hook draws random numbers before training,
    if several loaders shuffle, if a sampler is seeded by the epoch, or if the run continues from a checkpoint.

    Args:
        trainer: Trainer within `Strategy.setup` of a fit.
        everywhere: Whether hooks of batch transfer run on all ranks.

    Returns:
        The batch. None if reading one would leave a trace: an iterable dataset, a loader that is no `DataLoader`,
        overrides its iteration or has a `state_dict`, a sampler that cannot be copied, or no data. The largest batch
        needs no loader.
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
        if batch is None or (trainer.global_rank and not everywhere):
            return batch
        # A sample that is not batched may be the dataset's own, and a hook may change it in place.
        batch = trainer.precision_plugin.convert_input(tree_map_only(torch.Tensor, torch.clone, batch))
        hooks: Any = trainer._data_connector._datahook_selector
        with on_one_rank():
            for hook, place in _TRANSFER_HOOKS:
                batch = getattr(hooks.get_instance(hook), hook)(batch, *place, 0)
    return batch


def _synthetic_batch(trainer: Trainer) -> dict[str, Any] | None:
    """Return the batch that `SyntheticData` stands for; None if the data is something else.

    Raises:
        ValueError: If no batch can be made for the model.
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
    """Return the first batch of the loader or of a collection of loaders; `undo` restores the state of the loaders."""
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
        source: Lightning's source of the loaders, which calls the hook.
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
        """Return the loaders that the next call of `dataloader` returns."""
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
    """Return the loader of the fit, or its collection of loaders."""
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
    """Return True if `loader` is a map-style dataset's `DataLoader` with PyTorch's own iteration."""
    if not isinstance(loader, DataLoader) or hasattr(loader, "state_dict"):
        return False
    own = type(loader).__iter__ is DataLoader.__iter__ and type(loader)._get_iterator is DataLoader._get_iterator
    return own and not isinstance(loader.dataset, IterableDataset)


def _first_of(loader: DataLoader[Any], in_order: bool) -> Any | None:
    """Return the first batch of `loader`, drawn as an iterator would.

    None if its sampler is empty or cannot be copied.
    """
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
    """Yield the data that a sampler, and samplers inside it, index into: a copy of the sampler shares it."""
    yield dataset
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, Sampler):
            yield from _data_of(value, dataset)
        elif hasattr(value, "__getitem__") and (isinstance(value, np.memmap) or not isinstance(value, _COPIED)):
            yield value


def _read(loader: DataLoader[Any], indices: Any) -> Any:
    """Return the batch of these indices, or the item of one index if the loader does not batch."""
    assert loader.collate_fn is not None
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[indices])
    if hasattr(dataset, "__getitems__"):
        return loader.collate_fn(dataset.__getitems__(indices))
    return loader.collate_fn([dataset[index] for index in indices])


def _read_in_worker(loader: DataLoader[Any], indices: Any) -> Any:
    """Return the batch of these indices as the first worker process of `loader` reads it."""
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


_NO_BATCH = (
    "No batch can be taken ahead of training (there are none, or the data is iterable, keeps a state, or has a sampler "
    "that cannot be copied)"
)
_OTHER_BATCH = "Give the data module a method `largest_batch`, or plan without data (`data: null`)."
_NO_PLAN = "No plan is searched for, and streamed weights keep their own dtype."
_BUDGET = "device_memory"
_OTHER_PLAN = (
    "Give the data module, or the data set or loader that fit is given, a method `largest_batch` that returns a batch. "
    'Or set plan="offload" or "resident", or leave device_memory out: activations are not counted then.'
)
# What a step may raise before training has begun, e.g. for want of what `on_train_start` sets. One that is wrong in
# itself raises again when it is run.
STEP_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def profile_training_step(
    trainer: Trainer,
    layout: ModelLayout,
    needed_for: str = "",
    hardware: HardwareProfile | None = None,
    otherwise: str = _NO_PLAN,
) -> ModelProfile | None:
    """Run `training_step` on the largest batch, or the first, to learn its shapes; see `profile_model`.

    A step that cannot be traced runs on the device, with real tensors.

    The model keeps its mode (training or evaluation). Nothing reaches loggers, metrics, optimizers, schedulers or the
    results of the trainer. Random states are restored, and so is the state of the module and the data module, as far as
    [Note: Reach] goes; other effects of the step remain. A model with a key-value cache runs twice, with the cache and
    without, and swapped bytes are the larger of the two: the runtime switches caches off where blocks are checkpointed.
    Hooks that run before the first step (`on_train_start`) have not run.

    Args:
        trainer: Trainer within `Strategy.setup` of a fit, with its optimizers.
        layout: Result of `describe_model` for the module of the trainer.
        needed_for: The feature that needs a profile, for the message; empty means that no feature does.
        hardware: Hardware of the plan; None means the device of the trainer.
        otherwise: Consequence of a missing profile, as a sentence.

    Returns:
        The profile. None and one sentence for the user, if there is no batch or the step raises.

    Raises:
        ValueError: If there is no batch and the profile is needed. Errors of the step are raised then, too.
    """
    model = trainer.lightning_module
    kind = capability(hardware.name) if hardware is not None else None
    context = trainer.precision_plugin.train_step_context
    try:
        batch = batch_to_plan_with(trainer)
        if is_param_in_hook_signature(model.training_step, "dataloader_iter", explicit=True):
            raise UntraceableError("`training_step` takes batches itself, from `dataloader_iter`.")
        if batch is None:
            raise UntraceableError(f"{_NO_BATCH}.")
        takes_index = is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2)
        step: Callable[[], Any] = partial(model.training_step, batch, *([0] if takes_index else []))
        if model.automatic_optimization:
            step = partial(with_loss, step, trainer.accumulate_grad_batches)

        @cache
        def log_once(message: str) -> None:
            rank_zero_info(message)

        def profiled() -> ModelProfile:
            with ExitStack() as stack:
                stack.enter_context(undisturbed(trainer, model, batch))
                stack.push(_note)
                return profile_model(
                    model, layout, step, context, trainer.strategy.root_device, kind, log_once=log_once
                )

        profile = profiled()
        with _without_caches(model) as caches:
            if caches:
                profile = _with_swaps_of(profiled(), profile)
        samples, tokens = size_of(batch)
        absent = _absent(trainer, layout, profile)
        return replace(profile, samples=samples, tokens=tokens, absent=absent)
    except UntraceableError as error:
        if needed_for:
            raise ValueError(_what_is_missing(needed_for, str(error))) from error
        _say_unknown(str(error), otherwise)
    except STEP_ERRORS as error:
        if needed_for.startswith(_BUDGET):
            raise ValueError(_what_is_missing(needed_for, f"it raised {type(error).__name__} ({error}).")) from error
        if needed_for:
            raise
        _say_unknown(f"it raised {type(error).__name__} ({error}).", otherwise)
    return None


def _absent(trainer: Trainer, layout: ModelLayout, profile: ModelProfile) -> tuple[str, ...]:
    """Return the units that read media, if the data says that it has none; a synthetic batch says nothing."""
    rows = getattr(trainer.fit_loop._data_source.instance, "rows_with_media", None)
    if rows is None or rows():
        return ()
    ran = {call.name for call in profile.calls}
    modules = dict(trainer.lightning_module.named_modules())
    models: list[Any] = [module for module in modules.values() if hasattr(module, "get_decoder")]
    texts = {id(each.get_decoder()) for each in models[:1] if set(each.config.sub_configs) - {"text_config"}}
    prefixes = tuple(f"{name}." for name, module in modules.items() if id(module) in texts)
    idle = [unit.name for unit in layout.units if unit.parameters and unit.name not in ran]
    return tuple(name for name in idle if prefixes and not f"{name}.".startswith(prefixes))


def once_for_each_kind(
    profile: Callable[[HardwareProfile | None], _T],
) -> Callable[[HardwareProfile | None], _T]:
    """Return `profile`, which is called once for each kind of GPU: those of one capability run the same kernels."""
    found: dict[object, _T] = {}

    def on(hardware: HardwareProfile | None) -> _T:
        kind = None if hardware is None else capability(hardware.name)
        if kind not in found:
            found[kind] = profile(hardware)
        return found[kind]

    return on


@contextmanager
def _without_caches(model: LightningModule) -> Iterator[list[Any]]:
    """Switch key-value caches off, as the runtime does if blocks are checkpointed; return the switched configs."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    try:
        for config in caching:
            config.use_cache = False
        yield caching
    finally:
        for config in caching:
            config.use_cache = True


def _with_swaps_of(profile: ModelProfile, other: ModelProfile) -> ModelProfile:
    """Return `profile` with the larger swaps of both profiles, because the plan decides which of them a run follows."""
    most: dict[str, int] = {}
    for call in other.calls:
        most[call.name] = max(most.get(call.name, 0), call.swap_bytes)
    calls = (replace(call, swap_bytes=max(call.swap_bytes, most.get(call.name, 0))) for call in profile.calls)
    return replace(profile, calls=tuple(calls))


def _what_is_missing(needed_for: str, reason: str) -> str:
    """Return the message where a profile is needed for a budget, a knob or a dry run, and there is none."""
    knob, given, _ = needed_for.partition("=")
    instead = f"Leave {knob} out (num_checkpoint_blocks needs no profile)." if given else _OTHER_BATCH
    if knob == _BUDGET:
        instead = _OTHER_PLAN
    return f"{needed_for} needs a profile of a training step, and there is none: {reason} {instead}"


def _say_unknown(reason: str, otherwise: str) -> None:
    rank_zero_info(f"The training step could not be profiled: {reason} {otherwise}")


def streamable(profile: ModelProfile | None, model: LightningModule, low_dtype: str | None) -> frozenset[str]:
    """Return parameters that may be streamed in `low_dtype`: `castable` ones without hooks, which would see the cast.

    None of a step that was measured: how it uses a weight may depend on values, which another batch has others of.
    """
    if profile is None or profile.measured or low_dtype is None:
        return frozenset()
    hooked = {
        fqn
        for fqn, parameter in model.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    }
    return castable(profile, low_dtype) - hooked


@contextmanager
def undisturbed(trainer: Trainer, model: LightningModule, batch: Any) -> Iterator[None]:
    """Suppress the effects of a step besides computing, and restore all state that can be restored."""
    with ExitStack() as undo:
        undo.callback(_set_rng_states, _collect_rng_states())
        settings = [optimizer.param_groups for optimizer in trainer.optimizers]
        undo.enter_context(unchanged(model, trainer.datamodule, batch, settings))  # type: ignore[attr-defined]
        undo.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        for module in list(model.modules()):
            if isinstance(module, LightningModule):
                vars(module).update(_mute_module(module))
            elif isinstance(module, (Metric, MetricCollection)):
                vars(module).update(_mute_metric(module))
        yield


def _note(kind: object, error: BaseException | None, traceback: object) -> None:
    """Add a note to an exception that says when it was raised."""
    if error is not None:
        error.add_note("Raised while `training_step` ran for its shapes, before training and its hooks have begun.")


def with_loss(step: Callable[[], Any], accumulate: int) -> dict[str, Any] | None:
    """Run the step; return the tensors that the loop holds at backward: the divided loss, and its copy for logging."""
    outputs = step()
    if outputs is None:
        return None
    result = ClosureResult.from_training_step_output(outputs, accumulate)
    return {"loss": result.closure_loss, "held": result}


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _mute_module(module: LightningModule) -> dict[str, Callable[..., Any]]:
    """Return methods without effect, in place of methods with effects outside of `module`."""

    def optimizers(use_pl_optimizer: bool = True) -> Any:
        return _map(_Idle, module.__class__.optimizers(module, use_pl_optimizer))

    def lr_schedulers() -> Any:
        return _map(_Idle, module.__class__.lr_schedulers(module))

    def manual_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    muted = dict.fromkeys(("log", "log_dict", "print", "clip_gradients"), _nothing)
    return muted | {"optimizers": optimizers, "lr_schedulers": lr_schedulers, "manual_backward": manual_backward}


def _map(function: Callable[[Any], Any], values: Any) -> Any:
    return list(map(function, values)) if isinstance(values, list) else values and function(values)


def _mute_metric(metric: Metric | MetricCollection) -> dict[str, Callable[..., Any]]:
    """Return methods for a metric that counts nothing: its values are zero."""

    def zero(*args: Any, **kwargs: Any) -> Any:
        return dict.fromkeys(metric.keys(), nothing) if isinstance(metric, MetricCollection) else nothing

    nothing = torch.zeros(())
    return {"forward": zero, "compute": zero, "update": _nothing, "reset": _nothing}


class _Idle:
    """An optimizer or a scheduler that can be read but does nothing.

    Args:
        real: Optimizer that it stands for.
    """

    def __init__(self, real: Any) -> None:
        self._real = real
        if hasattr(real, "param_groups"):
            self.param_groups = [dict(group) for group in real.param_groups]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Run the closure, if there is one."""
        return closure() if callable(closure) else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients stay."""
