"""Chunks that come to the devices of a node in parts: each rank uploads one, and has the others from the other ranks.

[Note: Gathers]
The ranks of a node hold one copy of every chunk in host memory, and each of them can upload all of it. Where their
devices reach each other faster than the host, each uploads one part of L instead, and an all-gather over the L ranks
makes the whole of them. That comes to the same bytes, over 1 / L of each rank's link to the host.

A chunk is cut into *windows* of at most `WINDOW` bytes, and each window into L parts of the same size. A window is
gathered when this rank's part of it has been uploaded, while that of the next one is. A rank that needs a chunk no more
takes part in gathers for the sake of others, see [Note: Script]: with memory for one window, not for a chunk. What does
not divide into L parts of whole `GRAIN`s, less than `GRAIN` * L bytes at the end of a chunk, is uploaded by every rank:
nothing is padded, and a chunk takes the same memory as without.

Three fences more than in [Note: Streams] order this:

- A gather waits for the upload of the part that it sends; it fills the rest of a window, which an upload fences off
  from earlier kernels, as its own part. Both wait on a stream of their own, so that computing goes on.
- The compute stream waits for the gathers where it would wait for an upload: where the bytes are first used, or where
  their memory is freed unused.
- Uploads for gathers without a use wait for the gather before, which has the same memory; and the compute stream waits
  for them before gradients are sent, as it has for uploads of this rank's own: whoever has the sums may step the
  weights, see [Note: Turns].

All are begun on one thread in the order in which they were asked for. One whose part waits for a step of the optimizer
keeps back those behind it, as uploads do that wait for a step, until somebody needs it.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_protrain.device import Device, StreamDevice
from lightning_protrain.host import Job
from lightning_protrain.planner.network import WINDOW
from lightning_protrain.runtime.arriving import Arriving
from lightning_protrain.runtime.comm import Communicator
from lightning_protrain.uploads import PendingUpload

# Bytes that parts are multiples of, for copies and collectives at full speed.
GRAIN = 16


@dataclass(frozen=True)
class Window:
    """Bytes of a chunk that are gathered at once.

    Attributes:
        begin: The first.
        part: Bytes of the part of each rank.
    """

    begin: int
    part: int

    def mine(self, place: int) -> slice:
        """The part of a rank, by its place on the node."""
        return slice(self.begin + place * self.part, self.begin + (place + 1) * self.part)


def windows(nbytes: int, num_ranks: int, most: int | None = None) -> tuple[list[Window], int]:
    """How a chunk is cut.

    Args:
        nbytes: Its bytes.
        num_ranks: Of the node.
        most: Of a window; None: `WINDOW`.

    Returns:
        The windows, and where the bytes begin that every rank uploads.
    """
    unit = GRAIN * num_ranks
    size = max((WINDOW if most is None else most) // unit, 1) * unit
    end = nbytes // unit * unit
    return [Window(begin, min(size, end - begin) // num_ranks) for begin in range(0, end, size)], end


@dataclass(eq=False)
class _Gather:
    """Of one window.

    Attributes:
        whole: Where it lies on the device.
        part: What of it this rank uploads.
        source: From where: held until it has been.
        uploaded: The fence of that.
        work: The collective; None: it has not begun.
    """

    whole: Tensor
    part: Tensor
    source: Tensor
    uploaded: Any
    work: Any = None

    @property
    def waits(self) -> bool:
        """Whether the upload is not even issued: a step of the optimizer comes first."""
        return isinstance(self.uploaded, PendingUpload) and not self.uploaded.is_issued


@dataclass(eq=False)
class Arrival(Arriving):
    """A chunk that comes in parts: what stands for the fence of its upload.

    Args:
        parts: Bring it.
        gathers: Of its windows.
        source: What every rank uploads.
        rest: The fence of that; None: there is nothing, or it is there.

    Attributes:
        abandoned: Whether nobody waits for it any more, after an exception: others may still write to its memory.
    """

    parts: Parts
    gathers: list[_Gather]
    source: Tensor
    rest: Any
    abandoned: bool = False
    arrived: bool = field(default=False, init=False)

    def wait(self) -> None:
        """Makes the compute stream wait for all of it."""
        if not self.arrived and not self.abandoned:
            self.parts.end(self)
            self.arrived = True

    def land(self) -> None:
        """Blocks the host until this rank has read from host memory what it uploads."""
        for each in self.gathers:
            self.parts.device.land(each.uploaded)
        self.parts.device.land(self.rest)


class Parts:
    """Uploads parts of chunks and gathers them, see [Note: Gathers].

    Args:
        communicator: Reaches the ranks of the node.
        device: Where chunks come.
        most: Bytes of the largest chunk.

    Attributes:
        device: Where chunks come.
    """

    def __init__(self, communicator: Communicator, device: Device, most: int) -> None:
        self.device = device
        self._communicator = communicator
        self._place, self._num_ranks = communicator.ranks.local_rank, communicator.ranks.local_size
        self._host_waits = not isinstance(device, StreamDevice)
        # Asked for, and not begun in all of their windows; and not waited for.
        self._asked: deque[Arrival] = deque()
        self._under_way: dict[Arrival, None] = {}
        # For gathers without a use: memory of one window, and they.
        self._most = min(most, WINDOW)
        self._spare: Tensor | None = None
        self._given: list[_Gather] = []
        self._lost: list[Any] = []

    def upload(self, source: Tensor, target: Tensor, after: Job | None = None) -> Arrival:
        """Brings a chunk to the device, as `Device.upload` does: this rank's parts, and from others the rest.

        All ranks of the node call it for the same chunk, or `give` its parts.

        Args:
            source: All of it, in host memory; one-dimensional, bytes.
            target: The same on the device.
            after: A step of the optimizer that makes the bytes.
        """
        cut, end = windows(source.numel(), self._num_ranks)
        gathers = []
        for window in cut:
            mine = window.mine(self._place)
            whole = target[window.begin : window.begin + self._num_ranks * window.part]
            part, target_part = source[mine], target[mine]
            gathers.append(_Gather(whole, target_part, part, self.device.upload(part, target_part, after)))
        rest = source[end:]
        arrival = Arrival(self, gathers, rest, self.device.upload(rest, target[end:], after) if rest.numel() else None)
        self._asked.append(arrival)
        self._under_way[arrival] = None
        self.begin()
        return arrival

    def begin(self, until: Arrival | None = None) -> None:
        """Begins the gathers that were asked for, in their order, up to the first that waits for a step.

        Args:
            until: Everything up to this one begins, and the host waits for the steps of its parts.
        """
        forced = until in self._asked
        while self._asked:
            arrival = self._asked[0]
            for each in arrival.gathers:
                if each.work is None:
                    if each.waits and not forced:
                        return
                    self._begin(each)
            self._asked.popleft()
            forced = forced and arrival is not until

    def begin_all(self) -> None:
        """Begins all that were asked for."""
        if self._asked:
            self.begin(self._asked[-1])

    def end(self, arrival: Arrival) -> None:
        """Makes the compute stream wait for a chunk."""
        self.begin(arrival)
        for each in arrival.gathers:
            self._communicator.end_gather(each.work)
        if arrival.rest is not None:
            self.device.wait(arrival.rest)
        del self._under_way[arrival]

    def give(self, source: Tensor) -> None:
        """Takes part in the gathers of a chunk for the sake of other ranks; what comes is of no use."""
        for window in windows(source.numel(), self._num_ranks)[0]:
            mine, nbytes = window.mine(self._place), self._num_ranks * window.part
            whole = self._spare_window(nbytes)
            part, target = source[mine], whole[self._place * window.part :][: window.part]
            # The first comes behind what had the memory before, the others behind the one before it.
            with self.device.beside if self._given else nullcontext():
                gather = _Gather(whole, target, part, self.device.upload(part, target))
            self._begin(gather)
            if not self._host_waits:
                with self.device.beside:
                    gather.work.wait()
            self._given.append(gather)

    def wait_until_given(self) -> None:
        """Makes the compute stream wait until this rank has read from host memory what it has given to others."""
        if self._given:
            self.device.wait(self._given[-1].uploaded)

    def finish(self) -> None:
        """What was given has been taken by everybody, as far as the compute stream can tell."""
        for each in self._given:
            self._communicator.end_gather(each.work)
        self._given.clear()
        if self._spare is not None:
            self.device.resize(self._spare.untyped_storage(), 0)
            self._spare = None

    def abandon(self) -> None:
        """After an exception: waits for nobody, and nothing has the memory that others may still write to."""
        for arrival in self._under_way:
            arrival.abandoned = True
            self._lost.append(arrival)
        self._lost += [*self._given, self._spare]
        self._asked.clear()
        self._under_way.clear()
        self._given.clear()
        self._spare = None

    def _begin(self, gather: _Gather) -> None:
        with self.device.beside:
            self.device.wait(gather.uploaded)
            gather.work = self._communicator.begin_gather(gather.whole, gather.part)

    def _spare_window(self, nbytes: int) -> Tensor:
        """Memory to gather into: where the host waits another one each time, as nothing orders them there."""
        if self._host_waits:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device)
        if self._spare is None:
            spare = torch.empty(0, dtype=torch.uint8, device=self.device.torch_device)
            self.device.resize(spare.untyped_storage(), self._most)
            self._spare = spare.as_strided((self._most,), (1,))
        return self._spare[:nbytes]
