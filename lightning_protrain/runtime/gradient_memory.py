"""Host memory of gradients: one block for all of a chunk.

[Note: Gradient memory]
A block is taken when the first gradient of a chunk comes, and goes back when the last tensor over it dies. Each
gradient has its own place in it, and a storage of its own over that place. A place is given out once in the life of a
block: where somebody may still hold what lies there, a new block is taken, so a gradient is never overwritten. That
somebody keeps the whole block.

Who looks at one gradient of a chunk waits for all that are on their way to it: to the eyes of the device a block is one
piece of memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_protrain.host import HostMemory
from lightning_protrain.planner.plan import chunk_offsets

# What NumPy knows: through it a tensor over a part of a block is made in a third of the time.
_NUMPY_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float16: np.dtype("float16"),
    torch.float32: np.dtype("float32"),
    torch.float64: np.dtype("float64"),
}


class GradientMemory:
    """Places for the gradients of one chunk, see [Note: Gradient memory].

    Args:
        memory: Where blocks come from.
        sizes: Bytes of each gradient.

    Attributes:
        nbytes: Of a block.
        offsets: Where each gradient lies in it.
        has_been_used: Whether a block has ever been taken.
    """

    def __init__(self, memory: HostMemory, sizes: Sequence[int]) -> None:
        self._memory = memory
        self.offsets, self.nbytes = chunk_offsets(sizes)
        self._block: weakref.ref[np.ndarray[Any, Any]] | None = None
        self._free: set[int] = set()
        self.has_been_used = False

    def empty_like(self, gradient: Tensor, place: int) -> Tensor:
        """An uninitialised host tensor of the shape, strides and dtype of `gradient`, which must be dense.

        Args:
            gradient: Has the bytes that the place was made for.
            place: Index into `sizes`.
        """
        block = self._block() if self._block is not None and place in self._free else None
        if block is None:
            block = self._new_block()
        self._free.discard(place)
        offset = self.offsets[place]
        kind = _NUMPY_TYPES.get(gradient.dtype)
        if kind is not None and gradient.is_contiguous():
            return torch.from_numpy(np.ndarray(gradient.shape, kind, block, offset))
        empty = torch.empty(0, dtype=gradient.dtype)
        if gradient.numel() == 0:
            return empty.new_empty(gradient.shape)
        flat = torch.frombuffer(block, dtype=gradient.dtype, count=gradient.numel(), offset=offset)
        return empty.set_(flat.untyped_storage(), 0, gradient.shape, gradient.stride())

    def begin(self) -> None:
        """Have the gradients that follow, one for each place, lie in one block."""
        if len(self._free) < len(self.offsets):
            self._block = None

    def whole(self) -> Tensor:
        """Return the present block, (nbytes,) of uint8; a gradient in it must be alive."""
        block = self._block() if self._block is not None else None
        assert block is not None
        return torch.from_numpy(block)[: self.nbytes]

    def _new_block(self) -> np.ndarray[Any, Any]:
        """A block in which every place is free. The array keeps it through a tensor, as NumPy alone would not."""
        block: np.ndarray[Any, Any] = torch.frombuffer(self._memory.empty(self.nbytes), dtype=torch.uint8).numpy()
        self._block = weakref.ref(block)
        self.has_been_used = True
        self._free = set(range(len(self.offsets)))
        return block
