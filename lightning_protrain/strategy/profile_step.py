"""Takes a training batch of a Trainer and profiles one step, without changing the run.

The planner must know the memory of a step before the model is placed, but Lightning makes the training data later. So a
batch is read early: the largest if the data knows it (`HasLargestBatch`), else the first. A loader is iterated as in
training, and its state is restored. If a hook makes the loader, it is called early, once. When Lightning asks for the
loader, it gets this one, and random states as the hook left them. So later random numbers are as in a run without a
profile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any, Protocol, TypeVar, runtime_checkable

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

from lightning_protrain.profiler.blocks import compiled_parameters
from lightning_protrain.profiler.fake_mode import UntraceableError
from lightning_protrain.profiler.gpu_specs import capability
from lightning_protrain.profiler.one_rank import on_one_rank
from lightning_protrain.profiler.profile import profile_model, unchanged
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout, ModelProfile, castable
from lightning_protrain.profiler.row_wise import Slices
from lightning_protrain.profiler.synthetic import LENGTH, enlarged, size_of, synthetic_batch
from lightning_protrain.runtime.recompute import stop_caching
from lightning_protrain.runtime.slices import run_in_slices

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_TRANSFER_HOOKS: tuple[tuple[str, tuple[torch.device, ...]], ...] = (
    ("on_before_batch_transfer", ()),
    ("transfer_batch_to_device", (_CPU,)),
    ("on_after_batch_transfer", ()),
)
# The profile of a synthetic batch with more than 32 times as many tokens is extrapolated, see `enlarged`.
FEW_TOKENS = 4 * 1024
# Maximum number of batches to try if the step returns None.
MOST_SKIPPED = 4
# Slices of a step, see [Note: Slices] in profiler/row_wise.py: the most slices, and the fewest tokens of one. Smaller
# slices save little memory, as activations between modules are not sliced, and leave a GPU idle.
MOST_SLICES, LEAST_SLICE = 16, 1024
# Maximum number of tokens of a batch that runs on slices, as it is traced whole.
MOST_TOKENS = 1 << 21


@runtime_checkable
class HasLargestBatch(Protocol):
    """A data module, a module with loaders, a loader or its dataset that knows its largest batch."""

    def largest_batch(self) -> Any | None:
        """Return the training batch with the most tokens (padding included) of any epoch; None if unknown.

        The batch is as the loader returns it: collated, on the CPU, before the hooks of batch transfer. Of equally
        large batches, return the most expensive one. That is one with padding if models drop an attention mask that
        masks nothing. Lightning's `setup` hooks have run before the call.
        """


class SyntheticData(IterableDataset[Any]):
    """Placeholder for missing training data: its one batch is made for the model, see [Note: Synthetic batches].

    It is for planning only, for example `trainer.fit(model, DataLoader(SyntheticData(), batch_size=None))` within
    `PlanSession.planning_only`.

    Args:
        batch_size: Number of samples; None: 1.
        length: Tokens of each sample; None: 1024, or the model's number of positions if that is less.
    """

    def __init__(self, batch_size: int | None = None, length: int | None = None) -> None:
        self.samples, self.length = 1 if batch_size is None else batch_size, length

    def __len__(self) -> int:
        return 1  # With a length, Lightning prefetches no batch, and the number of steps is finite.

    def __iter__(self) -> Iterator[Any]:
        yield from self._refuse()  # Upon the first batch: Lightning makes an iterator for a plan, too.

    def _refuse(self) -> Iterator[Any]:
        raise ValueError("There is no training data: a batch that is made for a model is for planning only. Give data.")


def batch_to_plan_with(trainer: Trainer, everywhere: bool = False, samples: int | None = None, skip: int = 0) -> Any:
    """Return a training batch on the CPU, as `training_step` will receive it.

    Every rank calls it, so that all ranks make their loaders at the same time. Rank 0 plans with the batch. The other
    ranks get the batch without hooks of batch transfer, unless `everywhere` is set. On rank 0 these hooks run without
    the other ranks, see [Note: One rank].

    With `SyntheticData` the batch is made for the model. If the training data has `largest_batch`, that batch is
    returned; else the first one. Items of the first batch are read from the dataset now, and again in training. If the
    loader has workers, a worker process reads the items and ends before this function returns; else this process does.
    Hooks of batch transfer run now, and again in training. Afterwards random states are restored. So is the state of
    the module, the data module and the loaders (with datasets, samplers and `collate_fn`), within the limits of
    [Note: Reach], and arrays that samplers hold.

    Training may begin with another batch of the same kind. That happens if random numbers are drawn before training, if
    several loaders shuffle, if the epoch seeds a sampler, or if the run resumes from a checkpoint.

    Args:
        trainer: Trainer within `Strategy.setup` of a fit.
        everywhere: True to run hooks of batch transfer on all ranks.
        samples: Number of samples in a batch of `SyntheticData`; None: as it says.
        skip: Number of batches of a loader to skip; without effect on `SyntheticData` and `largest_batch`.

    Raises:
        NoBatchError: There is no batch, or reading it would change the run: the dataset is iterable, the sampler can be
            iterated only once, or the loader is not a plain `DataLoader` or has a `state_dict`. These limits do not
            concern `largest_batch`, which needs no loader.
    """
    if trainer.limit_train_batches == 0:
        raise NoBatchError("limit_train_batches is 0.")
    if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        rank_zero_warn(
            "BatchSizeFinder tries batch sizes under one plan, that of the size it begins with: more may fit than it "
            "finds, and what it finds may take more than device_memory. Each `fit` plans anew for the size that it "
            "begins with, and `lightning-protrain plan` says what a size takes without trying it."
        )
    with ExitStack() as undo:
        undo.callback(_set_rng_states, _collect_rng_states())
        batch = _synthetic_batch(trainer, samples)
        if batch is None:
            batch = _largest_batch(trainer, undo)
        if batch is None:
            batch = _first_batch(trainer, undo, skip)
        if trainer.global_rank and not everywhere:
            return batch
        # The loader may return the dataset's own tensors without collation, and a hook may change them in place.
        batch = trainer.precision_plugin.convert_input(tree_map_only(torch.Tensor, torch.clone, batch))
        hooks: Any = trainer._data_connector._datahook_selector
        with on_one_rank():
            for hook, place in _TRANSFER_HOOKS:
                batch = getattr(hooks.get_instance(hook), hook)(batch, *place, 0)
    return batch


def _synthetic_data(trainer: Trainer) -> SyntheticData | None:
    """Return the placeholder of a fit without training data; None if there is data."""
    data = getattr(trainer.fit_loop._data_source.instance, "dataset", None)
    return data if isinstance(data, SyntheticData) else None


def _synthetic_batch(trainer: Trainer, samples: int | None) -> dict[str, Any] | None:
    """Return the batch of `SyntheticData`; None if the training data is something else.

    Raises:
        ValueError: No batch can be made for the model.
    """
    data = _synthetic_data(trainer)
    if data is None:
        return None
    assert trainer.lightning_module is not None
    return synthetic_batch(trainer.lightning_module, samples or data.samples, data.length)


def _largest_batch(trainer: Trainer, undo: ExitStack) -> Any | None:
    """Return the `largest_batch` of the module that makes loaders, or of a loader given to `fit`; else None."""
    source = trainer.fit_loop._data_source.instance
    data = next((it for it in (source, getattr(source, "dataset", None)) if isinstance(it, HasLargestBatch)), None)
    if data is None:
        return None
    with ExitStack() as undo_data:
        undo_data.callback(_set_rng_states, _collect_rng_states())
        undo_data.enter_context(unchanged(trainer.lightning_module, trainer.datamodule, data))  # type: ignore[attr-defined]
        batch = data.largest_batch()
        if batch is not None:
            undo.enter_context(undo_data.pop_all())
        return batch


def _first_batch(trainer: Trainer, undo: ExitStack, skip: int) -> Any:
    """Return batch number `skip` of the loader or collection of loaders; `undo` later restores the loaders' state.

    Raises:
        NoBatchError: As in `batch_to_plan_with`.
    """
    in_order = trainer.overfit_batches > 0  # type: ignore[attr-defined]
    loaders, structure = tree_flatten(_train_loaders(trainer))
    refusals = [_refusal(loader) for loader in loaders] or ["there is no loader"]
    if any(refusals):
        raise NoBatchError(f"{next(filter(None, refusals))}.")
    undo.enter_context(unchanged(trainer.lightning_module, trainer.datamodule, *loaders))  # type: ignore[attr-defined]
    for part in (part for loader in loaders for part in _sampler_parts(loader._index_sampler)):
        if type(part) is np.ndarray and part.flags.writeable:
            undo.callback(np.copyto, part, part.copy())
        elif isinstance(part, torch.Tensor):
            undo.callback(part.copy_, part.clone())
    return tree_unflatten([_first_of(loader, in_order, skip) for loader in loaders], structure)


class _MadeSource(_DataLoaderSource):
    """A source of loaders whose hook has run already: returns its result once, and later calls the hook again.

    When the result is returned, random states become those after the hook, if they are still those before the hook.
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

    def dataloader(self) -> Any:
        if not self._made:
            return self._source.dataloader()
        made, before, after = self._made.pop()
        pairs = zip(tree_leaves(_collect_rng_states()), tree_leaves(before), strict=True)
        if all(np.array_equal(now, then) for now, then in pairs):
            _set_rng_states(after)
        return made


def _train_loaders(trainer: Trainer) -> Any:
    """Return the loader of the fit, or its collection of loaders."""
    loop = trainer.fit_loop
    if loop._combined_loader is not None:  # a user asked for `estimated_stepping_batches`
        return loop._combined_loader.iterables
    if loop._data_source.is_module():
        loop._data_source = source = _MadeSource(loop._data_source)
        loaders = source._made[0][0]  # Those that its next `dataloader` returns.
    else:
        loaders = loop._data_source.instance
    return loaders.iterables if isinstance(loaders, CombinedLoader) else loaders


def _refusal(loader: Any) -> str:
    """Return why no batch of a loader can be read ahead of training; an empty string if one can be read."""
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"{name} is no DataLoader"
    if hasattr(loader, "state_dict"):
        return f"{name} keeps a state, it has a `state_dict`"
    if (type(loader).__iter__, type(loader)._get_iterator) != (DataLoader.__iter__, DataLoader._get_iterator):
        return f"{name} iterates in a way of its own"
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__} is an iterable dataset"
    if any(isinstance(part, Iterator) for part in _sampler_parts(loader._index_sampler)):
        return f"the sampler of {name} can be iterated only once"
    return ""


def _sampler_parts(sampler: object) -> Iterator[object]:
    """Yield a sampler, its attributes with their items, and those of samplers inside of it."""
    yield sampler
    for name, value in getattr(sampler, "__dict__", {}).items():
        if isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
            yield from _sampler_parts(value)
        else:
            yield value
            yield from value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


def _first_of(loader: DataLoader[Any], in_order: bool, skip: int) -> Any:
    """Return batch number `skip` of a loader; if the loader has workers, one worker process reads it and ends."""
    settings: dict[str, Any] = {
        "num_workers": min(loader.num_workers, 1),
        "persistent_workers": False,
        "pin_memory": False,
        "_iterator": None,
    }
    if in_order:  # Lightning replaces the sampler to overfit.
        settings["sampler"] = sampler = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
        if loader.batch_size is not None:
            settings["batch_sampler"] = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    reader = copy.copy(loader)
    vars(reader).update(settings)
    for batch in islice(reader, skip, None):
        return batch
    raise NoBatchError(f"{type(loader).__name__} has {skip} batches.")


_OTHER_BATCH = "Give the data module a method `largest_batch`, or plan without data (`data: null`)."
_NO_PLAN = "No plan is searched for, and streamed weights keep their own dtype."
_BUDGET = "device_memory"
_OTHER_PLAN = (
    "Give the data module, or the data set or loader that fit is given, a method `largest_batch` that returns a batch. "
    'Or set plan="offload" or "resident", or leave device_memory out: activations are not counted then.'
)
# Errors of a step before training has begun, for example because `on_train_start` has not run yet. A step that is wrong
# itself raises again in training.
STEP_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def profile_training_step(
    trainer: Trainer,
    layout: ModelLayout,
    needed_for: str = "",
    hardware: HardwareProfile | None = None,
    otherwise: str = _NO_PLAN,
) -> ModelProfile | None:
    """Run `training_step` once, to learn its shapes, on the batch of `batch_to_plan_with`; see `profile_model`.

    If the step returns None for the batch, so that Lightning skips it, the next batches are tried. Of a large synthetic
    batch, only parts are run, see [Note: Large batches].

    A step that cannot be traced runs with real tensors on the device.

    The model keeps its mode (training or evaluation). Nothing reaches loggers, metrics, optimizers, schedulers or the
    Trainer's results. Random states and the state of the module and the data module are restored, within the limits of
    [Note: Reach]; other side effects remain. A model with a key-value cache runs with the cache and without it, because
    the runtime switches caches off if blocks are checkpointed; the larger swapped bytes count. Hooks that run before
    the first step (`on_train_start`) have not run.

    Args:
        trainer: Trainer within `Strategy.setup` of a fit, with its optimizers.
        layout: Result of `describe_model` for the Trainer's module.
        needed_for: Feature that needs a profile, for the message; empty means that no feature does.
        hardware: Hardware to plan for; None means the Trainer's device.
        otherwise: Sentence on the consequence of a missing profile.

    Returns:
        The profile. None, with one sentence for the user, if there is no batch or the step raises. None on other ranks
        than rank 0, which only make their loaders.

    Raises:
        ValueError: The profile is needed, but there is no batch. Errors of the step are raised unchanged, with a note,
            if it is needed. A step that trains nothing is refused only if something else than a budget needs it.
    """
    return _profile(_Asked(trainer, layout, needed_for, hardware, otherwise))


def profile_in_slices(
    trainer: Trainer, layout: ModelLayout, needed_for: str, hardware: HardwareProfile | None
) -> ModelProfile | None:
    """Do the same, with row-wise modules on slices of the tokens, see [Note: Slices] in profiler/row_wise.py.

    The runtime switches key-value caches off if there are slices, so the step runs once.
    """
    return _profile(_Asked(trainer, layout, needed_for, hardware, in_slices=True))


@dataclass(frozen=True)
class _Asked:
    """The arguments of `profile_training_step`, and whether row-wise modules run on slices."""

    trainer: Trainer
    layout: ModelLayout
    needed_for: str
    hardware: HardwareProfile | None
    otherwise: str = _NO_PLAN
    in_slices: bool = False


def _profile(asked: _Asked) -> ModelProfile | None:
    trainer, needed_for, otherwise = asked.trainer, asked.needed_for, asked.otherwise
    if trainer.global_rank:
        with suppress(NoBatchError):
            batch_to_plan_with(trainer)
        return None
    model = trainer.lightning_module
    kind = capability(asked.hardware.name) if asked.hardware is not None else None
    context = trainer.precision_plugin.train_step_context
    slices = Slices(run_in_slices, MOST_SLICES, LEAST_SLICE) if asked.in_slices else None

    @cache
    def log_once(message: str) -> None:
        rank_zero_info(message)

    def of(batch: Any, index: int = 0) -> ModelProfile:
        if is_param_in_hook_signature(model.training_step, "dataloader_iter", explicit=True):
            raise UntraceableError("`training_step` takes batches itself, from `dataloader_iter`.")
        takes_index = is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2)
        step: Callable[[], Any] = partial(model.training_step, batch, *([index] if takes_index else []))
        if model.automatic_optimization:
            step = partial(with_loss, step, trainer.accumulate_grad_batches)

        def profiled() -> ModelProfile:
            with ExitStack() as stack:
                stack.enter_context(undisturbed(trainer, model, batch))
                stack.push(partial(_note, needed_for))
                return profile_model(
                    model,
                    asked.layout,
                    step,
                    context,
                    trainer.strategy.root_device,
                    kind,
                    log_once=log_once,
                    slices=slices,
                )

        with _without_caches(model) if asked.in_slices else nullcontext():
            profile = profiled()
        if not profile.segments:
            raise NoBackwardError(
                "`training_step` returned None, or a loss without a gradient, so nothing was trained."
            )
        with _without_caches(model) as caches:
            if caches and not asked.in_slices:
                profile = _with_swaps_of(profiled(), profile)
        samples, tokens = size_of(batch)
        return replace(profile, samples=samples, tokens=tokens, absent=_absent(trainer, asked.layout, profile))

    try:
        large = None if asked.in_slices else _of_large_batch(trainer, of)
        return large or _of_first_trained(trainer, of)
    except NoBackwardError as error:
        if needed_for and not needed_for.startswith(_BUDGET):  # Lightning trains on; so does a run with a budget.
            raise ValueError(_what_is_missing(needed_for, str(error))) from error
        _say_unknown(str(error), otherwise)
    except UntraceableError as error:
        if needed_for:
            raise ValueError(_what_is_missing(needed_for, str(error))) from error
        _say_unknown(str(error), otherwise)
    except STEP_ERRORS as error:
        if needed_for:
            raise
        _say_unknown(f"it raised {type(error).__name__} ({error}).", otherwise)
    return None


def may_slice(profile: ModelProfile) -> bool:
    """Return True if the profiled step may run on slices of the tokens, for all that its size says."""
    return not profile.measured and (not profile.tokens or LEAST_SLICE < profile.tokens <= MOST_TOKENS)


def _of_large_batch(trainer: Trainer, of: Callable[[Any], ModelProfile]) -> ModelProfile | None:
    """Return the profile of a large synthetic batch, extrapolated from two parts of it; None: trace the batch."""
    data = _synthetic_data(trainer)
    if data is None:
        return None
    few = max(FEW_TOKENS // (data.length or LENGTH), 1)
    if data.samples <= 32 * few:
        return None
    for part in (few, 4 * few, 16 * few):  # The smallest part may have too few slices of the loss.
        one, two = (of(batch_to_plan_with(trainer, samples=samples)) for samples in (part, 2 * part))
        if (profile := enlarged(one, two, (data.samples - part) / part)) is not None:
            return profile
    return None


def _of_first_trained(trainer: Trainer, of: Callable[[Any, int], ModelProfile]) -> ModelProfile:
    """Return the profile of the first batch that the step trains; Lightning skips a batch if the step returns None.

    Raises:
        NoBackwardError: The step trains none of the first MOST_SKIPPED batches.
    """
    skipped: NoBackwardError | None = None
    for index in range(MOST_SKIPPED):
        try:
            return of(batch_to_plan_with(trainer, skip=index), index)
        except NoBackwardError as error:
            skipped = error
        except NoBatchError:
            if skipped is None:
                raise
            break
    assert skipped is not None
    raise skipped


def _absent(trainer: Trainer, layout: ModelLayout, profile: ModelProfile) -> tuple[str, ...]:
    """Return the units that read media if the data has no media; with synthetic data, no units."""
    rows = getattr(trainer.fit_loop._data_source.instance, "rows_with_media", None)
    if rows is None or rows():
        return ()
    ran = {call.name for call in profile.calls}
    modules = dict(trainer.lightning_module.named_modules())
    models: list[Any] = [module for module in modules.values() if hasattr(module, "get_decoder")]
    texts = {id(model.get_decoder()) for model in models[:1] if set(model.config.sub_configs) - {"text_config"}}
    prefixes = tuple(f"{name}." for name, module in modules.items() if id(module) in texts)
    idle = [unit.name for unit in layout.units if unit.parameters and unit.name not in ran]
    return tuple(name for name in idle if prefixes and not f"{name}.".startswith(prefixes))


def once_for_each_kind(
    profile: Callable[[HardwareProfile | None], _T],
) -> Callable[[HardwareProfile | None], _T]:
    """Return `profile` with a cache for each compute capability: GPUs of one capability run the same kernels."""
    profiles: dict[object, _T] = {}

    def on(hardware: HardwareProfile | None) -> _T:
        kind = None if hardware is None else capability(hardware.name)
        if kind not in profiles:
            profiles[kind] = profile(hardware)
        return profiles[kind]

    return on


@contextmanager
def _without_caches(model: LightningModule) -> Iterator[list[Any]]:
    """Switch key-value caches off, as the runtime does if blocks are checkpointed; yield the changed configs."""
    caching = stop_caching(model)
    try:
        yield caching
    finally:
        for config in caching:
            config.use_cache = True


def _with_swaps_of(profile: ModelProfile, other: ModelProfile) -> ModelProfile:
    """Return `profile` with the larger swapped bytes of both profiles, as either may apply to the run."""
    most: dict[str, int] = {}
    for call in other.calls:
        most[call.name] = max(most.get(call.name, 0), call.swap_bytes)
    calls = (replace(call, swap_bytes=max(call.swap_bytes, most.get(call.name, 0))) for call in profile.calls)
    return replace(profile, calls=tuple(calls))


def _what_is_missing(needed_for: str, reason: str) -> str:
    """Return the message if a budget, a knob or a dry run needs a profile that does not exist."""
    knob, value, _ = needed_for.partition("=")
    instead = f"Leave {knob} out (num_checkpoint_blocks needs no profile)." if value else _OTHER_BATCH
    if knob == _BUDGET:
        instead = _OTHER_PLAN
    return f"{needed_for} needs a profile of a training step, and there is none: {reason} {instead}"


def _say_unknown(reason: str, otherwise: str) -> None:
    rank_zero_info(f"The training step could not be profiled: {reason} {otherwise}")


def streamable(profile: ModelProfile | None, model: LightningModule, low_dtype: str | None) -> frozenset[str]:
    """Return parameters that may be streamed in `low_dtype`: `castable` ones that no hook and no compiled code reads.

    A hook would see the cast. Compiled code reads the memory itself, as the dtype that the parameter claims to have.
    Return none if the step was measured: then the use of a weight may depend on the values of a batch.
    """
    if profile is None or profile.measured or low_dtype is None:
        return frozenset()
    compiled = {id(parameter) for parameter in compiled_parameters(model)}
    excluded = {
        fqn
        for fqn, parameter in model.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks or id(parameter) in compiled
    }
    return castable(profile, low_dtype) - excluded


@contextmanager
def undisturbed(trainer: Trainer, model: LightningModule, batch: Any) -> Iterator[None]:
    """Suppress all side effects of a step, and restore all state that can be restored."""
    with ExitStack() as undo:
        undo.callback(_set_rng_states, _collect_rng_states())
        settings = [optimizer.param_groups for optimizer in trainer.optimizers]
        undo.enter_context(unchanged(*model.modules(), trainer.datamodule, batch, settings))  # type: ignore[attr-defined]
        undo.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        for module in list(model.modules()):
            if isinstance(module, LightningModule):
                vars(module).update(_mute_module(module))
            elif isinstance(module, (Metric, MetricCollection)):
                vars(module).update(_mute_metric(module))
        yield


class NoBatchError(UntraceableError):
    """An error if no batch can be taken ahead of training.

    Args:
        reason: The reason, as a sentence that names the loader or its data.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"No batch can be taken ahead of training: {reason}")


class NoBackwardError(UntraceableError):
    """An error of a step that trains nothing: it returned None, for which Lightning skips a batch, or no gradient."""


def _note(needed_for: str, kind: object, error: BaseException | None, traceback: object) -> None:
    """Add a note to an exception that says that it was raised while the step was profiled."""
    if error is not None and not isinstance(error, UntraceableError):
        error.add_note("Raised while `training_step` ran for its shapes, before training and its hooks have begun.")
        if needed_for.startswith(_BUDGET):
            error.add_note(
                f"{needed_for} needs these shapes. If the step is right once training has begun, set "
                'plan="offload" or "resident", or leave device_memory out: activations are not counted then.'
            )


def with_loss(step: Callable[[], Any], accumulate: int) -> dict[str, Any] | None:
    """Run the step; return the tensors that the loop holds during backward: the divided loss and a copy for logging."""
    outputs = step()
    if outputs is None:
        return None
    result = ClosureResult.from_training_step_output(outputs, accumulate)
    return {"loss": result.closure_loss, "held": result}


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _mute_module(module: LightningModule) -> dict[str, Callable[..., Any]]:
    """Return replacements that do nothing, for methods with effects outside of `module`."""

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
    """Return replacements for a metric's methods that count nothing; its values are zero."""

    def zero(*args: Any, **kwargs: Any) -> Any:
        return dict.fromkeys(metric.keys(), nothing) if isinstance(metric, MetricCollection) else nothing

    nothing = torch.zeros(())
    return {"forward": zero, "compute": zero, "update": _nothing, "reset": _nothing}


class _Idle:
    """A stand-in for an optimizer or a scheduler that can be read but does nothing."""

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
