"""Gradients that lie where the copies of their weights lay.

[Note: Low gradients]
From the last use of a weight in backward to its optimizer step nobody needs the copy that is streamed in its place, see
[Note: Low precision], and the step writes it anew. The gradient has its dtype, its size and its layout, and as many
values as the copy: autograd would only cast them. So it lands in the memory of the copy, and the step reads it there,
tile by tile, before it writes. What stands for it in `grad` has no memory. Whoever computes with that before the step
gets the gradient in the dtype of the weight, and `grad` is such a tensor from then on; so it is if the copy is wanted
again. Behind the step the values are gone, and whoever wants them is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_protrain.runtime.guard import DESCRIPTIONS, below_guard

_PROPERTIES = ("is_sparse", "grad_fn", "nbytes", "itemsize")
# What needs no values.
_FREE = DESCRIPTIONS | {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {Tensor.numel, Tensor.size, Tensor.dim}


class LowGradient(Tensor):
    """Stands for a gradient in the memory of a copy, see [Note: Low gradients].

    Args:
        parameter: Whose gradient, of its shape, strides and dtype.
        values: The memory of its copy, of the same shape and strides, in another dtype.
    """

    def __new__(cls, parameter: nn.Parameter, values: Tensor) -> LowGradient:
        made: LowGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __init__(self, parameter: nn.Parameter, values: Tensor) -> None:
        self._parameter = parameter
        self._low: Tensor | None = values
        self._whole: Tensor | None = None
        self._is_stepped = False
        self._land: Callable[[], None] = _landed

    def lands(self, land: Callable[[], None]) -> None:
        """It is on its way; `land` waits for it."""
        self._land = land

    def cast(self) -> Tensor:
        """The gradient in the dtype of its weight; it stays where it is.

        Raises:
            RuntimeError: The step has been made.
        """
        return self.landed().to(self.dtype)

    def stored(self) -> Tensor:
        """The gradient as it is kept, whatever its dtype; for its step, and the copy that brings it.

        Raises:
            RuntimeError: The step has been made.
        """
        low = self._low
        return self.landed() if low is None else low

    def whole(self) -> Tensor:
        """The gradient in memory of its own, and in the dtype of its weight; `grad` is that from now on.

        Raises:
            RuntimeError: The step has been made.
        """
        if self._whole is None:
            with below_guard(), torch.no_grad(), torch.inference_mode(False):
                self._whole = self.landed().to(self.dtype)
                self._low, self._land = None, _landed
                if self._parameter.grad is self and self._parameter.dtype == self.dtype:
                    self._parameter.grad = self._whole
        return self._whole

    def begin_step(self) -> None:
        """From now on the step may be writing the copy over it."""
        self._is_stepped = True

    def give_up(self) -> None:
        """The copy has been written over it."""
        self._is_stepped, self._low, self._land = True, None, _landed

    @property
    def is_given_up(self) -> bool:
        """Whether nobody knows it any more, nor any sum with it."""
        return self._whole is None and self._is_stepped

    def landed(self) -> Tensor:
        """Return the gradient as it is kept, whatever its dtype, once it is on the host.

        Raises:
            RuntimeError: The step has been made.
        """
        low = self._low  # Read first: another thread that makes it whole lets go of it last.
        if self._whole is not None:
            return self._whole
        if low is None or self._is_stepped:
            raise RuntimeError(
                "The gradient of this weight has been used in an optimizer step, and the weight's copy in low "
                'precision is in its memory now. Read gradients before the step, or give overlap_optimizer="off", '
                "which keeps them until `zero_grad`."
            )
        self._land()
        return low

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Python's way to whatever is computed with it, and to its memory."""
        if func in _FREE:
            with below_guard():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Autograd's way, and that of whoever passes below the other."""
        args, kwargs = tree_map_only(LowGradient, LowGradient.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def is_given_up(gradient: Tensor | None) -> bool:
    """Whether it stands for one that nobody knows any more."""
    return isinstance(gradient, LowGradient) and gradient.is_given_up


def stored(gradient: Tensor) -> Tensor:
    """What an optimizer step reads: the gradient as it is kept."""
    return gradient.stored() if isinstance(gradient, LowGradient) else gradient


def cast(gradient: Tensor) -> Tensor:
    """The gradient in the dtype of its weight, for the moment."""
    return gradient.cast() if isinstance(gradient, LowGradient) else gradient


def _landed() -> None:
    """It is there."""
