"""Shadow copies: host weights in low precision, which are streamed in place of the weights themselves.

[Note: Shadow copies]
If autocast would cast a float32 weight in its only use, the host casts it instead: the weight's *shadow copy* is
streamed, which halves the bytes. A shadow copy is *current* as long as its weight has the version that it was cast
from and the weight has not been accessed since. The version alone is not enough, because writes through `weight.data`
do not move it. So from the cast on (by a fetch or by a step) a guard watches the weight, see [Note: Guard]. An access
invalidates the shadow copy, and the next fetch renews it. Reading metadata or gradients does not invalidate it.

Memory that has another name (`data = weight.data`) cannot be watched. References to the memory are counted, and while
there is another name, the shadow copy is renewed in every scope. The shadow copy is also renewed after a step on the
main thread, because the optimizer may write through `data`. If ranks share a weight, only its owner renews the shadow
copy; on other ranks it always counts as current.

[Note: Gradients in shadows]
Nobody needs the shadow copy between the last use of its weight in backward and the optimizer step, which renews it.
The gradient has the dtype, size and layout of the shadow copy; autograd would only cast it. So the gradient is
downloaded into the memory of the shadow copy, and the step reads it there, tile by tile, before it writes. The tensor
in `grad` is a stand-in without memory of its own. Code that computes with it before the step gets the gradient in the
dtype of the weight, and that tensor replaces the stand-in. The replacement also happens if the shadow copy is needed
again. After the step the gradient values are gone, and reading them raises. A gradient in passing also has a stand-in
and is given up, see [Note: Gradients in passing].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_protrain.runtime.access_guard import DESCRIPTIONS, below_guard
from lightning_protrain.runtime.low_precision import ParamUses


@dataclass(eq=False, slots=True)
class ShadowWeight:
    """The shadow copy of a host weight, see [Note: Shadow copies].

    Attributes:
        host: The weight.
        values: The shadow copy, in the dtype of the device parameter.
        uses: Uses of the device parameter, see [Note: Low-precision uses].
        owned: Whether this rank renews the shadow copy.
        made_of: Version of `host` that the shadow copy was cast from; -1: it is not current.
        gradient: Gradient in the memory of the shadow copy, see [Note: Gradients in shadows]; None: there is none.
    """

    host: nn.Parameter
    values: Tensor
    uses: ParamUses
    owned: bool = True
    made_of: int = -1
    gradient: InPlaceGrad | None = None

    @property
    def is_current(self) -> bool:
        """True if the shadow copy equals the weight as it is now, see [Note: Shadow copies]."""
        return not self.owned or self.made_of == self.host._version

    def invalidate(self) -> None:
        """Have the next fetch renew the shadow copy."""
        self.made_of = -1

    def renew(self) -> None:
        """Cast the weight again; a gradient in the memory of the shadow copy moves to memory of its own."""
        self.keep_gradient()
        self.values.copy_(self.host.detach())
        self.made_of = self.host._version

    def lend(self, gradient: Tensor) -> InPlaceGrad | None:
        """Return a stand-in for a gradient to download into the shadow copy; None if the gradient does not fit it."""
        values = self.values
        alike = values.dtype == gradient.dtype and values.stride() == gradient.stride()
        if not alike or gradient.layout != torch.strided:
            return None
        self.keep_gradient()  # User code may still hold the stand-in of an earlier gradient.
        self.invalidate()
        self.gradient = InPlaceGrad(self.host, values)
        return self.gradient

    def keep_gradient(self) -> None:
        """Move the gradient out of the memory of the shadow copy."""
        gradient, self.gradient = self.gradient, None
        if gradient is not None and not gradient.is_given_up:
            gradient.whole()

    def begin_step(self) -> None:
        """Begin a step: from now on the step may write the weight and its shadow copy."""
        if self.gradient is not None:
            self.gradient.begin_step()

    def end_step(self) -> None:
        """End a step, which has written the shadow copy if the weight had a gradient."""
        if self.host.grad is None:
            if not self.is_current:
                self.renew()
            return
        self.made_of = self.host._version
        if self.gradient is not None:
            self.gradient.give_up()
            self.gradient = None

    def forget_gradient(self) -> None:
        """Leave no stand-in in `grad`: replace it by the gradient, or by None if the step has been made."""
        self.keep_gradient()
        if isinstance(self.host.grad, InPlaceGrad):
            self.host.grad = None


_PROPERTIES = ("is_sparse", "grad_fn", "nbytes", "itemsize")
# Functions that need no values.
_FREE = DESCRIPTIONS | {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {Tensor.numel, Tensor.size, Tensor.dim}


class InPlaceGrad(Tensor):
    """A stand-in for a gradient whose memory is used for something else after the step.

    That is the memory of a shadow copy, see [Note: Gradients in shadows], or memory that the gradient of another chunk
    uses next, see [Note: Gradients in passing].

    Args:
        parameter: The weight; the stand-in has its shape and dtype.
        values: Memory of the gradient, in the dtype of the weight or a lower one.
    """

    def __new__(cls, parameter: nn.Parameter, values: Tensor) -> InPlaceGrad:
        made: InPlaceGrad = Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=values.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __init__(self, parameter: nn.Parameter, values: Tensor) -> None:
        self._parameter = parameter
        self._low: Tensor | None = values
        self._whole: Tensor | None = None
        self._is_stepped = False
        self._wait: Callable[[], None] = _no_wait

    def downloads(self, wait: Callable[[], None]) -> None:
        """Note that the gradient is being downloaded; `wait` waits for it."""
        self._wait = wait

    def cast(self) -> Tensor:
        """Return a copy of the gradient in the dtype of its weight; the gradient stays in the shadow copy's memory.

        Raises:
            RuntimeError: The optimizer step has been made.
        """
        return self.arrived().to(self.dtype)

    def stored(self) -> Tensor:
        """Return the memory of the gradient in the dtype that it is kept in, for its download and its step.

        Raises:
            RuntimeError: The gradient has memory of its own, and the optimizer step has been made.
        """
        low = self._low
        return self.arrived() if low is None else low

    def whole(self) -> Tensor:
        """Move the gradient to memory of its own, in the dtype of its weight, and set `grad` to it.

        Raises:
            RuntimeError: The optimizer step has been made.
        """
        if self._whole is None:
            with below_guard(), torch.no_grad(), torch.inference_mode(False):
                self._whole = self.arrived().to(self.dtype, copy=True)
                self._low, self._wait = None, _no_wait
                if self._parameter.grad is self and self._parameter.dtype == self.dtype:
                    self._parameter.grad = self._whole
        return self._whole

    def begin_step(self) -> None:
        """Begin the step, which may overwrite the gradient from now on."""
        self._is_stepped = True

    def give_up(self) -> None:
        """Note that the step has overwritten the gradient."""
        self._is_stepped, self._low, self._wait = True, None, _no_wait

    @property
    def is_given_up(self) -> bool:
        """True if the step has overwritten the gradient, so that its values are gone."""
        return self._whole is None and self._is_stepped

    def arrived(self) -> Tensor:
        """Return the gradient in the dtype that it is kept in, once its download has ended.

        Raises:
            RuntimeError: The optimizer step has been made.
        """
        low = self._low  # Read it first: another thread that runs `whole` clears it last.
        if self._whole is not None:
            return self._whole
        if low is None or self._is_stepped:
            raise RuntimeError(
                "The gradient of this weight has been used in an optimizer step, and its memory serves something else "
                'since. Read gradients before the step, or set overlap_optimizer="off", '
                "which keeps them until `zero_grad`."
            )
        self._wait()
        return low

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept Python operations: compute with the gradient in memory of its own, unless no values are needed."""
        if func in _FREE:
            with below_guard():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept operations of autograd and of code below `__torch_function__`."""
        args, kwargs = tree_map_only(InPlaceGrad, InPlaceGrad.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def is_given_up(gradient: Tensor | None) -> bool:
    """Return whether a gradient is a stand-in whose values are gone."""
    return isinstance(gradient, InPlaceGrad) and gradient.is_given_up


def stored(gradient: Tensor) -> Tensor:
    """Return the gradient in the dtype that it is kept in, for an optimizer step to read."""
    return gradient.stored() if isinstance(gradient, InPlaceGrad) else gradient


def cast(gradient: Tensor) -> Tensor:
    """Return the gradient in the dtype of its weight; a stand-in keeps its place."""
    return gradient.cast() if isinstance(gradient, InPlaceGrad) else gradient


def _no_wait() -> None:
    """Do not wait: the download has already completed."""
