"""The host memory of swapped activations: what is planned for each call, and more where the host can spare it.

[Note: Growth]
A call that saves more than planned takes further slabs, as long as the host has memory to spare. They are whole pieces
of memory, kept when their graph has died and given to the next call that asks for the same size, of whatever block. The
sizes are multiples of an eighth of the planned slab, so few are asked for, and new memory is taken only for a batch
that is larger than those before it. Idle pieces go back to the system where another size is wanted and there would be
no room: what the spare bytes bound is what live graphs hold, and never is more than that taken.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_protrain.device import Device
from lightning_protrain.host import PAGE, HostMemory

# The planned slab has so many times the bytes of the smallest one that a call grows by.
GROWTH_STEPS = 8

_CAUSES = (
    "Either this batch is larger than the one the plan was made with, or is padded where that one was not: give "
    "batches of one size, or the largest first (for a data module with `largest_batch()`, such as `ChatDataModule`, "
    "the plan is made with that one). Or parameters train that did not when the plan was made (a callback has unfrozen "
    "them): begin another fit once they are unfrozen, which plans again"
)


@dataclass(eq=False)
class Slab:
    """A piece of the host memory of one call; `fence` is that of the latest copy from or to it."""

    memory: Tensor
    used: int = 0
    fence: Any = None


@dataclass(eq=False)
class _Piece:
    """Memory that grown slabs are made of, one after the other."""

    memory: HostMemory
    nbytes: int
    in_use: bool = False


class SlabPool:
    """Gives calls their slabs, and takes them back when the last copy from or to them has ended.

    Args:
        device: Its host memory is given.
        say: Takes a sentence for the user.
        spare_bytes: What the host may give beyond what is planned, see [Note: Growth].
    """

    def __init__(self, device: Device, say: Callable[[str], None], spare_bytes: int) -> None:
        self.say = say
        self.said = False
        self._device = device
        self._limit = spare_bytes
        self._pieces: list[_Piece] = []
        self._cooling: deque[Slab] = deque()

    @property
    def grown_bytes(self) -> int:
        """What has been taken from the host beyond what is planned, in use or kept for the next call."""
        return sum(piece.nbytes for piece in self._pieces)

    @property
    def spare_bytes(self) -> int:
        """What a call may still have beyond what is planned."""
        return self._limit - sum(piece.nbytes for piece in self._pieces if piece.in_use)

    def planned(self, nbytes: int) -> Slab:
        """A slab of exactly `nbytes`."""
        return Slab(torch.frombuffer(self._device.host.empty(nbytes), dtype=torch.uint8, count=nbytes))

    def grown(self, nbytes: int, step: int) -> Slab | None:
        """A slab of at least `nbytes`, a multiple of `step` where there is room for it; None: there is no room.

        Args:
            nbytes: Whole pages.
            step: Whole pages.
        """
        rounded = -(-nbytes // step) * step
        size = rounded if rounded <= self.spare_bytes else nbytes
        if size > self.spare_bytes:
            return None
        idle = [piece for piece in self._pieces if not piece.in_use]
        piece = next((piece for piece in idle if piece.nbytes == size), None)
        if piece is None:
            while self.grown_bytes + size > self._limit:
                self._drop(idle.pop())
            piece = _Piece(self._device.new_host_memory(), size)
            self._pieces.append(piece)
        view = piece.memory.empty(size)
        piece.in_use = True
        # When the last tensor over it has died.
        weakref.finalize(view, setattr, piece, "in_use", False).atexit = False
        return Slab(torch.frombuffer(view, dtype=torch.uint8))

    def close(self) -> None:
        """Unlocks what has been taken beyond what is planned, once the device has ended all copies."""
        while self._pieces:
            self._drop(self._pieces[-1])

    def _drop(self, piece: _Piece) -> None:
        piece.memory.close()
        self._pieces.remove(piece)

    def take_back(self, slab: Slab, owner: object) -> None:
        """Has `slab` cool down when `owner` has died."""
        weakref.finalize(owner, self._cooling.append, slab).atexit = False

    def cool(self, wait: bool = True) -> None:
        """Gives the host memory of dead graphs back.

        Args:
            wait: Whether the host waits for the last copy from or to it; else what is under way stays.
        """
        while self._cooling and (wait or self._device.has_ended(self._cooling[0].fence)):
            self._device.land(self._cooling[0].fence)
            self._cooling.popleft()


class CallSlabs:
    """The slabs of one call; who holds on to what lies in them holds on to this.

    Args:
        pool: Where they come from.
        name: The unit's name.
        planned_bytes: Bytes of the first one.
    """

    def __init__(self, pool: SlabPool, name: str, planned_bytes: int) -> None:
        self._pool = pool
        self._name = name
        self._planned_bytes = planned_bytes
        self._has_planned = False
        self._slabs: list[Slab] = []

    @property
    def used_bytes(self) -> int:
        """Of all slabs, in whole pages."""
        return sum(slab.used for slab in self._slabs)

    def reserve(self, nbytes: int) -> tuple[Slab, Tensor]:
        """Memory of `nbytes`, and the slab that it belongs to, whose fence the caller sets.

        Raises:
            RuntimeError: It does not fit what is planned, nor what the host has to spare.
        """
        size = -(-nbytes // PAGE) * PAGE
        slab = next((slab for slab in self._slabs if slab.used + size <= slab.memory.nbytes), None)
        if slab is None:
            slab = self._another(size)
            self._slabs.append(slab)
            self._pool.take_back(slab, self)
        memory = slab.memory[slab.used : slab.used + nbytes]
        slab.used += size
        return slab, memory

    def tell_growth(self) -> None:
        """Says once for all calls of the pool that one has grown, if this one has."""
        if self._pool.said or self.used_bytes <= self._planned_bytes:
            return
        self._pool.said = True
        self._pool.say(
            f"{self._name!r} is swapped and saves more than planned: {self._planned_bytes} bytes of host memory are "
            f"planned for one call, this one took {self.used_bytes}. The host gives them; on the device, too, the step "
            f"takes more than was predicted, and may run out of memory. {_CAUSES}."
        )

    def _another(self, size: int) -> Slab:
        """A slab with room for `size` bytes: the planned one, or else one that the host has to spare."""
        if size <= self._planned_bytes and not self._has_planned:
            self._has_planned = True
            return self._pool.planned(self._planned_bytes)
        slab = self._pool.grown(size, step=-(-self._planned_bytes // (GROWTH_STEPS * PAGE)) * PAGE)
        if slab is None:
            raise RuntimeError(
                f"{self._name!r} is swapped and saves more than planned: {self._planned_bytes} bytes of host memory "
                f"are planned for one call, at least {self.used_bytes + size} are needed, and beyond the plan the host "
                f"may give {self._pool.spare_bytes} more. {_CAUSES}, or checkpoint the blocks "
                "(`num_checkpoint_blocks`) instead of swapping them. Or raise `host_memory`."
            )
        return slab
