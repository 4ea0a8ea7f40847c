"""Chooses an overlap of the host's optimizer step that gives exact results with the user's hooks, see [Note: Overlap].

A hook is *passive* if it reads no gradient. Hooks of Lightning and of this package are passive, except for callbacks
that average, prune or unfreeze weights; a user's hook may do anything. If a hook that is not passive runs, gradients
get memory of their own. Hooks that read weights need no such rule, see [Note: Guard].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging
from torch.optim import Optimizer

from lightning_protrain.config import OverlapChoice
from lightning_protrain.runtime.access_guard import can_be_watched
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.optim.step import has_step_hooks, steps_parameters_alone

# Hooks that run between an optimizer step and the next forward.
_HOOKS_AFTER_STEP = ("on_train_batch_end", "on_train_batch_start")
_PASSIVE_PACKAGES = ("lightning.pytorch.", "lightning_protrain.")
_CALLBACKS = "lightning.pytorch.callbacks."
_READERS = tuple(_CALLBACKS + name for name in ("weight_averaging", "stochastic_weight_avg", "pruning", "finetuning"))
# Hooks that run between backward and the step; they may read or change any gradient and any weight.
_HOOKS_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step")
# All hooks between two training steps that may see gradients before `zero_grad` drops them.
_HOOKS_IN_TRAINING = (
    *(*_HOOKS_AFTER_STEP, *_HOOKS_BEFORE_STEP, "on_before_batch_transfer", "transfer_batch_to_device"),
    *("on_after_batch_transfer", "lr_scheduler_step", "optimizer_step", "backward", "on_before_backward"),
    *("on_before_zero_grad", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_save_checkpoint", "state_dict"),
)


@dataclass(frozen=True)
class OverlapPlan:
    """The overlap of the host's optimizer step in one run.

    Attributes:
        overlap: The phase during which the host steps.
        clip_value: Clipping bound of gradient values, for steps during backward; None: no clipping.
        take_norms: True if norms of gradients may be computed as the gradients arrive.
        lends: True if gradients may use the memory of shadow copies, see [Note: Gradients in shadows]. This needs one
            backward a step, one rank, and no hook that reads gradients.
        passes: True if gradients may have host memory only until their step, see [Note: Gradients in passing].
        clipping_keeps: True if `passes` is false only because gradients are clipped by norm.
    """

    overlap: Overlap = Overlap.OFF
    clip_value: float | None = None
    take_norms: bool = False
    lends: bool = False
    passes: bool = False
    clipping_keeps: bool = False

    def describe(self, threads: int | None) -> str:
        """Return a sentence for the user: on how many threads the host steps the optimizer, and during which phase."""
        on = f"on {threads} thread{'s' if threads > 1 else ''} " if threads else ""
        if self.overlap is Overlap.OFF:
            return f"The host steps the optimizer {on}while the device waits."
        return f"The host steps the optimizer {on}while the device computes: behind {self.overlap}."


NO_OVERLAP = OverlapPlan()


def plan_overlap(
    choice: OverlapChoice, trainer: Trainer, model: LightningModule, optimizers: Sequence[Optimizer], device_type: str
) -> OverlapPlan:
    """Return the overlap of the host's optimizer step.

    Args:
        choice: `"auto"`: the first exact one of backward, forward and off; always off on the CPU, where the step would
            take cores from the model.
        trainer: The Trainer; its clipping, callbacks and debugging options decide what is exact.
        model: The module; its overridden hooks decide what is exact.
        optimizers: Optimizers of the model.
        device_type: Type of the accelerator.

    Raises:
        ValueError: The requested overlap would not be exact; the message says why, and what to change.
    """
    if choice == "off" or (choice == "auto" and device_type == "cpu"):
        return OverlapPlan()
    obstacles = {
        Overlap.FORWARD: list(_obstacles(trainer, model, optimizers)),
        Overlap.BACKWARD: [*_obstacles(trainer, model, optimizers), *_obstacles_to_backward(trainer, model)],
    }
    if choice == "auto":
        overlap = next((way for way in (Overlap.BACKWARD, Overlap.FORWARD) if not obstacles[way]), Overlap.OFF)
    else:
        overlap = Overlap(choice)
        if obstacles[overlap]:
            raise ValueError(f"overlap_optimizer={choice!r} would not be exact: {'; '.join(obstacles[overlap])}.")
    by_norm = clips_by_norm(trainer)
    before_step = any(_overrides(trainer, model, _HOOKS_BEFORE_STEP))
    lends = overlap is not Overlap.OFF and _may_lend(trainer, model, optimizers)
    may_pass = lends and _may_pass(model, optimizers)
    return OverlapPlan(
        overlap=overlap,
        clip_value=trainer.gradient_clip_val if trainer.gradient_clip_val and not by_norm else None,
        take_norms=by_norm and not before_step and not _is_overridden(model, "configure_gradient_clipping"),
        lends=lends,
        passes=may_pass and overlap is Overlap.BACKWARD,
        clipping_keeps=may_pass and choice == "auto" and by_norm and len(obstacles[Overlap.BACKWARD]) == 1,
    )


def _may_pass(model: LightningModule, optimizers: Sequence[Optimizer]) -> bool:
    """Return True if every trained weight is stepped, no hook of the user delays its step, and no state exists yet.

    Until the first step has ended, gradients take the memory of states (Adagrad makes its states beforehand).
    """
    stepped = {id(weight) for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooked = any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in trained)
    fresh = not any(optimizer.state for optimizer in optimizers)
    return fresh and not hooked and all(id(weight) in stepped for weight in trained)


def _may_lend(trainer: Trainer, model: LightningModule, optimizers: Sequence[Optimizer]) -> bool:
    """Return `OverlapPlan.lends`; if it is true, the plan expects every gradient in the memory of a shadow copy."""
    is_plain = trainer.world_size == trainer.accumulate_grad_batches == 1
    if not is_plain or any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return False
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # With several dtypes the norm is computed from all gradients at once, so no chunk could be stepped before.
    whole = clips_by_norm(trainer) and len({parameter.dtype for parameter in trained}) > 1
    stepped_by_chunks = not any(map(has_step_hooks, optimizers)) and all(map(can_be_watched, trained))
    return stepped_by_chunks and not whole and _only_passive_hooks(trainer, model)


def _only_passive_hooks(trainer: Trainer, model: LightningModule) -> bool:
    """Return True if no hook that may read gradients runs between two training steps.

    The hooks of a callback that derives from one of Lightning's count as unknown, as it may override what they call.
    """
    if not model.automatic_optimization:
        return False  # Under manual optimization a training step may read gradients after an optimizer step.
    for owner in (*trainer.callbacks, model):  # type: ignore[attr-defined]
        known = owner is model or type(owner).__module__.startswith(_PASSIVE_PACKAGES)
        for name in _HOOKS_IN_TRAINING:
            origin = _origin(owner, name)
            passive = origin.startswith(_PASSIVE_PACKAGES) and not origin.startswith(_READERS)
            if not _is_default(origin) and not (known and passive):
                return False
    return True


def step_is_followed_by_forward(trainer: Trainer) -> bool:
    """Return True if a training batch follows this optimizer step, as far as this can be predicted."""
    loop = trainer.fit_loop.epoch_loop
    last = loop.batch_progress.is_last_batch or trainer.should_stop or loop.global_step + 1 == trainer.max_steps
    every = trainer.val_check_batch
    counts = (loop.batch_idx + 1, loop.total_batch_idx + 1)
    validates = isinstance(every, int) and every > 0 and any(count % every == 0 for count in counts)
    return not last and not validates


def _obstacles(trainer: Trainer, model: LightningModule, optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """Yield the reasons why no overlap is exact, each with the setting to change."""
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield (
            f"precision={trainer.precision!r} decides after backward whether a step is taken at all "
            '(give "off" or "auto", or precision="bf16-mixed")'
        )
    if not model.automatic_optimization:
        yield 'optimization is manual, so the step is a part of `training_step` (give "off" or "auto")'
    for optimizer in optimizers:
        if not steps_parameters_alone(optimizer):
            yield (
                f"{type(optimizer).__name__} is not known to step each parameter on its own "
                '(give "off" or "auto", or an optimizer of torch.optim other than LBFGS)'
            )
    if _is_overridden(model, "optimizer_step"):
        yield f'{type(model).__name__} overrides `optimizer_step` (give "off" or "auto")'


def _obstacles_to_backward(trainer: Trainer, model: LightningModule) -> Iterator[str]:
    """Yield the reasons why an overlap with backward is not exact, each with the setting to change."""
    if clips_by_norm(trainer):
        yield (
            f"gradient_clip_val={trainer.gradient_clip_val} clips by norm, which needs all gradients before the first "
            'step (give "forward" or "auto", or clip by value)'
        )
    if trainer._detect_anomaly:
        yield 'detect_anomaly=True may end backward after the first step (give "forward" or "auto")'
    for name in ("configure_gradient_clipping", "backward"):
        if _is_overridden(model, name):
            yield f'{type(model).__name__} overrides `{name}` (give "forward" or "auto")'
    for what in _overrides(trainer, model, _HOOKS_BEFORE_STEP):
        yield f'{what} may look at weights or gradients before the step (give "forward" or "auto")'


def clips_by_norm(trainer: Trainer) -> bool:
    """Return True if the gradients of a run are clipped by their total norm."""
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"


def _overrides(trainer: Trainer, model: LightningModule, names: Sequence[str]) -> Iterator[str]:
    """Yield the hooks of the user; those of this package read no weight and no gradient."""
    for owner in (*trainer.callbacks, model):  # type: ignore[attr-defined]
        for name in names:
            if _is_overridden(owner, name) and not _origin(owner, name).startswith("lightning_protrain."):
                yield f"`{name}` of {type(owner).__name__}"


def _is_overridden(owner: Any, name: str) -> bool:
    return not _is_default(_origin(owner, name))


def _is_default(origin: str) -> bool:
    """Return True if `origin` is a base class's module or empty, so that the user has not overridden the hook."""
    return origin.startswith(("lightning.pytorch.core.", "torch.nn.")) or origin in ("", _CALLBACKS + "callback")


def _origin(owner: Any, name: str) -> str:
    """Return the name of the module that defines the hook `name` of `owner`; empty if there is no hook."""
    function = vars(owner).get(name) or getattr(type(owner), name, None)
    return getattr(function, "__module__", "") or ""


def writes_averages(trainer: Trainer) -> str:
    """Return the class name of a callback that overwrites weights with their averages; empty if there is none.

    Every rank writes its averages for validation or at the end of training. If ranks shared weights, they would all
    write to the same copy.
    """
    callbacks: Sequence[Any] = getattr(trainer, "callbacks", ())
    averaging = WeightAveraging, StochasticWeightAveraging
    return next((type(callback).__name__ for callback in callbacks if isinstance(callback, averaging)), "")
