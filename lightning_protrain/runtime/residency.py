"""Decides which chunks are live, pinned and prefetched, and when a buffer is given to another.

[Note: Warm-up prefetch]
The chunks that a scope needs first are fetched when it begins, because user code and resident layers run before the
first block. That code may write to weights: a weight average is swapped in for a validation step, the weights of a
critic are clipped before a training step, and much of it goes through `weight.data`, which moves no version. So until
the first block is entered, the fetched weights are guarded like those of pending steps, see [Note: Guard]. Touching one
waits for the uploads, and the chunks are fetched again when they are needed. Code that touches weights once will do so
in every step, so later scopes of the same kind fetch nothing early. Chunks whose weights cannot be guarded are never
fetched early.

The sets of live, running and pinned chunks are kept up to date where they change. So a call of a block looks at its own
chunks, the live ones and the next few uses: its cost does not grow with the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from lightning_protrain.runtime.access_guard import GRADIENTS, AccessGuard, can_be_watched
from lightning_protrain.runtime.block import Block
from lightning_protrain.runtime.chunk import ChunkState
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.runtime.prefetch_schedule import Capacity, choose_evictions, choose_prefetch
from lightning_protrain.runtime.step_context import StepContext


class WarmupPrefetch:
    """Fetches ahead of the first block of a scope, see [Note: Warm-up prefetch].

    Args:
        context: Where the step is.
        residency: Fetches chunks.
        async_step: Watches weights whose steps are pending.
    """

    def __init__(self, context: StepContext, residency: Residency, async_step: AsyncStep) -> None:
        self._context = context
        self._residency = residency
        self._guard = AccessGuard(lambda _: self.cancel(), GRADIENTS, beside=async_step.copies.guard)
        self._unguarded = frozenset(
            index
            for index, chunk in enumerate(context.chunks)
            if not all(can_be_watched(param.host) for param in chunk.params)
        )
        self._allowed = {True: True, False: True}
        # Of which kind the scope is that has begun, and what has been fetched for it.
        self._kind: bool | None = None
        self._fetched: frozenset[int] = frozenset()

    def begin(self, training: bool) -> None:
        """Fetch what the first blocks of a scope need; nothing is live yet."""
        if not self._allowed[training]:
            return
        self._kind = training
        self._residency.prefetch(self._unguarded)
        self._fetched = frozenset(self._residency.live)
        for index in self._fetched:
            self._guard.watch(param.host for param in self._context.chunks[index].params)

    def end(self) -> None:
        """Watch no more: the first block is entered, and what comes early from now on comes for the next blocks."""
        if self._kind is None:
            return
        self._kind = None
        for index in self._fetched:
            self._guard.leave(param.host for param in self._context.chunks[index].params)

    def cancel(self) -> None:
        """Release what has been fetched, as somebody touches a weight, and fetch nothing early any more."""
        if self._kind is not None:
            self._allowed[self._kind] = False
            self.drop()

    def drop(self) -> None:
        """Release what has been fetched: the scope has ended before a block was entered, or a weight is touched."""
        if self._kind is not None:
            self.end()
            self._residency.release_unused()
            self._context.device.settle()
            self._residency.invalidate_copies(self._fetched)


# Choices that are remembered for each chunk before they are forgotten.
_MANY = 16


class Residency:
    """The chunks on the device: brings them and lets them go, within the capacity.

    Args:
        context: Where the step is.
        capacity: What may be live at one time.
        async_step: Knows which host weights are still being stepped.

    Attributes:
        live: Indices of the chunks on the device, or on their way there.
        running: Blocks whose forwards are running; their chunks stay.
        pins: Blocks whose chunks stay for a backward, with the number of the earliest call that holds them.
    """

    def __init__(self, context: StepContext, capacity: Capacity, async_step: AsyncStep) -> None:
        self.live: set[int] = set()
        self.running: dict[Block, None] = {}
        self.pins: dict[Block, int] = {}
        self._context = context
        self._chunks = context.chunks
        self._capacity = capacity
        self._async_step = async_step
        self._said = False

    def pinned(self) -> set[int]:
        """Return the indices of the chunks that must stay."""
        return {index for blocks in (self.running, self.pins) for block in blocks for index in block.chunks}

    def pin(self, block: Block, number: int) -> None:
        """Keep the chunks of `block` for the backward of call `number`."""
        self.pins[block] = min(number, self.pins.get(block, number))

    def unpin(self, end: int) -> None:
        """Let go of what calls from `end` on have pinned: backward has gone through all of them."""
        for block in [block for block, number in self.pins.items() if number >= end]:
            del self.pins[block]

    def require(self, block: Block, in_backward: bool) -> None:
        """Make the chunks of `block` live, as it computes next.

        Args:
            block: The block.
            in_backward: Whether the values must be those of the forward.
        """
        if not self.live.issuperset(block.chunks):
            self._make_room(block)
        counters = self._context.device.counters
        for index in block.chunks:
            chunk = self._chunks[index]
            self._async_step.finish(index)
            if chunk.state is ChunkState.HOST:
                self._fetch(index)
                counters.prefetch_misses += 1
            elif chunk.prefetched:
                counters.prefetch_hits += 1
            chunk.prefetched = False
            self._wait(index, in_backward)

    def prefetch(self, but: Set[int] = frozenset()) -> None:
        """Fetch what is needed next, as far as there is room, except the chunks `but`."""
        timeline, position = self._context.timeline, self._context.position
        known = (position, frozenset(self.live), frozenset(self.pinned()))
        choice = timeline.choices.get(known)
        if choice is None:  # A step like the one before chooses the same.
            if len(timeline.choices) > _MANY * len(self._chunks):
                timeline.choices.clear()
            choice = choose_prefetch(known[1], known[2], timeline, position, self._capacity)
            timeline.choices[known] = choice
        releases, fetches = choice
        self.release(releases)
        for index in fetches:
            if index not in but:
                self._fetch(index, ahead=True)

    def release(self, indices: Iterable[int]) -> None:
        """Free the device memory of chunks."""
        for index in list(indices):
            self._chunks[index].prefetched = False
            self._chunks[index].release()
            self.live.discard(index)

    def release_unused(self) -> None:
        """Free everything that need not stay."""
        self.release(self.live - self.pinned())

    def leave(self, index: int) -> None:
        """Release a chunk before its gradients are sent: a rank that shares it may step it from then on.

        See [Note: Step sync].
        """
        if self._async_step.leave(index) and index in self.live - self.pinned():
            self.release([index])

    def invalidate_copies(self, indices: Iterable[int]) -> None:
        """Have the shadow copies of chunks made anew by the next fetch."""
        self._async_step.copies.invalidate(param for index in indices for param in self._chunks[index].params)

    def renew(self) -> None:
        """Fetch again what must stay, whatever the versions say."""
        for index in self.pinned():
            self.release([index])
            self._fetch(index)
            self._wait(index, in_backward=False)

    def _make_room(self, block: Block) -> None:
        context, kept = self._context, self.pinned().union(block.chunks)
        evictions = choose_evictions(self.live - kept, kept, context.timeline, context.position, self._capacity)
        if evictions is None:
            if not self._said:
                self._said = True
                context.log_once(
                    f"{block.name!r} runs inside blocks that do not enclose it by name: more chunks are on the device "
                    "at one time than planned."
                )
            evictions = list(self.live - kept)
        self.release(evictions)

    def _fetch(self, index: int, ahead: bool = False) -> None:
        chunk = self._chunks[index]
        job = self._async_step.job(index) if ahead else None
        chunk.fetch(job)
        if job is None:
            self._async_step.copies.watch(chunk.params)
        chunk.prefetched = ahead
        self.live.add(index)

    def _wait(self, index: int, in_backward: bool) -> None:
        chunk = self._chunks[index]
        try:
            chunk.wait(in_backward)
        finally:
            if chunk.state is ChunkState.HOST:  # It was released to be fetched again, and could not be.
                self.live.discard(index)
