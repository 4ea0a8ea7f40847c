"""Tensors over memory that is there already, on the host and on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def in_block(block: memoryview, offset: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Host memory from `offset` on, as a tensor of the shape and strides of `like` with a storage of its own."""
    dtype = dtype or like.dtype
    empty = torch.empty(0, dtype=dtype)
    if not like.numel():
        return empty.new_empty(like.shape)
    flat = torch.frombuffer(block, dtype=dtype, count=like.numel(), offset=offset)
    return empty.set_(flat.untyped_storage(), 0, like.shape, like.stride())


def in_storage(storage: torch.UntypedStorage, offset: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The storage from `offset` on, as a tensor of the shape and strides of `like`; `offset` is aligned to `dtype`."""
    dtype = dtype or like.dtype
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, like.shape, like.stride())


def dense_like(tensor: Tensor) -> Tensor:
    """One without memory, of the strides of `tensor` where its elements fill their memory, else contiguous."""
    if _is_dense(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without holes or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
