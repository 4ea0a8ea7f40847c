"""Decides which chunks to fetch and to release, in pure functions over a known future, without tensors.

A training step needs its chunks in the order in which the blocks ran the last time, then in reverse for backward. With
the future known, releasing the chunk whose next use is farthest away is optimal (Belady, 1966). A chunk is fetched
ahead only if no chunk with an earlier use has to be released for it. So at the end of forward, the live chunks are
those that backward needs first; no special rule is needed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from lightning_protrain.planner.plan import Plan

NEVER = 1 << 60
# What a prefetch decision depends on: position, live chunks, pinned chunks.
CacheKey = tuple[int, frozenset[int], frozenset[int]]


class Timeline:
    """The positions at which each chunk is needed.

    Args:
        needs: Chunk indices needed at each position, in order.

    Attributes:
        choices: Cache of prefetch decisions, by position, live chunks and pinned chunks.
    """

    def __init__(self, needs: Iterable[Sequence[int]]) -> None:
        self.choices: dict[CacheKey, tuple[list[int], list[int]]] = {}
        self._positions: dict[int, list[int]] = {}
        self._uses: list[tuple[int, int]] = []
        self._starts = [0]
        for position, chunks in enumerate(needs):
            for chunk in chunks:
                self._positions.setdefault(chunk, []).append(position)
                self._uses.append((position, chunk))
            self._starts.append(len(self._uses))
        self._last = len(self._starts) - 1

    def next_use(self, chunk: int, position: int) -> int:
        """Return the first position at or after `position` that needs `chunk`, or `NEVER`."""
        positions = self._positions.get(chunk, ())
        found = bisect_left(positions, position)
        return positions[found] if found < len(positions) else NEVER

    def later(self, position: int) -> Set[int]:
        """Return the chunks with any use except those needed at `position`."""
        here = self._uses[self._starts[min(position, self._last)] : self._starts[min(position + 1, self._last)]]
        return self._positions.keys() - {chunk for _, chunk in here}

    def upcoming(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield (position, chunk) of every use from `position` on, lazily."""
        for at in range(self._starts[min(position, self._last)], len(self._uses)):
            yield self._uses[at]


@dataclass(frozen=True)
class Capacity:
    """The number and bytes of chunks that may be live at one time.

    Attributes:
        chunks: Number of chunk buffers.
        nbytes: Size of all live chunks together, bytes.
        sizes: Size of each chunk, bytes.
    """

    chunks: int
    nbytes: int
    sizes: Sequence[int]

    @classmethod
    def of(cls, plan: Plan) -> Capacity:
        """Return the capacity of a plan, with the sizes of its offloaded chunks."""
        sizes = tuple(chunk.nbytes for chunk in plan.chunks if not chunk.resident)
        return cls(plan.num_chunk_buffers, plan.memory.chunk_buffers, sizes)

    def holds(self, live: Set[int]) -> bool:
        """Return True if the chunks `live` fit into the chunk buffers together."""
        return len(live) <= self.chunks and sum(self.sizes[chunk] for chunk in live) <= self.nbytes


def choose_evictions(
    candidates: Set[int], kept: Set[int], timeline: Timeline, position: int, capacity: Capacity
) -> list[int] | None:
    """Choose live chunks to release so that `kept` fits beside the rest, farthest next use first.

    Args:
        candidates: Live chunks that may be released.
        kept: Live chunks that must stay, and chunks that are about to be fetched.
        timeline: Positions at which each chunk is needed.
        position: First position that has not begun.
        capacity: Number and bytes of chunks that may be live.

    Returns:
        Chunks to release, or None if `kept` alone does not fit.
    """
    staying = set(candidates) | kept
    evicted: list[int] = []
    waiting = sorted(candidates, key=lambda chunk: (timeline.next_use(chunk, position), chunk))
    while not capacity.holds(staying):
        if not waiting:
            return None
        evicted.append(waiting.pop())
        staying.discard(evicted[-1])
    return evicted


def choose_prefetch(
    live: Set[int],
    pinned: Set[int],
    timeline: Timeline,
    position: int,
    capacity: Capacity,
) -> tuple[list[int], list[int]]:
    """Choose chunks to fetch ahead of their use, and chunks to release for them.

    Args:
        live: Chunks on the device.
        pinned: Chunks of `live` that are in use now.
        timeline: Positions at which each chunk is needed.
        position: First position that has not begun.
        capacity: Number and bytes of chunks that may be live.

    Returns:
        (chunks to release, chunks to fetch, in order of use).
    """
    released: list[int] = []
    fetched: list[int] = []
    sizes = capacity.sizes
    if len(live) == len(sizes):
        return released, fetched  # All chunks are live.
    num_present, present_bytes = len(live), sum(sizes[chunk] for chunk in live)
    present = set(live)
    # Live chunks that may be released; the farthest next use is last.
    candidates = sorted((timeline.next_use(chunk, position), chunk) for chunk in present - pinned)
    for use, chunk in timeline.upcoming(position):
        if chunk in present:
            continue
        num_present, present_bytes = num_present + 1, present_bytes + sizes[chunk]
        given_up: list[int] = []
        while num_present > capacity.chunks or present_bytes > capacity.nbytes:
            if not candidates or candidates[-1][0] <= use:
                return released, fetched  # A chunk with an earlier use stays.
            given_up.append(candidates.pop()[1])
            num_present, present_bytes = num_present - 1, present_bytes - sizes[given_up[-1]]
        present.difference_update(given_up)
        present.add(chunk)
        released.extend(given_up)
        fetched.append(chunk)
        if chunk not in pinned:
            insort(candidates, (use, chunk))
    return released, fetched
