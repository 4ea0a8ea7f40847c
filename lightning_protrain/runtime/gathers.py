"""Which fetches are gathered, see [Note: Script] and [Note: Gathers]: those that all ranks of a node expect to make.

[Note: Agreement]
When a training step begins, every rank says to the ranks of its node what it did in the latest step of the same kind,
by a digest, or that it does not know yet: two such steps have to be alike. Only where all say the same do they gather
in this step. So a rank that does something else in one step (another block is skipped, a weight is touched) costs the
steps until all do the same again, in which each uploads whole chunks; nobody needs to be told. The steps of validation
and prediction, in which ranks may have different numbers of batches, and whatever runs outside of steps is not gathered
at all. After an exception nothing is gathered any more in the run.

Micro-batches that end with sums of gradients are of one kind, and the others of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_protrain.device import Device
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.comm import Communicator
from lightning_protrain.runtime.parts import Arrival, Parts
from lightning_protrain.runtime.script import BACKWARD, SUMS, Walk, digest
from lightning_protrain.runtime.updates import Updates


class Gathers:
    """Says of each fetch whether ranks make it together, see [Note: Agreement].

    Args:
        chunks: The offloaded chunks, which the ranks of the node share.
        communicator: Reaches them.
        device: Where chunks come.
        updates: Knows which chunks are still being stepped.
    """

    def __init__(self, chunks: Sequence[Chunk], communicator: Communicator, device: Device, updates: Updates) -> None:
        self._chunks = tuple(chunks)
        self._communicator = communicator
        self._updates = updates
        self._parts = Parts(communicator, device, max(chunk.nbytes for chunk in chunks))
        # By kind: what was done the last time, and whether it was done the time before, too.
        self._known: dict[bool, tuple[int, ...]] = {}
        self._settled = {True: False, False: False}
        self._off = False
        # Of the step that runs: its kind, what has been done in it, and what was agreed on.
        self._kind: bool | None = None
        self._done: list[int] = []
        self._walk: Walk | None = None

    def begin(self, averages: bool) -> None:
        """A training step begins on every rank.

        Args:
            averages: Whether its backward ends with sums of gradients.
        """
        self.end()
        self._kind, self._done = averages, []
        script = self._known.get(averages, ()) if self._settled[averages] and not self._off else ()
        ranks = self._communicator.ranks
        told = torch.zeros(ranks.local_size, dtype=torch.int64)
        told[ranks.local_rank] = digest(script) if script else 0
        mine = int(told[ranks.local_rank])
        everywhere: list[int] = self._communicator.sum_of_node(told).tolist()
        if mine and everywhere == [mine] * ranks.local_size:
            self._walk = Walk(script)

    def join(self, index: int) -> Callable[..., Arrival] | None:
        """What brings a chunk that is about to be fetched in parts; None: this rank uploads all of it.

        Raises:
            BaseException: This rank does something else than before, and a step of weights that others need has failed.
        """
        self._note(index)
        return self._parts.upload if self._reach(index) else None

    def begin_backward(self) -> None:
        """Backward begins."""
        self._note(BACKWARD)
        self._reach(BACKWARD)
        self._parts.begin_all()  # No step is pending any more.

    @contextmanager
    def around_sums(self) -> Iterator[None]:
        """Within it the gradients of a chunk are sent."""
        self._note(SUMS)
        self._reach(SUMS)
        self._parts.wait_until_given()
        yield
        if self._walk is not None:
            self._walk.send()
            self._give(self._walk.owed())

    def end(self) -> None:
        """Backward has ended, or there was none; does nothing if that is known."""
        walk, self._walk = self._walk, None
        if walk is not None:
            self._give(walk.end())
            self._parts.begin_all()
            self._parts.finish()
        if self._kind is not None:
            done = tuple(self._done)
            self._settled[self._kind] = self._known.get(self._kind) == done
            self._known[self._kind] = done
            self._kind = None

    def abandon(self) -> None:
        """After an exception, before anything is released: waits for no other rank."""
        self._off, self._kind, self._walk = True, None, None
        self._parts.abandon()

    def _note(self, event: int) -> None:
        if self._kind is not None:
            self._done.append(event)

    def _reach(self, event: int) -> bool:
        walk = self._walk
        if walk is None or walk.left:
            return False
        stays = walk.reach(event)
        if not stays:
            self._give(walk.owed())
        return stays

    def _give(self, indices: Sequence[int]) -> None:
        """Takes part in gathers for the sake of others."""
        if indices:
            self._parts.begin_all()
        for index in indices:
            self._updates.finish(index)
            self._chunks[index].publish()
            self._parts.give(self._chunks[index].source)
