"""Chunks that come before any unit has asked for them.

[Note: Early]
What a scope needs first is fetched when it begins: the user's own code and layers that are resident run before the
first unit. That code may write to weights, as code may at any time: averages take the place of weights for a validation
step, the weights of a critic are clipped before a training step, and much of it goes through `weight.data`, of which no
version tells. So until the first unit is entered, the weights that have been fetched are guarded like those of pending
steps, see [Note: Guard]: whoever touches one waits for the uploads, and the chunks come again when they are needed.
What does so once will do so in every step: later scopes of the kind fetch nothing early. Nor do chunks come early whose
weights cannot be guarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.guard import GRADIENTS, Guard, can_be_watched
from lightning_protrain.runtime.residency import Residency
from lightning_protrain.runtime.schedule import Timeline
from lightning_protrain.runtime.updates import Updates


class EarlyFetch:
    """Fetches ahead of the first unit of a scope, see [Note: Early].

    Args:
        chunks: The offloaded chunks.
        residency: Fetches them.
        updates: Guards those whose steps are pending.
        give_up: Frees what has been fetched, waits for uploads, and trusts no copies of the chunks it is given.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        residency: Residency,
        updates: Updates,
        give_up: Callable[[Iterable[int]], None],
    ) -> None:
        self._chunks = tuple(chunks)
        self._residency = residency
        self._updates = updates
        self._give_up = give_up
        self._guard = Guard(lambda _: self.cancel(), GRADIENTS, beside=updates.copies.guard)
        self._unguarded = frozenset(
            index for index, chunk in enumerate(chunks) if not all(can_be_watched(slot.host) for slot in chunk.slots)
        )
        updates.when_touched.append(self.cancel)
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
        self._guarded = [self._chunks[index] for index in self._fetched if self._updates.job(index) is None]
        for chunk in self._guarded:
            self._guard.watch(slot.host for slot in chunk.slots)

    def end(self) -> None:
        """The first unit is entered: what comes early from now on comes for the next units."""
        self._kind = None
        while self._guarded:
            self._guard.leave(slot.host for slot in self._guarded.pop().slots)

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
