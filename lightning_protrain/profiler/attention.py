"""Which kernel a CUDA device takes for attention, and running that one in a trace on another device.

[Note: Attention kernels]
`scaled_dot_product_attention` is one name for four kernels that save and allocate different tensors: flash, efficient
(CUTLASS), cuDNN and math, which keeps the whole matrix of weights. PyTorch takes the first, in an order of priority,
whose conditions the call meets. A trace for a CUDA device that is there leaves the choice to PyTorch. For one that is
not, the conditions of PyTorch 2.13 are checked here, for the compute capability of the GPU that is planned for, with
what the user has switched off; then the kernel is called by its own name, with the padding, the masks and the casts of
autocast that PyTorch puts around it. Assumed is a build of PyTorch with all kernels, and a cuDNN of 9.15.1 or later,
which is the first choice on Hopper and Blackwell data-centre GPUs.
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
# As PyTorch numbers them in its order of priority; what is not here (4: for other devices) is passed over.
_NUMBERS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
_USUAL_ORDER = [1, 2, 0, 3, 4]
_CUDNN_FIRST = [3, 1, 2, 0]
Capability = tuple[int, int]
# The operation of each kernel, forward and backward; math is made of many.
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
        attn_mask: Bool, or added to the scores; None: none.
        dropout_p: The part of the weights that is dropped.
        is_causal: Whether each query sees only keys up to its own place.
        scale: Of the scores; None: one over the root of the width.
        enable_gqa: Whether several heads of `query` share one of `key` and `value`.
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
        """Whether autograd saves anything for it."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def cast_by_autocast(self, device_type: str) -> AttentionCall:
        """The call as autocast hands it on: everything in floating point but float64 becomes the lower precision."""
        if not torch.is_autocast_enabled(device_type):
            return self
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor: Any) -> Any:
            is_cast = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64
            return tensor.to(dtype) if is_cast else tensor

        query, key, value = map(cast, self.tensors)
        return replace(self, query=query, key=key, value=value, attn_mask=cast(self.attn_mask))


def cuda_kernel(call: AttentionCall, capability: Capability) -> str:
    """The kernel that PyTorch takes on a CUDA device: a value of `KERNELS`, or `"math"`; see [Note: Attention kernels].

    Args:
        call: As autocast hands it on.
        capability: Of the device, e.g. `(8, 6)`.

    Raises:
        ValueError: The user has switched off every kernel that could run it.
    """
    order = list(torch._C._get_sdp_priority_order())
    if order == _USUAL_ORDER and capability[0] in (9, 10):
        order = _CUDNN_FIRST
    for number in order:
        kernel = _NUMBERS.get(number)
        if kernel is not None and _ALLOWED[kernel]() and _FITS[kernel](call, capability):
            return kernel
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in call.tensors)
    raise ValueError(
        f"No kernel that is switched on computes attention of {shapes} in {call.query.dtype} on a GPU of capability "
        f"{capability[0]}.{capability[1]}. Allow SDPBackend.MATH, or switch another one on."
    )


def run_kernel(kernel: str, call: AttentionCall) -> Any:
    """Computes `call` with the kernel, as PyTorch does around it."""
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
    """CUTLASS reads masks in steps of eight elements."""
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
    """Whether all have four dimensions, as many samples, something to look at, and heads that go together."""
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
    """Whether the last dimension is the innermost; of one element each, some kernels do not ask."""
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
    """Elements to a multiple of which CUTLASS needs the width: 16 bytes for tensor cores."""
    if capability >= (8, 0) or (capability >= (7, 0) and dtype in _HALF):
        return 8 if dtype in _HALF else 4
    return 1


_FITS: dict[str, Callable[[AttentionCall, Capability], bool]] = {
    "flash": _fits_flash,
    "efficient": _fits_efficient,
    "cudnn": _fits_cudnn,
    "math": lambda call, capability: True,
}
_SWITCHES = torch.backends.cuda
_ALLOWED: dict[str, Callable[[], bool]] = {
    "flash": _SWITCHES.flash_sdp_enabled,
    "efficient": _SWITCHES.mem_efficient_sdp_enabled,
    "cudnn": _SWITCHES.cudnn_sdp_enabled,
    "math": _SWITCHES.math_sdp_enabled,
}


# --- what a kernel allocates for itself -------------------------------------------------------------------------------


def workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that an operation of a CUDA attention kernel allocates and frees within itself; 0 for any other one.

    Backward sums the gradient of the query in float32, in tiles of 128 queries, and keeps one number for each of them;
    flash computes gradients of shared keys and values for every head first. The same is assumed of cuDNN, whose
    workspace is its own affair.
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp

    Args:
        func: An `OpOverload`.
        args: Its arguments.
    """
    if func not in _BACKWARDS:
        return 0
    query, key = args[1], args[2]
    batch, heads, queries, width = query.shape
    rows = batch * heads * (-(-queries // 128) * 128)
    if func is _ATEN._scaled_dot_product_efficient_attention_backward.default:
        # Sums of float32 are made in place.
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
