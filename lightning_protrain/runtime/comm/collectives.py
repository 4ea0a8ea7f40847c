"""Collectives between the ranks of a run, counted and timed.

[Note: Nodes]
A *node* is one host with its ranks. Under `shard` the ranks of a node share one host copy of every offloaded weight;
every other node has its own. A gradient is summed over a node to the rank that owns its parameter, and then over the
nodes among the owners. So each byte is sent once within a node, and only owners send between nodes.

On a device with streams, collectives run on streams of their own, behind the work queued on the compute stream so far.
The sum over nodes is issued right behind the sum over a node, with no work of the compute stream in between. The
compute stream waits only where a sum is needed, and the host never waits. On the CPU the host waits for each sum.

[Note: One group at a time]
NCCL may deadlock if collectives of two groups run on a device at the same time: each holds a part of the device while
it waits for ranks that run the other one first. So PyTorch asks for one order of collectives on all ranks, and for a
wait on the device before another group is used. The groups with device tensors are `everyone` (gradients of chunks),
`node` and `peers` (under `shard` on several nodes), and the default group (resident gradients). Their order is that of
the plan: chunks from the last to the first, for each the sums of the node and then that of the peers. Resident
gradients follow when the last chunk has been sent. Where the group changes, a second stream waits for the collective of
the previous group, and the next collective is issued on this stream. So the compute stream goes on, and computing
overlaps with all collectives.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_protrain.device.device import Device, StreamDevice
from lightning_protrain.planner.network import Network, Route
from lightning_protrain.planner.plan import Sharding
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.rank_store import RankStore

_SUMS = "averages of gradients"


@dataclass(frozen=True)
class RankMesh:
    """The ranks and process groups of a run, seen from one rank.

    Attributes:
        rank: Index of this rank among all ranks.
        world_size: Number of all ranks.
        local_rank: Index of this rank on its node.
        local_size: Number of ranks of each node.
        everyone: Group of all ranks for gradients of chunks. The default group is left to the buckets of DDP, whose
            order may differ between ranks (`find_unused_parameters`). None: the ranks average no gradients.
        node: Group of the ranks of this node; None: there is one node.
        peers: Group of the ranks with the same `local_rank` on all nodes; None: there is one node.
        store: Messages between the ranks, which finds out who has failed.
        meeting: Group of all ranks for messages on the host, and for nothing else. In a shared group, a rank could take
            a message for the result of another collective that it waits for.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    store: RankStore
    meeting: Any
    everyone: Any = None
    node: Any = None
    peers: Any = None

    @property
    def first_of_node(self) -> int:
        """Rank of the first process of this node."""
        return self.rank - self.local_rank

    @property
    def on_node(self) -> range:
        """Ranks of this node."""
        return range(self.first_of_node, self.first_of_node + self.local_size)

    @property
    def machine(self) -> int:
        """Index of this rank's node."""
        return self.rank // self.local_size

    def meet(self, what: str, flag: bool = False) -> bool:
        """Wait until all ranks are at the same point of a run.

        Args:
            what: Point that this rank has reached: `"batch 3 of epoch 0"`.
            flag: Flag to report to all ranks.

        Returns:
            Whether any rank has set its flag.

        Raises:
            RuntimeError: A rank is at another point, has failed or is gone.
        """
        place = zlib.crc32(what.encode())
        told = torch.tensor([int(flag), place, -place])
        work = dist.all_reduce(told, dist.ReduceOp.MAX, group=self.meeting, async_op=True)
        self.store.wait(work, what)
        if told[1] != -told[2]:
            places = self.store.gather(what, "Comparing places")
            listed = ", ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            raise RuntimeError(
                f"The ranks have diverged ({listed}). Check that all ranks have the same number of batches."
            )
        return bool(told[0])


def make_rank_mesh(
    local_rank: int, local_size: int, timeout: timedelta | None = None, device: torch.device | None = None
) -> RankMesh:
    """Create the process groups of a run; every rank calls it, after the default group exists.

    Args:
        local_rank: Index of this rank on its node.
        local_size: Number of ranks of every node; ranks of a node are consecutive.
        timeout: Longest duration of a collective; None: PyTorch's default.
        device: Device that gradients are averaged on; None: the CPU.
    """
    ranks = replace(find_meeting(local_rank, local_size, timeout), everyone=dist.new_group(timeout=timeout))
    if local_size < ranks.world_size:
        first_ranks = range(0, ranks.world_size, local_size)
        # Every rank creates every group, as creating one is a collective of all ranks.
        nodes = [dist.new_group(list(range(first, first + local_size)), timeout) for first in first_ranks]
        peers = [dist.new_group([first + place for first in first_ranks], timeout) for place in range(local_size)]
        ranks = replace(ranks, node=nodes[ranks.machine], peers=peers[local_rank])
    if device is not None and device.type != "cpu":  # Gloo connects a group when it is created.
        connect_groups(ranks, device)
    return ranks


def connect_groups(ranks: RankMesh, device: torch.device) -> None:
    """Run a first collective in every group of this rank, in one order on all ranks.

    NCCL may connect a group at its first collective, and blocks the host until the other ranks of the group arrive.
    Ranks that first used two groups in different orders would wait for each other forever.
    """
    for group in (dist.group.WORLD, ranks.everyone, ranks.node, ranks.peers):
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def find_meeting(local_rank: int, local_size: int, timeout: timedelta | None = None) -> RankMesh:
    """Create only the group for messages on the host, without groups that average; every rank calls it.

    Args:
        local_rank: See `make_rank_mesh`.
        local_size: See `make_rank_mesh`.
        timeout: See `make_rank_mesh`.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    meeting = dist.new_group(backend="gloo", timeout=timeout)
    return RankMesh(rank, world_size, local_rank, local_size, RankStore.open_run(), meeting)


class Collectives:
    """Sums of gradients over ranks, with counts of what is sent.

    Args:
        ranks: Ranks that take part.
        device: Device that gradients are averaged on.
        dtype: Dtype in which gradients are sent; None: the dtype of their parameters.
    """

    def __init__(self, ranks: RankMesh, device: Device, dtype: torch.dtype | None = None) -> None:
        self.ranks = ranks
        self.dtype = dtype
        self._device = device
        self._host_waits = not isinstance(device, StreamDevice)
        # The latest collective, and its group; None: the compute stream has waited for it.
        self._latest: tuple[Any, Any] | None = None

    def begin_each(self, parts: Sequence[tuple[Tensor, int | None]]) -> list[Any]:
        """Begin to sum tensors over the ranks in place; call `end` for each before reading it.

        All sums of the node come before those of the peers. Then all owners of a node sum with their peers at the same
        time, and no rank of the node waits for another owner's sum.

        Args:
            parts: One-dimensional tensors on the device, each with the rank of each node that needs the sum, as
                `local_rank`; None: all ranks need it.
        """
        works = [self._begin(flat, owner) for flat, owner in parts]
        if self._host_waits or self.ranks.local_size == 1:
            return works
        return [
            self._begin_between_nodes(flat) if self._sums_between_nodes(owner) else work
            for work, (flat, owner) in zip(works, parts, strict=True)
        ]

    def _begin(self, flat: Tensor, owner: int | None) -> Any:
        """Begin the first collective of a sum: of all ranks, of the node, or of the peers of a rank that is alone."""
        if owner is not None and self.ranks.local_size == 1:
            return self._begin_between_nodes(flat)
        self._count(flat)
        if owner is None:
            return self._issue(self.ranks.everyone, lambda group: dist.all_reduce(flat, group=group, async_op=True))
        return self._issue(
            self.ranks.node or self.ranks.everyone,
            lambda group: dist.reduce(flat, group=group, async_op=True, group_dst=owner),
        )

    def _issue(self, group: Any, collective: Callable[[Any], Any]) -> Any:
        """Begin a collective of a group, see [Note: One group at a time]."""
        if self._latest is None or self._latest[0] is group:
            work = collective(group)
        else:
            with self.behind_others():
                work = collective(group)
        self._latest = group, work
        return work

    @contextmanager
    def behind_others(self) -> Iterator[None]:
        """Issue collectives of any group within this context, behind those already issued.

        A second stream is current within this context. It waits for the work queued on the compute stream and for the
        latest collective; the compute stream goes on. Before the context ends, make this stream wait for collectives
        that are not issued by this object, such as those of DDP.
        """
        if self._host_waits:
            yield
            return
        assert isinstance(self._device, StreamDevice)
        computed = self._device.compute_stream().record_event()
        with self._device.aside:
            self._device.compute_stream().wait_event(computed)
            if self._latest is not None:
                self._latest[1].wait()
            yield

    def end(self, work: Any, flat: Tensor, owner: int | None) -> None:
        """Make the compute stream wait until the sum is complete; if `owner` is given, only owners have the sum."""
        with self._device.span("network", "averages"):
            if self._latest is not None and self._latest[1] is work:
                self._latest = None  # Free the tensor that it may hold.
            if not self._host_waits:
                work.wait()  # Blocks the compute stream, not the host.
                return
            alone = self.ranks.local_size == 1
            members = None if owner is None or alone else self.ranks.on_node
            self.ranks.store.wait(work, _SUMS, members)
            if self._sums_between_nodes(owner) and not alone:
                self.ranks.store.naming(lambda: self._begin_between_nodes(flat).wait())

    def _sums_between_nodes(self, owner: int | None) -> bool:
        return self.ranks.peers is not None and owner == self.ranks.local_rank

    def _begin_between_nodes(self, flat: Tensor) -> Any:
        self._count(flat)
        return self._issue(self.ranks.peers, lambda group: dist.all_reduce(flat, group=group, async_op=True))

    def sum_of_node(self, values: Tensor) -> Tensor:
        """Sum small host tensors over the ranks of this node in place, and return the sum."""
        self._count(values)
        work = dist.all_reduce(values, group=self.ranks.node or self.ranks.meeting, async_op=True)
        self.ranks.store.wait(work, "the other ranks of its node", self.ranks.on_node)
        return values

    def meet(self) -> None:
        """Wait for the ranks of this node, so that all they have written to shared memory is visible."""
        if self.ranks.local_size > 1:
            self.sum_of_node(torch.zeros(1))  # Blocks the host, unlike a barrier of NCCL.

    def _count(self, tensor: Tensor) -> None:
        self._device.counters.collectives += 1
        self._device.counters.communicated_bytes += tensor.nbytes


# Size of the collective that measures latency, and maximum size of the one that measures bandwidth, bytes. Each is
# repeated, and the fastest one counts.
_SMALL, _LARGEST = 1 << 10, 64 << 20
_REPEATS = 3


def measure_collectives(
    ranks: RankMesh, device: torch.device, sharding: Sharding, layout: ModelLayout, dtype: torch.dtype | None = None
) -> Network:
    """Measure the all-reduces of a plan; every rank calls it, and all ranks get the figures of the slowest one.

    Args:
        ranks: Ranks that take part.
        device: Device that gradients are averaged on.
        sharding: Whether ranks share offloaded chunks.
        layout: Structure of the model; the gradients of its largest unit give the size of the large all-reduce.
        dtype: Dtype in which gradients are sent; None: the dtype of their parameters.

    Raises:
        RuntimeError: A rank is gone, or has failed.
    """
    element = None if dtype is None else dtype.itemsize
    shards = sharding is Sharding.SHARD
    sums: dict[str, Callable[[torch.Tensor], list[Any]]] = {
        "everyone": lambda flat: [dist.all_reduce(flat, group=ranks.everyone, async_op=True)],
    }
    if shards:
        node = ranks.node or ranks.everyone
        sums["owner"] = lambda flat: [dist.reduce(flat, group=node, async_op=True, group_dst=0)]
        if ranks.peers is not None:
            sums["peers"] = lambda flat: [dist.all_reduce(flat, group=ranks.peers, async_op=True)]
    large = max(min(_largest(layout), _LARGEST), 2 * _SMALL)
    seconds = [_seconds(begin, size, device, ranks) for begin in sums.values() for size in (_SMALL, large)]
    told = torch.tensor(seconds, dtype=torch.float64)
    work = dist.all_reduce(told, dist.ReduceOp.MAX, group=ranks.meeting, async_op=True)
    ranks.store.wait(work, "the rates of the network")
    slowest = told.tolist()
    routes = {name: _route(slowest[2 * at], slowest[2 * at + 1], large) for at, name in enumerate(sums)}
    return Network(**routes, owners=ranks.local_size if shards else 1, element=element)


def _largest(layout: ModelLayout) -> int:
    trained = {info.fqn: info.nbytes for info in layout.parameters if info.trainable}
    return max((sum(trained.get(fqn, 0) for fqn in unit.parameters) for unit in layout.units), default=0)


def _route(small: float, large: float, nbytes: int) -> Route:
    """Return latency and bandwidth of a collective from its seconds for `_SMALL` and for `nbytes` bytes.

    If the durations hardly differ, latency and bandwidth cannot be separated: the bandwidth then covers the whole
    duration for the large tensor.
    """
    beside = large - small
    if beside <= 0.5 * large:
        return Route(min(small, large), nbytes / large)
    return Route(small, (nbytes - _SMALL) / beside)


def _seconds(begin: Callable[[torch.Tensor], list[Any]], nbytes: int, device: torch.device, ranks: RankMesh) -> float:
    """Return the duration of the fastest of several collectives, seconds; `begin` returns the `Work` handles of one.

    The first collective is not timed, because it opens the connections.
    """
    flat = torch.zeros(nbytes // 4, device=device)
    durations = []
    for _ in range(_REPEATS + 1):
        together = torch.zeros(1)
        _wait(ranks, [dist.all_reduce(together, group=ranks.meeting, async_op=True)], together)
        started = time.perf_counter()
        _wait(ranks, begin(flat), flat)
        durations.append(time.perf_counter() - started)
    return min(durations[1:])


def _wait(ranks: RankMesh, works: Sequence[Any], flat: torch.Tensor) -> None:
    for work in works:
        if flat.device.type == "cpu":
            ranks.store.wait(work, "the rates of the network")
        else:
            work.wait()  # Blocks the compute stream; later reads of the sum are behind it.
    flat[:1].tolist()  # Blocks the host until the sum is complete.
