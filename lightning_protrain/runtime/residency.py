"""Decides which chunks to fetch, prefetch and evict, and which chunks must stay on the device for a running block.

The sets of live, running and pinned chunks are updated where they change. A call of a block therefore looks only at its
own chunks, the live ones and the next few uses: its cost does not grow with the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from lightning_protrain.runtime.block import Block
from lightning_protrain.runtime.chunk import ChunkState
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.runtime.prefetch_schedule import Capacity, choose_evictions, choose_prefetch
from lightning_protrain.runtime.step_context import StepContext

# Number of remembered prefetch decisions for each chunk, after which the cache is emptied.
_MANY = 16


class Residency:
    """The chunks on the device: fetches and releases them within the capacity.

    Args:
        context: State of the present step.
        capacity: Number and bytes of chunks that may be live at one time.
        async_step: Knows which host weights are still being stepped.

    Attributes:
        live: Indices of the chunks on the device or on their way there.
        running: Blocks whose forwards are running; their chunks stay.
        pins: Blocks whose chunks stay for a backward, with the number of the earliest call that needs them.
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
        """Unpin the chunks of calls from number `end` on: backward has gone through all of them."""
        for block in [block for block, number in self.pins.items() if number >= end]:
            del self.pins[block]

    def require(self, block: Block, in_backward: bool) -> None:
        """Make the chunks of `block` live, as the block computes next.

        Args:
            block: The block that computes next.
            in_backward: Whether the weights must still have the values of the forward.
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
        """Fetch the chunks that are needed next, as far as there is room, except the chunks `but`."""
        timeline, position = self._context.timeline, self._context.position
        known = (position, frozenset(self.live), frozenset(self.pinned()))
        choice = timeline.choices.get(known)
        if choice is None:  # Usually a step makes the same decisions as the one before.
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

    def release_to_owner(self, index: int) -> None:
        """Release a chunk before its gradients are sent: from then on another rank that shares it may step it.

        See [Note: Step sync].
        """
        if self._async_step.release_to_owner(index) and index in self.live - self.pinned():
            self.release([index])

    def renew(self) -> None:
        """Fetch all pinned chunks again, even if no version has changed."""
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
            self._async_step.shadows.watch(chunk.params)
        chunk.prefetched = ahead
        self.live.add(index)

    def _wait(self, index: int, in_backward: bool) -> None:
        chunk = self._chunks[index]
        try:
            chunk.wait(in_backward)
        finally:
            if chunk.state is ChunkState.HOST:  # `wait` released the chunk, and its second fetch failed.
                self.live.discard(index)
