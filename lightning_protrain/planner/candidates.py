"""The candidates of a search for one packing of the model into chunks, and the plan of each candidate."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, islice, product
from math import inf
from typing import NamedTuple

from lightning_protrain.config import Knobs, plural
from lightning_protrain.planner.memory import gradient_buffers_of, host_terms, memory_terms, nests, swapped_bytes
from lightning_protrain.planner.memory_timeline import MemoryTimeline, memory_timeline
from lightning_protrain.planner.packing import (
    Recomputation,
    Step,
    check_counts,
    chunks_of,
    lay_out,
    order_steps,
    pack_chunks,
    swap_interval,
    swap_places,
    with_residency,
)
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, ChunkPlan, MemoryTerms, Plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.replay import checkpoint_saving, product_bytes
from lightning_protrain.profiler.records import Segment

# If a packing has at most this many candidates, all are tried.
FEW = 300


class Point(NamedTuple):
    """A candidate, except for its number of chunk buffers.

    Attributes:
        num_swap: Number of blocks that swap their activations.
        num_steps: Number of recompute steps of the blocks that do not swap, see [Note: Layout of policies].
        offloaded: Number of offloaded chunks: the last ones in order; all earlier chunks are resident.
        num_inputs: Number of checkpointed blocks whose inputs go to the host: the first ones that can.
    """

    num_swap: int
    num_steps: int
    offloaded: int
    num_inputs: int = 0


class Packing:
    """The model packed into chunks of one size, and the plans that use these chunks.

    Args:
        problem: The problem to solve.
        chunk_bytes: Maximum size of a chunk, bytes; None: no limit.
        chunks: The chunks, all offloaded.
        places: Indices of the blocks that may swap, in the order in which the search lets them swap.
        steps: Steps in which blocks give up activations, in order, see [Note: Layout of policies].
    """

    def __init__(
        self,
        problem: Problem,
        chunk_bytes: int | None,
        chunks: tuple[ChunkPlan, ...],
        places: tuple[int, ...],
        steps: tuple[Step, ...],
    ) -> None:
        self.problem, self.chunk_bytes, self.chunks = problem, chunk_bytes, chunks
        self.places, self.steps = places, steps
        layout = problem.layout
        needed = chunks_of(layout, chunks)
        # The last chunk that each block needs: the block streams unless this chunk is resident.
        self._last_chunk = [max(needed[block.name], default=-1) for block in layout.blocks]
        self._nests = [sorted(nest) for nest in nests(layout, needed)]
        self._resident = tuple(with_residency(layout, chunk, True) for chunk in chunks)
        self._shapes = {info.fqn: info.shape for info in layout.parameters}
        self._blocks: dict[tuple[int, int, int, int], tuple[BlockPlan, ...]] = {}
        self._terms: dict[tuple[int, int], MemoryTerms] = {}

    # --- what knobs allow ---------------------------------------------------------------------------------------------

    def swap_range(self, knobs: Knobs) -> tuple[int, int]:
        """Return the fewest and the most swapped blocks."""
        pinned = knobs.num_swap_blocks
        return (0, len(self.places)) if pinned is None else (pinned, min(pinned, len(self.places)))

    def step_range(self, num_swap: int, knobs: Knobs) -> tuple[int, int]:
        """Return the fewest and the most recompute steps if `num_swap` blocks swap."""
        most, pinned = self._most_steps[num_swap], knobs.num_checkpoint_blocks
        return (0, most) if pinned is None else (pinned, min(pinned, most))

    def most_inputs(self, num_swap: int, num_steps: int) -> int:
        """Return the number of checkpointed blocks whose inputs can go to the host."""
        policies, movable = self.policies(num_swap, num_steps), self.problem.movable_inputs
        blocks = zip(self.problem.layout.blocks, policies, strict=True)
        return sum(policy is BlockPolicy.CHECKPOINT and block.name in movable for block, policy in blocks)

    def offloaded_range(self, num_swap: int, num_steps: int, knobs: Knobs) -> tuple[int, int] | None:
        """Return the fewest and the most offloaded chunks; None if no number of them satisfies the pinned knobs."""
        count, pinned = len(self.chunks), knobs.num_persistent_chunks
        low, high = (0, count) if pinned is None else (count - pinned, count - pinned)
        if knobs.num_chunk_buffers is not None:
            # More offloaded chunks need more buffers.
            while low <= high and self.fewest_buffers(high) > knobs.num_chunk_buffers:
                high -= 1
        if knobs.num_keep_offloaded_blocks is not None:
            # Of the blocks that keep activations, exactly `keeps` may have offloaded chunks: those whose last chunks
            # come latest. The last chunk of the kept block before them must be resident.
            lasts = [-1, *sorted(self._kept(num_swap, num_steps)), count]
            keeps = knobs.num_keep_offloaded_blocks
            if keeps > len(lasts) - 2:
                return None
            low, high = max(low, count - lasts[-1 - keeps]), min(high, count - 1 - lasts[-2 - keeps])
        return (low, high) if 0 <= low <= high else None

    def allows(self, point: Point, knobs: Knobs) -> bool:
        """Return True if the knobs allow the chunks and buffers of a candidate whose policies they allow."""
        num_swap, num_steps, offloaded, num_inputs = point
        bounds = self.offloaded_range(num_swap, num_steps, knobs)
        if bounds is None or not bounds[0] <= offloaded <= bounds[1]:
            return False
        return num_inputs == 0 or 0 < num_inputs <= self.most_inputs(num_swap, num_steps)

    def points(self, knobs: Knobs) -> Iterator[Point]:
        """Yield all candidates that the knobs allow."""
        for num_swap, num_steps in self.policies_allowed(knobs):
            bounds, most = self.offloaded_range(num_swap, num_steps, knobs), self.most_inputs(num_swap, num_steps)
            if bounds is not None:
                every = product(range(bounds[0], bounds[1] + 1), range(most + 1))
                yield from (Point(num_swap, num_steps, *counts) for counts in every)

    def has_few(self, knobs: Knobs) -> bool:
        """Return True if there are so few candidates that all can be tried."""
        return next(islice(self.points(knobs), FEW, None), None) is None

    def policies_allowed(self, knobs: Knobs) -> Iterator[tuple[int, int]]:
        """Yield all pairs `(num_swap, num_steps)` that the knobs allow."""
        low, high = self.swap_range(knobs)
        for num_swap in range(low, high + 1):
            least, most = self.step_range(num_swap, knobs)
            yield from ((num_swap, num_steps) for num_steps in range(least, most + 1))

    @cached_property
    def _most_steps(self) -> list[int]:
        """Return the number of available recompute steps if the first s places swap, for each s."""
        taken = [sum(index == place for index, _ in self.steps) for place in self.places]
        return [len(self.steps) - swapped for swapped in accumulate(taken, initial=0)]

    # --- plans --------------------------------------------------------------------------------------------------------

    def policies(self, num_swap: int, num_steps: int) -> tuple[BlockPolicy, ...]:
        """Return the policies of all blocks."""
        return lay_out(len(self.problem.layout.blocks), self.steps, self.places[:num_swap], num_steps)

    def _kept(self, num_swap: int, num_steps: int) -> list[int]:
        """Return the index of the last chunk of each block that keeps its activations; -1: it has no chunk."""
        policies = self.policies(num_swap, num_steps)
        return [last for last, policy in zip(self._last_chunk, policies, strict=True) if policy is BlockPolicy.KEEP]

    def possible_keeps(self, num_swap: int, num_steps: int, low: int, high: int) -> set[int]:
        """Return the possible counts of kept blocks with offloaded chunks, if `low` to `high` chunks are offloaded."""
        count, lasts = len(self.chunks), self._kept(num_swap, num_steps)
        # The count changes only where the first offloaded chunk is the last chunk of a kept block.
        ends = {count - low, *(last for last in lasts if count - high <= last < count - low), count - high}
        return {sum(last >= persistent for last in lasts) for persistent in ends}

    def fewest_buffers(self, offloaded: int) -> int:
        """Return the minimum number of chunk buffers with which the model can run."""
        persistent = len(self.chunks) - offloaded
        return max((len(nest) - bisect_left(nest, persistent) for nest in self._nests), default=0)

    def least_buffers(self, point: Point, knobs: Knobs) -> int:
        """Return the minimum number of chunk buffers of a candidate, or the number that the user pinned."""
        return self.fewest_buffers(point.offloaded) if knobs.num_chunk_buffers is None else knobs.num_chunk_buffers

    def plan(self, point: Point, buffers: int) -> Plan:
        """Return the plan of a candidate."""
        layout, persistent = self.problem.layout, len(self.chunks) - point.offloaded
        chunks = self._resident[:persistent] + self.chunks[persistent:]
        # How much blocks swap depends on which weights are streamed.
        same = point.num_swap, point.num_steps, persistent if point.num_swap else 0, point.num_inputs
        if same not in self._blocks:
            self._blocks[same] = self._planned_blocks(point, chunks)
        blocks = self._blocks[same]
        if (persistent, buffers) not in self._terms:
            self._terms[persistent, buffers] = memory_terms(layout, chunks, buffers, self.problem.state_bytes)
        plan = Plan(
            chunks=chunks,
            blocks=blocks,
            num_chunk_buffers=buffers,
            memory=replace(self._terms[persistent, buffers], swapped_activations=swapped_bytes(blocks)),
            shapes=self._shapes,
        )
        return self._passing(plan) if layout.passes_gradients and self.problem.host_bytes is not None else plan

    def _passing(self, plan: Plan) -> Plan:
        """Let gradients pass if the plan does not fit the host otherwise, as backward has to wait for buffers then."""
        problem, layout = self.problem, self.problem.layout
        terms = host_terms(layout, plan, problem.state_bytes, asynchronous=problem.hardware.asynchronous)
        if sum(terms.values()) + problem.checkpoint_copy <= (problem.host_bytes or 0):
            return plan
        return replace(plan, gradient_buffers=gradient_buffers_of(layout, plan.chunks, problem.state_bytes))

    def _planned_blocks(self, point: Point, chunks: Sequence[ChunkPlan]) -> tuple[BlockPlan, ...]:
        policies = self.policies(point.num_swap, point.num_steps)
        swapped: Mapping[str, int] = {}
        if point.num_swap:
            low = frozenset(fqn for chunk in chunks if chunk.streamed_dtype for fqn in chunk.parameters)
            swapped = self.problem.profile.swap_bytes(low)
        blocks, left = list[BlockPlan](), point.num_inputs
        for block, policy in zip(self.problem.layout.blocks, policies, strict=True):
            nbytes = swapped[block.name] if policy is BlockPolicy.SWAP else 0
            if policy is BlockPolicy.CHECKPOINT and left and block.name in self.problem.movable_inputs:
                nbytes, left = self.problem.movable_inputs[block.name], left - 1
            blocks.append(BlockPlan(block.name, policy, nbytes))
        return tuple(blocks)

    def device_bytes(self, point: Point, buffers: int) -> int:
        """Return the device memory that a candidate needs, bytes."""
        plan = self.plan(point, buffers)
        return device_bytes(memory_timeline(self.problem, plan, counts_host=False), plan, self.problem.evaluates)

    def host_bytes(self, point: Point, buffers: int) -> int:
        """Return the host memory that a candidate needs, bytes."""
        return memory_timeline(self.problem, self.plan(point, buffers)).host_peak


def device_bytes(timeline: MemoryTimeline, plan: Plan, evaluates: bool) -> int:
    """Return the device memory that a plan needs, bytes: its largest phase, or all that it places if that is more.

    Args:
        timeline: Memory of the plan in each phase.
        plan: The plan.
        evaluates: True if evaluation must also fit.
    """
    phases = (phase.total for phase in timeline.phases if evaluates or phase.name != "evaluation")
    return max(plan.memory.total, *phases)


def packings(problem: Problem, knobs: Knobs) -> list[Packing]:
    """Return the distinct packings of the model into chunks, over all chunk sizes that the knobs allow.

    Raises:
        ValueError: The knobs name more blocks than the model has.
    """
    check_counts(problem.layout, knobs.num_swap_blocks or 0, knobs.num_checkpoint_blocks or 0)
    sizes = problem.chunk_bytes if knobs.chunk_bytes is None else (knobs.chunk_bytes,)
    places = _places(problem, knobs.num_swap_blocks)
    selective = knobs.num_checkpoint_blocks is None and knobs.num_keep_offloaded_blocks is None
    steps = order_steps(_recomputations(problem, selective))
    if not all(block.name for block in problem.layout.blocks):
        places, steps = (), ()  # The root module cannot be run again.
    made: list[Packing] = []
    for size in sizes:
        chunks = pack_chunks(problem.layout, size)
        if all(chunks != other.chunks for other in made):
            made.append(Packing(problem, size, chunks, places, steps))
    return made


def spread(low: int, high: int, count: int) -> Iterable[int]:
    """Return at most `count` numbers spread evenly over a range, including both ends."""
    if high < low:
        return []
    return dict.fromkeys(low + (high - low) * index // max(count - 1, 1) for index in range(count))


def _recomputations(problem: Problem, selective: bool) -> list[Recomputation]:
    """Return the cost of recomputing each block: as a whole and, if `selective`, with its products kept."""
    segments = problem.profile.segments
    # Do not count casts of weights: streamed weights arrive in the dtype of autocast.
    saved = [checkpoint_saving(it) - sum(nbytes for _, nbytes in it.casts) for it in segments]
    whole = [seconds for seconds, _ in problem.recomputes]
    values: list[Sequence[float]] = [whole, saved]
    # In a measured step, a kernel that cannot be traced may write to a product, and neither autograd nor the profile
    # would notice.
    if selective and not problem.profile.measured:
        seconds = [seconds for _, seconds in problem.recomputes]
        values += [seconds, [_left(*figures) for figures in zip(segments, saved, seconds, whole, strict=True)]]
    return [Recomputation(*figures) for figures in zip(*(_of_blocks(problem, value) for value in values), strict=True)]


def _left(segment: Segment, saved: int, selective: float, whole: float) -> float:
    """Return the bytes of `saved` that are freed if products are kept; -inf if the block cannot keep its products."""
    products = product_bytes(segment)
    return -inf if products is None or products > saved or selective > whole else saved - products


def _of_blocks(problem: Problem, values: Iterable[float]) -> list[float]:
    """Sum the values of segments by block."""
    sums = dict.fromkeys((block.name for block in problem.layout.blocks), 0.0)
    for segment, value in zip(problem.profile.segments, values, strict=True):
        if segment.unit in sums:
            sums[segment.unit] += value
    return list(sums.values())


def _places(problem: Problem, num_swap: int | None) -> tuple[int, ...]:
    """Return the indices of the blocks that may swap: far enough apart for computation to hide the transfers."""
    names = [block.name for block in problem.layout.blocks]
    computes = _of_blocks(problem, [forward for forward, _ in problem.computes])
    swapped = problem.profile.swap_bytes(problem.layout.low)
    nbytes = [max(swapped.get(name, 0), 0) for name in names]
    able = [bool(name) and size > 0 for name, size in zip(names, nbytes, strict=True)]
    rate = min(problem.hardware.upload, problem.hardware.download)
    transfers = [size / rate if can else 0.0 for size, can in zip(nbytes, able, strict=True)]
    return swap_places(able, swap_interval(transfers, computes), num_swap)


def check_pins(packed: Sequence[Packing], knobs: Knobs) -> None:
    """Refuse knobs that no plan can satisfy, however much memory there is.

    Args:
        packed: Packings of the model for all allowed chunk sizes.
        knobs: Decisions that the user pinned; check them with `check_counts` first.

    Raises:
        ValueError: The knobs ask for more chunks than the model has, for more swapped blocks than can swap, for too few
            chunk buffers, or for a value of `num_keep_offloaded_blocks` that the other knobs make impossible.
    """
    resident, swap, buffers = knobs.num_persistent_chunks or 0, knobs.num_swap_blocks or 0, knobs.num_chunk_buffers
    count = max(len(packing.chunks) for packing in packed)
    if resident > count:
        raise ValueError(
            f"num_persistent_chunks={resident}: this model has {plural(count, 'chunk')}. Give at most {count}."
        )
    packed = [packing for packing in packed if len(packing.chunks) >= resident]
    places = max(len(packing.places) for packing in packed)
    if swap > places:
        raise ValueError(
            f"num_swap_blocks={swap}: this model has {plural(places, 'block')} with activations that can be swapped. "
            "Use num_checkpoint_blocks, or name other blocks with `blocks`."
        )
    if buffers is not None:
        # More resident chunks need fewer buffers.
        pinned = knobs.num_persistent_chunks
        least = min(packing.fewest_buffers(0 if pinned is None else len(packing.chunks) - pinned) for packing in packed)
        if buffers < least:
            raise ValueError(f"num_chunk_buffers={buffers}: this model needs at least {least} with these settings.")
    if knobs.num_keep_offloaded_blocks is not None:
        _check_keep(packed, knobs)


def _check_keep(packed: Sequence[Packing], knobs: Knobs) -> None:
    """Refuse an impossible number of kept blocks with offloaded chunks."""
    possible: set[int] = set()
    free = replace(knobs, num_keep_offloaded_blocks=None)
    for packing in packed:
        for num_swap, num_steps in packing.policies_allowed(free):
            bounds = packing.offloaded_range(num_swap, num_steps, free)
            if bounds is not None:
                possible.update(packing.possible_keeps(num_swap, num_steps, *bounds))
            if knobs.num_keep_offloaded_blocks in possible:
                return
    others = [f"{name}={getattr(knobs, name)}" for name in knobs.given if name != "num_keep_offloaded_blocks"]
    num_keep = knobs.num_keep_offloaded_blocks
    if not others:
        most = max(possible)
        raise ValueError(
            f"num_keep_offloaded_blocks={num_keep}: at most {plural(most, 'block')} can have offloaded chunks and keep "
            "the activations."
        )
    raise ValueError(
        f"num_keep_offloaded_blocks={num_keep} contradicts {' and '.join(others)}, which leave between {min(possible)} "
        f"and {max(possible)} such blocks. Leave one of them out."
    )
