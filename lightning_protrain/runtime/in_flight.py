"""How many gradients leave the device while the next one is computed.

[Note: In flight]
The plan has room for the two largest gradients: for those on their way to the host, and for the one that is computed
next. How large that one is tells the order of the backward before; from the first one on that is another one, the
largest is expected. So the device waits for the host only where a gradient that is about to be computed would not fit
beside those that land. The first one out of order (another expert, another branch) may be larger than the one it stands
for: it finds less room than it takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_protrain.runtime.slot import Slot


class InFlight:
    """How much may land while the next gradient is computed, see [Note: In flight].

    Args:
        sizes: Bytes of all gradients that land.

    Attributes:
        hold_bytes: What may land while the largest one is computed.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        largest = sorted(sizes)[-2:]
        self._total = sum(largest)
        self.hold_bytes = largest[0] if len(largest) > 1 else 0
        # In the order of landing, with their bytes: in the backward before, and in this one.
        self._expected: list[tuple[Slot, int]] = []
        self._seen: list[tuple[Slot, int]] = []
        self._as_expected = True

    def land(self, slot: Slot, nbytes: int) -> int:
        """What may be under way, this gradient included, until the next one comes."""
        at = len(self._seen)
        self._seen.append((slot, nbytes))
        self._as_expected = self._as_expected and at < len(self._expected) and self._expected[at][0] is slot
        if not self._as_expected:
            return self.hold_bytes
        following = self._expected[at + 1 : at + 2]
        return self._total - following[0][1] if following else self._total

    def end(self) -> None:
        """A backward has ended."""
        if self._seen:
            self._expected = self._seen
        self.forget()

    def forget(self) -> None:
        """A backward has not ended as it should, or the next one begins."""
        self._seen, self._as_expected = [], True
