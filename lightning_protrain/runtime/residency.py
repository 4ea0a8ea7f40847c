"""Decides which chunks are live, pinned and prefetched, and when a buffer is given to another.

[Note: Warm-up prefetch]
What a scope needs first is fetched when it begins: the user's own code and layers that are resident run before the
first unit. That code may write to weights, as code may at any time: averages take the place of weights for a validation
step, the weights of a critic are clipped before a training step, and much of it goes through `weight.data`, of which no
version tells. So until the first unit is entered, the weights that have been fetched are guarded like those of pending
steps, see [Note: Guard]: whoever touches one waits for the uploads, and the chunks come again when they are needed.
What does so once will do so in every step: later scopes of the kind fetch nothing early. Nor do chunks come early whose
weights cannot be guarded.

[Note: Constant cost]
What is live, what runs and what is pinned is kept up to date where it changes. A call of a unit looks at its own
chunks, at those that are live and at the next few uses; how many blocks the model has does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from lightning_protrain.device.device import Device
from lightning_protrain.runtime.access_guard import GRADIENTS, AccessGuard, can_be_watched
from lightning_protrain.runtime.block import Block
from lightning_protrain.runtime.chunk import Chunk, ChunkState
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.runtime.prefetch_schedule import Capacity, Timeline, choose_evictions, choose_prefetch


class WarmupPrefetch:
    """Fetches ahead of the first unit of a scope, see [Note: Warm-up prefetch].

    Args:
        chunks: The offloaded chunks.
        residency: Fetches them.
        async_step: Guards those whose steps are pending.
        give_up: Frees what has been fetched, waits for uploads, and trusts no copies of the chunks it is given.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        residency: Residency,
        async_step: AsyncStep,
        give_up: Callable[[Iterable[int]], None],
    ) -> None:
        self._chunks = tuple(chunks)
        self._residency = residency
        self._async_step = async_step
        self._give_up = give_up
        self._guard = AccessGuard(lambda _: self.cancel(), GRADIENTS, beside=async_step.copies.guard)
        self._unguarded = frozenset(
            index for index, chunk in enumerate(chunks) if not all(can_be_watched(param.host) for param in chunk.params)
        )
        async_step.when_touched.append(self.cancel)
        self._allowed = {True: True, False: True}
        # Of which kind the scope is that has begun, what has been fetched for it, and what is guarded here.
        self._kind: bool | None = None
        self._fetched: frozenset[int] = frozenset()
        self._guarded: list[Chunk] = []

    def begin(self, timeline: Timeline, training: bool) -> None:
        """A scope begins, nothing is live.

        Args:
            timeline: When each chunk is needed in it.
            training: Its kind.
        """
        if not self._allowed[training]:
            return
        self._kind = training
        self._residency.prefetch(timeline, 0, self._unguarded)
        self._fetched = frozenset(self._residency.live)
        self._guarded = [self._chunks[index] for index in self._fetched if self._async_step.job(index) is None]
        for chunk in self._guarded:
            self._guard.watch(param.host for param in chunk.params)

    def end(self) -> None:
        """The first unit is entered: what comes early from now on comes for the next units."""
        self._kind = None
        while self._guarded:
            self._guard.leave(param.host for param in self._guarded.pop().params)

    def cancel(self) -> None:
        """Somebody touches a weight: gives up what has been fetched, and fetches nothing early any more."""
        if self._kind is None:
            return
        self._allowed[self._kind] = False
        self.drop()

    def drop(self) -> None:
        """The scope has ended before a unit was entered, or a weight is touched."""
        if self._kind is not None:
            self.end()
            self._give_up(self._fetched)


# Choices that are remembered for each chunk before they are forgotten.
_MANY = 16


class Residency:
    """Brings chunks to the device and lets them go, within the capacity.

    Args:
        chunks: The offloaded chunks.
        capacity: What may be live at one time.
        device: Where to.
        async_step: Knows which host weights are still being stepped.
        say: Takes a sentence for the user.

    Attributes:
        live: Indices of the chunks on the device, or on their way there.
        running: Units whose forwards are running; their chunks stay.
        pins: Units whose chunks stay for a backward, with the number of the earliest call that holds them.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        capacity: Capacity,
        device: Device,
        async_step: AsyncStep,
        say: Callable[[str], None],
    ) -> None:
        self.live: set[int] = set()
        self.running: dict[Block, None] = {}
        self.pins: dict[Block, int] = {}
        self._chunks = tuple(chunks)
        self._sizes = {index: chunk.nbytes for index, chunk in enumerate(chunks)}
        self._capacity = capacity
        self._counters = device.counters
        self._async_step = async_step
        self._say = say
        self._said = False

    def pinned(self) -> set[int]:
        """Indices of the chunks that must stay."""
        return {index for units in (self.running, self.pins) for unit in units for index in unit.chunks}

    def pin(self, unit: Block, number: int) -> None:
        """The backward of call `number` needs the chunks of `unit`."""
        self.pins[unit] = min(number, self.pins.get(unit, number))

    def unpin(self, end: int) -> None:
        """Backward has gone through all calls from `end` on."""
        for unit in [unit for unit, number in self.pins.items() if number >= end]:
            del self.pins[unit]

    def require(self, unit: Block, timeline: Timeline, position: int, in_backward: bool) -> None:
        """Makes the chunks of `unit` live.

        Args:
            unit: Computes next.
            timeline: When each chunk is needed.
            position: First position that has not begun.
            in_backward: Whether the values must be those of the forward.
        """
        if not self.live.issuperset(unit.chunks):
            self._make_room(unit, timeline, position)
        for index in unit.chunks:
            chunk = self._chunks[index]
            self._async_step.finish(index)
            if chunk.state is ChunkState.HOST:
                self._fetch(index)
                self._counters.prefetch_misses += 1
            elif chunk.prefetched:
                self._counters.prefetch_hits += 1
            chunk.prefetched = False
            self._wait(index, in_backward)

    def prefetch(self, timeline: Timeline, position: int, but: Set[int] = frozenset()) -> None:
        """Fetches what is needed from `position` on, as far as there is room.

        Args:
            timeline: When each chunk is needed.
            position: First position that has not begun.
            but: Chunks that are not fetched now.
        """
        known = (position, frozenset(self.live), frozenset(self.pinned()))
        choice = timeline.choices.get(known)
        if choice is None:  # A step like the one before chooses the same.
            if len(timeline.choices) > _MANY * len(self._chunks):
                timeline.choices.clear()
            choice = choose_prefetch(known[1], known[2], timeline, position, self._capacity, self._sizes)
            timeline.choices[known] = choice
        releases, fetches = choice
        self.release(releases)
        for index in fetches:
            if index not in but:
                self._fetch(index, ahead=True)

    def release(self, indices: Iterable[int]) -> None:
        """Frees the device memory of chunks."""
        for index in list(indices):
            self._chunks[index].prefetched = False
            self._chunks[index].release()
            self.live.discard(index)

    def release_unused(self) -> None:
        """Frees everything that need not stay."""
        self.release(self.live - self.pinned())

    def renew(self) -> None:
        """Fetches again what must stay, whatever the versions say."""
        for index in self.pinned():
            self.release([index])
            self._fetch(index)
            self._wait(index, in_backward=False)

    def _make_room(self, unit: Block, timeline: Timeline, position: int) -> None:
        wanted, pinned = set(unit.chunks), self.pinned()
        evictions = choose_evictions(self.live, wanted, pinned, timeline, position, self._capacity, self._sizes)
        if evictions is None:
            if not self._said:
                self._said = True
                self._say(
                    f"{unit.name!r} runs inside units that do not enclose it by name: more chunks are on the device at "
                    "one time than planned."
                )
            evictions = list(self.live - wanted - pinned)
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
