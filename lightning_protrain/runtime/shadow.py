"""Shadow copies: host weights in low precision, which are streamed in place of the weights themselves.

[Note: Shadow copies]
A float32 weight whose only use autocast would cast is cast on the host instead: its *shadow copy* is streamed, half the
bytes. A shadow copy is *current* as long as its weight has the version that the copy was made of, and nobody has
touched the weight since. The second half is needed because code that writes through `weight.data` moves no version. So
from when its copy is made, by a fetch or by a step, the weight is watched, see [Note: Guard]. Touching it invalidates
the copy, which the next fetch makes anew. Reading metadata or gradients is no touch.

Memory that is held under another name (`data = weight.data`) cannot be watched, but its references are counted: such a
copy is made anew in every scope. So is the copy of a weight that was stepped on the main thread, where the optimizer
may write through `data`. Where ranks share a weight, only its owner makes its copy; to the others it is always current.

[Note: Gradients in shadows]
From the last use of a weight in backward to its optimizer step nobody needs the shadow copy, and the step writes it
anew. The gradient has its dtype, size and layout, and no more values than the copy holds: autograd would only cast
them. So the gradient lands in the memory of the copy, and the step reads it there, tile by tile, before it writes. What
stands for it in `grad` has no memory of its own. Code that computes with it before the step gets the gradient in the
dtype of the weight, and `grad` is that tensor from then on. The same happens if the copy is needed again. After the
step the values are gone, and reading them raises.
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
        values: The copy, in the dtype of the device parameter.
        uses: Watches the uses of the device parameter, see [Note: Low-precision uses].
        owned: Whether this rank makes the copy.
        made_of: Version of `host` that the copy was made of; -1: the copy is not current.
        gradient: The gradient in the memory of the copy, see [Note: Gradients in shadows].
    """

    host: nn.Parameter
    values: Tensor
    uses: ParamUses
    owned: bool = True
    made_of: int = -1
    gradient: InPlaceGrad | None = None

    @property
    def is_current(self) -> bool:
        """Whether the copy is that of the weight as it is now, see [Note: Shadow copies]."""
        return not self.owned or self.made_of == self.host._version

    def invalidate(self) -> None:
        """Have the next fetch make the copy anew."""
        self.made_of = -1

    def renew(self) -> None:
        """Cast the weight again; a gradient in the memory of the copy moves elsewhere."""
        self.keep_gradient()
        self.values.copy_(self.host.detach())
        self.made_of = self.host._version

    def lend(self, gradient: Tensor) -> InPlaceGrad | None:
        """Return a stand-in for a gradient that may land in the memory of the copy; None: it cannot lie there."""
        values = self.values
        alike = values.dtype == gradient.dtype and values.stride() == gradient.stride()
        if not alike or gradient.layout != torch.strided:
            return None
        self.keep_gradient()  # Somebody may hold one that was dropped.
        self.invalidate()
        self.gradient = InPlaceGrad(self.host, values)
        return self.gradient

    def keep_gradient(self) -> None:
        """Move a gradient out of the memory of the copy."""
        gradient, self.gradient = self.gradient, None
        if gradient is not None and not gradient.is_given_up:
            gradient.whole()

    def begin_step(self) -> None:
        """Begin a step: from now on it may write weight and copy."""
        if self.gradient is not None:
            self.gradient.begin_step()

    def end_step(self) -> None:
        """End a step, which has written the copy if the weight had a gradient."""
        if self.host.grad is None:
            if not self.is_current:
                self.renew()
            return
        self.made_of = self.host._version
        if self.gradient is not None:
            self.gradient.give_up()
            self.gradient = None

    def forget_gradient(self) -> None:
        """Leave no stand-in in `grad`: make the gradient whole, or drop it where the step has been made."""
        self.keep_gradient()
        if isinstance(self.host.grad, InPlaceGrad):
            self.host.grad = None


_PROPERTIES = ("is_sparse", "grad_fn", "nbytes", "itemsize")
# What needs no values.
_FREE = DESCRIPTIONS | {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {Tensor.numel, Tensor.size, Tensor.dim}


class InPlaceGrad(Tensor):
    """Stands for a gradient in the memory of a copy, see [Note: Gradients in shadows].

    Args:
        parameter: Whose gradient, of its shape, strides and dtype.
        values: The memory of its copy, of the same shape and strides, in another dtype.
    """

    def __new__(cls, parameter: nn.Parameter, values: Tensor) -> InPlaceGrad:
        made: InPlaceGrad = Tensor._make_wrapper_subclass(
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
        args, kwargs = tree_map_only(InPlaceGrad, InPlaceGrad.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def is_given_up(gradient: Tensor | None) -> bool:
    """Whether it stands for one that nobody knows any more."""
    return isinstance(gradient, InPlaceGrad) and gradient.is_given_up


def stored(gradient: Tensor) -> Tensor:
    """What an optimizer step reads: the gradient as it is kept."""
    return gradient.stored() if isinstance(gradient, InPlaceGrad) else gradient


def cast(gradient: Tensor) -> Tensor:
    """The gradient in the dtype of its weight, for the moment."""
    return gradient.cast() if isinstance(gradient, InPlaceGrad) else gradient


def _landed() -> None:
    """It is there."""
