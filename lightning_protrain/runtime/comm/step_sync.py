"""Tells the ranks of a node who may write which weight, and when.

[Note: Step sync]
For every step of an optimizer three kinds of numbers go up in memory that the ranks of a node share, each written by
one rank only: that of the step which a rank has begun, that of the step for which it has *left* all weights, and, for
each chunk, that of the step which its owner has made of its part. Who reads a chunk next (an upload, the guard, a
checkpoint) waits until every owner of it has made the present step; nobody needs to be asked for that, so a rank that
is late holds up only those who need what it steps. Why nobody still reads what an owner writes:

- *Behind forward*, and where nothing is overlapped: an owner writes when all ranks of its node have left all weights. A
  rank leaves when its backward, its clipping and the user's hooks between them have ended, with no upload under way.
  From then on the guard watches all weights until their step has ended, whoever makes it, see [Note: Guard].
- *Behind backward*: an owner writes when it has the averages of its gradients of the chunk. They are sums over all
  ranks of the node, and a rank sends its part when its backward has gone beyond the last call that reads the chunk, see
  [Note: Reduction]. Before that it leaves the chunk: its device memory is freed, and what is sent comes behind that on
  the compute stream, which has waited for every upload that it was given. From then on the guard watches the weights,
  and their versions have moved on this rank, too: who needs the chunk once more in this backward, and a graph that has
  saved a weight itself, raise as they do on the rank that steps it.

So what a device holds of a chunk is never older than its step: it is freed before it and fetched again behind it. All
ranks of a node must step behind backward or none, as one that does not leaves nothing before its hooks have run. What
tells a rank otherwise shows itself in a run (hooks on its optimizer, on its parameters), so each says with its number
whether it may; they are compared when backward begins, and hardly ever waited for.

A number is one aligned word, so it is never seen in part. That the weights are seen by whoever sees the number is not
left to the processor: x86 keeps the order of stores, ARM does not. Numbers are written within `NodeMemory.alone`, and
who has seen one passes through there before it goes on. The worker's own threads are ordered by the locks of Python.

[Note: Publishing]
What the optimizer steps at once, on the main thread, is told to other ranks when its hooks have run, and only then is
there what others have stepped. Who reads one of theirs in such a hook has the step published first, and sees what one
rank would have. So has who reads a weight whose step is pending. In the middle of the optimizer's own code nothing can
be published. Other threads wait.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Sequence
from functools import partial

from torch import Tensor

from lightning_protrain.device.host import HostWorker, Job
from lightning_protrain.runtime.access_guard import NO_VALUES, AccessGuard, can_be_watched
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.comm.collectives import Collectives, RankMesh
from lightning_protrain.runtime.comm.shared_memory import NodeMemory, num_counters
from lightning_protrain.runtime.shadow_cache import ShadowCache


def step_sync_of(chunks: Sequence[Chunk], communicator: Collectives) -> StepSync:
    """Return the turns of a rank in stepping shared chunks.

    Args:
        chunks: Chunks that ranks share, in execution order.
        communicator: Sends to those ranks.
    """
    ranks, units = communicator.ranks, [chunk.plan.unit for chunk in chunks]
    shares = [chunk.share for chunk in chunks if chunk.share is not None]
    return StepSync(shares[0].memory, ranks, [share.owners for share in shares], units)


class StepSync:
    """The numbers of one rank, and what it sees of others, see [Note: Step sync].

    Args:
        memory: Has them, all 0.
        ranks: Of whom.
        owners: Who steps some of each chunk, as `local_rank`.
        units: What each chunk belongs to, for errors.

    Attributes:
        number: Of the step that this rank has begun; the first one is that of the weights as they are placed.
        failure: Why some rank will not be waited for any more.
    """

    def __init__(
        self,
        memory: NodeMemory,
        ranks: RankMesh,
        owners: Sequence[Iterable[int]],
        units: Sequence[str],
    ) -> None:
        self.number = 1
        self.failure: RuntimeError | None = None
        self._memory = memory
        self._ranks = ranks
        self._others = [place for place in range(ranks.local_size) if place != ranks.local_rank]
        self._owners = [sorted(set(places) - {ranks.local_rank}) for places in owners]
        self._units = tuple(units)
        self._waiter = HostWorker(1)  # For other ranks, as the device's worker has to go on.
        numbers, size = memory.counters, ranks.local_size
        assert len(numbers) == num_counters(len(owners), size), "counters of other chunks"
        # Twice the number of the step that has begun, and one more where it may run behind backward.
        self._begun = numbers[:size]
        self._left = numbers[size : 2 * size]
        self._stepped = [numbers[begin : begin + size] for begin in range(2 * size, len(numbers), size)]

    def begin(self, behind_backward: bool) -> None:
        """Announce that this rank begins its next step.

        Args:
            behind_backward: True if the step may run behind backward on this rank.
        """
        self.number += 1
        self._write([self._begun], 2 * self.number + behind_backward)

    def all_behind_backward(self) -> bool:
        """Wait until every rank has begun this step; return True if it may run behind backward on all.

        Raises:
            RuntimeError: If a rank is missing; names it.
        """
        number, begun = self.number, self._begun
        for place in self._others:
            self._wait(begun, place, 2 * number, f"its begin of step {number - 1}")
        return all(begun[place] == 2 * number + 1 for place in self._others)

    def leave(self) -> None:
        """Until the step has been made, this rank reads no weight without waiting."""
        self._write([self._left], self.number)

    def wait_until_left(self, number: int) -> None:
        """Before this rank writes weights that others may not have left yet.

        Args:
            number: Of the step.

        Raises:
            RuntimeError: A rank is missing; names it.
        """
        for place in self._others:
            self._wait(self._left, place, number, f"the end of its backward of step {number - 1}")
        self._pass()

    def behind(self, job: Job, index: int, number: int) -> Job:
        """Return a job that ends when all owners of the chunk have stepped it.

        No thread of this rank is held up meanwhile.

        Args:
            job: Makes and announces the part of this rank.
            index: Index of the chunk.
            number: Number of the step.
        """

        def wait() -> None:
            job.result()
            self.wait_until_stepped(index, number)

        return self._waiter.submit(wait)

    def announce(self, indices: Iterable[int], number: int) -> None:
        """Announce that this rank has made its part of a step of chunks, even if that part is empty.

        Args:
            indices: Indices of the chunks.
            number: Number of the step.
        """
        self._write([self._stepped[index] for index in indices], number)

    def wait_until_stepped(self, index: int, number: int) -> None:
        """Before this rank reads weights that others step.

        Args:
            index: Of the chunk.
            number: Of the step.

        Raises:
            RuntimeError: A rank is missing; names it and the chunk.
        """
        for place in self._owners[index]:
            self._wait(self._stepped[index], place, number, f"its part of step {number - 1} of {self._units[index]!r}")
        self._pass()

    def give_up(self) -> None:
        """After an exception in the middle of a step, which other ranks will never make."""
        self.failure = self.failure or RuntimeError("A step was broken off on this rank.")

    def close(self) -> None:
        """Nothing is under way any more."""
        self._waiter.close()

    def _write(self, numbers: Iterable[memoryview], value: int) -> None:
        with self._memory.alone():
            for each in numbers:
                each[self._ranks.local_rank] = value

    def _pass(self) -> None:
        with self._memory.alone():
            return

    def _wait(self, numbers: memoryview, place: int, value: int, what: str) -> None:
        """Wait until a number of another rank has come to `value`, unless a rank was found missing before."""
        if numbers[place] >= value:
            return
        if self.failure is None:
            rank, is_there = self._ranks.first_of_node + place, partial(self._memory.is_held, place)

            def ends() -> bool:  # Another thread may find that a rank is missing.
                return numbers[place] >= value or self.failure is not None

            try:
                self._ranks.rank_health.wait_for_rank(rank, ends, is_there, what)
            except RuntimeError as failure:
                self.failure = failure
        if self.failure is not None and numbers[place] < value:
            raise self.failure


class StepPublisher:
    """Publishes steps of chunks that ranks share, see [Note: Publishing].

    Args:
        chunks: The offloaded ones.
        step_sync: Of this rank; None: it shares nothing.
        copies: Of the chunks.
        guard: Watches weights whose steps are pending.
        pending: Chunks whose steps are; as it is at any time.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        step_sync: StepSync | None,
        copies: ShadowCache,
        guard: AccessGuard,
        pending: Container[int],
    ) -> None:
        self._chunks = tuple(chunks)
        self._step_sync = step_sync
        self._copies = copies
        self._pending = pending
        self._guard = AccessGuard(self._touched, NO_VALUES, beside=guard)
        shared = [(at, param) for at, chunk in enumerate(chunks) if chunk.share is not None for param in chunk.params]
        self._theirs = [(at, param.host) for at, param in shared if not param.owned and can_be_watched(param.host)]
        self._watched: list[Tensor] = []
        # The thread that has launched a step which is not published, and whether the optimizer's own code has run.
        self._thread: int | None = None
        self._has_stepped = False

    def begin(self) -> None:
        """Prepare for a step of which some chunks are pending, while the optimizer steps the others at once."""
        if self._step_sync is None:
            return
        self._thread, self._has_stepped = threading.get_ident(), False
        self._watched = [
            host
            for at, host in self._theirs
            if at not in self._pending and (host.requires_grad or self._chunks[at].plan.trainable)
        ]
        self._guard.watch(self._watched)

    def end_step(self) -> None:
        """Note that the optimizer has stepped what it steps at once; its hooks come next."""
        self._has_stepped = True

    def publish(self) -> None:
        """Says what has been stepped at once, and waits until it is there, of every rank."""
        step_sync = self._step_sync
        if step_sync is None:
            return
        self.end()
        rest = [index for index in range(len(self._chunks)) if index not in self._pending]
        for index in rest:
            self._copies.publish(self._chunks[index])
        step_sync.announce(rest, step_sync.number)
        for index in rest:
            step_sync.wait_until_stepped(index, step_sync.number)

    def before_wait(self) -> None:
        """Publish the step if this thread, which reads a weight, is about to wait for pending steps.

        Raises:
            RuntimeError: If a rank is missing.
        """
        if self._thread == threading.get_ident() and self._has_stepped:
            self.publish()

    def end(self) -> None:
        """Stop watching: the step is published, or never will be."""
        self._thread, watched, self._watched = None, self._watched, []
        self._guard.leave(watched)

    def _touched(self, _: Sequence[Tensor]) -> None:
        # Where an optimizer looks at weights that it does not step, it does so as it would without any of this.
        if self._thread == threading.get_ident() and self._has_stepped:
            self.publish()
