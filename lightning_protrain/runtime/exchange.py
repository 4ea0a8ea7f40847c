"""New weights go from the machine that has stepped them to the others, see [Note: Machines].

[Note: Exchange]
Between machines the ranks that own the same parameters, one on each, send each other what each has stepped: from host
memory to host memory, in place, on a thread of their own. Every chunk is exchanged once in a step, in the order of the
plan and whatever the order of steps: a machine may step behind backward and another one behind forward, and neither
waits for what comes later. So a chunk is there for the ranks of a machine when it has been stepped, and exchanged. What
had no gradient is sent, too: how much is sent does not depend on the data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_protrain.host import HostWorker, Job
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.comm import Communicator
from lightning_protrain.runtime.guard import below_guard
from lightning_protrain.runtime.slot import Slot


class Exchange:
    """Sends and receives the new weights of this rank's part of chunks, see [Note: Exchange].

    Args:
        chunks: The offloaded ones, in execution order; shared by the ranks of a node.
        communicator: Reaches the peers of this rank.

    Attributes:
        failure: Why nothing is sent any more; None as long as it is.
    """

    def __init__(self, chunks: Sequence[Chunk], communicator: Communicator) -> None:
        ranks = communicator.ranks
        self._communicator = communicator
        self._units = [chunk.plan.unit for chunk in chunks]
        self._mine = [
            [(slot, machine) for slot in chunk.slots if slot.writes and (machine := chunk.machine(slot)) is not None]
            for chunk in chunks
        ]
        self._peers = range(ranks.local_rank, ranks.world_size, ranks.local_size)
        self._thread = HostWorker(1)
        self._mutex = threading.Lock()
        self._trained: set[Slot] = set()
        self._stepping: frozenset[int] = frozenset()
        # What is to be sent of chunks that are being stepped.
        self._chosen: dict[int, list[tuple[Slot, int]]] = {}
        # Chunks that have been stepped and wait for one before them; and that one.
        self._ready: dict[int, tuple[Future[None], Callable[[], object]]] = {}
        self._next = 0
        self.failure: BaseException | None = None

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """A step begins.

        Args:
            parameters: What its optimizer steps; the same on all ranks.
        """
        self._stepping = frozenset(map(id, parameters))
        for index in range(len(self._mine)):
            self._note_trained(index)

    def choose(self, index: int) -> None:
        """A chunk is about to be stepped: finds what will be sent of it, and counts that. Once in a step."""
        self._note_trained(index)
        chosen = [each for each in self._mine[index] if each[0] in self._trained and id(each[0].host) in self._stepping]
        self._chosen[index] = chosen
        with below_guard():
            for slot, _ in chosen:
                self._communicator.count_weights(slot.host)

    def add(self, index: int, then: Callable[[], object]) -> Job:
        """This rank has stepped its part of a chunk, all of which was chosen; may be called from any thread.

        Args:
            index: Of the chunk.
            then: Called when its new weights are there, on a thread of its own.

        Returns:
            What ends after that.
        """
        job: Future[None] = Future()
        with self._mutex:
            self._ready[index] = job, then
            while self.failure is None and self._next in self._ready:
                at, self._next = self._next, (self._next + 1) % len(self._mine)
                ready, follow = self._ready.pop(at)
                sent = self._thread.submit(partial(self._send, at, self._chosen.pop(at), follow))
                sent.add_done_callback(partial(self._end, ready))
        if self.failure is not None:
            self.fail(self.failure)
        return job

    def fail(self, error: BaseException) -> None:
        """Nothing more is sent: some chunk of this step will not come to its turn."""
        with self._mutex:
            self.failure = self.failure or error
            waiting, self._ready = list(self._ready.values()), {}
        for job, _ in waiting:
            job.set_exception(self.failure)

    def close(self) -> None:
        """Waits for what is under way and ends the thread."""
        self._thread.close()

    def _note_trained(self, index: int) -> None:
        # What was trained once may have a gradient, and be stepped, when it is frozen.
        with below_guard():
            self._trained.update(slot for slot, _ in self._mine[index] if slot.host.requires_grad)

    def _send(self, index: int, chosen: Sequence[tuple[Slot, int]], then: Callable[[], object]) -> None:
        if self.failure is not None:
            raise self.failure
        communicator = self._communicator
        with below_guard(), torch.no_grad():
            flats = [(_bytes_of(slot.host.data), machine) for slot, machine in chosen]
            works = [communicator.send_weights(flat, machine) for flat, machine in flats if flat.numel()]
            for work in works:
                what = f"a part of the step of {self._units[index]!r}"
                communicator.ranks.attendance.wait_for_peers(work, self._peers, what)
            for slot, _ in chosen:
                if slot.owned:
                    slot.sent_version = slot.host._version
                elif slot.copy is not None:
                    slot.renew_copy()
        then()

    def _end(self, job: Future[None], sent: Any) -> None:
        error = sent.exception()
        if error is None:
            job.set_result(None)
        else:
            self.fail(error)
            job.set_exception(error)


def _bytes_of(data: Tensor) -> Tensor:
    """Dense memory as it lies, one-dimensional; a tensor whose versions are nobody else's."""
    flat = data.as_strided((data.numel(),), (1,))
    return flat.view(torch.uint8) if data.numel() else torch.empty(0, dtype=torch.uint8)
