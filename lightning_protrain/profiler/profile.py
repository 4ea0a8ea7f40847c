"""Profile of one training step, usually from a trace without weights and without the GPU.

[Note: Reach]
A profiled step may change objects of the user, such as counters in the module. `unchanged` restores them: it visits all
objects that are reachable from a few roots through attributes, slots, containers, methods and closures. It restores
attributes of objects, contents of containers, and states of random generators, without deep copies.

Not restored are: values of tensors and arrays; globals and class attributes; iterators, files and other objects of the
standard library or of C extensions; the Trainer and objects that are only reachable through it. A container with more
than MAX_ITEMS items is restored, but its items are not visited.
"""

from __future__ import annotations

import argparse
import functools
import gc
import operator
import random
import sys
import warnings
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_protrain.profiler.attention import Capability
from lightning_protrain.profiler.blocks import is_compiled
from lightning_protrain.profiler.fake_mode import DataDependentError, MetaMode, StepMode, lifting_functions
from lightning_protrain.profiler.one_rank import on_one_rank
from lightning_protrain.profiler.real_mode import RealMode
from lightning_protrain.profiler.recorder import Recorder, in_backward
from lightning_protrain.profiler.records import ModelLayout, ModelProfile, UnitInfo
from lightning_protrain.profiler.row_wise import Slices
from lightning_protrain.progress import waiting

# Items of containers with more items are not visited, because they are assumed to be data.
MAX_ITEMS = 1000
# Maximum number of visited objects, in order of distance from the roots.
MAX_OBJECTS = 100_000

_Undo = Callable[[], object]
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
_ATOMS = (type(None), int, float, complex, str, bytes, type, ModuleType, np.ndarray, *weakref.ProxyTypes)
# Immutable objects that refer to others.
_LINKS = (tuple, frozenset, MethodType, functools.partial, CellType, np.random.Generator)
# Classes whose attributes are visited although they belong to the standard library or to torch.
_OPEN = (nn.Module, torch.Tensor, UserDict, UserList, SimpleNamespace, argparse.Namespace)
# Packages whose objects are not visited unless they are roots: the Trainer and its parts, the compiler's state, and an
# applied plan, whose host memory must not be forgotten.
_CLOSED = (
    *("lightning.", "pytorch_lightning.", "lightning_fabric.", "torch._"),
    *("lightning_protrain.runtime.", "lightning_protrain.device."),
)


@contextmanager
def unchanged(*roots: object) -> Iterator[None]:
    """Restore the roots and objects reachable from them at the end, even after an exception; see [Note: Reach].

    Args:
        roots: Modules, data modules, loaders, or other objects.
    """
    undo = list(_walk(roots))
    try:
        yield
    finally:
        for put_back in reversed(undo):
            put_back()


def _walk(roots: tuple[object, ...]) -> Iterator[_Undo]:
    """Yield functions that restore the reachable objects, in order of distance from the roots."""
    seen: dict[int, object] = {}
    queue: deque[Any] = deque(roots)
    entered = set(map(id, roots))
    while queue and len(seen) < MAX_OBJECTS:
        held = queue.popleft()
        kind = type(held)
        if id(held) in seen or issubclass(kind, _ATOMS):
            continue
        seen[id(held)] = held
        yield from _generator_state(held, kind)
        base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
        if base is not None:
            content = _content(held, base)
            yield functools.partial(_put_back, held, base, content)
            queue.extend(content if base.__len__(held) <= MAX_ITEMS else ())
        if id(held) in entered or _is_open(kind):
            if type(values := getattr(held, "__dict__", None)) is dict:
                queue.append(values)
            yield from _slots(held, kind, queue)
        if issubclass(kind, FunctionType):
            queue.extend((held.__dict__, held.__closure__, held.__defaults__, held.__kwdefaults__))
        elif issubclass(kind, _LINKS):
            links = gc.get_referents(held)
            queue.extend(links if len(links) <= MAX_ITEMS else ())
            if kind is CellType and links:
                yield functools.partial(setattr, held, "cell_contents", links[0])


def _generator_state(held: Any, kind: type) -> Iterator[_Undo]:
    """Yield a function that restores a random generator."""
    if issubclass(kind, (torch.Generator, np.random.RandomState)):
        yield functools.partial(held.set_state, held.get_state())
    elif issubclass(kind, random.Random) and kind is not random.SystemRandom:
        yield functools.partial(held.setstate, held.getstate())
    elif issubclass(kind, np.random.BitGenerator):
        yield functools.partial(setattr, held, "state", held.state)


def _content(held: Any, base: Any) -> list[Any]:
    """Return the items of a container; keys and values alternate. User code is not called."""
    return [*(chain.from_iterable(base.items(held)) if issubclass(base, dict) else base.__iter__(held))]


def _put_back(held: Any, base: Any, content: list[Any]) -> None:
    """Restore the items of a container."""
    now = _content(held, base)
    if len(now) == len(content) and all(map(operator.is_, now, content)):
        return
    base.clear(held)
    items = zip(content[::2], content[1::2], strict=True) if issubclass(base, dict) else content
    (base.extend if base in (list, deque) else base.update)(held, items)


def _is_open(kind: type) -> bool:
    """Return True if attributes of a class are visited: for Python classes outside the standard library."""
    if issubclass(kind, _OPEN):
        return True
    if str(kind.__module__).partition(".")[0] in sys.stdlib_module_names:
        return False
    return not any(str(base.__module__).startswith(_CLOSED) for base in kind.__mro__)


def _slots(held: object, kind: type, queue: deque[Any]) -> Iterator[_Undo]:
    """Yield functions that restore the slots that have a value."""
    for base in kind.__mro__:
        for member in vars(base).values() if "__slots__" in vars(base) else ():
            if type(member) is MemberDescriptorType and hasattr(held, member.__name__):
                queue.append(value := member.__get__(held))
                yield functools.partial(member.__set__, held, value)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


@waiting("Profiling a training step")
def profile_model(
    model: nn.Module,
    layout: ModelLayout,
    step: Callable[[], object],
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    device: torch.device | str = "cpu",
    capability: Capability | None = None,
    log_once: Callable[[str], object] | None = _warn,
    slices: Slices | None = None,
) -> ModelProfile:
    """Trace one training step and return its profile; see [Note: Tensors without values] in fake_mode.py.

    If the step needs values of floating-point tensors, it is run with real tensors on `device` instead. In both cases
    the model is restored: parameters, buffers, gradients, attributes and random states. Side effects outside the model,
    such as on a logger or a file, remain.

    Args:
        model: The model; it may be on the meta device. A trace does not read its parameters.
        layout: Result of `describe_model`.
        step: Runs forward and loss on the model with a real batch, and returns the loss or a mapping with the key
            `"loss"`, like `training_step`. This function runs backward if `step` does not.
        forward_context: Context of the step, such as the autocast of the precision.
        device: Device of the step, which determines kernels and autocast rules; it must be available.
        capability: Compute capability of an absent CUDA GPU to plan for; determines the attention kernels of a trace,
            see [Note: Attention kernels]. None means the kernels of `device`.
        log_once: Called with a message before a step is run with real tensors; None forbids that.
        slices: Run row-wise modules of units on slices of the tokens, see [Note: Slices] in row_wise.py; None: do not.

    Raises:
        UntraceableError: If the device is not available, or the step cannot be traced and `log_once` is None. Errors of
            the step itself are raised unchanged.
    """
    buffers = list(model.buffers())
    tensors = [*model.parameters(), *(buffer for buffer in buffers if buffer.is_floating_point())]
    mode = MetaMode(tensors, device, capability)

    def whole_step() -> object:
        with forward_context():
            return step()

    run = functools.partial(_recorded_step, model, layout, whole_step, slices)
    try:
        return run(mode)
    except DataDependentError as error:
        if log_once is None:
            raise
        reason = str(error)
    where = str(mode.device)
    log_once(f"The training step is run once on {where!r} to measure it, because it cannot be traced: {reason}")
    units = {unit.name: sum(layout.parameter(fqn).nbytes for fqn in unit.parameters) for unit in layout.units}
    profile = run(RealMode([*model.parameters(), *buffers], device, 2 * max(units.values(), default=0)))
    return replace(profile, measured=reason)


def _recorded_step(
    model: nn.Module,
    layout: ModelLayout,
    step: Callable[[], object],
    slices: Slices | None,
    mode: StepMode,
) -> ModelProfile:
    """Run forward and backward under `mode`, and return the profile."""
    parameters = {info.fqn: model.get_parameter(info.fqn) for info in layout.parameters}
    compiled = {unit.name for unit in layout.units if any(map(is_compiled, model.get_submodule(unit.name).modules()))}
    recorder = Recorder(mode, parameters, model.buffers(), compiled)
    mode.observer = recorder
    # Modes belong to a thread, but autograd would run backward of GPU tensors on another thread.
    with (
        unchanged(*model.modules()),
        # Compiled functions run eagerly: under a mode, Dynamo would mark them as not compilable.
        torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext(),
        mode,
        lifting_functions(mode.lifted()),
        on_one_rank(),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        units = {id(model.get_submodule(unit.name)): unit for unit in layout.units}
        for name, module in list(model.named_modules()):
            forward = module.forward if slices is None else _slicing(name, module.forward, slices, recorder)
            vars(module)["forward"] = _recording(forward, units.get(id(module)), recorder)
        with recorder.watch_gradients():
            with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
                outputs = step()
            recorder.run_backward(outputs)
        del outputs
    profile = recorder.profile()
    return profile if slices is None else replace(profile, slice_tokens=slices.tokens)


def _slicing(name: str, forward: Callable[..., Any], slices: Slices, recorder: Recorder) -> Callable[..., Any]:
    """Return a forward that runs on slices of the tokens if it can."""

    def run(rows: torch.Tensor) -> Any:
        with recorder.lifted() if in_backward() else nullcontext():
            return forward(rows)

    @functools.wraps(forward)
    def sliced(*args: Any, **kwargs: Any) -> Any:
        result = None
        if slices.divide(args, kwargs) and recorder.observes:
            result = recorder.sliced(name, run, args[0], slices)
        return forward(*args, **kwargs) if result is None else result

    return sliced


def _recording(forward: Callable[..., Any], unit: UnitInfo | None, recorder: Recorder) -> Callable[..., Any]:
    """Return a forward that records the call of a unit, and supports recomputation in any module."""

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not recorder.observes:
            return forward(*args, **kwargs)
        if in_backward():  # Recomputation by activation checkpointing.
            with recorder.lifted():  # `Tensor.backward` disables function modes.
                return forward(*args, **kwargs)
        if unit is None:
            return forward(*args, **kwargs)
        with recorder.call(unit, (args, kwargs)):
            return forward(*args, **kwargs)

    return recorded
