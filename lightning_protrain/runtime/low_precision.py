"""Device parameters in bfloat16, and the uses of them that are exact.

[Note: Low-precision uses]
A low-precision device parameter stands in for a weight that a step uses only after a cast by autocast. The profiler has
traced only one step. Another step, an evaluation or a step under an older Plan may use the weight in another way. So
the class of such a device parameter intercepts every use, like the class in [Note: Guard]. Uses that autocast casts go
ahead. Metadata, including the dtype, is that of the weight. Any other operation gets a full-precision copy of the host
weight on the device, and gives the same result as without offloading. The use is refused if a gradient would flow
through the copy or be summed in low precision. Autograd's engine and operations inside of C++ are not intercepted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_protrain.runtime.access_guard import below_guard


def _attributes(*names: str) -> frozenset[Any]:
    attributes = (getattr(Tensor, name) for name in names)
    return frozenset(getattr(value, "__get__", value) if not callable(value) else value for value in attributes)


# Functions whose arguments are all cast by autocast, by device type; other devices use the set of the CPU.
_EVERYWHERE = frozenset(
    [
        *(F.linear, torch.matmul, torch.linalg.matmul, torch.mm, torch.bmm, torch.addmm, torch.addbmm, torch.baddbmm),
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, torch.conv_tbc),
        *(torch.conv1d, torch.conv2d, torch.conv3d, torch.prelu, F.prelu, torch.linalg.vecdot),
        *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d, F.scaled_dot_product_attention),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.addbmm),
        *(Tensor.baddbmm, Tensor.prelu),
    ]
)
_CUDA_ONLY = frozenset(
    [
        *(torch.mv, torch.addmv, torch.addr, torch.einsum, Tensor.mv, Tensor.addmv, Tensor.addr),
        *(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell),
    ]
)
CASTS = {"cpu": _EVERYWHERE, "cuda": _EVERYWHERE | _CUDA_ONLY}
# Functions that run many operations; an observer finds out what they do with a weight.
_COMPOSITES = frozenset([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.einsum, torch.inner])
_ATEN = torch.ops.aten
_READERS = frozenset(
    [
        *(_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN.mkldnn_rnn_layer, _ATEN._cudnn_rnn),
        *(_ATEN.miopen_rnn, _ATEN.mkldnn_rnn_layer, _ATEN.linear),
    ]
)
# Functions that return the same elements in another shape or order of dimensions.
_VIEWS = frozenset(
    [
        *_attributes("T", "mT"),
        *(getattr(Tensor, name) for name in ("t", "transpose", "permute", "swapaxes", "swapdims", "movedim")),
        *(getattr(Tensor, name) for name in ("unsqueeze", "squeeze", "view", "reshape", "flatten", "contiguous")),
        *(torch.t, torch.transpose, torch.permute, torch.swapaxes, torch.swapdims, torch.movedim),
        *(torch.unsqueeze, torch.squeeze, torch.reshape, torch.flatten),
    ]
)
# Functions that give the same answer for device parameter and weight, or concern the device parameter alone.
_SHARED = _attributes(
    *("shape", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_leaf", "is_meta", "is_sparse", "is_nested"),
    *("is_quantized", "is_mkldnn", "is_mps", "is_xpu", "requires_grad", "grad_fn", "retains_grad", "_version"),
    *("size", "dim", "numel", "stride", "is_contiguous", "storage_offset", "nelement", "ndimension", "__len__"),
    *("get_device", "is_floating_point", "is_complex", "is_inference", "is_pinned", "is_shared", "data_ptr"),
    *("requires_grad_", "_is_view", "__hash__", "is_signed", "is_conj", "is_neg"),
) | {Tensor.requires_grad.__set__, Tensor.grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel}  # type: ignore[attr-defined, union-attr]
# Called by autograd's hooks on saved tensors.
_DETACH = torch.ops.aten.detach.default
# Attributes that are read from the weight itself.
_OF_HOST = _attributes("dtype", "itemsize", "nbytes", "element_size", "grad", "_backward_hooks")
# Functions that read only the dtype or shape of their later arguments.
_LIKE = frozenset([Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.expand_as, Tensor.reshape_as])
_HOOKS = frozenset([Tensor.register_hook, Tensor.register_post_accumulate_grad_hook])


class DeviceParam(nn.Parameter):
    """A device parameter that can be printed at any time, even while its device memory is released."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with below_guard():
            if self.numel() and not self.untyped_storage().nbytes():
                return f"Parameter of {self.dtype}{list(self.shape)}, not on the device at present"
            return f"Parameter containing:\n{self.detach().as_subclass(Tensor)!r}"


@dataclass(eq=False, slots=True)
class ParamUses:
    """The uses of a weight that is streamed in low precision.

    Attributes:
        fqn: First fully qualified name of the weight.
        host: The weight.
        device: Device of its device parameter.
        dtype: Dtype of its device parameter.
        number: Number of uses with gradients since gradients were last summed.
        shown: True while its device parameter is registered.
    """

    fqn: str
    host: nn.Parameter
    device: torch.device
    dtype: torch.dtype
    number: int = 0
    shown: bool = False
    _full_precision: nn.Parameter | None = None

    @property
    def is_cast(self) -> bool:
        """True if autocast would cast the weight to the dtype of the device parameter now."""
        kind = self.device.type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is self.dtype

    def full_precision(self, requires_grad: bool) -> nn.Parameter:
        """Return the weight in its own dtype on the device, kept while the device parameter is registered."""
        if self._full_precision is None:
            copied = nn.Parameter(self.host.detach().to(self.device, copy=True), requires_grad=requires_grad)
            if not self.shown:
                return copied
            self._full_precision = copied
        self._full_precision.requires_grad_(requires_grad)
        return self._full_precision

    def end(self) -> None:
        """Drop the full-precision copy, as the device parameter is no longer registered.

        Raises:
            RuntimeError: The full-precision copy has been written to, and the change would be lost.
        """
        self.shown = False
        copied, self._full_precision = self._full_precision, None
        if copied is not None and not copied.is_inference() and copied._version:
            raise RuntimeError(
                f"{self.fqn!r} was changed in a forward and is streamed in {self.dtype}: the change would "
                f"lose precision. {_REMEDY}, or change it after the step."
            )

    def forget(self) -> None:
        """Forget all uses, after an exception."""
        self.number, self.shown, self._full_precision = 0, False, None

    def count(self, func: Any) -> None:
        """Count a use with gradients.

        Raises:
            RuntimeError: It is the second use, whose gradient would be summed in low precision.
        """
        self.number += 1
        if self.number > 1:
            self.refuse(func, "uses it a second time before backward, so that two gradients would be summed in it")

    def refuse(self, func: Any, what: str) -> NoReturn:
        """Raise RuntimeError, because a use would not give the same bits as without offloading.

        Args:
            func: Function that uses the weight.
            what: Predicate that says what the operation does with the weight: `"changes it"`.
        """
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        raise RuntimeError(
            f"{self.fqn!r} is streamed in {self.dtype}, because in the step that was traced its only use was one cast "
            f"by autocast. Now `{name}` {what}. {_REMEDY}."
        )


_REMEDY = (
    "Make its chunk resident (`num_persistent_chunks`, or `resident` in the Plan), or give a Plan that streams it in "
    "float32"
)


class _Low:
    """A mixin of low-precision device parameters and their views, see [Note: Low-precision uses]."""

    __slots__ = ()
    uses: ParamUses
    # Function calls that make this view from the device parameter: function, other arguments, keyword arguments.
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and (func is _DETACH or _is_below_autograd()):
            with below_guard():  # Saved tensors are detached, or a dispatch mode repeats a function.
                return func(*args, **kwargs)
        if func in _SHARED:
            with below_guard():
                return func(*args, **kwargs)
        low = [value for value in (*args, *kwargs.values()) if isinstance(value, _Low)] or list(_inside(args, kwargs))
        first = low[0]
        if first.uses.is_cast and func in CASTS.get(first.uses.device.type, _EVERYWHERE):
            _count(low, func)
            return _call_below(func, types, args, kwargs)
        if func in _OF_HOST and args[0] is first:
            return func(first.uses.host, *args[1:], **kwargs)
        if func in _VIEWS and args[0] is first and not any(isinstance(value, torch.dtype) for value in args[1:]):
            with below_guard():
                return _view(first, func(*args, **kwargs), (func, args[1:], kwargs))
        if func in _HOOKS:
            first.uses.refuse(func, f"would see a gradient of {first.uses.dtype}")
        if first.uses.is_cast and _is_plain_attention(func, args, kwargs):
            _count(low, func)
            return _call_below(func, types, args, kwargs)
        if first.uses.is_cast and func in _COMPOSITES and any(map(_is_trained, low)):
            return _observed(func, low, args, kwargs)
        return _with_full_precision(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _with_full_precision(copy.deepcopy, (self, memo), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _with_full_precision(lambda weight: weight.__reduce_ex__(protocol), (self,), {})


class LowPrecisionParam(_Low, DeviceParam):
    """The device parameter of a plain parameter, in low precision."""


class _LowView(_Low, Tensor):
    """A view of all elements of a device parameter."""


@cache
def low_precision_class(plain: type) -> type:
    """Return the class of the low-precision device parameter of a parameter of class `plain`."""
    if plain is nn.Parameter:
        return LowPrecisionParam
    return type(plain)(plain.__name__, (_Low, plain), {"__module__": plain.__module__})


def _is_below_autograd() -> bool:
    """Return whether an operation runs below autograd, as in a dispatch mode; inference mode alone does not count."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    return excluded and not torch.is_inference_mode_enabled()


def _is_trained(low: Any) -> bool:
    with below_guard():
        return torch.is_grad_enabled() and low.requires_grad


def _count(low: Sequence[Any], func: Any) -> None:
    if torch.is_grad_enabled():
        for weight in low:
            if _is_trained(weight):
                weight.uses.count(func)


def _inside(*values: Any) -> Iterator[Any]:
    """Return the low-precision parameters and views in lists, tuples and dicts."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, _Low))


def _call_below(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(types) > 1 and any(not issubclass(kind, _Low) for kind in types):
        # Another `__torch_function__` class takes part: let it see the call.
        with below_guard():
            args, kwargs = _replaced((args, kwargs), lambda weight: weight.as_subclass(Tensor))
        return func(*args, **kwargs)
    with below_guard():
        return func(*args, **kwargs)


def _view(base: Any, view: Any, step: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> Any:
    if view is base:
        return base
    view.__class__ = _LowView
    view.uses, view.steps = base.uses, (*getattr(base, "steps", ()), step)
    return view


def _is_plain_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `func` is an attention that gives each low-precision weight whole to one linear function."""
    if func is not F.multi_head_attention_forward or any(isinstance(bias, _Low) for bias in args[7:9]):
        return False
    packed = args[0] is args[1] is args[2] and not kwargs.get("use_separate_proj_weight")
    return packed or not any(isinstance(weight, _Low) for weight in args[5:7])


def _observed(func: Any, low: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that runs many operations, and refuse inexact uses of weights in them."""
    with below_guard(), _Observer(low) as observer:
        result = func(*args, **kwargs)
    for weight in low:
        if _is_trained(weight):
            number = observer.number[id(weight.uses)]
            if number is None:
                weight.uses.refuse(func, "uses it in another way")
            for _ in range(number):
                weight.uses.count(func)
    return result


class _Observer(TorchDispatchMode):
    """A dispatch mode that counts the matrix products which read low-precision weights.

    Attributes:
        number: Number of products, by the identity of `ParamUses`; None: another operation reads the weight or a part
            of it.
    """

    def __init__(self, low: Sequence[Any]) -> None:
        super().__init__()
        self._low = {self._place(weight): (id(weight.uses), weight.numel()) for weight in low}
        self.number: dict[int, int | None] = {id(weight.uses): 0 for weight in low}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)) if not func.is_view else ():
            if isinstance(tensor, Tensor):
                self._read(tensor, func)
        return func(*args, **(kwargs or {}))

    def _read(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()._cdata
        if not any(place[0] == storage for place in self._low):
            return
        key, numel = self._low.get(self._place(tensor), (None, 0))
        before = self.number.get(key) if key is not None else None
        whole = key is not None and numel == tensor.numel() and func.overloadpacket in _READERS
        if whole and before is not None and key is not None:
            self.number[key] = before + 1
        else:  # At an unknown offset, any of the weights may be read.
            self.number.update(dict.fromkeys([key] if key is not None else self.number, None))

    @staticmethod
    def _place(tensor: Any) -> tuple[int, int]:
        return tensor.untyped_storage()._cdata, tensor.storage_offset()


def _with_full_precision(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with full-precision copies in place of low-precision ones.

    Raises:
        RuntimeError: A gradient would flow through a full-precision copy, or `func` writes to one.
    """
    copies: list[tuple[Any, nn.Parameter]] = []

    def full_precision(low: Any) -> Any:
        with below_guard():
            parameter = low.uses.full_precision(low.requires_grad)
            copies.append((low, parameter))
            value = parameter
            for step, others, keywords in getattr(low, "steps", ()):
                value = step(value, *others, **keywords)
            return value

    new_args, new_kwargs = _replaced((args, kwargs), full_precision)
    versions = [_version(parameter) for _, parameter in copies]
    if func == Tensor.data.__get__:  # type: ignore[attr-defined]
        func = Tensor.detach  # Writes through `data` would move no version.
    result = func(*new_args, **new_kwargs)
    for (low, parameter), version in zip(copies, versions, strict=True):
        if _version(parameter) != version or func == Tensor.data.__set__:  # type: ignore[attr-defined]
            low.uses.refuse(func, "changes it, and the change would be lost")
        asks_only = func in _LIKE and not isinstance(args[0], _Low)
        if torch.is_grad_enabled() and parameter.requires_grad and not asks_only and _has_history(result, parameter):
            low.uses.refuse(func, "uses it in another way, whose gradient would have other bits")
    return result


def _has_history(result: Any, parameter: nn.Parameter) -> bool:
    return any(
        leaf is parameter or (leaf.requires_grad and leaf.grad_fn is not None)
        for leaf in tree_leaves(result)
        if isinstance(leaf, Tensor)
    )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to low-precision tensors, also inside lists, tuples and dicts."""
    if isinstance(value, _Low):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(item, change) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, change) for key, item in value.items()}
    return value
