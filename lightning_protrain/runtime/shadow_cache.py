"""Watches weights whose shadow copies are current, and invalidates those of accessed weights."""

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
        pending: Guard of weights with pending steps. A step renews shadow copies itself, and an access waits for it.

    Attributes:
        guard: Watches weights whose shadow copies are current.
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
        """Begin a scope: trust the shadow copies of weights that were watched without a gap."""
        with below_guard():
            self.invalidate(param for param in self._params.values() if not self._is_trusted(param.host))
        self._interrupted = False

    def _is_trusted(self, host: Tensor) -> bool:
        return not self._interrupted and self.guard.watches(host) and not is_aliased(host)

    def interrupt(self) -> None:
        """Trust no shadow copy in the next scope, as unknown code runs before it."""
        self._interrupted = True

    def watch(self, params: Iterable[OffloadedParam]) -> None:
        """Watch weights whose shadow copies have just been renewed, or are renewed by a step."""
        self.guard.watch(param.host for param in params if param in self._watchable)

    def invalidate(self, params: Iterable[OffloadedParam]) -> None:
        """Have the next fetch renew shadow copies, except those that a pending step renews."""
        for param in params:
            if id(param.host) in self._params and not self._pending.watches(param.host):
                assert param.shadow is not None
                param.shadow.invalidate()
                self.guard.unwatch((param.host,))

    def invalidate_stepped(self) -> None:
        """Invalidate shadow copies of weights stepped on the main thread; the optimizer may write to `data`."""
        for chunk in self._trainable:
            if not any(self._pending.watches(param.host) for param in chunk.params):
                self.invalidate(chunk.params)

    def publish(self, chunk: Chunk) -> None:
        """Renew the shadow copies that this rank owns, after a step of a chunk that the ranks of the node share."""
        chunk.renew_copies()
        self.watch(chunk.params)

    def forget(self) -> None:
        """Watch and trust nothing, after an exception or before the plan is removed."""
        self._interrupted = True
        self.invalidate(self._params.values())

    def close(self) -> None:
        """Watch nothing from now on."""
        self.guard.close()

    def touched(self, hosts: Sequence[Tensor]) -> None:
        """Invalidate the shadow copies of accessed weights."""
        self.invalidate(self._params[id(host)] for host in hosts if id(host) in self._params)
