"""Puts stand-ins in the place of tensors from outside, above autograd and autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# These look at memory without an operation that a dispatch mode could see.
_READS = {
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.__array__: "Tensor.__array__",
    torch.Tensor.data_ptr: "Tensor.data_ptr",
    torch.Tensor.__format__: "Tensor.__format__",
}
_DTYPE_OF_FIRST = (
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
    torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
    torch.Tensor.element_size,
    torch.Tensor.type,
    torch.result_type,
    # These give the tensor itself if it has the dtype that is asked for, and no operation tells of it.
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
)
_DTYPE_OF_OTHERS = (torch.Tensor.to, torch.Tensor.type_as, torch.result_type)


class Observer(Protocol):
    """What a run reports to."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation has run: its arguments and result are real and meta tensors."""

    def dtype_read(self, tensor: Tensor) -> None:
        """The program looks at the dtype of `tensor`, given as it holds it."""

    def attention(self) -> AbstractContextManager[None]:
        """Around one `scaled_dot_product_attention`."""


class Source(Protocol):
    """A dispatch mode that knows what stands for what."""

    observer: Observer | None

    def stand_in(self, tensor: Tensor) -> Tensor:
        """What takes the place of `tensor`; itself if nothing does."""

    def check_read(self, name: str, value: object) -> None:
        """The program calls the method `name` of `value`, which reads memory."""

    def attend(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls `scaled_dot_product_attention`."""


class StandIns(TorchFunctionMode):
    """Within it, every function gets stand-ins, also in lists, tuples and dicts.

    Args:
        source: What gives them.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        observer = self._source.observer
        if observer is not None:
            for tensor in _asked_for_dtype(func, args):
                observer.dtype_read(tensor)
        args, kwargs = self._lifted(args), self._lifted(kwargs or {})
        if func in _READS:
            self._source.check_read(_READS[func], args[0])
        if func is F.scaled_dot_product_attention and observer is not None:
            with observer.attention():
                return self._source.attend(func, args, kwargs)
        return func(*args, **kwargs)

    def _lifted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # What `vmap` holds comes from inside, and has no memory that anybody may look at.
            held = torch._C._functorch.is_functorch_wrapped_tensor(value)
            return value if held else self._source.stand_in(value)
        if type(value) in (tuple, list):
            return type(value)(map(self._lifted, value))
        if type(value) is dict:
            return {key: self._lifted(inner) for key, inner in value.items()}
        return value


def _asked_for_dtype(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    asked = [*(args[:1] if func in _DTYPE_OF_FIRST else ()), *(args[1:] if func in _DTYPE_OF_OTHERS else ())]
    # What `vmap` holds is made inside, and no parameter.
    is_held = torch._C._functorch.is_functorch_wrapped_tensor
    return [value for value in asked if isinstance(value, Tensor) and not is_held(value)]
