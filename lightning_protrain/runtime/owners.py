"""Which rank of a node steps which offloaded parameter.

[Note: Owners]
Under `shard` every offloaded parameter is owned by one rank of each node: only this rank gets its gradient, keeps its
optimizer state, and writes to the copy of it that all ranks of the node read. Parameters are owned whole, as in
ZeroRedundancyOptimizer of PyTorch: an optimizer that needs a whole matrix (Adafactor, Muon, LAMB) is exact, and none
needs to know. What is lost is little: a node's ranks have as many bytes to step as the largest parameter allows.

[Note: Machines]
Every node holds all offloaded weights, and each of them may step all of them: the same work, and the same states, as
often as there are nodes. Or nodes *divide steps*: what a rank owns in a chunk is stepped by one of the ranks that own
it, one on each node, and only there are its gradient and its optimizer state. The others, its *peers*, get the new
weights from it over the network: reduced to one and sent by one is as much as summed to all. Parameters are divided by
chunk and owner, so no sum is cut in two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_protrain.companions import packed_nbytes
from lightning_protrain.host import HostMemory
from lightning_protrain.planner.plan import ChunkPlan, chunk_offsets
from lightning_protrain.runtime.comm import Ranks
from lightning_protrain.runtime.node_memory import NodeMemory, open_node_memory, pages, with_counters
from lightning_protrain.runtime.rows import held_bytes, rows_of


@dataclass(frozen=True)
class Share:
    """What a rank holds of one chunk, see [Note: Owners].

    Attributes:
        memory: Where the ranks of the node have the weights.
        owners: The owner of each parameter, as `local_rank`.
        local_rank: Of this rank.
        machines: The node that steps each parameter; None: all of them do, see [Note: Machines].
        machine: That of this rank.
        num_places: Ranks of a node.
        mesh: Of nodes that hold rows of each parameter, see [Note: Rows]; None: each holds all of it.
    """

    memory: NodeMemory
    owners: tuple[int, ...]
    local_rank: int
    machines: tuple[int, ...] | None = None
    machine: int = 0
    num_places: int = 1
    mesh: Any = None

    def owns(self, at: int) -> bool:
        """Whether this rank steps a parameter.

        Args:
            at: Which of those of the chunk.
        """
        return self.owners[at] == self.local_rank and (self.machines is None or self.machines[at] == self.machine)

    def stepped_by(self, at: int) -> int:
        """Who steps a parameter: as `local_rank`, of every node, or as `rank`, where nodes divide steps."""
        return self.owners[at] + (0 if self.machines is None else self.machines[at] * self.num_places)


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


def assign_machines(
    chunks: Sequence[Sequence[tuple[int, int]]], owners: Sequence[Sequence[int]], num_machines: int
) -> list[list[int]]:
    """Deals out what ranks own so that machines have about the same to step, see [Note: Machines].

    Args:
        chunks: For each parameter of each chunk, in execution order: its bytes if it is trained, and its bytes.
        owners: As of `assign_owners`.
        num_machines: How many there are.

    Returns:
        The machine of each parameter.
    """
    loads = [(0, 0)] * num_machines
    machines = []
    for sizes, mine in zip(chunks, owners, strict=True):
        chosen = {}
        for owner in sorted(set(mine)):
            own = [size for size, place in zip(sizes, mine, strict=True) if place == owner]
            # Frozen ones count, too, but last: they may be trained later.
            least = chosen[owner] = min(range(num_machines), key=loads.__getitem__)
            loads[least] = tuple(map(sum, zip(loads[least], *own, strict=True)))  # type: ignore[assignment]
        machines.append([chosen[owner] for owner in mine])
    return machines


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
    if ranks.mesh is not None:
        nbytes = sum(_held_bytes(chunk, [parameters[fqn] for fqn in chunk.parameters], ranks.mesh) for chunk in chunks)
    memory = open_node_memory(ranks, nbytes, host, num_counters=num_counters(len(chunks), ranks.local_size))
    owners = owners_in_chunks(chunks, parameters, ranks.local_size)
    if not ranks.divides_steps:
        return [Share(memory, tuple(mine), ranks.local_rank, mesh=ranks.mesh) for mine in owners]
    sizes = [[_trained_and_all(parameters[fqn]) for fqn in chunk.parameters] for chunk in chunks]
    machines = assign_machines(sizes, owners, ranks.num_machines)
    return [
        Share(memory, tuple(mine), ranks.local_rank, tuple(where), ranks.machine, ranks.local_size)
        for mine, where in zip(owners, machines, strict=True)
    ]


def _trained_and_all(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter.nbytes if parameter.requires_grad else 0, parameter.nbytes


def _held_bytes(chunk: ChunkPlan, parameters: Sequence[nn.Parameter], mesh: Any) -> int:
    """What each node takes for a chunk of which it holds rows."""
    rows = rows_of(parameters, mesh)
    if chunk.streamed_dtype is None:
        return pages(chunk_offsets(held_bytes([packed_nbytes(each) for each in parameters], rows))[1])
    low: torch.dtype = getattr(torch, chunk.streamed_dtype)
    copies = held_bytes([each.numel() * low.itemsize for each in parameters], rows)
    masters = held_bytes([each.nbytes for each in parameters], rows)
    return pages(chunk_offsets(copies)[1]) + sum(map(pages, masters))


def _block_bytes(chunks: Sequence[ChunkPlan], nbytes: Mapping[str, int]) -> int:
    masters = [nbytes[fqn] for chunk in chunks if chunk.streamed_dtype for fqn in chunk.parameters]
    return sum(pages(chunk.nbytes) for chunk in chunks) + sum(map(pages, masters))
