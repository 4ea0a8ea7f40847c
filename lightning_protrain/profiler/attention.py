"""Choice of the attention kernel for an absent CUDA device, and traces of that kernel.

[Note: Attention kernels]
`scaled_dot_product_attention` has four kernels on CUDA, which save and allocate different tensors: flash, efficient
(CUTLASS), cuDNN, and math, which saves the whole attention matrix. PyTorch runs the first kernel, in an order of
priority, whose conditions are met. In a trace for an available CUDA device, PyTorch itself makes the choice. For an
absent device, this module checks the conditions of PyTorch 2.13 for the GPU's compute capability, and calls the
kernel's operation with the same padding, masks and autocast casts as PyTorch. It assumes a PyTorch build with all
kernels and with cuDNN 9.15.1 or later, which has priority on Hopper and Blackwell data-centre GPUs.
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
# Kernels by PyTorch's `SDPBackend` number, as in `_CHOICES`; 4 is for other devices.
_USUAL_ORDER = [1, 2, 0, 3, 4]
_CUDNN_FIRST = [3, 1, 2, 0]
Capability = tuple[int, int]
# Kernels by their operation; math consists of many operations.
KERNELS: dict[Any, str] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: "flash_cpu",
    _ATEN._scaled_dot_product_flash_attention.default: "flash",
    _ATEN._scaled_dot_product_efficient_attention.default: "efficient",
    _ATEN._scaled_dot_product_cudnn_attention.default: "cudnn",
}


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of `scaled_dot_product_attention`.

    Attributes:
        query: Shape (batch, heads, queries, width).
        key: Shape (batch, heads or fewer, keys, width).
        value: Shape (batch, heads or fewer, keys, width of the result).
        attn_mask: Bool mask, or float mask that is added to the scores; None means no mask.
        dropout_p: Dropout probability.
        is_causal: True for a causal mask.
        scale: Factor of the scores; None means one over the square root of the width.
        enable_gqa: True if several heads of `query` share one head of `key` and `value`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """True if the call has a backward."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def cast_by_autocast(self, device_type: str) -> AttentionCall:
        """Return the call with its floating-point tensors, except float64, cast to autocast's dtype."""
        if not torch.is_autocast_enabled(device_type):
            return self
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor: Any) -> Any:
            is_cast = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64
            return tensor.to(dtype) if is_cast else tensor

        query, key, value = map(cast, self.tensors)
        return replace(self, query=query, key=key, value=value, attn_mask=cast(self.attn_mask))


def cuda_kernel(call: AttentionCall, capability: Capability) -> str:
    """Return the kernel that PyTorch runs on a CUDA device: a value of `KERNELS`, or `"math"`.

    Args:
        call: The call after autocast.
        capability: Compute capability of the device, e.g. `(8, 6)`.

    Raises:
        ValueError: If every kernel that could run the call is disabled.
    """
    order = list(torch._C._get_sdp_priority_order())
    if order == _USUAL_ORDER and capability[0] in (9, 10):
        order = _CUDNN_FIRST
    for kernel, is_enabled, fits in (_CHOICES[number] for number in order if number in _CHOICES):
        if is_enabled() and fits(call, capability):
            return kernel
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in call.tensors)
    raise ValueError(
        f"No enabled kernel computes attention of {shapes} in {call.query.dtype} on a GPU of compute capability "
        f"{capability[0]}.{capability[1]}. Enable SDPBackend.MATH or another kernel."
    )


def run_kernel(kernel: str, call: AttentionCall) -> Any:
    """Run a call with a kernel, adding the same padding and masks as PyTorch."""
    rest: dict[str, Any] = {"dropout_p": call.dropout_p, "is_causal": call.is_causal}
    mask = _additive(call.attn_mask, call.query.dtype)
    if kernel == "math":
        rest |= {"scale": call.scale, "enable_gqa": call.enable_gqa}
        return _ATEN._scaled_dot_product_attention_math.default(*call.tensors, mask, **rest)[0]
    if kernel == "flash":
        width = call.query.shape[-1]
        padded = [F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in call.tensors]
        scale = call.scale if call.scale is not None else 1 / math.sqrt(width)
        result = _ATEN._scaled_dot_product_flash_attention.default(*padded, **rest, scale=scale)[0]
        return result[..., :width] if width % 8 else result
    if kernel == "efficient" and mask is not None:
        mask = _aligned(mask).expand(*call.query.shape[:3], call.key.shape[2])
    operation = next(operation for operation, name in KERNELS.items() if name == kernel)
    return operation(*call.tensors, mask, call.trains, **rest, scale=call.scale)[0]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), -math.inf, dtype=dtype, device=mask.device))


def _aligned(mask: Tensor) -> Tensor:
    """Align the rows of a mask to eight elements, as CUTLASS requires."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    last = mask.shape[-1]
    return F.pad(mask, (0, 8 - last % 8))[..., :last]


# --- conditions -------------------------------------------------------------------------------------------------------


def _fits_flash(call: AttentionCall, capability: Capability) -> bool:
    width = call.query.shape[-1]
    if call.attn_mask is not None or not (8, 0) <= capability <= (12, 1) or not _has_dtype(call, _HALF):
        return False
    if not (_has_shapes(call, shares_heads=True) and _is_dense(call, one_wide=True)):
        return False
    if {tensor.shape[-1] for tensor in call.tensors} != {width} or width > 256:
        return False
    if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
        return False
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    return not (small and call.trains) or width <= 192 or (width > 224 and not call.dropout_p)


def _fits_efficient(call: AttentionCall, capability: Capability) -> bool:
    query, key, value = call.tensors
    step = _alignment(query.dtype, capability)
    dtypes = (torch.float16, torch.float32, *((torch.bfloat16,) if capability >= (8, 0) else ()))
    if not ((5, 0) <= capability <= (12, 1) and _has_dtype(call, dtypes)):
        return False
    if not (_has_shapes(call, shares_heads=False) and _is_dense(call, one_wide=False)):
        return False
    widths = (query.shape[-1], value.shape[-1])
    if key.shape[-1] != widths[0] or any(width <= 0 or width % step for width in widths):
        return False
    nbytes = step * query.element_size()
    offsets = (tensor.storage_offset() * tensor.element_size() for tensor in call.tensors)
    return capability < (8, 0) or not any(offset % nbytes for offset in offsets)


def _fits_cudnn(call: AttentionCall, capability: Capability) -> bool:
    query, key, value = call.tensors
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if strict or not (8, 0) <= capability <= (12, 1) or not _has_dtype(call, _HALF):
        return False
    if not (_has_shapes(call, shares_heads=True) and _is_dense(call, one_wide=True) and _has_plain_mask(call)):
        return False
    if any(width > 128 or width % 8 for width in (query.shape[-1], value.shape[-1])):
        return False
    if max(query.shape[:2]) > 65535 or (call.dropout_p * 16) % 1:
        return False
    return key.shape[2] != 1 and (call.dropout_p == 0 or query.shape[2] != 1)


def _has_dtype(call: AttentionCall, dtypes: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype in dtypes and len({tensor.dtype for tensor in call.tensors}) == 1


def _has_shapes(call: AttentionCall, shares_heads: bool) -> bool:
    """Return True if all tensors have four dimensions, equal batch sizes, compatible heads, and are not empty."""
    query, key, _ = call.tensors
    if any(tensor.dim() != 4 for tensor in call.tensors) or len({tensor.shape[0] for tensor in call.tensors}) > 1:
        return False
    if not (query.shape[-2] and key.shape[-2]):
        return False
    heads = [tensor.shape[1] for tensor in call.tensors]
    if shares_heads and call.enable_gqa:
        return heads[1] == heads[2] and heads[0] % heads[1] == 0
    return len(set(heads)) == 1


def _is_dense(call: AttentionCall, one_wide: bool) -> bool:
    """Return True if the last dimension has stride 1; with `one_wide`, its stride is ignored at size 1."""
    dense = all(tensor.stride(-1) == 1 for tensor in call.tensors) or (one_wide and call.query.shape[-1] == 1)
    return dense and (call.attn_mask is None or call.attn_mask.stride(-1) == 1)


def _has_plain_mask(call: AttentionCall) -> bool:
    mask = call.attn_mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    whole = (*call.query.shape[:3], call.key.shape[2])[-mask.dim() :]
    return all(size in (1, full) for size, full in zip(mask.shape, whole, strict=True))


def _alignment(dtype: torch.dtype, capability: Capability) -> int:
    """Return the alignment of the width that CUTLASS requires, in elements: 16 bytes on tensor cores."""
    if capability >= (8, 0) or (capability >= (7, 0) and dtype in _HALF):
        return 8 if dtype in _HALF else 4
    return 1


_SWITCHES = torch.backends.cuda
# Kernel, whether the user allows it, and whether it can run a call.
_CHOICES: dict[int, tuple[str, Callable[[], bool], Callable[[AttentionCall, Capability], bool]]] = {
    0: ("math", _SWITCHES.math_sdp_enabled, lambda call, capability: True),
    1: ("flash", _SWITCHES.flash_sdp_enabled, _fits_flash),
    2: ("efficient", _SWITCHES.mem_efficient_sdp_enabled, _fits_efficient),
    3: ("cudnn", _SWITCHES.cudnn_sdp_enabled, _fits_cudnn),
}


# --- workspaces -------------------------------------------------------------------------------------------------------


def workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the temporary memory of a CUDA attention kernel, bytes; 0 for other operations.

    Backward sums the gradient of the query in float32, in tiles of 128 queries, with one more number for each query. If
    heads share keys and values, flash first computes the gradients of keys and values for every head. cuDNN does not
    document its workspace; it is assumed to be the same.
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp

    Args:
        func: An `OpOverload`.
        args: Arguments of the call.
    """
    if func not in _BACKWARDS:
        return 0
    query, key = args[1], args[2]
    batch, heads, queries, width = query.shape
    rows = batch * heads * (-(-queries // 128) * 128)
    if func is _ATEN._scaled_dot_product_efficient_attention_backward.default:
        # A float32 gradient is summed in its own memory.
        return 4 * rows * (1 + (-(-width // 64) * 64 if query.dtype in _HALF else 0))
    expanded = 0 if key.shape[1] == heads else 2 * batch * heads * key.shape[2] * width * key.element_size()
    return 4 * rows * (1 + (-(-width // 32) * 32 if width <= 192 else 256)) + expanded


_BACKWARDS = frozenset(
    [
        _ATEN._scaled_dot_product_flash_attention_backward.default,
        _ATEN._scaled_dot_product_efficient_attention_backward.default,
        _ATEN._scaled_dot_product_cudnn_attention_backward.default,
    ]
)
