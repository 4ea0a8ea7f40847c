"""Profiles one training step without weights and without a device: what it saves, casts and computes."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_protrain.profiler.attention import Capability
from lightning_protrain.profiler.measuring import RealMode
from lightning_protrain.profiler.one_rank import on_one_rank as on_one_rank
from lightning_protrain.profiler.recorder import Recorder, in_backward
from lightning_protrain.profiler.records import ModelLayout, ModelProfile, UnitInfo
from lightning_protrain.profiler.snapshot import unchanged as unchanged
from lightning_protrain.profiler.synthetic import synthetic_batch as synthetic_batch
from lightning_protrain.profiler.synthetic import synthetic_step
from lightning_protrain.profiler.tracing import DataDependentError, MetaMode


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def profile_model(
    model: nn.Module,
    layout: ModelLayout,
    step: Callable[[], object] | None = None,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    device: torch.device | str = "cpu",
    capability: Capability | None = None,
    measure: bool = True,
    say: Callable[[str], object] = _warn,
) -> ModelProfile:
    """Runs one training step for its shapes; see [Note: Tensors without values] in `tracing`.

    A step that needs values (a shape that depends on them, a decision upon them) is run a second time with real
    tensors on `device`, see [Note: Measured steps]; that is said, and `ModelProfile.measured` says why. The model is as
    it was afterwards, also if the step fails: parameters, buffers, gradients, attributes, versions and random states.
    What the step does to anything else (a logger, a file) it does.

    Args:
        model: The model; it may live on the meta device. Traced, its parameters are neither read nor copied.
        layout: What `describe_model` says about it.
        step: Runs forward and loss on the model, as it is, with a real batch, and returns the loss or a mapping with
            it as `"loss"`, as `training_step` does. If it has not gone through backward itself, that is done here.
            None: one of a model of transformers on a batch that is made for it, see [Note: Synthetic batches].
        forward_context: Around the step: the autocast of the precision.
        device: The device the step is to run on, which decides kernels and autocast rules; it must be present.
        capability: Compute capability of a CUDA GPU that is planned for and is not `device`: attention saves what its
            kernels save, see [Note: Attention kernels]. A step that is measured has the kernels of `device`.
        measure: Whether a step that cannot be traced is measured.
        say: Is told if it is, before it begins.

    Raises:
        ValueError: No batch can be made for the model.
        UntraceableError: The device is absent; or the step cannot be traced, with the operation and the unit, and is
            not to be measured. What the step itself raises is raised.
    """
    buffers = list(model.buffers())
    tensors = [*model.parameters(), *(buffer for buffer in buffers if buffer.is_floating_point())]
    mode: MetaMode | RealMode = MetaMode(tensors, device, capability)
    run = functools.partial(_recorded_step, model, layout, step or synthetic_step(model), forward_context)
    try:
        return run(mode)
    except DataDependentError as error:
        if not measure:
            raise
        reason = str(error)
    where = str(mode.device)
    say(f"The training step is measured on {where!r} with real tensors, which takes as long as one: {reason}")
    units = {unit.name: sum(layout.parameter(fqn).nbytes for fqn in unit.parameters) for unit in layout.units}
    profile = run(RealMode([*model.parameters(), *buffers], device, 2 * max(units.values(), default=0)))
    return replace(profile, measured=reason)


def _recorded_step(
    model: nn.Module,
    layout: ModelLayout,
    step: Callable[[], object],
    forward_context: Callable[[], AbstractContextManager[Any]],
    mode: MetaMode | RealMode,
) -> ModelProfile:
    """Forward and backward under `mode`."""
    parameters = {info.fqn: model.get_parameter(info.fqn) for info in layout.parameters}
    compiled = {unit.name for unit in layout.units if _is_compiled(model.get_submodule(unit.name))}
    recorder = Recorder(mode, parameters, model.buffers(), compiled)
    mode.observer = recorder
    # Modes are of a thread, and autograd would take another one for what is on a GPU.
    with (
        unchanged(model),
        _uncompiled(),
        mode,
        on_one_rank(),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        units = {id(model.get_submodule(unit.name)): unit for unit in layout.units}
        for module in list(model.modules()):
            vars(module)["forward"] = _recording(module.forward, units.get(id(module)), recorder)
        recorder.watch_gradients()
        with forward_context(), torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
            outputs = step()
        recorder.run_backward(outputs)
        del outputs
    recorder.check_conserved()
    return recorder.profile()


def _uncompiled() -> AbstractContextManager[Any]:
    """Within it compiled functions run as they were written: those that Dynamo meets under a mode it never compiles."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _is_compiled(module: nn.Module) -> bool:
    """Whether the forward of a part of it is, which PyTorch does not run where every operation is looked at."""
    return any(hasattr(part.forward, "_torchdynamo_orig_callable") for part in module.modules())


def _recording(forward: Callable[..., Any], unit: UnitInfo | None, recorder: Recorder) -> Callable[..., Any]:
    """The forward of a module, which may be a unit; what is recomputed may begin at any."""

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if in_backward():  # recomputation of a checkpoint
            with recorder.lifted():  # `Tensor.backward` takes function modes off while it runs
                return forward(*args, **kwargs)
        if unit is None:
            return forward(*args, **kwargs)
        with recorder.call(unit, (args, kwargs)) as call:
            outputs = forward(*args, **kwargs)
            recorder.give_out(call, outputs)
        return outputs

    return recorded
