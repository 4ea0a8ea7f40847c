"""Chunks of which each machine uploads its rows, and gets the others from the other machines.

[Note: Fetches together]
Rows of a parameter that lies row after row in memory are a part of its memory on the device, too. So a rank uploads the
rows of its machine to their place, and sends them from there to the ranks of the same place on the other machines,
which send theirs: nothing is copied once more. Each of the L ranks of a machine sends and gets an L-th of them, and the
ranks of a machine gather what has come, so the network carries each byte once for all of them; rows that have no L
equal parts come to each rank. All ranks fetch the same chunks in the same order. Before each fetch,
and before each sum of gradients, they meet on the host and say which one it is: a rank that does something else (a
block that it alone skips, a weight that it alone touches, one batch of validation less) is named, on all ranks, before
anybody waits for what will never come. That is one number for a chunk, while the device has work of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from lightning_protrain.device import Device
from lightning_protrain.runtime.arriving import Arriving
from lightning_protrain.runtime.comm import Communicator


class Piece(NamedTuple):
    """Bytes of a chunk that come from one place.

    Attributes:
        machine: That has them; None: each has.
        source: In host memory; None: not on this machine.
        target: On the device.
    """

    machine: int | None
    source: Tensor | None
    target: Tensor


class RowArrival(Arriving):
    """A chunk whose rows come from several machines.

    Args:
        communicator: Brings them.
        device: Where they come.
        fences: Of uploads.
        works: Of what is sent between machines.
    """

    def __init__(self, communicator: Communicator, device: Device, fences: list[Any], works: list[Any]) -> None:
        super().__init__()
        self._communicator = communicator
        self._device = device
        self._fences = fences
        self._works = works

    def wait(self) -> None:
        """Makes the compute stream wait for all of it."""
        if self.abandoned:
            return
        while self._works:
            self._communicator.end_rows(self._works.pop(0))
        for fence in self._fences:
            self._device.wait(fence)

    def land(self) -> None:
        """Blocks the host until this rank has read from host memory what it uploads."""
        for fence in self._fences:
            self._device.land(fence)


class RowGathers:
    """Fetches chunks together with the ranks of other machines, see [Note: Fetches together].

    Args:
        communicator: Reaches them.
        device: Where chunks come.
    """

    def __init__(self, communicator: Communicator, device: Device) -> None:
        self._communicator = communicator
        self._device = device

    def upload(self, unit: str, pieces: Sequence[Piece]) -> RowArrival:
        """Brings a chunk to the device; every rank calls it, for the same one.

        Args:
            unit: What the chunk belongs to, for errors.
            pieces: Of the chunk; the same on all ranks but for sources.

        Raises:
            RuntimeError: Another rank is not about to fetch it, has failed or is gone.
        """
        self._meet(f"the fetch of {unit!r}")
        device, communicator = self._device, self._communicator
        fences = [device.upload(piece.source, piece.target) for piece in pieces if piece.source is not None]
        if not fences:  # What is sent comes behind what has had the memory before.
            none = pieces[0].target[:0]
            fences.append(device.upload(none.cpu(), none))
        with device.beside:
            device.wait(fences[-1])
            divided = [(piece.target, piece.machine) for piece in pieces if piece.machine is not None]
            sent = [communicator.send_rows(*each) for each in divided]
            works = [communicator.fill_rows(work, *each) for work, each in zip(sent, divided, strict=True)]
        return RowArrival(communicator, device, fences, works)

    @contextmanager
    def around_sums(self) -> Iterator[None]:
        """Within it the gradients of a chunk are sent.

        Raises:
            RuntimeError: As of `upload`.
        """
        self._meet("a sum of gradients")
        yield

    def _meet(self, what: str) -> None:
        self._communicator.meet_everywhere(what)
