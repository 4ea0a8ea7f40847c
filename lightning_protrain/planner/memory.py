"""Computes the memory of placed chunks and swapped activations, on the device and on the host.

Also predicts the host memory of a plan, in training and while the model is placed.

Ranks of a node that share one copy of the offloaded chunks (*sharers*) share one host budget. The node holds weights,
low-precision copies and optimizer states once. Each rank has swapped activations of its own. With gradient
accumulation, each rank also has gradients of its own until the last micro-batch, and gradients that wait to be added.
Averaged gradients arrive only at the owner of each parameter, already cast, in one block of whole pages for each rank
and chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil
from mmap import PAGESIZE
from typing import NamedTuple

from lightning_protrain.config import format_bytes
from lightning_protrain.planner.packing import chunks_of, users_of
from lightning_protrain.planner.plan import (
    BlockPlan,
    ChunkPlan,
    MemoryTerms,
    Plan,
    chunk_offsets,
    gathers_gradients,
    unit_bytes,
)
from lightning_protrain.planner.prediction import OTHER_RANKS
from lightning_protrain.profiler.records import ModelLayout


@dataclass(frozen=True)
class HostUse:
    """The use of a node's host memory by its ranks.

    Attributes:
        sharers: Number of ranks that share one copy of the offloaded chunks.
        accumulate: Number of micro-batches in a step.
        gradient_buffers: Number of chunks whose gradients have host memory at the same time; 0: all.
    """

    sharers: int = 1
    accumulate: int = 1
    gradient_buffers: int = 0

    @property
    def gradients(self) -> int:
        """Number of copies of the offloaded chunks' gradients on the node."""
        return self.sharers if self.accumulate > 1 else 1


ALONE = HostUse()
CHECKPOINT_COPY_ADVICE = (
    "the copy of the checkpoint: saves that the training waits for, with asynchronous=False, need none."
)


@dataclass(frozen=True)
class StatesProblem:
    """The model states and swapped activations of a plan without a search, with their budgets.

    Attributes:
        layout: The model.
        state_bytes: Bytes of optimizer states (and master copies) for each trainable element.
        device_bytes: Bytes that the device may hold; None means no limit.
        host_bytes: Bytes that the host may hold; None means no limit.
        saved_bytes: Bytes that autograd saves in one forward of each block, by block name, in whole pages; without
            weights and buffers, each storage once. Only needed for `num_swap_blocks`.
        use: Use of the host by the ranks.
        reserved: Additional bytes that the device needs as soon as a plan offloads a chunk.
    """

    layout: ModelLayout
    state_bytes: float
    device_bytes: int | None = None
    host_bytes: int | None = None
    saved_bytes: Mapping[str, int] | None = None
    use: HostUse = ALONE
    reserved: int = 0


def minimum_chunk_buffers(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> int:
    """Return the least number of offloaded chunks that must be on the device together: the longest of `nests`."""
    return max((len(nest) for nest in nests(layout, offloaded_of(layout, chunks))), default=0)


def minimum_buffer_bytes(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> int:
    """Return the least bytes of offloaded chunks that must be on the device together: the heaviest of `nests`."""
    nested = nests(layout, offloaded_of(layout, chunks))
    return max((sum(chunks[index].nbytes for index in nest) for nest in nested), default=0)


def offloaded_of(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> dict[str, tuple[int, ...]]:
    """Return the indices of the offloaded chunks that each unit needs, in order."""
    needed = chunks_of(layout, chunks)
    return {name: tuple(index for index in indices if not chunks[index].resident) for name, indices in needed.items()}


def nests(layout: ModelLayout, needed: Mapping[str, tuple[int, ...]]) -> Iterator[Sequence[int]]:
    """Yield for each unit the sorted chunks that are needed while it runs: its own and those of all enclosing units.

    An enclosing unit that has all parameters of the inner unit (a block around a module that is also used elsewhere)
    adds nothing, because its own entry covers that case.

    Args:
        layout: The model.
        needed: Indices of the chunks that each unit itself needs.
    """
    around: dict[str, list[str]] = {unit.name: [] for unit in layout.units}
    parameters_of = {unit.name: unit.parameters for unit in layout.units}
    for unit in layout.units:
        for inner in unit.encloses:
            if not set(parameters_of[inner]) <= set(unit.parameters):
                around[inner].append(unit.name)
    for name, outer in around.items():
        yield sorted({*needed[name]}.union(*(needed[unit] for unit in outer))) if outer else needed[name]


class ChunkSums(NamedTuple):
    """Sums over the parameters of a chunk; bytes are in the parameters' own dtypes, or as they are streamed.

    Attributes:
        numel: Number of elements.
        nbytes: Bytes in the parameters' own dtypes.
        own_bytes: `nbytes` with alignment.
        largest: Bytes of the largest parameter in its own dtype, with alignment.
        streamed: Streamed bytes of the two largest parameters that only one module uses.
        shared: Streamed bytes of all parameters that several modules or units use.
        most_streamed: Streamed bytes of the two largest parameters.
    """

    numel: int
    nbytes: int
    own_bytes: int
    largest: int
    streamed: tuple[int, ...]
    shared: int
    most_streamed: tuple[int, ...]


def sums_of(layout: ModelLayout, chunk: ChunkPlan) -> ChunkSums:
    """Return the sums over the parameters of a chunk, cached in the layout."""
    key = "sums", chunk.parameters
    if key not in layout.known:
        if ("users",) not in layout.known:
            layout.known[("users",)] = users_of(layout)
        users = layout.known[("users",)]
        infos = [layout.by_name[fqn] for fqn in chunk.parameters]
        shared = [len(info.sites) > 1 or len(users[info.fqn]) > 1 for info in infos]
        sizes = [info.streamed_nbytes for info in infos]
        layout.known[key] = ChunkSums(
            numel=sum(info.numel for info in infos),
            nbytes=sum(info.nbytes for info in infos),
            own_bytes=chunk_offsets([info.nbytes for info in infos])[1],
            largest=chunk_offsets([max(info.nbytes for info in infos)])[1],
            streamed=tuple(sorted(size for size, twice in zip(sizes, shared, strict=True) if not twice)[-2:]),
            shared=sum(size for size, twice in zip(sizes, shared, strict=True) if twice),
            most_streamed=tuple(sorted(sizes)[-2:]),
        )
    sums: ChunkSums = layout.known[key]
    return sums


def sums_of_all(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> list[ChunkSums]:
    """Return the sums over the parameters of each chunk, cached in the layout."""
    key = "sums of all", *[chunk.parameters for chunk in chunks]
    if key not in layout.known:
        layout.known[key] = [sums_of(layout, chunk) for chunk in chunks]
    sums: list[ChunkSums] = layout.known[key]
    return sums


def memory_terms(
    layout: ModelLayout,
    chunks: Sequence[ChunkPlan],
    num_chunk_buffers: int,
    state_bytes: float,
    blocks: Sequence[BlockPlan] = (),
) -> MemoryTerms:
    """Return the device memory of model states and swapped activations.

    - Resident chunks: parameters, gradients of the same size if trainable, and optimizer states.
    - Chunk buffers: the largest sum of `num_chunk_buffers` consecutive offloaded chunks. The runtime keeps no more
      chunks than that, and evicts before it exceeds these bytes. There is room at least for one unit and all units
      around it.
    - Gradients in flight: one gradient is copied to the host while the next one is computed, so the two largest
      gradients of offloaded parameters count. Gradients of parameters that several modules share accumulate until their
      last use, so all of these count in addition. Gradients of a chunk that leave in one copy count as one gradient,
      and a second time for the memory that gathers them.
    - Swapped activations: the largest sum of two neighbouring blocks. In forward, the activations of one block leave
      while the next block computes; in backward, they come back while the next block computes.

    Args:
        layout: The model.
        chunks: All its chunks, in execution order, with their residency.
        num_chunk_buffers: Number of offloaded chunks that may be on the device together.
        state_bytes: Bytes of optimizer states (and master copies) for each trainable element.
        blocks: All its blocks, in execution order; empty if nothing is swapped.
    """
    every = zip(chunks, sums_of_all(layout, chunks), strict=True)
    resident = sum([_state_bytes(layout, chunk, own, state_bytes) for chunk, own in every if chunk.resident])
    sizes = [chunk.nbytes for chunk in chunks if not chunk.resident]
    sums = [0, *accumulate(sizes)]
    width = min(num_chunk_buffers, len(sizes))
    window = max(end - start for start, end in zip(sums, sums[width:], strict=False))
    return MemoryTerms(
        resident_states=resident,
        chunk_buffers=max(minimum_buffer_bytes(layout, chunks), window),
        gradients_in_flight=_gradients_in_flight(layout, chunks),
        module_buffers=layout.buffer_bytes,
        swapped_activations=swapped_bytes(blocks),
    )


def swapped_bytes(blocks: Sequence[BlockPlan]) -> int:
    """Return the device memory of swapped activations, see `memory_terms`."""
    swapped = [0, *(block.swap_bytes for block in blocks), 0]
    return max(map(sum, pairwise(swapped)))


def host_bytes(
    layout: ModelLayout,
    chunks: Sequence[ChunkPlan],
    state_bytes: float,
    blocks: Sequence[BlockPlan] = (),
    use: HostUse = ALONE,
) -> int:
    """Return the host memory of a plan, pinned and pageable, bytes.

    The host holds parameters, their low-precision copies, gradients and optimizer states of all offloaded chunks. At
    the end of forward it also holds the swapped activations of every block. On a single rank, gradients that reuse the
    memory of low-precision copies need no memory of their own.

    Args:
        layout: The model.
        chunks: All its chunks, with their residency.
        state_bytes: Bytes of optimizer states (and master copies) for each trainable element.
        blocks: All its blocks; empty if nothing is swapped.
        use: Use of the host by all ranks of the node.
    """
    offloaded = [chunk for chunk in chunks if not chunk.resident]
    saved = _saved_in_passing(layout, offloaded, state_bytes, use.gradient_buffers)
    lending = layout if use.sharers == 1 else replace(layout, lends_copies=False)
    states = sum(_state_bytes(lending, chunk, sums_of(layout, chunk), state_bytes) for chunk in offloaded)
    gradients = [sums_of(layout, chunk).own_bytes for chunk in offloaded if chunk.trainable]
    swapped = use.sharers * sum(block.swap_bytes for block in blocks)
    return states - saved + (use.gradients - 1) * sum(gradients) + swapped


def gradient_buffers_of(layout: ModelLayout, chunks: Sequence[ChunkPlan], state_bytes: float) -> int:
    """Return the number of buffers for gradients in passing, or 0 if they would save no memory.

    While gradients of a unit arrive, those of all its chunks and of the chunks of units around it may be incomplete.
    Besides, one chunk is stepped, and one waits for its step.
    """
    offloaded = [chunk for chunk in chunks if not chunk.resident]
    counts = Counter(chunk.unit for chunk in _kept_gradients(layout, offloaded))
    around = {unit.name for unit in layout.units if unit.encloses}
    inside = max((count for unit, count in counts.items() if unit not in around), default=0)
    count = inside + sum(count for unit, count in counts.items() if unit in around) + 2
    return count if _saved_in_passing(layout, offloaded, state_bytes, count) > 0 else 0


def _kept_gradients(layout: ModelLayout, offloaded: Iterable[ChunkPlan]) -> list[ChunkPlan]:
    """Return the chunks of a single rank whose gradients do not lie in shadow copies."""
    return [chunk for chunk in offloaded if chunk.trainable and not (layout.lends_copies and chunk.streamed_dtype)]


def _saved_in_passing(
    layout: ModelLayout, offloaded: Sequence[ChunkPlan], state_bytes: float, gradient_buffers: int
) -> int:
    """Return the host memory that gradients in passing save, see [Note: Gradients in passing].

    In the first step all gradients wait, in memory that states take later. The chunk that is being stepped has both.
    """
    chunks_kept = _kept_gradients(layout, offloaded)
    if not gradient_buffers or not layout.passes_gradients or not chunks_kept:
        return 0
    sizes = [_pages(sums_of(layout, chunk).own_bytes) for chunk in chunks_kept]
    states = int(state_bytes * sum(sums_of(layout, chunk).numel for chunk in chunks_kept))
    return max(sum(sizes) - max(gradient_buffers * max(sizes), sum(sizes) - states + max(sizes)), 0)


def _state_bytes(layout: ModelLayout, chunk: ChunkPlan, sums: ChunkSums, state_bytes: float) -> int:
    nbytes = sums.own_bytes
    copies = 0 if chunk.streamed_dtype is None else chunk.nbytes
    if not chunk.trainable:
        return nbytes + copies
    gradients = 0 if copies and layout.lends_copies else nbytes
    return nbytes + gradients + copies + ceil(state_bytes * sums.numel)


def _gradients_in_flight(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> int:
    shared, others, staged = 0, [0], 0
    every = zip(chunks, gathers_gradients(layout, chunks), sums_of_all(layout, chunks), strict=True)
    for chunk, gathered, sums in every:
        if chunk.resident or not chunk.trainable:
            continue
        shared += sums.shared
        if gathered:
            others.append(chunk.nbytes)
            staged = max(staged, chunk.nbytes)
        else:
            others += sums.streamed
    # One gradient is copied to the host while the next one is computed.
    return shared + sum(sorted(others)[-2:]) + staged


def check_fits(plan: Plan, problem: StatesProblem) -> None:
    """Refuse a plan that contradicts itself or exceeds the budgets; call `check_plan` first.

    Raises:
        ValueError: The plan exceeds a budget. Or its chunk buffers, in number or bytes, are too small for one unit and
            the units around it. Or its resident states are smaller than resident parameters and gradients. Or its
            swapped activations are smaller than those of two neighbouring blocks.
    """
    layout, device_budget = problem.layout, problem.device_bytes
    buffers = minimum_chunk_buffers(layout, plan.chunks)
    if plan.num_chunk_buffers < buffers:
        raise ValueError(
            f"The plan has num_chunk_buffers={plan.num_chunk_buffers}, this model needs at least {buffers}."
        )
    least = memory_terms(layout, plan.chunks, buffers, state_bytes=0.0, blocks=plan.blocks)
    needed = minimum_buffer_bytes(layout, plan.chunks)
    for term, planned, required in (
        ("chunk_buffers", plan.memory.chunk_buffers, needed),
        ("resident_states", plan.memory.resident_states, least.resident_states),
        ("swapped_activations", plan.memory.swapped_activations, least.swapped_activations),
    ):
        if planned < required:
            raise ValueError(
                f"The plan's memory.{term} is {format_bytes(planned)}, its {_NOUNS[term]} need at least "
                f"{format_bytes(required)}. Make the plan again."
            )
    if device_budget is not None and plan.memory.total > device_budget:
        raise ValueError(
            f"The plan needs {format_bytes(plan.memory.total)} on the device for model states, "
            f'{format_bytes(device_budget)} are allowed. Raise device_memory, or give plan="auto".'
        )
    use = replace(problem.use, gradient_buffers=plan.gradient_buffers)
    needed = host_bytes(layout, plan.chunks, problem.state_bytes, plan.blocks, use)
    check_host(needed, problem.host_bytes)


# A sentence for several ranks whose hosts are too small.
FSDP2_ADVICE = (
    'strategy="protrain_fsdp2" with cpu_offload=True shards weights and optimizer states over the hosts of all nodes; '
    "`lightning-protrain plan` shows what it needs."
)


class HostTooSmall(ValueError):
    """A plan, or every possible plan, needs more host memory than is available; the message says how much."""


def check_host(needed: int, host_budget: int | None) -> None:
    """Refuse a plan that does not fit host memory.

    Raises:
        HostTooSmall: `needed` is greater than `host_budget`, and that is not None.
    """
    if host_budget is not None and needed > host_budget:
        raise HostTooSmall(
            f"The plan needs {format_bytes(needed)} of host memory, {format_bytes(host_budget)} are available. Raise "
            "host_memory, keep more chunks on the device with num_persistent_chunks, swap fewer blocks, or train fewer "
            "parameters."
        )


_NOUNS = {"chunk_buffers": "chunks", "resident_states": "chunks", "swapped_activations": "swapped blocks"}


def host_terms(
    layout: ModelLayout,
    plan: Plan,
    state_bytes: float,
    use: HostUse = ALONE,
    asynchronous: bool = True,
) -> dict[str, int]:
    """Return the host memory at the end of a step by purpose, bytes; allocations in pages count as whole pages.

    - parameters: parameters of offloaded chunks.
    - low_precision_copies: copies that are streamed in place of parameters.
    - gradients: gradients of all offloaded chunks, except those that reuse the memory of low-precision copies. If they
      pass, the buffers that they pass through.
    - optimizer_states: optimizer states of offloaded chunks.
    - landing_gradients: gradients that wait to be added to earlier gradients, or to be cast. At most twice the bytes of
      the largest unit wait, beside the chunk that is being copied. A freed memory block is reused only for a gradient
      of equal size. In-place gradients are cast for their norms, or for steps without tiles; at most one chunk is cast
      at a time.
    - swapped_activations: activations that one call of every block swaps.
    - other_ranks: memory of the other sharers of a copy; missing if there are none.

    Args:
        layout: The model.
        plan: A plan for this model.
        state_bytes: Bytes of optimizer states (and master copies) for each trainable element.
        use: Use of the host by all ranks of the node.
        asynchronous: True if copies run beside computation.
    """
    accumulate, sharers = use.accumulate, use.sharers
    offloaded = [chunk for chunk in plan.chunks if not chunk.resident]
    trainable = [chunk for chunk in offloaded if chunk.trainable]
    elements = sum(sums_of(layout, chunk).numel for chunk in trainable)
    casts = sharers == 1
    lends = layout.lends_copies and sharers == 1
    lent = [chunk for chunk in trainable if lends and chunk.streamed_dtype is not None]
    stored = [chunk for chunk in trainable if not lends or chunk.streamed_dtype is None]
    waiting = [chunk.nbytes for chunk in stored if accumulate > 1 or (casts and chunk.streamed_dtype is not None)]
    pending = 2 * max(unit_bytes(offloaded), default=0) if asynchronous else 0
    terms = {
        "parameters": sum(_weights(layout, chunk) for chunk in offloaded),
        "low_precision_copies": sum(_pages(chunk.nbytes) for chunk in offloaded if chunk.streamed_dtype is not None),
        "gradients": sum(_pages(sums_of(layout, chunk).own_bytes) for chunk in stored)
        - _saved_in_passing(layout, offloaded, state_bytes, plan.gradient_buffers),
        "optimizer_states": ceil(state_bytes * elements),
        "landing_gradients": _pool(waiting, pending)
        + max((sums_of(layout, chunk).own_bytes for chunk in lent), default=0),
        "swapped_activations": sum(block.swap_bytes for block in plan.blocks),
    }
    if sharers > 1:
        of_rank = (
            terms["landing_gradients"] + terms["swapped_activations"] + (terms["gradients"] if accumulate > 1 else 0)
        )
        averages = 0 if accumulate > 1 else sum(min(sharers, len(chunk.parameters)) - 1 for chunk in trainable)
        terms[OTHER_RANKS] = (sharers - 1) * of_rank + averages * PAGESIZE
    return terms


def loading_terms(layout: ModelLayout, plan: Plan, asynchronous: bool) -> dict[str, int]:
    """Return the host memory while the model is placed: all weights are moved, chunk by chunk, into new memory."""
    offloaded = [chunk for chunk in plan.chunks if not chunk.resident]
    terms = host_terms(layout, plan, 0.0, asynchronous=asynchronous)
    largest = max((_pages(sums_of(layout, chunk).own_bytes) for chunk in offloaded), default=0)
    placed = terms["parameters"] + largest
    weights = sum(info.nbytes for info in layout.parameters)
    resident = weights - sum(sums_of(layout, chunk).nbytes for chunk in offloaded)
    return {
        "parameters": max(weights, placed if asynchronous else placed + resident),
        "low_precision_copies": terms["low_precision_copies"],
    }


def _pool(sizes: Iterable[int], pending: int) -> int:
    """Return the bytes of a pool: of each block size, enough for `pending` bytes and two more, or all in `sizes`."""
    return sum(_pages(size) * min(count, pending // max(size, 1) + 2) for size, count in Counter(sizes).items())


def _weights(layout: ModelLayout, chunk: ChunkPlan) -> int:
    if chunk.streamed_dtype is None:
        return _pages(chunk.nbytes)
    return sums_of(layout, chunk).nbytes


def _pages(nbytes: int) -> int:
    return max(-(-nbytes // PAGESIZE), 1) * PAGESIZE
