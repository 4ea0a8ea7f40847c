"""Nobody reads a weight while the host's worker is stepping it.

[Note: Guard]
While an update is pending, the class of its parameters is a subclass that overrides `__torch_function__`: the first
operation on one of them, an attribute such as `grad` or `data` included, waits for every pending update, gives the
classes back and goes on; only what describes the parameter, such as its dtype, is read at once. The objects stay the
same, so whoever holds them (optimizers, averages, callbacks) is covered, and nothing is paid where nobody looks. The
worker itself and autograd's engine pass below it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# The worker and the runtime themselves pass below the guard within it; it holds for the present thread.
below_guard = torch._C.DisableTorchFunctionSubclass

# What a step does not change: models ask for the dtype or the device of their weights in every forward.
_DESCRIPTIONS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "shape", "ndim", "layout", "is_cuda", "is_leaf", "requires_grad")
)
# Gradients are no weights.
_GRADIENT: Any = Tensor.grad
GRADIENTS = frozenset((_GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__))


class Guard:
    """Watches parameters, see [Note: Guard].

    Args:
        finish: Waits for all pending updates and calls `leave` for their parameters; it may raise instead.
        free: What may be done without that, beside asking for descriptions.
    """

    def __init__(self, finish: Callable[[], None], free: frozenset[Any] = frozenset()) -> None:
        self._finish = finish
        self._free = _DESCRIPTIONS | free
        self._classes: dict[type, type] = {}
        self._plain: dict[int, type] = {}

    def watches(self, parameter: Tensor) -> bool:
        """Whether an update of `parameter` is pending."""
        return id(parameter) in self._plain

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """From now on, whoever touches one of `parameters` waits."""
        for parameter in parameters:
            plain = type(parameter)
            self._plain[id(parameter)] = plain
            parameter.__class__ = self._watched(plain)

    def leave(self, parameters: Iterable[Tensor]) -> None:
        """Their update has ended."""
        for parameter in parameters:
            plain = self._plain.pop(id(parameter), None)
            if plain is not None:
                parameter.__class__ = plain

    def _watched(self, plain: type) -> type:
        if plain not in self._classes:
            finish, free = self._finish, self._free

            def touch(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
                if func not in free:
                    finish()
                with below_guard():
                    return func(*args, **(kwargs or {}))

            def deepcopy(parameter: Tensor, memo: dict[int, Any]) -> Tensor:
                finish()  # Before PyTorch asks for the class, of which the copy will be.
                return copy.deepcopy(parameter, memo)

            body = {"__torch_function__": classmethod(touch), "__deepcopy__": deepcopy, "__module__": plain.__module__}
            self._classes[plain] = type(plain)(plain.__name__, (plain,), body)
        return self._classes[plain]


def can_be_watched(parameter: Tensor) -> bool:
    """Whether the class of a parameter can be changed for a while: PyTorch's own, without a dispatch of its own."""
    return type(parameter) in (Tensor, nn.Parameter)
