"""What to fetch and what to give up, as pure functions over a known future. Knows no tensors.

[Note: Known future]
A training step needs its chunks in the order in which the units ran the last time, then in reverse for backward. With
the future known, giving up the chunk whose next use is farthest away is optimal (Belady, 1966), and fetching ahead is
worth it exactly as long as nothing with an earlier use has to go. So what is still live at the end of forward is what
backward needs first, without a rule of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

NEVER = 1 << 60


class Timeline:
    """When each chunk is needed.

    Args:
        needs: Chunk indices needed at each position, in order.
    """

    def __init__(self, needs: Sequence[Sequence[int]]) -> None:
        self.needs = tuple(tuple(chunks) for chunks in needs)
        self._positions: dict[int, list[int]] = {}
        for position, chunks in enumerate(self.needs):
            for chunk in chunks:
                self._positions.setdefault(chunk, []).append(position)

    def next_use(self, chunk: int, position: int) -> int:
        """First position at or after `position` that needs `chunk`, or `NEVER`."""
        positions = self._positions.get(chunk, [])
        found = bisect_left(positions, position)
        return positions[found] if found < len(positions) else NEVER

    def upcoming(self, position: int) -> Sequence[tuple[int, ...]]:
        """What is needed from `position` on."""
        return self.needs[position:]


@dataclass(frozen=True)
class Capacity:
    """How much may be live at one time.

    Attributes:
        chunks: Number of chunk buffers.
        nbytes: Bytes of all live chunks together.
    """

    chunks: int
    nbytes: int

    def holds(self, live: Set[int], sizes: Mapping[int, int]) -> bool:
        """Whether the chunks `live` fit."""
        return len(live) <= self.chunks and sum(sizes[chunk] for chunk in live) <= self.nbytes


def choose_evictions(
    live: Set[int],
    wanted: Set[int],
    pinned: Set[int],
    timeline: Timeline,
    position: int,
    capacity: Capacity,
    sizes: Mapping[int, int],
) -> list[int] | None:
    """The live chunks to give up so that `wanted` fits beside the rest, farthest next use first.

    Returns:
        Chunks to release, or None if what is pinned leaves no room for `wanted`.
    """
    staying = set(live) | set(wanted)
    evicted: list[int] = []
    candidates = sorted(live - wanted - pinned, key=lambda chunk: (timeline.next_use(chunk, position), chunk))
    while not capacity.holds(staying, sizes):
        if not candidates:
            return None
        evicted.append(candidates.pop())
        staying.discard(evicted[-1])
    return evicted


def choose_prefetch(
    live: Set[int],
    pinned: Set[int],
    timeline: Timeline,
    position: int,
    capacity: Capacity,
    sizes: Mapping[int, int],
) -> tuple[list[int], list[int]]:
    """The chunks to fetch ahead of their use, and those to give up for them, see [Note: Known future].

    Args:
        live: Chunks on the device.
        pinned: Those of them in use now.
        timeline: When each chunk is needed.
        position: First position that has not begun.
        capacity: What may be live.
        sizes: Bytes of each chunk.

    Returns:
        (chunks to release, chunks to fetch, in order of use).
    """
    released: list[int] = []
    fetched: list[int] = []
    present = set(live)
    for use, chunks in enumerate(timeline.upcoming(position), start=position):
        for chunk in chunks:
            if chunk in present:
                continue
            evictions = choose_evictions(present, {chunk}, pinned, timeline, position, capacity, sizes)
            if evictions is None or any(timeline.next_use(other, position) <= use for other in evictions):
                return released, fetched
            present.difference_update(evictions)
            present.add(chunk)
            released.extend(evictions)
            fetched.append(chunk)
        if len(present) >= capacity.chunks and all(timeline.next_use(c, position) <= use for c in present - pinned):
            break
    return released, fetched
