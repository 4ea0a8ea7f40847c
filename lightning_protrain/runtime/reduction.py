"""Gradients of offloaded chunks are averaged over the ranks before they leave the device.

[Note: Reduction]
In the backward that ends an optimizer step the gradients of a chunk are put into one *bucket* on the device, on top of
what earlier micro-batches have left on the host, divided by the number of ranks as DDP does it, and summed over the
ranks: to all of them, or under `shard` to the owner of each parameter. Backwards before it send nothing. The order of
chunks is the plan's, from the last to the first, on every rank and in every step, whatever the order of gradients: a
rank on which some part of the model was not used sends zeros for it, and says so in the same bucket. So the number of
collectives does not depend on the data.

A bucket is sent when backward has gone beyond the last call that reads its chunk, and lands when the next one has been
sent, so that sending and computing overlap; there are three at a time at most, while backward follows the plan's order.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.comm import Communicator
from lightning_protrain.runtime.slot import Slot


@dataclass(frozen=True)
class _Region:
    """Gradients that have the same owner, with a flag for each behind them: whether any rank has one.

    Attributes:
        owner: As `local_rank`; None: all ranks.
        slots: Whose gradients.
        begin: First element.
        flags: First element of the flags.
    """

    owner: int | None
    slots: tuple[Slot, ...]
    begin: int
    flags: int

    @property
    def end(self) -> int:
        """Behind the last element."""
        return self.flags + len(self.slots)


class _Bucket:
    """The gradients of one chunk, as they are sent.

    Args:
        regions: What is where.
        views: First element of each gradient.
        size: Elements in all.
        device: Where it lies.
    """

    def __init__(self, regions: Sequence[_Region], views: dict[Slot, int], size: int, device: torch.device) -> None:
        self.regions = regions
        self._begins = views
        self.flat = torch.empty(size, dtype=next(iter(views)).host.dtype, device=device)
        self.filled: set[Slot] = set()
        self.works: list[Any] = []

    def view(self, slot: Slot) -> Tensor:
        """The gradient of a parameter."""
        if not slot.host.numel():
            return self.flat.new_empty(slot.host.shape)
        return self.flat.as_strided(slot.host.shape, slot.host.stride(), self._begins[slot])

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """Adds a gradient to what is there."""
        if slot in self.filled:
            self.view(slot).add_(gradient)
        else:
            self.view(slot).copy_(gradient)
            self.filled.add(slot)

    def end_filling(self) -> None:
        """What has no gradient on this rank counts as zero."""
        for region in self.regions:
            self.flat[region.flags : region.end] = torch.tensor([float(slot in self.filled) for slot in region.slots])
            for slot in region.slots:
                if slot not in self.filled:
                    self.view(slot).zero_()


class Reduction:
    """Averages the gradients of offloaded chunks, see [Note: Reduction].

    Args:
        chunks: The offloaded chunks, in execution order.
        communicator: Sends.
        device: What PyTorch calls the device.
        receive: Takes the average of a gradient, on the device.
        is_past: Whether no call that reads the chunk is left in this backward, the present one included.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        communicator: Communicator,
        device: torch.device,
        receive: Callable[[Slot, Tensor], None],
        is_past: Callable[[int], bool],
    ) -> None:
        self._chunks = tuple(chunks)
        self._communicator = communicator
        self._device = device
        self._receive = receive
        self._is_past = is_past
        self._queue: deque[int] = deque()
        self._filling: dict[int, _Bucket] = {}
        self._sent: deque[tuple[_Bucket, Tensor]] = deque()
        # Averages that this rank owns and others have no part of.
        self._averages: dict[Slot, weakref.ref[Tensor]] = {}
        self.runs = False

    def begin(self) -> None:
        """The backward that follows ends with averages, on every rank."""
        self.runs = True
        trained = [
            index for index, chunk in enumerate(self._chunks) if any(_takes_gradient(slot) for slot in chunk.slots)
        ]
        self._queue = deque(reversed(trained))

    def add(self, index: int, slot: Slot, gradient: Tensor) -> None:
        """A gradient of this backward.

        Args:
            index: Of its chunk.
            slot: Of its parameter.
            gradient: On the device.

        Raises:
            RuntimeError: It is sparse, or comes after its chunk has been sent.
        """
        if gradient.is_sparse:
            raise RuntimeError(
                f"The gradient of {slot.fqn!r} is sparse, and its chunk is streamed on several ranks: dense ones are "
                "averaged only. Use `sparse=False`, or make the chunk resident (`num_persistent_chunks`)."
            )
        if index not in self._queue:
            raise _too_late(slot)
        bucket = self._bucket(index)
        if slot not in bucket.filled:
            self._add_older(bucket, slot)
        bucket.add(slot, gradient)

    def refuse_mixing(self, slot: Slot) -> None:
        """Before a gradient of this rank is added on the host to what may be an average already.

        Raises:
            RuntimeError: It is one, of a parameter that this rank owns: the sum would be no part of any average.
        """
        average = self._averages.pop(slot, None)
        grad = slot.host.grad
        if average is not None and grad is not None and average() is grad and bool(grad.any()):
            raise RuntimeError(
                f"{slot.fqn!r} has a gradient that has been averaged over the ranks, and a backward follows that "
                'averages nothing: under sharding="shard" both cannot be added up. Call `zero_grad` between them, or '
                'set sharding="replicate".'
            )

    def advance(self, waits: Callable[[int], bool]) -> None:
        """Sends what is complete.

        Args:
            waits: Whether something else may still add to gradients of a chunk.
        """
        while self._queue and self._is_past(self._queue[0]) and not waits(self._queue[0]):
            self._send(self._queue.popleft())
            while len(self._sent) > 1:
                self._land()

    def finish(self) -> None:
        """After the backward: every average has been received. Does nothing if there was none to be made."""
        while self._queue:
            self._send(self._queue.popleft())
            while len(self._sent) > 1:
                self._land()
        while self._sent:
            self._land()
        self.runs = False

    def forget(self) -> None:
        """Drops what is under way, after an exception."""
        self._queue.clear()
        self._filling.clear()
        self._sent.clear()
        self.runs = False

    def _bucket(self, index: int) -> _Bucket:
        bucket = self._filling.get(index)
        if bucket is None:
            bucket = self._filling[index] = self._new_bucket(self._chunks[index])
        return bucket

    def _new_bucket(self, chunk: Chunk) -> _Bucket:
        owners: dict[int | None, list[Slot]] = {}
        for slot in chunk.slots:
            if _takes_gradient(slot):
                owners.setdefault(chunk.owner(slot), []).append(slot)
        regions, begins, end = [], {}, 0
        for owner, slots in owners.items():
            begin = end
            for slot in slots:
                begins[slot] = end
                end += slot.twin.numel()
            regions.append(_Region(owner, tuple(slots), begin, end))
            end += len(slots)
        return _Bucket(regions, begins, end, self._device)

    def _add_older(self, bucket: _Bucket, slot: Slot) -> None:
        """Takes what earlier micro-batches of this rank have left."""
        older = slot.host.grad
        if older is None or (slot in self._averages and self._averages[slot]() is older):
            return
        bucket.add(slot, older)
        slot.host.grad = None

    def _send(self, index: int) -> None:
        bucket = self._bucket(index)
        del self._filling[index]
        for region in bucket.regions:
            for slot in region.slots:
                if slot not in bucket.filled:
                    self._add_older(bucket, slot)
        bucket.end_filling()
        bucket.flat.mul_(1.0 / self._communicator.ranks.world_size)
        flat = bucket.flat.to(self._communicator.dtype or bucket.flat.dtype)
        bucket.works = [self._communicator.begin(flat[each.begin : each.end], each.owner) for each in bucket.regions]
        self._sent.append((bucket, flat))

    def _land(self) -> None:
        bucket, flat = self._sent.popleft()
        for region, work in zip(bucket.regions, bucket.works, strict=True):
            self._communicator.end(work, flat[region.begin : region.end], region.owner)
        if flat is not bucket.flat:
            bucket.flat.copy_(flat)
        for region in bucket.regions:
            if region.owner is None or region.owner == self._communicator.ranks.local_rank:
                self._land_region(bucket, region)

    def _land_region(self, bucket: _Bucket, region: _Region) -> None:
        absent = [slot for slot in region.slots if slot not in bucket.filled]
        flags = bucket.flat[region.flags : region.end].tolist() if absent else []
        for at, slot in enumerate(region.slots):
            if slot in bucket.filled or flags[at]:
                self._receive(slot, bucket.view(slot))
                if region.owner is not None and slot.host.grad is not None:
                    self._averages[slot] = weakref.ref(slot.host.grad)


def _takes_gradient(slot: Slot) -> bool:
    return slot.host.requires_grad


def _too_late(slot: Slot) -> RuntimeError:
    return RuntimeError(
        f"A gradient of {slot.fqn!r} came after its chunk had been averaged over the ranks: the weight is used outside "
        "its own block. Use it inside, or make its chunk resident (`num_persistent_chunks`)."
    )
