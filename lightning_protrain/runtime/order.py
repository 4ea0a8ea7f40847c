"""The order in which units run in a step: what the next step is expected to repeat."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from lightning_protrain.runtime.schedule import Timeline
from lightning_protrain.runtime.unit import Unit


class Order:
    """Units in the order of their forwards, then in that of their backwards.

    Args:
        forward: The units whose forwards run.
        backward: The units whose backwards follow.

    Attributes:
        timeline: When each chunk is needed, forward and backward.
    """

    def __init__(self, forward: Sequence[Unit], backward: Sequence[Unit]) -> None:
        self.forward = list(forward)
        self.backward = list(backward)
        needs = [unit.chunks for unit in forward]
        self.timeline = Timeline(needs + [unit.chunks if unit.backward_reads else () for unit in backward])
        self._positions: dict[Unit, list[int]] = {}
        for position, unit in enumerate(forward):
            self._positions.setdefault(unit, []).append(position)

    def is_of(self, forward: Sequence[Unit], backward: Sequence[Unit]) -> bool:
        """Whether these are its units."""
        return self.forward == forward and self.backward == backward

    def behind(self, unit: Unit, position: int) -> int:
        """The position behind the next forward of `unit` from `position` on; `position` itself if there is none."""
        positions = self._positions.get(unit, ())
        found = bisect_left(positions, position)
        return positions[found] + 1 if found < len(positions) else position
