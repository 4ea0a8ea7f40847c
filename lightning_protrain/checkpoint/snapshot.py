"""Copies of tensors in host memory of their own, which is kept from one checkpoint to the next."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_protrain.checkpoint.payload import Payload
from lightning_protrain.checkpoint.tensors import shared_names

_ALIGNMENT = 64


class Snapshot:
    """One copy of what a checkpoint is made of; `take` overwrites the former one.

    The memory is shared with processes that are forked meanwhile and is none of theirs: what is copied anew while
    workers of a DataLoader live is there once, and not once more for them.

    Args:
        free_bytes: What the host has left.
    """

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self.free_bytes = free_bytes
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of host memory that it holds."""
        return 0 if self._memory is None else self._memory.nbytes

    def needed(self, payload: Payload) -> int:
        """Bytes of host memory that `take` would claim besides those that it holds."""
        size = _size(payload)
        return size if size > self.nbytes else 0

    def take(self, payload: Payload) -> Payload:
        """The same payload, of copies; what shares memory in it shares memory in them.

        Raises:
            OSError: The system has no such memory.
        """
        size = _size(payload)
        if size > self.nbytes:
            self._memory = None
            self._memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        place = 0

        def copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            nonlocal place
            shared = shared_names(tensors)
            copies: dict[str, Tensor] = {}
            for name, tensor in tensors.items():
                if name in shared:
                    copies[name] = copies[shared[name]]
                elif not tensor.numel():
                    copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                else:
                    assert self._memory is not None
                    part = self._memory[place : place + tensor.nbytes]
                    copies[name] = part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
                    place += aligned(tensor.nbytes)
            return copies

        return Payload(copy(payload.weights), copy(payload.tensors), payload.state, payload.ranks)

    def release(self) -> None:
        """Gives the memory back, once nobody uses the copies."""
        self._memory = None


def _size(payload: Payload) -> int:
    size = 0
    for tensors in (payload.weights, payload.tensors):
        shared = shared_names(tensors)
        size += sum(aligned(tensor.nbytes) for name, tensor in tensors.items() if name not in shared)
    return size


def aligned(size: int) -> int:
    """Bytes that a tensor of this size takes of it."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
