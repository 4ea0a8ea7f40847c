"""Describes all that the plan of a run depends on: the model, its optimizers, and one training step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_protrain.config import PlanOptions
from lightning_protrain.device.device import Device
from lightning_protrain.distributed.failures import failing_together
from lightning_protrain.planner.problem import Training, Workload
from lightning_protrain.planner.request import PlanOrPreset, ProfileOn, SlicedOn, needs_profile, what_needs_profile
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout, ModelProfile
from lightning_protrain.quant_state import prepare_weights
from lightning_protrain.runtime.optim.host_rate import host_slowdown
from lightning_protrain.strategy.overlap import NO_OVERLAP, OverlapPlan, clips_by_norm, plan_overlap
from lightning_protrain.strategy.precision import ProTrainPrecision
from lightning_protrain.strategy.profile_step import (
    may_slice,
    once_for_each_kind,
    profile_in_slices,
    profile_training_step,
    streamable,
)


@dataclass(frozen=True)
class Run:
    """A fit, validation, test or prediction during `Strategy.setup`.

    Attributes:
        trainer: The Trainer, with its module.
        device: Device of this rank.
        optimizers: Optimizers of the module; None if nothing is trained.
    """

    trainer: Trainer
    device: Device
    optimizers: Sequence[Optimizer] | None

    @property
    def precision(self) -> ProTrainPrecision:
        """The precision plugin, which knows the numbers of dtypes and of optimizer states."""
        plugin = self.trainer.precision_plugin
        assert isinstance(plugin, ProTrainPrecision)
        return plugin


@dataclass(frozen=True)
class Described:
    """The properties of a run on which its plan depends.

    Attributes:
        run: The run.
        workload: The model and its training; with a profile if the plan is for this node and needs one.
        overlap: The overlap of the host's optimizer steps.
        profile_on: Profiles the step for some hardware; None means that `workload` is complete.
        sliced_on: As in PlanRequest.
    """

    run: Run
    workload: Workload
    overlap: OverlapPlan = NO_OVERLAP
    profile_on: ProfileOn | None = None
    sliced_on: SlicedOn | None = None


@failing_together("Profiling a training step")
def describe(run: Run, choice: PlanOrPreset, options: PlanOptions, elsewhere: bool, device_type: str) -> Described:
    """Describe a run; every rank calls it, and rank 0 profiles the step.

    Args:
        run: The run.
        choice: A given plan, or the name of a preset.
        options: The user's choices for the plan.
        elsewhere: True to plan for other hardware; `profile_on` then profiles the step, once for each kind of GPU.
        device_type: Type of the device to plan for.

    Raises:
        ValueError: The model cannot be described or streamed, the overlap would not be exact, or the step must be
            profiled and cannot be.
    """
    trainer, optimizers, model = run.trainer, run.optimizers, run.trainer.lightning_module
    overlap = NO_OVERLAP
    if optimizers is not None:
        overlap = plan_overlap(options.overlap_optimizer, trainer, model, optimizers, device_type)
    refuse_unsupported(model)
    prepare_weights(model, run.device.torch_device)
    layout = describe_model(model, options.blocks, options.min_num_params)
    if optimizers is None:
        if not isinstance(choice, str):
            return Described(run, Workload(layout, low_dtype=run.precision.low_dtype_name))
        frozen = tuple(replace(info, trainable=False) for info in layout.parameters)
        return Described(run, Workload(replace(layout, parameters=frozen)))
    layout = replace(layout, lends_copies=overlap.lends, passes_gradients=overlap.passes)
    workload = _trained(run, optimizers, layout, overlap, device_type)
    limited = options.device_bytes is not None or run.device.free_bytes() is not None
    if not (elsewhere or needs_profile(choice, options, workload, limited)):
        return Described(run, workload, overlap)
    # On every rank, because the step of a user's class may communicate.
    workload = replace(workload, host_slowdown=host_slowdown(optimizers, run.device.worker))
    if trainer.global_rank:  # Only rank 0 plans and profiles.
        profile_training_step(trainer, layout)
        return Described(run, workload, overlap)
    reason = what_needs_profile(choice, options, elsewhere)
    profile_on = _profiling(run, workload, reason)
    sliced_on = _profiling_slices(run, profile_on, reason)
    return Described(run, workload if elsewhere else profile_on(None), overlap, profile_on, sliced_on)


def profiled_again(described: Described, needed_for: str) -> Described:
    """Return a description whose functions profile the step anew, because the data has another size; for rank 0.

    Args:
        described: The description with another size.
        needed_for: What needs the profile, for a message.
    """
    profile_on = _profiling(described.run, described.workload, needed_for)
    return replace(described, profile_on=profile_on, sliced_on=_profiling_slices(described.run, profile_on, needed_for))


def _trained(
    run: Run, optimizers: Sequence[Optimizer], layout: ModelLayout, overlap: OverlapPlan, device_type: str
) -> Workload:
    """Return the workload of a training, without a profile."""
    trainer, state_bytes = run.trainer, run.precision.state_bytes(optimizers)
    return Workload(
        layout,
        low_dtype=run.precision.low_dtype_name,
        state_bytes=state_bytes,
        training=Training(
            overlap.overlap.value, trainer.accumulate_grad_batches, clips_by_norm(trainer), trainer.enable_validation
        ),
        foreach=device_type != "cpu"
        and any(
            group.get("foreach") is not False and not group.get("fused")  # PyTorch's default on a GPU.
            for optimizer in optimizers
            for group in optimizer.param_groups
        ),
        copied_bytes=copied_bytes(trainer, optimizers, state_bytes),
        host_step_refusal=run.precision.host_step_refusal(optimizers),
        optimizers=tuple(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" for optimizer in optimizers),
        clipping_keeps=overlap.clipping_keeps,
    )


@runtime_checkable
class HoldsHostCopy(Protocol):
    """A callback that copies states to host memory, such as `ProTrainCheckpoint`."""

    def copied_bytes(self, trainer: Trainer, optimizers: Collection[Optimizer], state_bytes: float) -> int:
        """Return the size of the copy, bytes; see the function `copied_bytes`."""


def copied_bytes(trainer: Trainer, optimizers: Collection[Optimizer], state_bytes: float) -> int:
    """Return the host memory that the writing rank needs for all callbacks' copies of states, bytes.

    Args:
        trainer: Trainer before the fit; its module may be on the meta device.
        optimizers: Optimizers of the module.
        state_bytes: Optimizer state per parameter element, bytes, for optimizers that are not PyTorch's.
    """
    keepers = [each for each in getattr(trainer, "callbacks", []) if isinstance(each, HoldsHostCopy)]
    return sum(each.copied_bytes(trainer, optimizers, state_bytes) for each in keepers)


def _profiling(run: Run, workload: Workload, reason: str) -> ProfileOn:
    """Return a function that profiles the training step, once for each kind of hardware, for a feature or for none."""

    @once_for_each_kind
    def profile_on(hardware: HardwareProfile | None) -> Workload:
        return _profiled(run, workload, profile_training_step(run.trainer, workload.layout, reason, hardware))

    return profile_on


def _profiling_slices(run: Run, profile_on: ProfileOn, reason: str) -> SlicedOn:
    """Return a function that profiles the step with slices of the tokens; the arguments are those of `_profiling`."""

    @once_for_each_kind
    def sliced_on(hardware: HardwareProfile | None) -> Workload | None:
        workload = profile_on(hardware)
        if workload.profile is None or not may_slice(workload.profile):
            return None
        profile = profile_in_slices(run.trainer, workload.layout, reason, hardware)
        return _profiled(run, workload, profile) if profile is not None and profile.sliced else None

    return sliced_on


def _profiled(run: Run, workload: Workload, profile: ModelProfile | None) -> Workload:
    """Return the workload with the profile of its step, and with the dtypes in which weights may be streamed."""
    return workload.profiled(profile, streamable(profile, run.trainer.lightning_module, workload.low_dtype))


# Quantisation methods that can be streamed, by their names in transformers.
_STREAMED = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", "none")
_FP8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse models that would fail later; reads metadata only, so weights may be anywhere.

    Raises:
        ValueError: Weights have a format that cannot be trained (GPTQ, AWQ, FP8 and others), or the model was loaded
            with a `device_map` over several devices.
    """
    for name, module in model.named_modules():
        _refuse_placed(name, module)
        method = _method_of(module) or next(_formats_of(module), None)
        if method is not None:
            raise ValueError(
                f'{name or type(module).__name__!r} holds {method} weights, which strategy="protrain" does not '
                "support: it cannot stream them. Load the weights that they were made of, or "
                "quantise these with bitsandbytes (4 or 8 bits)."
            )


def _method_of(module: nn.Module) -> str | None:
    """Return the quantisation method of a transformers model if the strategy cannot stream it; else None."""
    config: Any = getattr(getattr(module, "config", None), "quantization_config", None)
    if config is None:
        return None
    settings = config if isinstance(config, dict) else vars(config)
    method = settings.get("quant_method")
    method = str(getattr(method, "value", method)).lower()
    # Some models are loaded as plain weights on request.
    return None if method in _STREAMED or settings.get("dequantize") else method.upper()


def _formats_of(module: nn.Module) -> Iterator[str]:
    """Yield the quantised formats of a layer's own tensors if the strategy cannot stream them."""
    tensors: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    for value in tensors.values():
        if value is not None and value.dtype in _FP8:
            yield f"FP8 ({str(value.dtype).removeprefix('torch.')})"
    codes = tensors.get("qweight")
    if codes is not None and not codes.is_floating_point() and "qzeros" in tensors:
        yield "AWQ" if "WQLinear" in type(module).__name__ or "Awq" in type(module).__name__ else "GPTQ"


def _refuse_placed(name: str, module: nn.Module) -> None:
    """Refuse a model that accelerate has divided; the map `{"": device}` of quantised weights divides nothing."""
    places = getattr(module, "hf_device_map", None)
    hooked = getattr(module, "_hf_hook", None)
    if (isinstance(places, dict) and len(set(map(str, places.values()))) > 1) or hooked is not None:
        where = f" over {', '.join(sorted(set(map(str, places.values()))))}" if isinstance(places, dict) else ""
        raise ValueError(
            f"{name or type(module).__name__!r} was loaded with a device_map{where}: accelerate moves its weights by "
            'hooks of its own, and strategy="protrain" decides itself where they are. Load it without `device_map`.'
        )
