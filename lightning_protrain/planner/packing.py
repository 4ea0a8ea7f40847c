"""Packs parameters into chunks, and assigns a policy to each block. Works on names and numbers only.

[Note: Layout of policies]
Swapped blocks come early and at equal distances, so that the transfers of one block are hidden before the next one.
Other blocks give up activations in *steps*: first all except the products (see [Note: Products]), then the products, or
everything at once if that costs less. Steps are sorted by the recompute time for each freed byte. That matters if only
some blocks have experts: it saves more than a few per cent of a step. Steps of about equal cost are ordered by block,
the first block first: backward uses the activations of the last blocks first, and frees their memory for recomputed
ones. The positions of swapped blocks do not depend on the number of steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter

from lightning_protrain.config import plural
from lightning_protrain.planner.plan import ALIGNMENT, BlockPolicy, ChunkPlan, chunk_offsets
from lightning_protrain.profiler.records import ModelLayout, ParameterInfo

# A step costs about the same as the next cheaper one if it costs at most this many times as much.
ALIKE = 1.05
# Index of a block, and the policy that it takes.
Step = tuple[int, BlockPolicy]


def users_of(layout: ModelLayout) -> dict[str, tuple[str, ...]]:
    """Return for each parameter, by its first name, the names of the units that need it, in execution order."""
    users: dict[str, tuple[str, ...]] = {info.fqn: () for info in layout.parameters}
    for unit in layout.units:
        names = (unit.name,)  # Units share one tuple among all their parameters.
        for fqn in unit.parameters:
            users[fqn] += names
    return users


def pack_chunks(layout: ModelLayout, chunk_bytes: int | None = None) -> tuple[ChunkPlan, ...]:
    """Pack every parameter into one chunk, all of them offloaded.

    All parameters of a chunk have one dtype (on the host and on the device), are all trainable or all frozen, and are
    needed by the same units. So a chunk never spans units. A tied parameter is in another chunk than parameters that
    only its first unit needs.

    Args:
        layout: The model.
        chunk_bytes: Maximum size of a chunk with alignment, bytes (S_chunk in the paper); None means no limit. A larger
            parameter gets a chunk of its own.

    Returns:
        Chunks in the execution order of the units that own them.

    Raises:
        ValueError: `chunk_bytes` is below 1.
    """
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; give a positive number of bytes, or None for no limit.")
    users = users_of(layout)
    chunks: list[ChunkPlan] = []
    # Units with parameters of equal sizes are divided equally.
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
    """Return the chunk as resident (in the dtype of its parameters) or as streamed."""
    infos = [layout.by_name[fqn] for fqn in chunk.parameters]
    _, nbytes = chunk_offsets([info.nbytes if resident else info.streamed_nbytes for info in infos])
    streamed_dtype = None if resident else infos[0].streamed_dtype
    return ChunkPlan(chunk.parameters, chunk.unit, chunk.dtype, chunk.trainable, nbytes, resident, streamed_dtype)


def _split(sizes: Sequence[int], chunk_bytes: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield (first parameter, end, bytes) of each chunk that parameters of these sizes fill."""
    begin = filled = 0
    for index, nbytes in enumerate(sizes):
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if index > begin and chunk_bytes is not None and filled + size > chunk_bytes:
            yield begin, index, filled
            begin, filled = index, 0
        filled += size
    yield begin, len(sizes), filled


def chunks_of(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> dict[str, tuple[int, ...]]:
    """Return the indices of all chunks that each unit needs, including tied parameters that another unit owns."""
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
        seconds: Seconds to recompute the whole block.
        nbytes: Bytes that recomputing the whole block frees.
        selective_seconds: Seconds to recompute everything except the products.
        selective_nbytes: Bytes that selective recomputation frees; 0 means that it is not possible.
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
        steps: All recompute steps of all blocks, from `order_steps`.
        swapped: Indices of blocks that swap.
        num_steps: Number of recompute steps to take, in blocks that do not swap.
    """
    policies = [BlockPolicy.KEEP] * num_blocks
    for index in swapped:
        policies[index] = BlockPolicy.SWAP
    for index, policy in [step for step in steps if step[0] not in swapped][:num_steps]:
        policies[index] = policy
    return tuple(policies)


def by_place(num_blocks: int) -> tuple[Step, ...]:
    """Return the recompute steps if costs are unknown: checkpoint one block after the other."""
    return tuple((index, BlockPolicy.CHECKPOINT) for index in range(num_blocks))


def order_steps(blocks: Sequence[Recomputation]) -> tuple[Step, ...]:
    """Return all recompute steps, sorted by time for each freed byte, see [Note: Layout of policies]."""
    costs = [
        (seconds / freed if freed > 0 else inf, index, policy)
        for index, block in enumerate(blocks)
        for policy, seconds, freed in _steps(block)
    ]
    ordered: list[tuple[int, int, int, BlockPolicy]] = []
    kind, previous = 0, 0.0
    for cost, index, policy in sorted(costs, key=itemgetter(0)):
        kind, previous = kind + (cost > ALIKE * previous), cost
        ordered.append((kind, index, len(ordered), policy))
    return tuple((index, policy) for _, index, _, policy in sorted(ordered))


def _steps(block: Recomputation) -> list[tuple[BlockPolicy, float, float]]:
    """Return (policy, seconds, bytes) of each step of one block; later steps cost more for each byte."""
    whole = BlockPolicy.CHECKPOINT, block.seconds, block.nbytes
    if block.selective_nbytes <= 0:
        return [whole]
    seconds, nbytes = block.seconds - block.selective_seconds, block.nbytes - block.selective_nbytes
    if nbytes <= 0 or block.selective_seconds * nbytes >= seconds * block.selective_nbytes:
        return [whole]
    first = BlockPolicy.SELECTIVE, block.selective_seconds, block.selective_nbytes
    return [first, (BlockPolicy.CHECKPOINT, seconds, nbytes)]


def spread(num_swap: int, num_blocks: int) -> tuple[int, ...]:
    """Return the indices of `num_swap` swapped blocks, spread evenly over the first `num_blocks` blocks."""
    return tuple(index * num_blocks // num_swap for index in range(num_swap))


def swap_interval(transfers: Sequence[float], computes: Sequence[float]) -> int:
    """Return the distance between swapped blocks that hides their transfers behind the blocks between them.

    Args:
        transfers: Seconds to copy the activations of each block in one direction; 0: the block cannot swap.
        computes: Forward time of each block, seconds.

    Returns:
        The least distance, at least 1 and at most the number of blocks.
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
    """Return the indices of the blocks that may swap, in the order of use: every `interval`-th from the first on.

    Args:
        able: True for each block that has activations to swap.
        interval: Distance between swapped blocks.
        pinned: Number of swapped blocks that the user requires; the interval is shortened to reach it. None: no number.

    Returns:
        Rising indices of blocks that are able to swap. Fewer than `pinned` only if fewer blocks are able to swap.
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
    """Refuse counts of swapped and checkpointed blocks that the model cannot have.

    Raises:
        ValueError: The counts exceed the number of blocks, or are positive although the whole model is one block.
    """
    counts = {"num_swap_blocks": num_swap, "num_checkpoint_blocks": num_checkpoint}
    settings = " and ".join(f"{name}={count}" for name, count in counts.items() if count)
    if settings and [block.name for block in layout.blocks] == [""]:
        effect = "cannot be run twice" if num_checkpoint else "would bring all its activations back at once"
        raise ValueError(
            f"{settings}: this model has no repeated list of blocks, and as a whole it {effect}. Name blocks with "
            "`blocks`."
        )
    if num_swap + num_checkpoint > len(layout.blocks):
        raise ValueError(f"{settings}: this model has {plural(len(layout.blocks), 'block')}. Give fewer.")
