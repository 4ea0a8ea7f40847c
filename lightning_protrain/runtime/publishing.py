"""What ranks that share chunks see of an optimizer's step before all of it has been published.

[Note: Publishing]
What the optimizer steps at once, on the main thread, is told to other ranks when its hooks have run, and only then is
there what others have stepped. Who reads one of theirs in such a hook has the step published first, and sees what one
rank would have. So has who reads a weight whose step is pending. In the middle of the optimizer's own code nothing can
be published. Other threads wait.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence

from torch import Tensor

from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.copies import Copies
from lightning_protrain.runtime.guard import NO_VALUES, Guard, can_be_watched
from lightning_protrain.runtime.turns import Turns


class Publishing:
    """Publishes steps of chunks that ranks share, see [Note: Publishing].

    Args:
        chunks: The offloaded ones.
        turns: Of this rank; None: it shares nothing.
        copies: Of the chunks.
        guard: Watches weights whose steps are pending.
        pending: Chunks whose steps are; as it is at any time.
    """

    def __init__(
        self, chunks: Sequence[Chunk], turns: Turns | None, copies: Copies, guard: Guard, pending: Container[int]
    ) -> None:
        self._chunks = tuple(chunks)
        self._turns = turns
        self._copies = copies
        self._pending = pending
        self._guard = Guard(self._touched, NO_VALUES, beside=guard)
        shared = [(at, slot) for at, chunk in enumerate(chunks) if chunk.share is not None for slot in chunk.slots]
        self._theirs = [(at, slot.host) for at, slot in shared if not slot.owned and can_be_watched(slot.host)]
        self._watched: list[Tensor] = []
        # The thread that has launched a step which is not published, and whether the optimizer's own code has run.
        self._thread: int | None = None
        self._has_stepped = False

    def begin(self) -> None:
        """The steps of some chunks are pending, and the optimizer is about to step the rest at once."""
        if self._turns is None:
            return
        self._thread, self._has_stepped = threading.get_ident(), False
        self._watched = [
            host
            for at, host in self._theirs
            if at not in self._pending and (host.requires_grad or self._chunks[at].plan.trainable)
        ]
        self._guard.watch(self._watched)

    def end_step(self) -> None:
        """The optimizer has stepped what it steps at once; its hooks come next."""
        self._has_stepped = True

    def publish(self) -> None:
        """Says what has been stepped at once, and waits until it is there, of every rank."""
        turns = self._turns
        if turns is None:
            return
        self.end()
        rest = [index for index in range(len(self._chunks)) if index not in self._pending]
        for index in rest:
            self._copies.publish(self._chunks[index])
        turns.announce(rest, turns.number)
        for index in rest:
            turns.wait_until_stepped(index, turns.number)

    def before_wait(self) -> None:
        """This thread is about to wait for pending steps, because somebody reads a weight.

        Raises:
            RuntimeError: A rank is missing.
        """
        if self._thread == threading.get_ident() and self._has_stepped:
            self.publish()

    def end(self) -> None:
        """It is published, or never will be."""
        self._thread, watched, self._watched = None, self._watched, []
        self._guard.leave(watched)

    def _touched(self, _: Sequence[Tensor]) -> None:
        # Where an optimizer looks at weights that it does not step, it does so as it would without any of this.
        if self._thread == threading.get_ident() and self._has_stepped:
            self.publish()
