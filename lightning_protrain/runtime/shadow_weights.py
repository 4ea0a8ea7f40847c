"""Which copies in low precision are still those of their weights.

[Note: Shadow copies]
A copy in low precision is made anew when the version of its weight has changed; but code that writes through
`weight.data` changes no version. So from when its copy is made, by a fetch or by a step, a weight is watched, see
[Note: Guard]: whoever touches one, at any time and in whatever code, has it cast again by the next fetch. What neither
shows values nor leads to their memory is no touch, nor are gradients.

Memory that somebody holds under another name (`data = weight.data`) is watched by nobody, but its references are
counted: such a weight is cast again in every scope. A step that is not overlapped has what it has stepped cast again,
whatever it has touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_protrain.runtime.access_guard import NO_VALUES, AccessGuard, below_guard, can_be_watched, is_aliased
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.param import OffloadedParam


class ShadowCache:
    """Trusts copies, or has them made anew, see [Note: Shadow copies].

    Args:
        chunks: The offloaded chunks.
        pending: Watches weights that are being stepped: such a step makes copies itself, and ends before a touch.

    Attributes:
        guard: Watches weights whose copies are trusted.
    """

    def __init__(self, chunks: Sequence[Chunk], pending: AccessGuard) -> None:
        low = [param for chunk in chunks for param in chunk.params if param.copy is not None and param.owned]
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
                param.copied_version = -1
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
