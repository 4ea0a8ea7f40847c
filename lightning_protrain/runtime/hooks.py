"""Where the runtime meets the model: the one file that attaches to modules, with one handle that takes it all off.

[Note: Interception]
A unit's `forward` is replaced on the instance, which changes no name, adds no module and leaves every hook of the user
in place. Compared with a pair of forward hooks it closes over exceptions and early stops: whatever happens inside, the
host parameters are registered again.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.runtime.executor import Executor, in_backward
from lightning_protrain.runtime.guard import below_guard
from lightning_protrain.runtime.recompute import checkpoint
from lightning_protrain.runtime.swap import ActivationSwap
from lightning_protrain.runtime.unit import Unit


class Interception:
    """Stands as `module.forward` while a plan is applied, see [Note: Interception].

    Args:
        unit: The unit whose forward it is.
        executor: Brings the unit's chunks.
        watch: Takes outputs that are views, with the unit's name.
        swap: Swaps activations; None where no block of the plan does.
    """

    def __init__(self, unit: Unit, executor: Executor, watch: ViewWatch, swap: ActivationSwap | None = None) -> None:
        self._unit = unit
        self._executor = executor
        self._watch = watch
        self._swap = swap
        self._had_own = unit.module.__dict__.get("forward")
        self._forward: Callable[..., Any] = unit.module.forward
        functools.update_wrapper(self, self._forward)
        unit.module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if in_backward() or not torch.is_grad_enabled():
            return self._compute(*args, **kwargs)
        unit, executor = self._unit, self._executor
        number = executor.begin_call(unit)
        received = histories((args, kwargs))
        with self._swapping(number):
            if unit.policy in (BlockPolicy.CHECKPOINT, BlockPolicy.SELECTIVE):
                selective = unit.policy is BlockPolicy.SELECTIVE
                outputs = checkpoint(self._compute, args, kwargs, unit.module, unit.name, selective)
            else:
                outputs = self._compute(*args, **kwargs)
        if (unit.chunks or self._swap is not None) and unit.backward_reads:
            hook_outputs(outputs, received, unit, number, executor, self._watch)
        return outputs

    def remove(self) -> None:
        """Gives the module its forward back."""
        if self._had_own is None:
            self._unit.module.__dict__.pop("forward", None)
        else:
            self._unit.module.__dict__["forward"] = self._had_own

    def _swapping(self, number: int) -> AbstractContextManager[None]:
        if self._swap is None:
            return nullcontext()
        return self._swap.call(self._unit.name, self._unit.module, number, self._unit.swap_bytes)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        self._executor.enter(self._unit)
        try:
            outputs = self._forward(*args, **kwargs)
            refuse_weights(outputs, self._unit)
            return outputs
        finally:
            self._executor.exit(self._unit)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ValueError(
            f"The model cannot be copied while its plan is applied ({self._unit.name!r} is streamed): the copy would "
            "share host memory and hooks with the original. Copy it before fit or after it, or copy `state_dict()`."
        )

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            f"The model cannot be pickled while its plan is applied ({self._unit.name!r} is streamed). Save its "
            "`state_dict()`, or use `trainer.save_checkpoint`."
        )


def refuse_weights(outputs: Any, unit: Unit) -> None:
    """Refuses outputs that lie in memory which is freed when the call has ended.

    Raises:
        ValueError: An output is one of the unit's weights or a view of one.
    """
    if not unit.slots:
        return
    with below_guard():  # Only descriptions are read; without it each costs a look at the class of the twin.
        storages = {slot.twin.untyped_storage()._cdata for slot in unit.slots}
        for tensor in find_tensors(outputs):
            if tensor.layout is torch.strided and not tensor.is_meta and tensor.untyped_storage()._cdata in storages:
                raise ValueError(
                    f"{unit.name!r} returns one of its weights, or a view of it, and is streamed: the memory may be "
                    "freed before it is read. Return `weight.clone()`, or make its chunk resident "
                    "(`num_persistent_chunks`)."
                )


def histories(inputs: Any) -> dict[int, Any]:
    """The node behind each tensor in `inputs`, by the identity of the tensor: an in-place change gives it another."""
    return {id(tensor): tensor.grad_fn for tensor in find_tensors(inputs)}


def hook_outputs(
    outputs: Any, received: dict[int, Any], unit: Unit, number: int, executor: Executor, watch: ViewWatch
) -> None:
    """Asks autograd to announce the gradient of any output that a call has made, see [Note: Calls].

    `received` is what `histories` said of its inputs before: one that is handed through is no output of this call.
    """
    awaited = False
    for tensor in find_tensors(outputs):
        if tensor.grad_fn is not None and tensor.grad_fn is not received.get(id(tensor)):
            tensor.register_hook(functools.partial(_announce, executor, unit, number, executor.num_calls))
            if tensor._is_view():
                watch.add(tensor, unit.name)
            awaited = True
    if awaited:
        executor.await_gradient(unit, number)


def _announce(executor: Executor, unit: Unit, number: int, end: int, gradient: Tensor) -> None:
    executor.before_backward(unit, number, end)


class ViewWatch:
    """Finds outputs that are views and were changed in place.

    Such a change takes the hook on the output off without a word (autograd rebuilds the history of a view), and the
    block would run its backward without weights.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[Tensor], int, str]] = []

    def add(self, tensor: Tensor, name: str) -> None:
        """Watches an output of the unit called `name`."""
        self._seen.append((weakref.ref(tensor), tensor._version, name))

    def check(self) -> None:
        """Refuses what has been changed since.

        Raises:
            ValueError: An output was changed in place.
        """
        seen, self._seen = self._seen, []
        for reference, version, name in seen:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise ValueError(
                    f"An output of {name!r} is a view and was changed in place afterwards, which removes the hook that "
                    "brings its weights back for backward. Change it out of place (`x = x + y` for `x += y`), or "
                    "return `output.clone()` from the block."
                )


def find_tensors(value: Any, depth: int = 3) -> list[Tensor]:
    """All tensors in `value`, in the order met: in containers, dataclasses, and attributes of other objects.

    Modules and classes are not entered, nothing twice, and no more than `depth` objects within each other: an argument
    may hold on to half of the program.
    """
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _find_inside(value, depth, set(), found)
    return found


def _find_inside(value: Any, depth: int, seen: set[int], found: list[Tensor]) -> None:
    if value is None or isinstance(value, (int, float, str, bytes, type, torch.nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        inner = value
    else:
        depth -= 1
        inner = list(vars(value).values()) if depth >= 0 and hasattr(value, "__dict__") else ()
    for item in inner:
        if isinstance(item, Tensor):
            found.append(item)
        else:
            _find_inside(item, depth, seen, found)
