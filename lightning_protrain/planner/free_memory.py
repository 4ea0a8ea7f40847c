"""What is free of the memory that a plan is made for, on the rank that has the least of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_protrain.planner.explain import short_bytes

# Of what rank 0 has: a rank that has less than this part of it is named.
MUCH = 0.95


@dataclass(frozen=True)
class FreeMemory:
    """What one rank has free, in bytes, before anything has been placed.

    Attributes:
        device: Of its device; None: no limit, or the user gives one.
        host: Of its machine, for all ranks there together; None: the user gives a limit.
        weights: What weights take of the host already: they are a part of what the plan counts.
        shared: Of the host's memory that its ranks can share; None: they share nothing.
        shared_at: A rank of the machine that has so little to share.
    """

    device: int | None
    host: int | None
    weights: int
    shared: int | None = None
    shared_at: int = 0

    def share(self, copies: int, nbytes: int) -> int:
        """Bytes of the host for each of so many copies of what is offloaded, with what weights take already.

        Args:
            copies: How many there will be on the machine.
            nbytes: Of the weights of the model; no more than one set of them is counted for each copy.
        """
        assert self.host is not None
        return (self.host + min(self.weights, copies * nbytes)) // copies


def least(found: Sequence[FreeMemory], local_size: int) -> FreeMemory:
    """What every rank has at least.

    Args:
        found: Of each rank.
        local_size: Ranks of each machine; they are neighbours, and share the host.
    """
    hosts = [_of_host(found[first : first + local_size]) for first in range(0, len(found), local_size)]
    _, host, weights = min(hosts)
    devices = [each.device for each in found if each.device is not None]
    has_limit = all(each.host is not None for each in found)
    rooms = [(each.shared, rank) for rank, each in enumerate(found) if each.shared is not None]
    shared = min(rooms, default=(None, 0))
    return FreeMemory(min(devices, default=None), host if has_limit else None, weights, *shared)


def shortages(found: Sequence[FreeMemory]) -> list[str]:
    """Who has much less than rank 0, which is where plans are made: one sentence for devices, one for hosts."""
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
    """Of the ranks of one machine: all that there is for them, of it what is free, and what weights take."""
    host, weights = min(each.host or 0 for each in ranks), sum(each.weights for each in ranks)
    return host + weights, host, weights
