"""Profiles the training step of a Trainer before there is a plan, and leaves no trace of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric, MetricCollection

from lightning_protrain.batches import batch_to_plan_with
from lightning_protrain.profiler.attention import Capability
from lightning_protrain.profiler.model import profile_model, unchanged
from lightning_protrain.profiler.records import ModelLayout, ModelProfile, castable
from lightning_protrain.profiler.synthetic import size_of
from lightning_protrain.profiler.tracing import UntraceableError

_NO_BATCH = (
    "no batch can be taken ahead of training (there are none, or the data is iterable, keeps a state, or has a sampler "
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
_STEP_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def profile_training_step(
    trainer: Trainer,
    model: LightningModule,
    layout: ModelLayout,
    forward_context: Callable[[], AbstractContextManager[Any]],
    needed_for: str = "",
    capability: Capability | None = None,
    otherwise: str = _NO_PLAN,
) -> ModelProfile | None:
    """Runs `training_step` on the largest batch, or the first, for its shapes; see `profile_model`.

    A step that cannot be traced runs on the device, with real tensors.

    The model stays in the mode that it is in. Nothing reaches loggers, metrics, optimizers, schedulers or the results
    of the trainer; random states are put back, and what the module and the data module hold, as far as [Note: Reach]
    goes. What the step does to anything else, it does. A model with a key-value cache runs twice, with it and without,
    and what is swapped is the larger of the two: the runtime switches caches off where blocks are checkpointed.
    Hooks that run before the first step (`on_train_start`) have not run.

    Args:
        trainer: In `Strategy.setup` of a fit, with its optimizers.
        model: The module that it trains.
        layout: What `describe_model` says about it.
        forward_context: Around the step: the autocast of the precision.
        needed_for: What cannot be had without a profile, for the message; empty: it is not needed.
        capability: Of the CUDA GPU that is planned for, if it is not the device of the trainer.
        otherwise: What follows where there is no profile, as a sentence.

    Returns:
        The profile; None, and one sentence for the user, if there is no batch, or the step raises.

    Raises:
        ValueError: There is no batch, and the profile is needed. What the step itself raises is raised then, too.
    """
    try:
        batch = batch_to_plan_with(trainer)
        if is_param_in_hook_signature(model.training_step, "dataloader_iter", explicit=True):
            raise UntraceableError("`training_step` takes batches itself, from `dataloader_iter`.")
        if batch is None:
            raise UntraceableError(f"{_NO_BATCH}.")
        takes_index = is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2)
        step: Callable[[], Any] = partial(model.training_step, batch, *([0] if takes_index else []))
        if model.automatic_optimization:
            step = partial(_with_loss, step, trainer.accumulate_grad_batches)

        @cache
        def say(message: str) -> None:
            rank_zero_info(message)

        def profiled() -> ModelProfile:
            with ExitStack() as stack:
                stack.enter_context(_undisturbed(trainer, model, batch))
                stack.push(_note)
                return profile_model(
                    model, layout, step, forward_context, trainer.strategy.root_device, capability, say=say
                )

        profile = profiled()
        with _without_caches(model) as caches:
            if caches:
                profile = _with_swaps_of(profiled(), profile)
        samples, tokens = size_of(batch)
        return replace(profile, samples=samples, tokens=tokens)
    except UntraceableError as error:
        if needed_for:
            raise ValueError(_what_is_missing(needed_for, str(error))) from error
        _say_unknown(str(error), otherwise)
    except _STEP_ERRORS as error:
        if needed_for.startswith(_BUDGET):
            raise ValueError(_what_is_missing(needed_for, f"it raised {type(error).__name__} ({error}).")) from error
        if needed_for:
            raise
        _say_unknown(f"it raised {type(error).__name__} ({error}).", otherwise)
    return None


@contextmanager
def _without_caches(model: LightningModule) -> Iterator[list[Any]]:
    """Switches key-value caches off, as the runtime does where blocks are checkpointed; gives what was switched."""
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
    """`profile`, with room for what `other` swaps: which of them the run is like depends on the plan."""
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
    return f"{needed_for} needs to know what a training step saves, and it is not known: {reason} {instead}"


def _say_unknown(reason: str, otherwise: str) -> None:
    rank_zero_info(f"What a training step saves, casts and computes is not known: {reason} {otherwise}")


def streamable(profile: ModelProfile | None, model: LightningModule, low_dtype: str | None) -> frozenset[str]:
    """Parameters that may be streamed in `low_dtype`: those of `castable` without hooks, which would see the cast.

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
def _undisturbed(trainer: Trainer, model: LightningModule, batch: Any) -> Iterator[None]:
    """Within it, what a step does beside computing does nothing; in the end all that can be is put back."""
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
    """Says with an exception when it was raised."""
    if error is not None:
        error.add_note("Raised while `training_step` ran for its shapes, before training and its hooks have begun.")


def _with_loss(step: Callable[[], Any], accumulate: int) -> dict[str, Any] | None:
    """What the loop holds of a step when backward begins: the loss, divided, and a copy of it for logging."""
    outputs = step()
    if outputs is None:
        return None
    result = ClosureResult.from_training_step_output(outputs, accumulate)
    return {"loss": result.closure_loss, "held": result}


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _mute_module(module: LightningModule) -> dict[str, Callable[..., Any]]:
    """Methods that take the place of those which reach out of `module`."""

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
    """Methods of a metric that counts nothing: its values are zero."""

    def zero(*args: Any, **kwargs: Any) -> Any:
        return dict.fromkeys(metric.keys(), nothing) if isinstance(metric, MetricCollection) else nothing

    nothing = torch.zeros(())
    return {"forward": zero, "compute": zero, "update": _nothing, "reset": _nothing}


class _Idle:
    """An optimizer or a scheduler that can be read but does nothing.

    Args:
        real: What it stands for.
    """

    def __init__(self, real: Any) -> None:
        self._real = real
        if hasattr(real, "param_groups"):
            self.param_groups = [dict(group) for group in real.param_groups]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Runs the closure, if there is one."""
        return closure() if callable(closure) else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leaves gradients alone."""
