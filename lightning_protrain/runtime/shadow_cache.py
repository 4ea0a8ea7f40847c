"""Watches weights whose shadow copies are current, and invalidates the copies of those that are touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_protrain.runtime.access_guard import NO_VALUES, AccessGuard, below_guard, can_be_watched, is_aliased
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.param import OffloadedParam


class ShadowCache:
    """The shadow copies of all chunks, see [Note: Shadow copies].

    Args:
        chunks: The offloaded chunks.
        pending: Watches weights that are being stepped: such a step makes copies itself, and ends before a touch.

    Attributes:
        guard: Watches weights whose copies are current.
    """

    def __init__(self, chunks: Sequence[Chunk], pending: AccessGuard) -> None:
        low = [param for chunk in chunks for param in chunk.params if param.shadow is not None and param.owned]
        self._params = {id(param.host): param for param in low}
        self._trainable = tuple(chunk for chunk in chunks if chunk.plan.trainable)
        self._watchable = {param for param in low if can_be_watched(param.host)}
        self._pending = pending
        self.guard = AccessGuard(self.touched, NO_VALUES, beside=pending)
        self._interrupted = True

    def begin(self) -> None:
        """Begin a scope: trust the copies of weights that were watched since they were made."""
        with below_guard():
            self.invalidate(param for param in self._params.values() if not self._is_trusted(param.host))
        self._interrupted = False

    def _is_trusted(self, host: Tensor) -> bool:
        return not self._interrupted and self.guard.watches(host) and not is_aliased(host)

    def interrupt(self) -> None:
        """Code of which nothing is known runs before the next scope: then no copy is trusted."""
        self._interrupted = True

    def watch(self, params: Iterable[OffloadedParam]) -> None:
        """Copies have just been made, or a step makes them."""
        self.guard.watch(param.host for param in params if param in self._watchable)

    def invalidate(self, params: Iterable[OffloadedParam]) -> None:
        """Has copies made anew by the next fetch, except by a pending step."""
        for param in params:
            if id(param.host) in self._params and not self._pending.watches(param.host):
                assert param.shadow is not None
                param.shadow.invalidate()
                self.guard.leave((param.host,))

    def invalidate_stepped(self) -> None:
        """What is stepped at once is cast again, even if the optimizer writes through `parameter.data`."""
        for chunk in self._trainable:
            if not any(self._pending.watches(param.host) for param in chunk.params):
                self.invalidate(chunk.params)

    def publish(self, chunk: Chunk) -> None:
        """After a step of a chunk that ranks share: the copies that this rank owns are there for all of them."""
        chunk.publish()
        self.watch(chunk.params)

    def forget(self) -> None:
        """After an exception, or before the plan is removed: nothing is watched, or trusted."""
        self._interrupted = True
        self.invalidate(self._params.values())

    def touched(self, hosts: Sequence[Tensor]) -> None:
        """Have the copies of weights made anew that somebody has looked at or written to."""
        self.invalidate(self._params[id(host)] for host in hosts if id(host) in self._params)
