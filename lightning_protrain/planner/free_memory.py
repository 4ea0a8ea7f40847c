"""Free memory for a plan, on the rank that has the least of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_protrain.planner.explain import short_bytes

# Of what rank 0 has: a rank that has less than this part of it is named.
MUCH = 0.95


@dataclass(frozen=True)
class FreeMemory:
    """Free memory of one rank before anything is placed, bytes.

    Attributes:
        device: Free memory of its device; None means no limit, or that the user gives one.
        host: Free memory of its node, for all ranks there together; None means that the user gives a limit.
        weights: Host memory that weights take already: the plan counts them too.
        shared: Host memory that the ranks of its node can share; None means that they share nothing.
        shared_at: A rank of the node that has the least memory to share.
    """

    device: int | None
    host: int | None
    weights: int
    shared: int | None = None
    shared_at: int = 0

    def share(self, copies: int, nbytes: int) -> int:
        """Return the host memory for each copy of the weights, including memory that they take already.

        Args:
            copies: Number of copies of the weights on the node.
            nbytes: Bytes of the model's weights; each copy counts at most once.
        """
        assert self.host is not None
        return (self.host + min(self.weights, copies * nbytes)) // copies


def least(found: Sequence[FreeMemory], local_size: int) -> FreeMemory:
    """Return the memory that every rank has at least.

    Args:
        found: Free memory of each rank.
        local_size: Ranks of each node; they have neighbouring numbers and share the host.
    """
    hosts = [_of_host(found[first : first + local_size]) for first in range(0, len(found), local_size)]
    _, host, weights = min(hosts)
    devices = [each.device for each in found if each.device is not None]
    has_limit = all(each.host is not None for each in found)
    rooms = [(each.shared, rank) for rank, each in enumerate(found) if each.shared is not None]
    shared = min(rooms, default=(None, 0))
    return FreeMemory(min(devices, default=None), host if has_limit else None, weights, *shared)


def shortages(found: Sequence[FreeMemory]) -> list[str]:
    """Return sentences on ranks with much less free memory than rank 0, which makes the plan, on device or host."""
    kinds: tuple[tuple[str, Callable[[FreeMemory], int | None]], ...] = (
        ("its device", lambda free: free.device),
        ("its host", lambda free: free.host),
    )
    sentences = []
    for what, of in kinds:
        known = {rank: nbytes for rank, free in enumerate(found) if (nbytes := of(free)) is not None}
        rank = min(known, key=lambda each: known[each], default=0)
        if known and known[rank] < MUCH * known.get(0, 0):
            sentences.append(
                f"Rank {rank} has {short_bytes(known[rank])} of {what} free, rank 0 {short_bytes(known[0])}: the plan "
                f"of all ranks is made for {short_bytes(known[rank])}."
            )
    return sentences


def _of_host(ranks: Sequence[FreeMemory]) -> tuple[int, int, int]:
    """Return the memory for all ranks of one node together, the free part of it, and the part that weights take."""
    host, weights = min(each.host or 0 for each in ranks), sum(each.weights for each in ranks)
    return host + weights, host, weights
