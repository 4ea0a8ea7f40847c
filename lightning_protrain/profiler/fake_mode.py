"""Dispatch mode that traces code with fake tensors: floating-point tensors have no values, integers are real.

[Note: Tensors without values]
In a trace, every floating-point tensor is a `ShapeTensor`: it reports the traced device to Python, autograd and
autocast, but wraps a meta tensor, on which operations run. Plain meta tensors would not do: autocast has no rules for
the meta device, and attention, LSTM and convolution take other code paths for meta tensors, with other saved tensors.

*Known* tensors are real tensors on the CPU: integers and bools, and floating-point tensors of one element, if they were
computed from known tensors only. So code can read tokens, masks, grids and single random numbers.

Parameters and buffers of the model are not changed: each is replaced by a *stand-in*, a `ShapeTensor`, whenever a
function gets it as an argument.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_protrain.profiler.attention import AttentionCall, Capability, cuda_kernel, run_kernel
from lightning_protrain.profiler.ops import (
    CPU_ONLY,
    SHAPE_RULES,
    map_tensors,
    mask_positions,
    tensors_in,
    written_tensors,
)

# Methods that read values without an operation that a dispatch mode could intercept.
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
    # These run no operation if the tensor already has the requested dtype.
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
)
_DTYPE_OF_OTHERS = (torch.Tensor.to, torch.Tensor.type_as, torch.result_type)


class Observer(Protocol):
    """The receiver of a trace's events, implemented by `Recorder`."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Handle an operation that has run on real or meta tensors."""

    def dtype_read(self, tensor: Tensor) -> None:
        """Handle a read of the dtype of a tensor, which is not replaced by its stand-in here."""

    def attention(self) -> AbstractContextManager[None]:
        """Return a context for one call of `scaled_dot_product_attention`."""


class StandIns(TorchFunctionMode):
    """A function mode that replaces tensors in the arguments of every function by their stand-ins.

    Args:
        source: Mode that provides the stand-ins.
    """

    def __init__(self, source: StepMode) -> None:
        super().__init__()
        self._source = source

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        observer = self._source.observer
        if observer is not None:
            for tensor in _dtype_reads(func, args):
                observer.dtype_read(tensor)
        args, kwargs = self.lifted(args), self.lifted(kwargs or {})
        if func in _READS:
            self._source.check_read(_READS[func], args[0])
        if func is torch.Tensor.backward:  # It disables function modes, which would hide kernels of backward.
            with self:
                return _run_backward(*args, **kwargs)
        if func is F.scaled_dot_product_attention and observer is not None:
            with observer.attention():
                return self._source.attend(func, args, kwargs)
        return func(*args, **kwargs)

    def lifted(self, value: Any) -> Any:
        """Return `value` (a tensor, or nested lists, tuples and dicts) with tensors replaced by their stand-ins."""
        return map_tensors(self._stand_in, value)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        # Tensors inside `vmap` wrap tensors of the trace.
        held = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        return tensor if held else self._source.stand_in(tensor)


def _run_backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run backward like `Tensor.backward`, but with function modes enabled."""
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


@contextmanager
def lifting_functions(stand_ins: StandIns) -> Iterator[None]:
    """Replace tensors by stand-ins in `torch.autograd.Function.apply`, which function modes do not intercept."""
    function: Any = torch.autograd.Function
    real = function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return real.__get__(None, cls)(*stand_ins.lifted(args), **stand_ins.lifted(kwargs))

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = real


def _dtype_reads(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    read = [*(args[:1] if func in _DTYPE_OF_FIRST else ()), *(args[1:] if func in _DTYPE_OF_OTHERS else ())]
    # Tensors inside `vmap` are not parameters.
    is_held = torch._C._functorch.is_functorch_wrapped_tensor
    return [value for value in read if isinstance(value, Tensor) and not is_held(value)]


_META = torch.device("meta")
_CPU = torch.device("cpu")
_ATEN = torch.ops.aten
_GATHERS = (_ATEN.index.Tensor, _ATEN._unsafe_index.Tensor)
_PUTS = (_ATEN.index_put.default, _ATEN._unsafe_index_put.default)
_IN_PLACE_PUTS = (_ATEN.index_put_.default, _ATEN._index_put_impl_.default)
_RESIZES = (_ATEN.resize_, _ATEN.resize_as_, _ATEN.set_)
_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class UntraceableError(ValueError):
    """An error of code that cannot be traced."""


class DataDependentError(UntraceableError):
    """An error of code that needs values of a floating-point tensor, or a kernel without a shape rule."""


class ShapeTensor(Tensor):
    """A fake tensor that reports a device but has no values; see [Note: Tensors without values].

    Args:
        elem: Meta tensor with the same shape, strides, dtype and storage.
        device: Device that the tensor reports.
        requires_grad: True makes a leaf that requires a gradient.
    """

    elem: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: Tensor, device: torch.device, requires_grad: bool = False) -> ShapeTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        self.elem = elem
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UntraceableError(f"{func} was called after the end of a trace on a tensor of the trace without values.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShapeTensor({tuple(self.shape)}, {self.dtype}, device={str(self.device)!r})"


class StepMode(TorchDispatchMode, ABC):
    """A dispatch mode that runs code of this thread with stand-ins for the model's tensors: MetaMode or RealMode.

    At its end, random states and all tensors that existed before are restored, including their versions.

    Args:
        device: Device of the stand-ins.

    Attributes:
        observer: Receiver of all events, or None.
        scopes: Names of the running units, innermost last, for messages; set by the recorder.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.observer: Observer | None = None
        self.scopes: list[str] = []
        self._undo = ExitStack()
        self._journal: dict[int, object] = {}
        # By address of a storage from outside: the storage, and the storage of its stand-in.
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        # Real storages that were allocated within the mode.
        self._own: set[StorageWeakRef] = set()
        self._lift = StandIns(self)

    def __enter__(self) -> Self:
        self._undo.callback(random.setstate, random.getstate())
        self._undo.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 (the global generator)
        self._undo.callback(torch.set_rng_state, torch.get_rng_state())
        if self.device.type != "cpu":
            states = torch.get_device_module(self.device)
            self._undo.callback(states.set_rng_state, states.get_rng_state(self.device), self.device)
        self._lift.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._lift.__exit__(*exception)
        with torch.no_grad():
            self._undo.close()
        # Release the references to outside tensors.
        for references in (self._journal, self._storages, self._stand_ins, self._own):
            references.clear()

    def lifted(self) -> StandIns:
        """Return a function mode that replaces tensors by stand-ins, for code where PyTorch disables function modes."""
        return StandIns(self)

    def storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """Return the storage of the tensor's stand-in; its meta storage in a trace."""
        with torch._C.DisableTorchFunction():
            storage = (tensor.elem if isinstance(tensor, ShapeTensor) else tensor).untyped_storage()
        return self._storages.get(storage._cdata, (storage, storage))[1]

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return the stand-in of a tensor from outside the step, or `tensor` itself if it needs none."""
        known = self._stand_ins.get(id(tensor))
        if known is not None:
            return known[1]
        with torch._C.DisableTorchFunction():
            return self._replace(tensor) if self._needs_stand_in(tensor) else tensor

    def _replace(self, tensor: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch():
            stand_in = self._make(tensor)
        # Keep a reference, so that the tensor's id is not reused.
        self._stand_ins[id(tensor)] = tensor, stand_in
        return stand_in

    @abstractmethod
    def _needs_stand_in(self, tensor: Tensor) -> bool: ...

    @abstractmethod
    def _make(self, tensor: Tensor) -> Tensor:
        """Return a stand-in; tensors that share memory get stand-ins that share memory."""

    @abstractmethod
    def check_read(self, name: str, value: object) -> None:
        """Handle a call of the method `name` of the tensor `value` that reads its memory."""

    def elsewhere(self, gradient: Tensor) -> Tensor | None:
        """Return a copy of a parameter's gradient that does not count as an activation; None: it would take memory."""
        return None

    def attend(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call `scaled_dot_product_attention`, with the device's own kernels."""
        return func(*args, **kwargs)

    def _remember(self, tensor: Tensor, has_values: bool = True) -> None:
        """Store values, shape and version of a tensor from outside the step before it changes, to restore them."""
        storage = tensor.untyped_storage()
        if StorageWeakRef(storage) in self._own:
            return
        if id(tensor) not in self._journal and not tensor.is_inference():
            self._journal[id(tensor)] = tensor
            self._undo.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            if has_values:
                self._undo.callback(tensor.as_strided_, tensor.shape, tensor.stride(), tensor.storage_offset())
        if storage._cdata not in self._journal and has_values:
            self._journal[storage._cdata] = storage
            self._undo.callback(storage.copy_, storage.clone())


class MetaMode(StepMode):
    """A dispatch mode that traces the code of this thread with fake tensors; see [Note: Tensors without values].

    Args:
        unknown: Tensors that get stand-ins, even if they are integers or of one element: parameters and
            floating-point buffers of a model.
        device: Device that fake tensors report. It must be available, because autograd uses its streams.
        capability: Compute capability of an absent CUDA device to plan for; determines the attention kernels, see
            [Note: Attention kernels]. None means the kernels of `device`.

    Raises:
        UntraceableError: If the device is not available.
    """

    def __init__(
        self,
        unknown: Iterable[Tensor] = (),
        device: torch.device | str = "cpu",
        capability: Capability | None = None,
    ) -> None:
        super().__init__(torch.device(device))
        self._capability = capability
        if not torch.get_device_module(self.device).is_available():
            raise UntraceableError(
                f"A trace for {str(self.device)!r} needs that device, because autograd uses its streams. Trace for "
                "'cpu', with the autocast of the CPU."
            )
        for tensor in unknown:
            self._replace(tensor)

    def elsewhere(self, gradient: Tensor) -> Tensor | None:
        """Return a copy of a parameter's gradient that does not count as an activation."""
        assert isinstance(gradient, ShapeTensor)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return ShapeTensor(_like(gradient.elem), self.device)

    def is_known(self, tensor: Tensor) -> bool:
        """Return True if a tensor is known, see [Note: Tensors without values]."""
        if isinstance(tensor, ShapeTensor) or tensor.device != _CPU or tensor.requires_grad:
            return False
        return _may_be_known(tensor) and tensor.untyped_storage()._cdata not in self._storages

    def _needs_stand_in(self, tensor: Tensor) -> bool:
        if is_traceable_wrapper_subclass(tensor):
            raise UntraceableError(f"A {type(tensor).__name__} cannot be traced: it wraps several tensors.")
        # A tensor with a grad_fn is part of the autograd graph, and must not be replaced.
        return not (isinstance(tensor, ShapeTensor) or tensor.grad_fn is not None or self.is_known(tensor))

    def _make(self, tensor: Tensor) -> ShapeTensor:
        return ShapeTensor(self._meta(tensor), self.device, tensor.requires_grad)

    def check_read(self, name: str, value: object) -> None:
        """Raise DataDependentError if a method reads the values of a fake tensor."""
        if isinstance(value, ShapeTensor):
            raise self.refuse(name, "reads the values of a tensor")

    def attend(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `scaled_dot_product_attention` with the kernel of the GPU to plan for."""
        if self._capability is None:
            return super().attend(func, args, kwargs)
        call = AttentionCall(*args, **kwargs).cast_by_autocast(self.device.type)
        with torch.autocast(self.device.type, enabled=False):
            return run_kernel(cuda_kernel(call, self._capability), call)

    def refuse(self, operation: str, reason: str) -> DataDependentError:
        """Return the error for an operation that needs values."""
        scope = repr(self.scopes[-1] or "the model") if self.scopes else "code outside all blocks"
        return DataDependentError(
            f"{operation} in {scope} {reason}. A trace has shapes, integers and bools, but no floating-point values."
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if func is _ATEN.set_.source_Tensor and args[0] is args[1]:
            return args[0]  # `register_parametrization` without a right inverse, as PEFT calls it for experts.
        if func.overloadpacket in _RESIZES:
            raise self.refuse(str(func), "resizes the memory of a tensor")
        for tensor in written_tensors(func, args, kwargs):
            if not isinstance(tensor, ShapeTensor):
                self._remember(tensor, self.is_known(tensor))
        if all(map(self.is_known, tensors)):
            return self._run_known(func, args, kwargs, bool(tensors))
        return self._run_shapes(func, args, kwargs)

    def _run_known(self, func: Any, args: Any, kwargs: dict[str, Any], has_inputs: bool) -> Any:
        """Run an operation on known tensors; replace floating-point results of several elements by fake tensors."""
        places = any(argument.name == "device" for argument in func._schema.arguments)
        if not has_inputs and places:
            shapes = func(*args, **_without_device(kwargs), device=_META)
            if not all(map(_may_be_known, tensors_in(shapes))):
                return self._finish(func, args, kwargs, shapes, {})
        if places and (not has_inputs or kwargs.get("device") is not None):
            kwargs = {**kwargs, "device": _CPU, "pin_memory": False}
        generator = kwargs.get("generator")
        if generator is not None and id(generator) not in self._journal:
            self._journal[id(generator)] = generator
            self._undo.callback(generator.set_state, generator.get_state())
        result = map_tensors(lambda out: out if _may_be_known(out) else _like(out), func(*args, **kwargs))
        read, made = (
            {StorageWeakRef(it.untyped_storage()) for it in tensors_in(values)} for values in ((args, kwargs), result)
        )
        self._own |= made - read
        if self.observer is not None:
            self.observer.operation(func, args, kwargs, result)
        return map_tensors(lambda out: ShapeTensor(out, self.device) if out.is_meta else out, result)

    def _run_shapes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on the meta tensors of its arguments."""
        written = {id(tensor) for tensor in written_tensors(func, args, kwargs)}
        originals: dict[int, Tensor] = {}

        def lower(tensor: Tensor) -> Tensor:
            if isinstance(tensor, ShapeTensor):
                elem = tensor.elem
            elif id(tensor) in written or not self.is_known(tensor):
                elem = self._meta(tensor)
            else:
                elem = _like(tensor)
            originals[id(elem)] = tensor
            return elem

        resolved, rule = self._resolve_values(func, args, kwargs)
        observed = map_tensors(lower, args)
        args = observed if resolved is args else map_tensors(lower, resolved)
        kwargs = map_tensors(lower, kwargs)
        if "device" in kwargs or "generator" in kwargs:
            kwargs = _without_device(kwargs) | ({"device": _META} if "device" in kwargs else {})
        try:
            result = rule(*args, **kwargs) if rule else func(*args, **kwargs)
        except NotImplementedError as error:
            raise self.refuse(str(func), "has no meta kernel") from error
        except RuntimeError as error:
            if "data-dependent shape" not in str(error):  # PyTorch's message for custom operations
                raise
            raise self.refuse(str(func), "needs the values of a tensor") from error
        return self._finish(func, observed, kwargs, result, originals)

    def _finish(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, originals: dict[int, Tensor]) -> Any:
        """Report an operation on meta tensors to the observer, and return its result as fake tensors."""
        if self.observer is not None:
            self.observer.operation(func, args, kwargs, result)

        def out(elem: Tensor) -> Tensor:
            original = originals.get(id(elem))
            if original is None:
                return ShapeTensor(elem, self.device)
            if original.shape != elem.shape or original.stride() != elem.stride():
                assert torch.Tag.inplace_view in func.tags, f"{func} changes the shape of its input"
                with torch._C._DisableTorchDispatch():
                    original.as_strided_(elem.shape, elem.stride(), elem.storage_offset())
            return original

        return map_tensors(out, result)

    def _resolve_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Callable[..., Any] | None]:
        """Replace known masks in an operation's arguments by indices; refuse operations that need unknown values.

        Returns:
            The arguments, and a function to run instead of the operation; None means the operation itself.
        """
        if func in _GATHERS or func in _PUTS or func in _IN_PLACE_PUTS:
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            if all(map(self.is_known, masks)):
                return (args[0], mask_positions(args[1]), *args[2:]), None
            if func in _PUTS:
                return args, lambda tensor, *_, **__: torch.empty_like(tensor)
            if func in _IN_PLACE_PUTS:
                return args, lambda tensor, *_, **__: tensor
        elif func is _ATEN.masked_select.default and self.is_known(args[1]):
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            count = int(args[1].expand(shape).sum())
            return args, lambda tensor, *_, **__: tensor.new_empty(count)
        elif kwargs.get("output_size") is not None or not _DEPENDS_ON_VALUES & set(func.tags):
            on_cpu = self.device == _CPU and self._capability is None
            return args, SHAPE_RULES.get(func) if on_cpu or func not in CPU_ONLY else None
        raise self.refuse(str(func), "needs the values of a tensor")

    def _meta(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor for a real one; tensors that share memory get meta tensors that share memory."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            # Keep a reference, so that the storage's address is not reused.
            self._storages[storage._cdata] = (storage, torch.UntypedStorage(storage.nbytes(), device=_META))
        empty = torch.empty(0, dtype=tensor.dtype, device=_META)
        meta = self._storages[storage._cdata][1]
        return empty.set_(meta, tensor.storage_offset(), tensor.shape, tensor.stride())


def _may_be_known(result: Tensor) -> bool:
    """Return True if the result of known tensors is known too: it is an integer, or has one element."""
    return not (result.is_floating_point() or result.is_complex()) or result.numel() <= 1


def _like(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the shape, strides and dtype of `tensor`, and its own storage."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _without_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for the meta device: without device, and with None for a generator."""
    arguments = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    return {**arguments, "generator": None} if "generator" in arguments else arguments
