"""Which blocks swap, which recompute, which keep their activations, if so many do (paper, section 3.1.2).

[Note: Layout of policies]
Swapped blocks come early and apart from each other: what one of them swaps has the time of the blocks up to the next
one to leave and to come back. Of the others, those that take the least time for each byte they free are checkpointed
first: where some blocks have experts and others do not, that is more than a few per cent of a step. Blocks that cost
about the same go by their place, the first one first: what the last blocks keep is used up first in backward, and
makes room for what comes back. The places of swapped blocks do not depend on the number of checkpoints, and one more
checkpoint turns the next kept block of that order into a checkpointed one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.profiler.records import ModelLayout

# Blocks cost about the same if they differ by no more than that from the next cheaper one.
ALIKE = 1.05


def lay_out(order: Sequence[int], swapped: Collection[int], num_checkpoint: int) -> tuple[BlockPolicy, ...]:
    """Policies of all blocks, see [Note: Layout of policies].

    Args:
        order: Indices of all blocks, as of `checkpoint_order`; by place where nothing is known of their costs.
        swapped: Indices of those that swap.
        num_checkpoint: How many of the others recompute.
    """
    policies = [BlockPolicy.KEEP] * len(order)
    for index in swapped:
        policies[index] = BlockPolicy.SWAP
    others = [index for index in order if index not in swapped]
    for index in others[:num_checkpoint]:
        policies[index] = BlockPolicy.CHECKPOINT
    return tuple(policies)


def checkpoint_order(seconds: Iterable[float], nbytes: Iterable[float]) -> tuple[int, ...]:
    """Indices of all blocks, those first whose recomputation takes the least time for each byte.

    Args:
        seconds: What each takes to recompute.
        nbytes: What each frees; who frees nothing comes last.
    """
    costs = [taken / freed if freed > 0 else inf for taken, freed in zip(seconds, nbytes, strict=True)]
    kinds, kind, previous = [0] * len(costs), 0, 0.0
    for index in sorted(range(len(costs)), key=costs.__getitem__):
        kind += costs[index] > ALIKE * previous
        kinds[index], previous = kind, costs[index]
    return tuple(sorted(range(len(costs)), key=kinds.__getitem__))


def spread(num_swap: int, num_blocks: int) -> tuple[int, ...]:
    """Places of `num_swap` swapped blocks, evenly among the first `num_blocks`."""
    return tuple(index * num_blocks // num_swap for index in range(num_swap))


def swap_interval(transfers: Sequence[float], computes: Sequence[float]) -> int:
    """Every how many blocks one may swap, so that the transfer is hidden: the fewest blocks that compute as long.

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
    """Places where blocks may swap, in the order in which they are taken: every `interval` blocks from the first on.

    Args:
        able: Which blocks have something to swap.
        interval: Blocks from one place to the next.
        pinned: So many places there must be: the interval is shortened for them.

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
    """Refuses numbers of blocks that the model has not.

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
        raise ValueError(f"{given}: this model has {len(layout.blocks)} blocks.")
