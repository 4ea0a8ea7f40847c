"""Coordinates when the ranks of a node may read and write shared weights.

[Note: Step sync]
For every optimizer step, three kinds of counters increase in memory that the ranks of a node share. Each counter is
written by one rank only, and holds the number of the last step

- that the rank has begun;
- for which the rank has *left* all weights: it no longer reads them before the step;
- of which the rank has made its part; there is one such counter for each chunk in which the rank owns parameters.

A reader of a chunk (an upload, the guard, a checkpoint) waits until every owner has made its part of the present step.
Readers only look at counters and send no messages, so a late rank delays only the readers of its own weights. Two rules
keep an owner from writing weights that another rank still reads:

- *Behind forward*, and without overlap: an owner writes when all ranks of its node have left all weights. A rank leaves
  when its backward, its clipping and the user's hooks between them have ended, and no upload is running. From then on
  the guard watches all weights until their step has ended on every owner, see [Note: Guard].
- *Behind backward*: an owner writes when it has the averages of its gradients of the chunk. The averages are sums over
  all ranks of the node, and a rank sends its part only when its backward has passed the last call that uses the chunk,
  see [Note: Reduction]. Before a rank sends, it leaves the chunk: it frees the chunk's device memory. The gradients are
  sent after that, on the compute stream, which has waited for every upload. From then on the guard watches the weights,
  and their versions increase on every rank, not only on the owner. So a later use of the chunk in this backward raises
  on every rank, and so does a graph that has saved a weight itself.

So the device never holds values older than the step: a chunk is freed before its step, and fetched again after it. All
ranks of a node overlap with backward, or none does: a rank that does not still reads weights until its hooks have run.
Whether a rank can overlap is known only in the run (hooks on its optimizer or on its parameters), so each rank writes
it beside the number of its step. The ranks compare this when backward begins, and hardly ever wait for it.

A counter is one aligned word, so it is never read half-written. Memory order is not left to the processor: x86 keeps
the order of stores, ARM does not. Counters are written within `NodeMemory.alone`, and a rank that has read one enters
`alone` before it continues. So a rank that sees a counter also sees the weights. The worker's own threads are ordered
by Python's locks.

Some weights are stepped by the optimizer itself, on the main thread. `StepPublisher` announces that step to other ranks
after the optimizer's hooks have run, and waits for the other ranks' parts. If a hook reads a weight of another owner or
a weight whose step is pending, the step is published first. So the hook sees the values that a single rank would have.
While the optimizer's own code runs, nothing can be published, and other threads that read such a weight wait.
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
    """Return the step sync of this rank.

    Args:
        chunks: Chunks that ranks share, in execution order.
        communicator: Reaches the ranks.
    """
    ranks, units = communicator.ranks, [chunk.plan.unit for chunk in chunks]
    shares = [chunk.share for chunk in chunks if chunk.share is not None]
    return StepSync(shares[0].memory, ranks, [share.owners for share in shares], units)


class StepSync:
    """The counters of one rank and its view of the others', see [Note: Step sync].

    Args:
        memory: Memory that holds the counters, all 0.
        ranks: Ranks of the run.
        owners: For each chunk, the ranks that step some of it, as `local_rank`.
        units: Name of the unit of each chunk, for messages.

    Attributes:
        number: Number of the step that this rank has begun; step 1 stands for placing the weights.
        failure: Error for waits on a rank that is missing; None: no rank is missing.
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
        self._waiter = HostWorker(1)  # Waits for other ranks, while the device's worker continues.
        numbers, size = memory.counters, ranks.local_size
        assert len(numbers) == num_counters(len(owners), size), "counters of other chunks"
        # Twice the number of the begun step, plus one if it may run behind backward.
        self._begun = numbers[:size]
        self._left = numbers[size : 2 * size]
        self._stepped = [numbers[begin : begin + size] for begin in range(2 * size, len(numbers), size)]

    def begin(self, behind_backward: bool) -> None:
        """Begin the next step of this rank.

        Args:
            behind_backward: Whether the step may run behind backward on this rank.
        """
        self.number += 1
        self._write([self._begun], 2 * self.number + behind_backward)

    def all_behind_backward(self) -> bool:
        """Wait until every rank has begun this step, and return whether it may run behind backward on all of them.

        Raises:
            RuntimeError: A rank is missing; the message names it.
        """
        number, begun = self.number, self._begun
        for place in self._others:
            self._wait(begun, place, 2 * number, f"its begin of step {number - 1}")
        return all(begun[place] == 2 * number + 1 for place in self._others)

    def release_weights(self) -> None:
        """Release all weights to their owners: until the step has been made, this rank reads none without waiting."""
        self._write([self._left], self.number)

    def wait_until_left(self, number: int) -> None:
        """Wait until all ranks have left the weights, so that this rank may write them.

        Args:
            number: Number of the step.

        Raises:
            RuntimeError: A rank is missing; the message names it.
        """
        for place in self._others:
            self._wait(self._left, place, number, f"the end of its backward of step {number - 1}")
        self._pass()

    def behind(self, job: Job, index: int, number: int) -> Job:
        """Return a job that ends when all owners have stepped a chunk; it does not block the device's worker.

        Args:
            job: Steps and announces this rank's part of the chunk.
            index: Index of the chunk.
            number: Number of the step.
        """

        def wait() -> None:
            job.result()
            self.wait_until_stepped(index, number)

        return self._waiter.submit(wait)

    def announce(self, indices: Iterable[int], number: int) -> None:
        """Announce that this rank has made its part of the step of some chunks.

        Args:
            indices: Indices of the chunks; there may be none.
            number: Number of the step.
        """
        self._write([self._stepped[index] for index in indices], number)

    def wait_until_stepped(self, index: int, number: int) -> None:
        """Wait until all owners have stepped a chunk, so that this rank may read its weights.

        Args:
            index: Index of the chunk.
            number: Number of the step.

        Raises:
            RuntimeError: A rank is missing; the message names it and the chunk.
        """
        for place in self._owners[index]:
            self._wait(self._stepped[index], place, number, f"its part of step {number - 1} of {self._units[index]!r}")
        self._pass()

    def give_up(self) -> None:
        """Note an exception in the middle of a step: the remaining parts of that step will never run."""
        self.failure = self.failure or RuntimeError("A step was broken off on this rank.")

    def close(self) -> None:
        """End the waiting thread; no step may be pending."""
        self._waiter.close()

    def _write(self, numbers: Iterable[memoryview], value: int) -> None:
        with self._memory.alone():
            for numbers_of_chunk in numbers:
                numbers_of_chunk[self._ranks.local_rank] = value

    def _pass(self) -> None:
        with self._memory.alone():
            return

    def _wait(self, numbers: memoryview, place: int, value: int, what: str) -> None:
        """Wait until a counter of another rank has reached `value`; after a failure, raise at once instead."""
        if numbers[place] >= value:
            return
        if self.failure is None:
            rank, is_there = self._ranks.first_of_node + place, partial(self._memory.is_held, place)

            def ends() -> bool:  # Another thread may find first that a rank is missing.
                return numbers[place] >= value or self.failure is not None

            try:
                self._ranks.store.wait_for_rank(rank, ends, is_there, what)
            except RuntimeError as failure:
                self.failure = failure
        if self.failure is not None and numbers[place] < value:
            raise self.failure


class StepPublisher:
    """The announcement of steps that the optimizer makes on the main thread, see [Note: Step sync].

    Args:
        chunks: The offloaded chunks.
        step_sync: Counters of this rank; None: it shares no chunk.
        copies: Shadow copies of the chunks.
        guard: Watches weights whose steps are pending.
        pending: Indices of chunks whose steps are pending, kept up to date by the caller.
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
        # The thread that launched a step which is not yet published, and whether the optimizer's own code has run.
        self._thread: int | None = None
        self._has_stepped = False

    def begin(self) -> None:
        """Begin to watch the weights of other owners, before the optimizer steps the chunks that are not pending."""
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
        """Note that the optimizer's own code has run; its hooks come next."""
        self._has_stepped = True

    def publish(self) -> None:
        """Announce the step made on the main thread, and wait until every rank has made its part."""
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
        """Publish the step, if possible, before this thread waits for pending steps to read a weight.

        Raises:
            RuntimeError: A rank is missing.
        """
        if self._thread == threading.get_ident() and self._has_stepped:
            self.publish()

    def end(self) -> None:
        """Stop watching the weights of other owners, because the step has been published or has failed."""
        self._thread, watched, self._watched = None, self._watched, []
        self._guard.unwatch(watched)

    def close(self) -> None:
        """Watch nothing from now on."""
        self._guard.close()

    def _touched(self, _: Sequence[Tensor]) -> None:
        # While the optimizer's own code runs, nothing is published: a weight that
        # another rank steps may have its value from before or after that step.
        if self._thread == threading.get_ident() and self._has_stepped:
            self.publish()
