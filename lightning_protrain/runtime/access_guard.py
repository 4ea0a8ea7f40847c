"""Guards weights against access while the host's worker steps them.

[Note: Guard]
While an optimizer step is pending, the class of its parameters is a subclass that overrides `__torch_function__`. The
first operation on one of them, including an attribute such as `grad` or `data`, waits for every pending step, restores
the classes and continues. Metadata, such as the dtype, is read at once. The parameters stay the same objects, so
everything that holds them (optimizers, weight averages, callbacks) is covered, and unguarded code pays nothing. The
worker itself and autograd's engine bypass the guard. Shadow copies ([Note: Shadow copies]) use a guard of their own. If
several guards watch a parameter, its class notifies all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# Context in which this thread bypasses the guard; the worker and the runtime use it.
below_guard = torch._C.DisableTorchFunctionSubclass

# Metadata, which no step changes: models ask for the dtype or the device of their weights in every forward.
DESCRIPTIONS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "shape", "ndim", "layout", "is_cuda", "is_leaf", "requires_grad")
)
# Access to a gradient neither reads nor writes its weight.
_GRADIENT: Any = Tensor.grad
GRADIENTS = frozenset((_GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__))
# Attributes that neither read values nor give access to their memory.
_NAMES = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "grad_fn", "nbytes", "itemsize", "is_sparse")
_METHODS = ("size", "stride", "numel", "dim", "element_size", "is_floating_point", "is_complex")
NO_VALUES = GRADIENTS.union(
    (getattr(Tensor, name).__get__ for name in _NAMES),
    (getattr(Tensor, name) for name in (*_METHODS, "register_hook", "requires_grad_")),
    (torch.is_floating_point, torch.is_complex, torch.numel),
)


# Calls a function with its arguments, see [Note: Direct reads] in direct_reads.py.
Reader = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


class AccessGuard:
    """A watch over parameters, see [Note: Guard].

    Args:
        finish: Called with the parameters that are accessed; it calls `leave` for them or raises.
        free: Functions that do not call `finish`, in addition to `DESCRIPTIONS`.
        beside: Another guard that may watch some of the same parameters; None: no other guard does.

    Attributes:
        register: Parameters that this guard and those beside it watch.
    """

    def __init__(
        self,
        finish: Callable[[Sequence[Tensor]], None],
        free: frozenset[Any] = frozenset(),
        beside: AccessGuard | None = None,
    ) -> None:
        self.finish = finish
        self.free = DESCRIPTIONS | free
        self.register: _Register = beside.register if beside is not None else _Register()

    def watches(self, parameter: Tensor) -> bool:
        """Return whether this guard watches `parameter`."""
        watched = self.register.watched.get(id(parameter))
        return watched is not None and self in watched.guards

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch `parameters`: from now on `finish` runs before any access to one of them."""
        for parameter in parameters:
            self.register.add(parameter, self)

    def unwatch(self, parameters: Iterable[Tensor]) -> None:
        """Stop watching `parameters`; unwatched ones are ignored."""
        for parameter in parameters:
            self.register.discard(parameter, self)

    def close(self) -> None:
        """Stop watching every parameter, and forget `finish`, whose owner may own this guard."""
        self.unwatch([watched.parameter for watched in self.register.watched.values()])
        self.finish = lambda _: None  # It watches no parameter.


@dataclass(eq=False, slots=True)
class _Watched:
    """A watched parameter, its original class, and the guards that watch it."""

    parameter: Tensor
    plain: type
    guards: dict[AccessGuard, None] = field(default_factory=dict)


class _Register:
    """The parameters that a guard and the guards beside it watch, by identity.

    Attributes:
        reader: Calls functions of PyTorch on watched parameters in place of their caller; None: nobody does.
    """

    def __init__(self) -> None:
        self.watched: dict[int, _Watched] = {}
        self.reader: Reader | None = None
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
        """Notify the guards of the parameters in `arguments`, or of all parameters if `arguments` has none."""
        leaves = arguments[0][:1] if func in NO_VALUES else tree_leaves(arguments)  # Skip the slow search if possible.
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
                    if register.reader is not None:
                        return register.reader(func, args, kwargs or {})
                    return func(*args, **(kwargs or {}))

            def deepcopy(parameter: Tensor, memo: dict[int, Any]) -> Tensor:
                register.touch(None, parameter)
                shown, parameter.__class__ = type(parameter), plain  # PyTorch copies the class, too.
                try:
                    return copy.deepcopy(parameter, memo)
                finally:
                    if id(parameter) in register.watched:
                        parameter.__class__ = shown

            body = {"__torch_function__": classmethod(touch), "__deepcopy__": deepcopy, "__module__": plain.__module__}
            self._classes[plain] = type(plain)(plain.__name__, (plain,), body)
        return self._classes[plain]


def is_aliased(parameter: Tensor) -> bool:
    """Return whether memory of `parameter` has another name too (`data = weight.data`, a view, an array).

    A guard cannot see accesses through another name. If there is none, the storage has two references: one from the
    parameter, and one from the Python storage object made here.
    """
    return torch._C._storage_Use_Count(parameter.untyped_storage()._cdata) > 2


def can_be_watched(parameter: Tensor) -> bool:
    """Return whether a guard can watch a parameter; it cannot watch subclasses, which may dispatch on their own."""
    return type(parameter) in (Tensor, nn.Parameter)
