"""All-reduces over ranks of one node and of two: their traffic, and the rates that all ranks measure."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_protrain import rank_store
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import Sharding
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.rank_store import RankStore
from lightning_protrain.runtime.comm.collectives import Collectives, RankMesh, make_rank_mesh, measure_collectives
from tests.planner.layouts import layout_of, parameter
from tests.simulation.ranked import Case, ranks_of
from tests.support.ranks import run_ranks, values
from tests.support.simulated.device import Rates, SimulatedDevice
from tests.support.simulated.network import SimulatedNetwork


def _places(rank: int, local_size: int) -> Any:
    ranks = make_rank_mesh(rank % local_size, local_size, timedelta(seconds=7))
    limits = [
        each._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for each in (ranks.meeting, ranks.node, ranks.peers)
        if each is not None
    ]
    members = [
        dist.get_process_group_ranks(group) if group is not None else None for group in (ranks.node, ranks.peers)
    ]
    dist.barrier()  # All are connected.
    return ranks.first_of_node, list(ranks.on_node), members, set(limits)


def test_the_ranks_of_one_machine_are_one_node(tmp_path: Path) -> None:
    assert values(run_ranks(_places, 2, tmp_path, 2)) == [(0, [0, 1], [None, None], {7.0})] * 2


def test_machines_are_nodes_with_peers(tmp_path: Path) -> None:
    assert values(run_ranks(_places, 4, tmp_path, 2)) == [
        (0, [0, 1], [[0, 1], [0, 2]], {7.0}),
        (0, [0, 1], [[0, 1], [1, 3]], {7.0}),
        (2, [2, 3], [[2, 3], [0, 2]], {7.0}),
        (2, [2, 3], [[2, 3], [1, 3]], {7.0}),
    ]


def _connected(rank: int, local_size: int, kind: str) -> list[list[int]]:
    """The ranks of each group in the order of first collectives; the CPU stands in for a device of `kind`."""
    order, zeros = [], torch.zeros
    reduce = dist.all_reduce

    def reduced(tensor: torch.Tensor, *, group: Any) -> Any:
        order.append(dist.get_process_group_ranks(group))
        return reduce(tensor, group=group)

    with mock.patch.object(dist, "all_reduce", reduced), mock.patch.object(torch, "zeros", lambda n, device: zeros(n)):
        make_rank_mesh(rank % local_size, local_size, device=torch.device(kind))
    dist.barrier()  # All are connected.
    return order


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_every_rank_connects_its_groups_in_one_order(kind: str, tmp_path: Path) -> None:
    """A backend may connect a group at its first collective, and then wait for the other ranks of the group."""
    everyone = [0, 1, 2, 3]
    nodes, peers = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]
    expected = [[everyone, everyone, node, others] for node, others in zip(nodes, peers, strict=True)]
    assert values(run_ranks(_connected, 4, tmp_path, 2, kind)) == (expected if kind == "cuda" else [[]] * 4)


def _sums(rank: int, local_size: int) -> Any:
    """Return the values of this rank after each kind of collective, and its counters."""
    ranks = make_rank_mesh(rank % local_size, local_size)
    device = CPUDevice(torch.device("cpu"))
    communicator, counters = Collectives(ranks, device), device.counters
    found = []
    for owner in (None, 0, 1):
        flat = torch.tensor([1.0, 10.0**rank])
        before = counters.collectives, counters.communicated_bytes
        communicator.end(*communicator.begin_each([(flat, owner)]), flat, owner)
        cost = counters.collectives - before[0], counters.communicated_bytes - before[1]
        found.append((flat.tolist() if owner in (None, ranks.local_rank) else None, cost))
    on_node = communicator.sum_of_node(torch.tensor([float(rank)])).item()
    before = counters.collectives, counters.communicated_bytes
    communicator.meet()
    return found, on_node, counters.collectives - before[0], counters.communicated_bytes - before[1]


def test_sums_on_one_node_cost_one_collective(tmp_path: Path) -> None:
    first, second = values(run_ranks(_sums, 2, tmp_path, 2))
    assert first == ([([2.0, 11.0], (1, 8)), ([2.0, 11.0], (1, 8)), (None, (1, 8))], 1.0, 1, 4)
    assert second == ([([2.0, 11.0], (1, 8)), (None, (1, 8)), ([2.0, 11.0], (1, 8))], 1.0, 1, 4)


def test_between_nodes_only_owners_send(tmp_path: Path) -> None:
    found = values(run_ranks(_sums, 4, tmp_path, 2))
    whole = [4.0, 1111.0]
    for rank, (sums, on_node, *meeting) in enumerate(found):
        expected = [(whole, (1, 8)), (None, (1, 8)), (None, (1, 8))]
        expected[1 + rank % 2] = (whole, (2, 16))
        assert sums == expected
        assert on_node == (1.0 if rank < 2 else 5.0)
        assert meeting == [1, 4]


def _try(action: Any) -> Any:
    try:
        return action()
    except RuntimeError as error:
        return str(error)


def _meetings(rank: int) -> list[Any]:
    ranks = make_rank_mesh(rank, 3)
    found = [
        ranks.meet("batch 0"),
        ranks.meet("batch 1", flag=rank == 2),
        ranks.meet("batch 2"),
        _try(lambda: ranks.meet(f"batch {3 + (rank == 1)}")),
    ]
    ranks.store.sign_off("failed in this run")
    dist.barrier()
    # The notes of that run are none of the next one's.
    again = make_rank_mesh(rank, 3)
    if rank == 1:
        time.sleep(1.0)
    return [*found, _try(lambda: again.meet("batch 0"))]


def test_ranks_meet_or_learn_where_the_others_are(tmp_path: Path) -> None:
    places = "rank 0: batch 3, rank 1: batch 4, rank 2: batch 3"
    apart = f"The ranks have diverged ({places}). Check that all ranks have the same number of batches."
    assert values(run_ranks(_meetings, 3, tmp_path)) == [[False, True, False, apart, False]] * 3


def _late(rank: int, everybody: bool) -> Any:
    """Rank 1 is late for the sum of its node, while the other node waits for all at the next batch.

    Args:
        everybody: A mistake: whoever waits is taken to wait for all ranks.
    """
    rank_store._EVERY = 0.1
    if everybody:
        wait = RankStore.wait
        RankStore.wait = lambda self, work, what, members=None: wait(self, work, what)  # type: ignore[method-assign]
    ranks = make_rank_mesh(rank % 2, 2)
    communicator = Collectives(ranks, CPUDevice(torch.device("cpu")))
    if rank == 1:
        time.sleep(1.5)
    return _try(lambda: communicator.meet() or ranks.meet("batch 1"))


def test_a_rank_that_is_late_for_its_node_is_waited_for_by_all(tmp_path: Path) -> None:
    assert values(run_ranks(_late, 4, tmp_path, False)) == [False] * 4


def test_a_rank_that_waits_for_its_node_is_not_taken_to_wait_for_all(tmp_path: Path) -> None:
    found = [outcome.value for outcome in run_ranks(_late, 4, tmp_path, True)]
    assert any(
        "waits for the other ranks of its node, but this rank waits for batch 1" in str(value) for value in found
    )


def _asleep(rank: int, fault: str) -> Any:
    ranks: RankMesh = make_rank_mesh(rank, 2)
    communicator = Collectives(ranks, CPUDevice(torch.device("cpu")))
    flat = torch.ones(3)
    ranks.store.doing = "Training at step 4"
    if rank == 1:
        if fault == "failed":
            ranks.store.sign_off("failed (training at step 4) with ValueError: boom")
            return None
        found = _try(lambda: ranks.meet("batch 5"))
        time.sleep(1.5)  # Whoever notices first must not be gone before the other one does.
        return found
    return _try(partial(communicator.end, *communicator.begin_each([(flat, 0)]), flat, 0))


@pytest.mark.slow
def test_averages_that_a_rank_never_joins(tmp_path: Path) -> None:
    for fault, reason in {
        "failed": "failed (training at step 4) with ValueError: boom",
        "apart": "waits for batch 5, but this rank waits for averages of gradients. "
        "Check that all ranks have the same number of batches.",
    }.items():
        folder = tmp_path / fault
        folder.mkdir()
        found = run_ranks(_asleep, 2, folder, fault)
        assert found[0].value.rstrip(".") == f"Training at step 4 ends on rank 0: rank 1 {reason}".rstrip(".")
        assert max(outcome.seconds for outcome in found) < 10


# --- on a device with streams -----------------------------------------------------------------------------------------
def _sum_on_streams(case: Case, network: SimulatedNetwork, rank: int, owner: int | None) -> Any:
    device = SimulatedDevice(Rates(network=1.0, latency=0.0))
    with device:
        communicator = Collectives(ranks_of(case, network, device, rank), device)
        flat = torch.tensor([1.0, 10.0**rank])
        device.set_place(flat, "device")
        (work,) = communicator.begin_each([(flat, owner)])
        communicator.end(work, flat, owner)
        ended = device.compute_stream().time
        found = flat.mul(1.0).tolist() if owner in (None, communicator.ranks.local_rank) else None
        assert device.host_stream.time == 0, "the host has waited"
        return found, device.counters.collectives, device.counters.communicated_bytes, ended


@pytest.mark.parametrize("owner", [None, 0, 1])
def test_on_streams_it_costs_the_same_and_the_host_goes_on(owner: int | None) -> None:
    network, case = SimulatedNetwork(4), Case(nodes=2)
    for rank, found in enumerate(network.run(lambda rank: _sum_on_streams(case, network, rank, owner))):
        owns = owner == rank % 2
        number = 2 if owns else 1
        whole = [4.0, 1111.0] if owns or owner is None else None
        assert found == (whole, number, 8 * number, 8.0 * number)  # Seconds: one byte takes one.


def test_on_streams_both_sums_are_issued_without_the_compute_stream() -> None:
    network, case = SimulatedNetwork(4), Case(nodes=2)

    def work(rank: int) -> tuple[float, float]:
        device = SimulatedDevice(Rates(network=1.0, latency=0.0, memory=1.0))
        with device:
            communicator = Collectives(ranks_of(case, network, device, rank), device)
            flat, other = torch.zeros(1), torch.zeros(2)
            for tensor in (flat, other):
                device.set_place(tensor, "device")
            (sums,) = communicator.begin_each([(flat, 0)])
            other.zero_()
            computed = device.compute_stream().time
            communicator.end(sums, flat, 0)
            return computed, device.compute_stream().time

    assert network.run(work) == [(16.0, 16.0)] * 4  # Four bytes twice on the network, while sixteen are touched.


CPU = torch.device("cpu")
LAYOUT: ModelLayout = layout_of([parameter("a.w", 1 << 18)], {"a": ["a.w"]})


def _gauge(rank: int, local_size: int, sharding: Sharding, slow: int = -1) -> Network:
    ranks = make_rank_mesh(rank % local_size, local_size)
    plain = dist.all_reduce

    def late(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() > 1000:
            time.sleep(0.2)
        return plain(tensor, *args, **kwargs)

    if rank == slow:
        dist.all_reduce = late  # Of this process.
    return measure_collectives(ranks, CPU, sharding, LAYOUT, torch.bfloat16 if slow >= 0 else None)


@pytest.mark.parametrize(
    ("world_size", "local_size", "sharding", "routes"),
    [
        (2, 2, Sharding.REPLICATE, (True, False, False)),
        (2, 2, Sharding.SHARD, (True, True, False)),
        (4, 2, Sharding.SHARD, (True, True, True)),
    ],
    ids=["replicate", "shard", "two machines"],
)
def test_all_ranks_have_the_same_rates(
    world_size: int, local_size: int, sharding: Sharding, routes: tuple[bool, ...], tmp_path: Path
) -> None:
    first, *others = values(run_ranks(_gauge, world_size, tmp_path, local_size, sharding))
    assert others == [first] * (world_size - 1)
    assert (True, first.owner is not None, first.peers is not None) == routes
    assert first.owners == (local_size if sharding is Sharding.SHARD else 1)
    assert first.element is None
    assert 1e6 < first.everyone.rate < 1e12
    assert 0 <= first.everyone.latency < 1


def test_the_slowest_rank_counts(tmp_path: Path) -> None:
    first, second = values(run_ranks(_gauge, 2, tmp_path, 2, Sharding.REPLICATE, 1))
    assert first == second
    assert first.element == 2
    assert first.everyone.rate < LAYOUT.parameters[0].nbytes / 0.19
