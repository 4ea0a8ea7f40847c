"""Averages gradients of offloaded chunks over the ranks before they leave the device.

[Note: Reduction]
In the backward that ends an optimizer step, the gradients of a chunk are collected in one *bucket* on the device.
Gradients that earlier micro-batches left on the host are added. The bucket is divided by the number of ranks, as in
DDP, and summed over the ranks: to all of them, or under `shard` to the owner of each parameter. Earlier backwards send
nothing. Chunks are sent in the plan's order, from the last to the first, on every rank and in every step, whatever
the order of gradients. A rank that did not use some part of the model sends zeros for it, and a flag in the same bucket
that says so. So the number of collectives does not depend on the data.

A bucket is sent when backward has passed the last call that uses its chunk. Its sums are received when the next bucket
has been sent, so that communication overlaps with computation. While backward follows the plan's order, at most three
buckets exist at a time. If gradients are sent in another dtype, a bucket is cast when it is sent and when its sums are
received. Then at most two buckets exist at a time, each in both dtypes. Gradients of earlier micro-batches are uploaded
when the bucket is created, at the first gradient of its chunk. Only the compute stream waits for the upload; the host
keeps these gradients until the sums of the bucket are received.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from lightning_protrain.device.device import Device
from lightning_protrain.runtime.comm.collectives import Collectives
from lightning_protrain.runtime.param import OffloadedParam
from lightning_protrain.runtime.step_context import StepContext


class _Region:
    """The gradients of one chunk that have the same owner, in a flat tensor with one flag for each at the end.

    Args:
        owner: Owner of the parameters, as `local_rank`; None: all ranks need the gradients.

    Attributes:
        flat: Gradients and flags, shape (elements + parameters,); a flag is more than 0 if any rank has the gradient.
        sent: `flat` in the dtype in which it is sent.
        work: Running sum; None: it has not begun.
    """

    def __init__(self, owner: int | None, params: Sequence[OffloadedParam], device: Device) -> None:
        self.owner = owner
        self.params = tuple(params)
        ends = list(accumulate(param.device_param.numel() for param in params))
        self._begins = dict(zip(params, [0, *ends], strict=False))
        self._num_elements = ends[-1]
        size, dtype = ends[-1] + len(params), params[0].host.dtype
        flat = torch.empty(0, dtype=dtype, device=device.torch_device)
        device.resize(flat.untyped_storage(), size * dtype.itemsize)
        self.sent = self.flat = flat.as_strided((size,), (1,))
        self.work: Any = None

    def view(self, param: OffloadedParam) -> Tensor:
        """Return the gradient of a parameter, as a view."""
        shape = param.device_param.shape
        if not shape.numel():
            return self.flat.new_empty(shape)
        return self.flat.as_strided(shape, param.host.stride(), self._begins[param])

    def end_filling(self, filled: Container[OffloadedParam]) -> None:
        """Set gradients that this rank does not have, and their flags, to zero."""
        # Fill on the device: uploading flags from the host would wait for all pending computation.
        self.flat[self._num_elements :].fill_(1.0)
        for at, param in enumerate(self.params, self._num_elements):
            if param not in filled:
                self.view(param).zero_()
                self.flat[at : at + 1].zero_()

    def flags(self) -> list[float]:
        """Return a number for each gradient, more than 0 if any rank has it; blocks the host."""
        flags: list[float] = self.flat[self._num_elements :].tolist()
        return flags


class _Bucket:
    """The bucket of one chunk, in regions by owner, see [Note: Reduction]."""

    def __init__(self, regions: Sequence[_Region], device: Device) -> None:
        self.regions = tuple(regions)
        self.filled: set[OffloadedParam] = set()
        self._places = {param: region for region in regions for param in region.params}
        self._device = device
        self._arriving: dict[OffloadedParam, Any] = {}  # Fences of uploads that the compute stream has not waited for.
        self._uploaded: list[tuple[Tensor, Any]] = []

    def upload(self, param: OffloadedParam, older: Tensor) -> None:
        """Add a gradient in host memory, which must not change before `let_go`."""
        self._wait_for(param)
        view = self._places[param].view(param)
        if param in self.filled:
            there = torch.empty_like(view)
            fence = self._device.upload(older, there)
            self._device.wait(fence)
            view.add_(there)
        else:
            fence = self._arriving[param] = self._device.upload(older, view)
        self._uploaded.append((older, fence))
        self.filled.add(param)

    def wait(self) -> None:
        """Make the compute stream wait for all uploads of older gradients from host memory."""
        while self._arriving:
            self._wait_for(next(reversed(self._arriving)))

    def let_go(self) -> None:
        """Wait for all uploads, so that the host may write to their sources."""
        for _, fence in self._uploaded:
            self._device.wait_host(fence)
        self._uploaded.clear()

    def add(self, param: OffloadedParam, gradient: Tensor) -> None:
        """Add a gradient on the device."""
        self._wait_for(param)
        view = self._places[param].view(param)
        if param in self.filled:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self.filled.add(param)

    def _wait_for(self, param: OffloadedParam) -> None:
        if param in self._arriving:
            self._device.wait(self._arriving.pop(param))


class GradReducer:
    """The reducer that averages gradients of offloaded chunks, see [Note: Reduction].

    Args:
        context: State of the present step.
        communicator: Sums over the ranks.

    Attributes:
        runs: True if the present backward averages gradients over the ranks.
    """

    def __init__(self, context: StepContext, communicator: Collectives) -> None:
        self._context = context
        self.communicator = communicator
        self._queue: deque[int] = deque()
        self._deferred: deque[Callable[[], None]] = deque()
        self._filling: dict[int, _Bucket] = {}
        self._sent: deque[_Bucket] = deque()
        # Averages of parameters that this rank owns, which other ranks do not have.
        self._averages: dict[OffloadedParam, weakref.ref[Tensor]] = {}
        self.runs = False

    def begin(self) -> None:
        """Average gradients in the next backward; every rank calls it."""
        self.runs = True
        trained = [
            index
            for index, chunk in enumerate(self._context.chunks)
            if any(param.host.requires_grad for param in chunk.params)
        ]
        self._queue = deque(reversed(trained))

    def add(self, index: int, param: OffloadedParam, gradient: Tensor, on_host: bool = False) -> None:
        """Add a gradient of this backward to the bucket of its chunk.

        Args:
            index: Index of the chunk.
            param: The parameter.
            gradient: Gradient on the device, or in host memory if `on_host`.
            on_host: True if it lies in host memory, where it does not change before the average has arrived.

        Raises:
            RuntimeError: The gradient is sparse, or its chunk has already been sent.
        """
        if gradient.is_sparse:
            raise RuntimeError(
                f"The gradient of {param.fqn!r} is sparse, and its chunk is streamed on several ranks, which average "
                "dense gradients only. Use `sparse=False`, or make the chunk resident (`num_persistent_chunks`)."
            )
        if index not in self._queue:
            raise RuntimeError(
                f"A gradient of {param.fqn!r} came after its chunk had been averaged over the ranks: the weight is "
                "used outside its own block. Use it inside, or make its chunk resident (`num_persistent_chunks`)."
            )
        bucket = self._bucket(index)
        self._take_older(bucket, param)
        if on_host:
            bucket.upload(param, gradient)
        else:
            bucket.add(param, gradient)

    def refuse_mixing(self, param: OffloadedParam) -> None:
        """Refuse to add a gradient of this rank on the host to an average.

        Raises:
            RuntimeError: `host.grad` is an average that only this rank, the owner, has. If the gradient were added to
                it, no later average would include the gradient.
        """
        average = self._averages.pop(param, None)
        grad = param.host.grad
        if average is not None and grad is not None and average() is grad and bool(grad.any()):
            raise RuntimeError(
                f"{param.fqn!r} has a gradient that has been averaged over the ranks, and a backward follows that "
                'averages nothing: under sharding="shard" both cannot be added up. Call `zero_grad` between them, or '
                'set sharding="replicate".'
            )

    def next_complete(self, kept_back: Container[int]) -> int | None:
        """Return the next chunk to send if backward adds nothing more to its gradients, else None.

        Args:
            kept_back: Chunks to whose gradients direct uses may still add, see [Note: Direct use].
        """
        if not self._queue or not self._context.has_left(self._queue[0]) or self._queue[0] in kept_back:
            return None
        return self._queue[0]

    @property
    def is_sending(self) -> bool:
        """True if the present backward has more chunks to send."""
        return bool(self._queue)

    def send(self, index: int) -> None:
        """Send the bucket of the first chunk of the queue, which must be `index`."""
        assert self._queue.popleft() == index
        self._send(index)
        self._call_deferred()

    def defer(self, issue: Callable[[], None]) -> None:
        """Call `issue` when the present backward has sent all chunks, see [Note: One group at a time]."""
        self._deferred.append(issue)
        self._call_deferred()

    def _call_deferred(self) -> None:
        while self._deferred and not self._queue:
            self._deferred.popleft()()

    def arrived(self, but: int = 0) -> Iterator[tuple[OffloadedParam, Tensor]]:
        """Yield parameters and their averages on the device, for all chunks sent except the last `but`.

        The caller puts each average into `host.grad` before it asks for the next one.
        """
        while len(self._sent) > but:
            yield from self._land()

    def finish(self) -> Iterator[tuple[OffloadedParam, Tensor]]:
        """Send all remaining chunks after the backward, and yield all averages as `arrived` does."""
        while self._queue:
            self.send(self._queue[0])
            yield from self.arrived(but=1)
        yield from self.arrived()
        self.runs = False

    def forget(self) -> None:
        """Drop pending buckets after an exception."""
        for bucket in (*self._filling.values(), *self._sent):
            bucket.let_go()
        self._queue.clear()
        self._deferred.clear()
        self._filling.clear()
        self._sent.clear()
        self.runs = False

    def _bucket(self, index: int) -> _Bucket:
        if index in self._filling:
            return self._filling[index]
        chunk = self._context.chunks[index]
        owners: dict[int | None, list[OffloadedParam]] = {}
        for param in chunk.params:
            if param.host.requires_grad:
                owners.setdefault(chunk.owner(param), []).append(param)
        regions = [_Region(owner, params, self._context.device) for owner, params in owners.items()]
        bucket = _Bucket(regions, self._context.device)
        for param in reversed(chunk.params):  # The order in which gradients usually arrive: each waits for its upload.
            if param.host.requires_grad:
                self._take_older(bucket, param)
        self._filling[index] = bucket
        return bucket

    def _take_older(self, bucket: _Bucket, param: OffloadedParam) -> None:
        """Move a gradient that this rank has on the host, from earlier micro-batches or direct use, into the bucket."""
        older = param.host.grad
        if older is None or (param in self._averages and self._averages[param]() is older):
            return
        bucket.upload(param, older)
        param.host.grad = None

    def _send(self, index: int) -> None:
        bucket = self._bucket(index)
        del self._filling[index]
        for param in chain.from_iterable(region.params for region in bucket.regions):
            self._take_older(bucket, param)
        bucket.wait()
        for region in bucket.regions:
            region.end_filling(bucket.filled)
            region.flat.mul_(1.0 / self.communicator.ranks.world_size)
            region.sent = region.flat.to(self.communicator.dtype or region.flat.dtype)
        works = self.communicator.begin_each([(region.sent, region.owner) for region in bucket.regions])
        self._sent.append(bucket)
        for region, work in zip(bucket.regions, works, strict=True):
            region.work = work
            region.flat = region.sent  # Free the uncast gradients, if there was a cast.

    def _land(self) -> Iterator[tuple[OffloadedParam, Tensor]]:
        bucket = self._sent.popleft()
        bucket.let_go()
        for region in bucket.regions:
            self.communicator.end(region.work, region.sent, region.owner)
            # All parameters of a region have one owner, so any of them tells whether it is this rank.
            if region.owner is None or region.params[0].owned:
                region.flat = region.sent.to(region.params[0].host.dtype)
                yield from self._land_region(bucket, region)

    def _land_region(self, bucket: _Bucket, region: _Region) -> Iterator[tuple[OffloadedParam, Tensor]]:
        flags = region.flags() if any(param not in bucket.filled for param in region.params) else []
        for at, param in enumerate(region.params):
            if param in bucket.filled or flags[at]:
                yield param, region.view(param)
                if region.owner is not None and param.host.grad is not None:
                    self._averages[param] = weakref.ref(param.host.grad)
