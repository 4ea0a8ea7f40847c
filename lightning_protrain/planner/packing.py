"""Packs parameters into chunks, and lays out the policies of blocks. Names and numbers in, names and numbers out.

[Note: Layout of policies]
Swapped blocks come early and at a distance from each other: the transfers of one have the time up to the next one.
Other blocks give up activations in *steps*: first all except the products (see [Note: Products]), then these too, or
all at once where that is cheaper. Steps with the least time for each freed byte come first. That matters if only some
blocks have experts: it is more than a few per cent of a step. Steps of about equal cost are ordered by block, the first
block first: activations of the last blocks are used first in backward, and make room for what comes back. The places of
swapped blocks do not depend on the number of steps, and one more step is one more block that gives something up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter

from lightning_protrain.config import plural
from lightning_protrain.planner.plan import ALIGNMENT, BlockPolicy, ChunkPlan, chunk_offsets
from lightning_protrain.profiler.records import ModelLayout, ParameterInfo

# Steps cost about the same if they differ by no more than that from the next cheaper one.
ALIKE = 1.05
# A block and what becomes of it.
Step = tuple[int, BlockPolicy]


def users_of(layout: ModelLayout) -> dict[str, tuple[str, ...]]:
    """Return the names of the units that need each parameter, in execution order, by its first name."""
    users: dict[str, tuple[str, ...]] = {info.fqn: () for info in layout.parameters}
    for unit in layout.units:
        own = (unit.name,)  # One tuple for all chunks that only this unit needs.
        for fqn in unit.parameters:
            users[fqn] += own
    return users


def pack_chunks(layout: ModelLayout, chunk_bytes: int | None = None) -> tuple[ChunkPlan, ...]:
    """Pack every parameter into one chunk, all of them offloaded.

    A chunk holds parameters of one dtype (on the host and on the device), all trainable or all frozen, that the same
    units need. So a chunk never spans units, and a tied parameter is in another chunk than parameters that only its
    first unit needs.

    Args:
        layout: The model.
        chunk_bytes: Maximum size of a chunk with alignment, bytes (S_chunk in the paper); a larger parameter gets a
            chunk of its own. `None` means no limit.

    Returns:
        Chunks in execution order of the units that own them.

    Raises:
        ValueError: If `chunk_bytes` is below 1.
    """
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; give a positive number of bytes, or None for no limit.")
    users = users_of(layout)
    chunks: list[ChunkPlan] = []
    # Alike units are divided alike.
    parts: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for unit in layout.units:
        groups: dict[tuple[str, str | None, bool, tuple[str, ...]], list[ParameterInfo]] = {}
        latest, group = None, []
        for fqn in unit.parameters:
            used_by = users[fqn]
            if used_by[0] == unit.name:
                info = layout.by_name[fqn]
                kind = (info.dtype, info.streamed_dtype, info.trainable, used_by)
                if kind != latest:
                    latest, group = kind, groups.setdefault(kind, [])
                group.append(info)
        for (dtype, streamed, trainable, _), infos in groups.items():
            sizes = tuple([info.streamed_nbytes for info in infos])
            if sizes not in parts:
                parts[sizes] = list(_split(sizes, chunk_bytes))
            names = tuple([info.fqn for info in infos])
            chunks += [
                ChunkPlan(names[begin:end], unit.name, dtype, trainable, nbytes, False, streamed)
                for begin, end, nbytes in parts[sizes]
            ]
    return tuple(chunks)


def with_residency(layout: ModelLayout, chunk: ChunkPlan, resident: bool) -> ChunkPlan:
    """Return the chunk as a resident one (in the dtype of its parameters) or a streamed one."""
    infos = [layout.by_name[fqn] for fqn in chunk.parameters]
    _, nbytes = chunk_offsets([info.nbytes if resident else info.streamed_nbytes for info in infos])
    streamed_dtype = None if resident else infos[0].streamed_dtype
    return ChunkPlan(chunk.parameters, chunk.unit, chunk.dtype, chunk.trainable, nbytes, resident, streamed_dtype)


def _split(sizes: Sequence[int], chunk_bytes: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield the first parameter, the end and the bytes of each chunk that parameters of these sizes fill."""
    begin = filled = 0
    for index, nbytes in enumerate(sizes):
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if index > begin and chunk_bytes is not None and filled + size > chunk_bytes:
            yield begin, index, filled
            begin, filled = index, 0
        filled += size
    yield begin, len(sizes), filled


def chunks_of(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> dict[str, tuple[int, ...]]:
    """Return the indices of all chunks that each unit needs, those of tied parameters it does not own included."""
    key = tuple([chunk.parameters for chunk in chunks])
    if key not in layout.known:
        index_of = {fqn: index for index, chunk in enumerate(chunks) for fqn in chunk.parameters}
        layout.known[key] = {
            unit.name: tuple(sorted({index_of[fqn] for fqn in unit.parameters})) for unit in layout.units
        }
    needed: dict[str, tuple[int, ...]] = layout.known[key]
    return needed


@dataclass(frozen=True)
class Recomputation:
    """The cost of recomputing a block, and the memory that it frees.

    Attributes:
        seconds: Seconds to recompute all of it.
        nbytes: Bytes that are freed then.
        selective_seconds: Seconds to recompute everything but its products.
        selective_nbytes: Bytes that are freed then; 0 means that it is not possible.
    """

    seconds: float
    nbytes: float
    selective_seconds: float = 0.0
    selective_nbytes: float = 0.0


def lay_out(
    num_blocks: int, steps: Sequence[Step], swapped: Collection[int], num_steps: int
) -> tuple[BlockPolicy, ...]:
    """Return the policies of all blocks, see [Note: Layout of policies].

    Args:
        num_blocks: Number of blocks.
        steps: All of them, of all blocks, as of `order_steps`.
        swapped: Indices of blocks that swap.
        num_steps: Number of steps that the other blocks take.
    """
    policies = [BlockPolicy.KEEP] * num_blocks
    for index in swapped:
        policies[index] = BlockPolicy.SWAP
    for index, policy in [step for step in steps if step[0] not in swapped][:num_steps]:
        policies[index] = policy
    return tuple(policies)


def by_place(num_blocks: int) -> tuple[Step, ...]:
    """Return the steps if costs are unknown: one block after the other is checkpointed."""
    return tuple((index, BlockPolicy.CHECKPOINT) for index in range(num_blocks))


def order_steps(blocks: Sequence[Recomputation]) -> tuple[Step, ...]:
    """Return all steps, the least time for each freed byte first, see [Note: Layout of policies]."""
    costs = [
        (seconds / freed if freed > 0 else inf, index, policy)
        for index, block in enumerate(blocks)
        for policy, seconds, freed in _steps(block)
    ]
    found: list[tuple[int, int, int, BlockPolicy]] = []
    kind, previous = 0, 0.0
    for cost, index, policy in sorted(costs, key=itemgetter(0)):
        kind, previous = kind + (cost > ALIKE * previous), cost
        found.append((kind, index, len(found), policy))
    return tuple((index, policy) for _, index, _, policy in sorted(found))


def _steps(block: Recomputation) -> list[tuple[BlockPolicy, float, float]]:
    """Return the steps of one block: policy, seconds and bytes; each byte costs more than one of the step before."""
    whole = BlockPolicy.CHECKPOINT, block.seconds, block.nbytes
    if block.selective_nbytes <= 0:
        return [whole]
    seconds, nbytes = block.seconds - block.selective_seconds, block.nbytes - block.selective_nbytes
    if nbytes <= 0 or block.selective_seconds * nbytes >= seconds * block.selective_nbytes:
        return [whole]
    first = BlockPolicy.SELECTIVE, block.selective_seconds, block.selective_nbytes
    return [first, (BlockPolicy.CHECKPOINT, seconds, nbytes)]


def spread(num_swap: int, num_blocks: int) -> tuple[int, ...]:
    """Return the places of `num_swap` swapped blocks, evenly among the first `num_blocks`."""
    return tuple(index * num_blocks // num_swap for index in range(num_swap))


def swap_interval(transfers: Sequence[float], computes: Sequence[float]) -> int:
    """Return the distance between swapped blocks that hides their transfers: the fewest blocks that compute as long.

    Args:
        transfers: Seconds that the activations of each block take to leave or to come back; 0: it cannot swap.
        computes: Seconds of the forward of each block.

    Returns:
        At least 1, at most the number of blocks.
    """
    swapped = [seconds for seconds in transfers if seconds > 0]
    if not swapped:
        return max(len(transfers), 1)
    transfer, compute = max(swapped), sum(computes) / len(computes)
    interval = 1
    while interval < len(transfers) and interval * compute < transfer:
        interval += 1
    return interval


def swap_places(able: Sequence[bool], interval: int, pinned: int | None = None) -> tuple[int, ...]:
    """Return the places where blocks may swap, in the order of use: every `interval` blocks from the first on.

    Args:
        able: True for each block that has something to swap.
        interval: Blocks from one place to the next.
        pinned: Number of places that the user requires; the interval is shortened to have them.

    Returns:
        Indices that rise; all of blocks that are able. With `pinned`, fewer only if fewer blocks are able.
    """
    candidates = [index for index, can in enumerate(able) if can]
    places: list[int] = []
    for distance in range(interval, 0, -1):
        places = []
        for index in candidates:
            if not places or index - places[-1] >= distance:
                places.append(index)
        if len(places) >= (pinned or 0):
            break
    return tuple(places[:pinned])


def check_counts(layout: ModelLayout, num_swap: int, num_checkpoint: int) -> None:
    """Refuse numbers of blocks that the model does not have.

    Raises:
        ValueError: More blocks than there are, or any of a model that is one block.
    """
    counts = {"num_swap_blocks": num_swap, "num_checkpoint_blocks": num_checkpoint}
    given = " and ".join(f"{name}={count}" for name, count in counts.items() if count)
    if given and [block.name for block in layout.blocks] == [""]:
        effect = "cannot be run twice" if num_checkpoint else "would bring all its activations back at once"
        raise ValueError(
            f"{given}: this model has no repeated list of blocks, and as a whole it {effect}. Name blocks with "
            "`blocks`."
        )
    if num_swap + num_checkpoint > len(layout.blocks):
        raise ValueError(f"{given}: this model has {plural(len(layout.blocks), 'block')}. Give fewer.")
