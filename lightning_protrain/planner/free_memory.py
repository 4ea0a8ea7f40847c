"""Free memory to plan for: the least of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_protrain.planner.explain import short_bytes

# A rank that has less free memory than this fraction of rank 0's is named in a message.
MUCH = 0.95


@dataclass(frozen=True)
class FreeMemory:
    """Free memory of one rank before anything is placed, bytes.

    Attributes:
        device: Free memory of its device; None if it has no limit, or if the user gives one.
        host: Free memory of its node, for all ranks there; None if the user gives a limit.
        weights: Host memory that the weights occupy already, which the plan counts as well.
        shared: Free shared memory of its node; None if the ranks share nothing.
        shared_at: The rank whose node has least shared memory.
    """

    device: int | None
    host: int | None
    weights: int
    shared: int | None = None
    shared_at: int = 0

    def share(self, copies: int, nbytes: int) -> int:
        """Return the host memory available for each copy of the weights, including memory that they occupy already.

        Args:
            copies: Number of copies of the weights on the node.
            nbytes: Bytes of the model's weights; occupied memory counts at most this much for each copy.
        """
        assert self.host is not None
        return (self.host + min(self.weights, copies * nbytes)) // copies


def least(reports: Sequence[FreeMemory], local_size: int) -> FreeMemory:
    """Return the least free memory over all ranks.

    Args:
        reports: Free memory of each rank.
        local_size: Ranks of each node; ranks with consecutive numbers are on one node.
    """
    hosts = [_of_host(reports[first : first + local_size]) for first in range(0, len(reports), local_size)]
    _, host, weights = min(hosts)
    devices = [report.device for report in reports if report.device is not None]
    has_limit = all(report.host is not None for report in reports)
    rooms = [(report.shared, rank) for rank, report in enumerate(reports) if report.shared is not None]
    shared = min(rooms, default=(None, 0))
    return FreeMemory(min(devices, default=None), host if has_limit else None, weights, *shared)


def shortages(reports: Sequence[FreeMemory]) -> list[str]:
    """Return sentences on ranks with much less free device or host memory than rank 0, which makes the plan."""
    kinds: tuple[tuple[str, Callable[[FreeMemory], int | None]], ...] = (
        ("its device", lambda free: free.device),
        ("its host", lambda free: free.host),
    )
    sentences = []
    for what, of in kinds:
        known = {rank: nbytes for rank, free in enumerate(reports) if (nbytes := of(free)) is not None}
        rank = min(known, key=lambda number: known[number], default=0)
        if known and known[rank] < MUCH * known.get(0, 0):
            sentences.append(
                f"Rank {rank} has {short_bytes(known[rank])} of {what} free, rank 0 {short_bytes(known[0])}: the plan "
                f"of all ranks is made for {short_bytes(known[rank])}."
            )
    return sentences


def _of_host(ranks: Sequence[FreeMemory]) -> tuple[int, int, int]:
    """Return the available memory of one node: the total, the free part, and the part that weights occupy."""
    host, weights = min(report.host or 0 for report in ranks), sum(report.weights for report in ranks)
    return host + weights, host, weights
