"""How many bytes of offloaded chunks are on the device at every position of a step.

Live chunks:
The runtime fetches in the order of use as long as it need not give up what is used earlier. So when a unit has begun,
those chunks are there that are needed next, from its own on; after them, where room is left, what was used last. Before
the first unit that streams they are those that it will need. There are as many as there are buffers, if these have the
bytes for them; else the bytes of all buffers are the bound. A unit that encloses others is there while they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_protrain.planner.chunks import chunks_of
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.records import ModelLayout


class LiveChunks:
    """Bytes of live chunks under a plan, see [Note: Live chunks].

    Args:
        layout: The model.
        plan: Made for it.
        units: Names of the units in the order of their segments; `""` for what runs between two of them.

    Attributes:
        forward: Bytes in every segment of a forward that a backward follows.
        backward: Bytes in the backward of every segment.
        evaluation: Bytes in every segment of a forward alone.
    """

    def __init__(self, layout: ModelLayout, plan: Plan, units: Sequence[str]) -> None:
        needed = {
            name: tuple(index for index in indices if not plan.chunks[index].resident)
            for name, indices in chunks_of(layout, plan.chunks).items()
        }
        ran = set(units)
        around: dict[str, tuple[int, ...]] = {}
        for unit in layout.units:
            for inner in unit.encloses if unit.name and unit.name not in ran else ():
                around[inner] = (*around.get(inner, ()), *needed[unit.name])
        # The weights of the root itself are there throughout a step.
        self._pinned = set(needed.get("", ()))
        self._sizes = [chunk.nbytes for chunk in plan.chunks]
        self._plan = plan
        there = [(*needed.get(name, ()), *around.get(name, ())) if name else () for name in units]
        back = there[::-1]
        # What is needed first was used last by the backward before, and may be there still.
        first = self._bytes_of((index for needs in there for index in needs), ())
        self.evaluation = self._walk(there, (), first)
        self.forward = self._walk(there, back, first)
        after_forward = self.forward[-1] if self.forward else 0
        self.backward = self._walk(back, (), after_forward)[::-1]

    def _walk(
        self, uses: Sequence[tuple[int, ...]], then: Sequence[tuple[int, ...]], before: int = 0
    ) -> tuple[int, ...]:
        """Bytes at each of `uses`, which `then` follow; `before` the first of them that needs chunks."""
        live, latest = [], max(before, sum(self._sizes[index] for index in self._pinned))
        for position, own in enumerate(uses):
            if own:
                upcoming = (index for needs in (*uses[position:], *then) for index in needs)
                past = (index for needs in uses[position::-1] for index in needs)
                latest = self._bytes_of(upcoming, past)
            live.append(latest)
        return tuple(live)

    def _bytes_of(self, upcoming: Iterable[int], past: Iterable[int]) -> int:
        live = dict.fromkeys(self._pinned)
        for indices in (upcoming, past):
            for index in indices:
                if len(live) >= self._plan.num_chunk_buffers:
                    break
                live[index] = None
        return min(sum(self._sizes[index] for index in live), self._plan.memory.chunk_buffers)
