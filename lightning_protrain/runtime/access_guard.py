"""Nobody reads a weight while the host's worker is stepping it.

[Note: Guard]
While an update is pending, the class of its parameters is a subclass that overrides `__torch_function__`: the first
operation on one of them, an attribute such as `grad` or `data` included, waits for every pending update, gives the
classes back and goes on; only what describes the parameter, such as its dtype, is read at once. The objects stay the
same, so whoever holds them (optimizers, averages, callbacks) is covered, and nothing is paid where nobody looks. The
worker itself and autograd's engine pass below it. Others watch for reasons of their own ([Note: Warm-up prefetch],
[Note: Shadow copies]); a parameter that several guards watch has one such class, which tells each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# The worker and the runtime themselves pass below the guard within it; it holds for the present thread.
below_guard = torch._C.DisableTorchFunctionSubclass

# What a step does not change: models ask for the dtype or the device of their weights in every forward.
DESCRIPTIONS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "shape", "ndim", "layout", "is_cuda", "is_leaf", "requires_grad")
)
# Gradients are no weights.
_GRADIENT: Any = Tensor.grad
GRADIENTS = frozenset((_GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__))
# Nor is what neither shows values nor leads to their memory.
_NAMES = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "grad_fn", "nbytes", "itemsize", "is_sparse")
_METHODS = ("size", "stride", "numel", "dim", "element_size", "is_floating_point", "is_complex")
NO_VALUES = GRADIENTS.union(
    (getattr(Tensor, name).__get__ for name in _NAMES),
    (getattr(Tensor, name) for name in (*_METHODS, "register_hook", "requires_grad_")),
    (torch.is_floating_point, torch.is_complex, torch.numel),
)


class AccessGuard:
    """Watches parameters, see [Note: Guard].

    Args:
        finish: Called with those that are touched; calls `leave` for them, or raises instead.
        free: What may be done without that, beside asking for descriptions.
        beside: Another guard that may watch the same parameters at the same time.
    """

    def __init__(
        self,
        finish: Callable[[Sequence[Tensor]], None],
        free: frozenset[Any] = frozenset(),
        beside: AccessGuard | None = None,
    ) -> None:
        self.finish = finish
        self.free = DESCRIPTIONS | free
        self._register: _Register = beside._register if beside is not None else _Register()

    def watches(self, parameter: Tensor) -> bool:
        """Whether somebody would be told of a touch of `parameter`."""
        watched = self._register.watched.get(id(parameter))
        return watched is not None and self in watched.guards

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """From now on, whoever touches one of `parameters` calls `finish` first."""
        for parameter in parameters:
            self._register.add(parameter, self)

    def leave(self, parameters: Iterable[Tensor]) -> None:
        """They may be touched; those that are not watched may be among them."""
        for parameter in parameters:
            self._register.discard(parameter, self)


@dataclass(eq=False, slots=True)
class _Watched:
    """A parameter that is watched, its class before, and by whom."""

    parameter: Tensor
    plain: type
    guards: dict[AccessGuard, None] = field(default_factory=dict)


class _Register:
    """What guards of the same parameters watch, by identity."""

    def __init__(self) -> None:
        self.watched: dict[int, _Watched] = {}
        self._classes: dict[type, type] = {}

    def add(self, parameter: Tensor, guard: AccessGuard) -> None:
        watched = self.watched.get(id(parameter))
        if watched is None:
            watched = self.watched[id(parameter)] = _Watched(parameter, type(parameter))
            parameter.__class__ = self._class_of(watched.plain)
        watched.guards[guard] = None

    def discard(self, parameter: Tensor, guard: AccessGuard) -> None:
        watched = self.watched.get(id(parameter))
        if watched is None or guard not in watched.guards:
            return
        del watched.guards[guard]
        if not watched.guards:
            parameter.__class__ = watched.plain
            del self.watched[id(parameter)]

    def touch(self, func: Any, arguments: Any) -> None:
        """Tells the guards of the parameters in `arguments`; of all of them where none is found."""
        leaves = arguments[0][:1] if func in NO_VALUES else tree_leaves(arguments)  # To be asked often is cheap.
        found = [watched for leaf in leaves if (watched := self.watched.get(id(leaf))) is not None]
        touched: dict[AccessGuard, list[Tensor]] = {}
        for watched in found or self.watched.values():
            for guard in watched.guards:
                if func not in guard.free:
                    touched.setdefault(guard, []).append(watched.parameter)
        for guard, parameters in touched.items():
            guard.finish(parameters)

    def _class_of(self, plain: type) -> type:
        if plain not in self._classes:
            register = self

            def touch(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
                if func not in DESCRIPTIONS:
                    register.touch(func, (args, kwargs))
                with below_guard():
                    return func(*args, **(kwargs or {}))

            def deepcopy(parameter: Tensor, memo: dict[int, Any]) -> Tensor:
                register.touch(None, parameter)  # Before PyTorch asks for the class, of which the copy will be.
                return copy.deepcopy(parameter, memo)

            body = {"__torch_function__": classmethod(touch), "__deepcopy__": deepcopy, "__module__": plain.__module__}
            self._classes[plain] = type(plain)(plain.__name__, (plain,), body)
        return self._classes[plain]


def is_aliased(parameter: Tensor) -> bool:
    """Return whether memory of `parameter` is held under another name too (`data = weight.data`, a view, an array).

    Nobody can watch what is done through the other name. A parameter alone has two references to its storage, its own
    and that of the Python object which is asked here.
    """
    return torch._C._storage_Use_Count(parameter.untyped_storage()._cdata) > 2


def can_be_watched(parameter: Tensor) -> bool:
    """Whether the class of a parameter can be changed for a while: PyTorch's own, without a dispatch of its own."""
    return type(parameter) in (Tensor, nn.Parameter)
