"""Which rank of a node steps which offloaded parameter.

[Note: Owners]
Under `shard` every offloaded parameter is owned by one rank of each node: only this rank gets its gradient, keeps its
optimizer state, and writes to the copy of it that all ranks of the node read. Parameters are owned whole, as in
ZeroRedundancyOptimizer of PyTorch: an optimizer that needs a whole matrix (Adafactor, Muon, LAMB) is exact, and none
needs to know. What is lost is little: a node's ranks have as many bytes to step as the largest parameter allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_protrain.host import HostMemory
from lightning_protrain.planner.plan import ChunkPlan
from lightning_protrain.runtime.comm import Ranks
from lightning_protrain.runtime.node_memory import NodeMemory, open_node_memory, pages, with_counters


@dataclass(frozen=True)
class Share:
    """What a rank holds of one chunk, see [Note: Owners].

    Attributes:
        memory: Where the ranks of the node have the weights.
        owners: The owner of each parameter, as `local_rank`.
        local_rank: Of this rank.
    """

    memory: NodeMemory
    owners: tuple[int, ...]
    local_rank: int

    def owns(self, at: int) -> bool:
        """Whether this rank steps a parameter.

        Args:
            at: Which of those of the chunk.
        """
        return self.owners[at] == self.local_rank


def assign_owners(chunks: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """Deals parameters out so that ranks have about the same to step, in each chunk and in all.

    Args:
        chunks: Bytes of the parameters of each chunk, in execution order.
        num_ranks: Ranks of a node.

    Returns:
        The owner of each parameter, as `local_rank`.
    """
    loads = [0] * num_ranks
    owners = []
    for sizes in chunks:
        mine = [0] * len(sizes)
        # The largest first, each to the rank that has least: no rank has more than the mean and one parameter.
        for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
            mine[at] = min(range(num_ranks), key=loads.__getitem__)
            loads[mine[at]] += sizes[at]
        owners.append(mine)
    return owners


def owners_in_chunks(
    chunks: Sequence[ChunkPlan], parameters: Mapping[str, nn.Parameter], num_ranks: int
) -> list[list[int]]:
    """The owner of each parameter of offloaded chunks, as `local_rank`.

    Args:
        chunks: All of them, in execution order.
        parameters: The model's, by first name.
        num_ranks: Ranks of a node.
    """
    return assign_owners([[parameters[fqn].nbytes for fqn in chunk.parameters] for chunk in chunks], num_ranks)


def num_counters(num_chunks: int, num_ranks: int) -> int:
    """How many numbers the ranks of a node share, see [Note: Turns].

    Args:
        num_chunks: That they share.
        num_ranks: Of the node.
    """
    return (2 + num_chunks) * num_ranks


def shared_bytes(chunks: Sequence[ChunkPlan], nbytes: Mapping[str, int], num_ranks: int) -> int:
    """What `share_chunks` takes of the memory that ranks of a node can share.

    Args:
        chunks: All offloaded ones.
        nbytes: Of the model's parameters, by first name.
        num_ranks: Of the node.
    """
    return with_counters(_block_bytes(chunks, nbytes), num_counters(len(chunks), num_ranks)) if chunks else 0


def share_chunks(
    chunks: Sequence[ChunkPlan], parameters: Mapping[str, nn.Parameter], ranks: Ranks, host: HostMemory
) -> list[Share]:
    """What this rank holds of offloaded chunks; every rank calls it.

    Args:
        chunks: All of them, in execution order.
        parameters: The model's, by first name.
        ranks: Who they are shared with.
        host: Memory of the device.

    Raises:
        ValueError: There is too little memory that ranks can share.
    """
    nbytes = _block_bytes(chunks, {fqn: parameter.nbytes for fqn, parameter in parameters.items()})
    memory = open_node_memory(ranks, nbytes, host, num_counters=num_counters(len(chunks), ranks.local_size))
    owners = owners_in_chunks(chunks, parameters, ranks.local_size)
    return [Share(memory, tuple(mine), ranks.local_rank) for mine in owners]


def _block_bytes(chunks: Sequence[ChunkPlan], nbytes: Mapping[str, int]) -> int:
    masters = [nbytes[fqn] for chunk in chunks if chunk.streamed_dtype for fqn in chunk.parameters]
    return sum(pages(chunk.nbytes) for chunk in chunks) + sum(map(pages, masters))
