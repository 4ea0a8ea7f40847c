"""Ranks in threads, one at a time in a fixed order; their collectives do what those of NCCL do in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.simulated.collectives import SimulatedGroup
from tests.support.simulated.device import Rates, SimulatedDevice
from tests.support.simulated.network import SimulatedNetwork
from tests.support.simulated.streams import RaceError


def test_the_first_failure_is_raised_and_others_learn_that_nobody_comes() -> None:
    network, learnt = SimulatedNetwork(3), []

    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError("out of luck")
        try:
            network.exchange("a place", rank, range(3), None)
        except RuntimeError as error:
            learnt.append(str(error))
            raise

    with pytest.raises(ValueError, match="out of luck"):
        network.run(fail)
    assert learnt == [f"Rank {rank} waits for a place, and no other rank goes on." for rank in (0, 2)]


RATES = Rates(memory=1e6, network=1e3, latency=0.5)


class Rank:
    """One of several, with a device and a group of all."""

    def __init__(self, network: SimulatedNetwork, rank: int, rates: Rates = RATES) -> None:
        self.rank = rank
        self.network = network
        self.device = SimulatedDevice(rates)
        self.group = SimulatedGroup("all", network, self.device, rank, range(network.world_size))

    def tensor(self, *values: float) -> Tensor:
        """Return a tensor on the device."""
        tensor = torch.tensor(values)
        self.device.set_place(tensor, "device")
        return tensor

    def look(self, tensor: Tensor) -> list[float]:
        """Return the values in memory now, which pending work may still overwrite."""
        with self.device.unattributed():
            return tensor.clone().tolist()  # type: ignore[no-any-return]


def on_ranks(work: Callable[[Rank], Any], world_size: int = 2, rates: Callable[[int], Rates] = lambda _: RATES) -> Any:
    """Return the results of `work` on all ranks."""
    network = SimulatedNetwork(world_size)

    def run(number: int) -> Any:
        rank = Rank(network, number, rates(number))
        with rank.device:
            return work(rank)

    return network.run(run)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_sum_is_there_when_it_has_been_waited_for_and_not_before(world_size: int) -> None:
    def work(rank: Rank) -> Any:
        flat = rank.tensor(1.0, 10.0**rank.rank)
        handle = dist.all_reduce(flat, group=rank.group, async_op=True)
        before = rank.look(flat)
        handle.wait()
        return before, rank.look(flat.mul(1.0)), handle.is_completed()

    nothing, total = [pytest.approx(float("nan"), nan_ok=True)] * 2, [world_size, float("1" * world_size)]
    for before, after, completed in on_ranks(work, world_size):
        assert before == nothing
        assert after == total
        assert not completed  # The host has not waited.


def test_the_sum_of_a_reduction_is_on_its_root_only() -> None:
    def work(rank: Rank) -> list[float]:
        flat = rank.tensor(1.0 + rank.rank)
        dist.reduce(flat, group=rank.group, group_dst=1, async_op=True).wait()
        return rank.look(flat)

    first, second = on_ranks(work)
    assert first == [pytest.approx(float("nan"), nan_ok=True)]
    assert second == [3.0]


def test_it_waits_for_what_the_compute_stream_has_been_given() -> None:
    def work(rank: Rank) -> list[float]:
        host = rank.device.host.empty_like(torch.ones(2)).fill_(rank.rank + 1.0)
        flat = rank.tensor(0.0, 0.0)
        rank.device.wait(rank.device.upload(host, flat))
        dist.all_reduce(flat, group=rank.group, async_op=True).wait()
        return flat.mul(1.0).tolist()  # type: ignore[no-any-return]

    assert on_ranks(work) == [[3.0, 3.0]] * 2


def test_ranks_run_theirs_although_others_are_later() -> None:
    """Each rank waits for the sums of another group first; none of them runs before somebody needs it."""
    network = SimulatedNetwork(3)

    def work(number: int) -> list[float]:
        rank = Rank(network, number)
        pairs = [(0, 1), (1, 2), (0, 2)]
        groups = {
            pair: SimulatedGroup(f"pair {pair}", network, rank.device, number, pair) for pair in pairs if number in pair
        }
        with rank.device:
            flats = {pair: rank.tensor(number + 1.0) for pair in groups}
            # One after the other, in the same order everywhere; and each behind the one before.
            handles = []
            for pair, group in groups.items():
                rank.device.collectives.clear()  # Here two groups may run at a time.
                handles.append(dist.all_reduce(flats[pair], group=group, async_op=True))
            for handle in handles if number != 1 else handles[::-1]:
                handle.wait()
            return [flats[pair].mul(1.0).item() for pair in groups]

    assert network.run(work) == [[3.0, 4.0], [3.0, 5.0], [5.0, 4.0]]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_group_waits_for_the_collectives_of_other_groups(waits: bool, is_async: bool) -> None:
    def work(rank: Rank) -> None:
        other = SimulatedGroup("other", rank.network, rank.device, rank.rank, range(2))
        handle = dist.all_reduce(rank.tensor(1.0), group=rank.group, async_op=True)
        if waits:
            handle.wait()
        dist.all_reduce(rank.tensor(1.0), group=other, async_op=is_async)

    refused = pytest.raises(RaceError, match="other 0 begins all_reduce while a collective of all 0 may still run")
    with nullcontext() if waits else refused:
        on_ranks(work)


# --- host tensors -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("operation", "expected"), [(dist.ReduceOp.SUM, 3), (dist.ReduceOp.MAX, 2)])
def test_host_tensors_are_summed_when_the_host_waits(operation: Any, expected: int) -> None:
    def work(rank: Rank) -> tuple[bool, int]:
        told = torch.tensor([rank.rank + 1])
        handle = dist.all_reduce(told, operation, group=rank.group, async_op=True)
        before = told.item()
        assert handle.is_completed()
        handle.wait()
        assert rank.device.host_stream.time == 0
        return before == expected, int(told.item())

    assert on_ranks(work) == [(False, expected)] * 2


# --- mistakes of ranks ------------------------------------------------------------------------------------------------
def test_ranks_that_send_different_things_are_told_so() -> None:
    def work(rank: Rank) -> None:
        dist.all_reduce(rank.tensor(*[1.0] * (1 + rank.rank)), group=rank.group, async_op=True)

    with pytest.raises(RuntimeError, match=r"collective 1 of all 0 is another one on each rank: rank 0: .*\(1,\)"):
        on_ranks(work)


def test_a_rank_that_sends_nothing_is_noticed() -> None:
    def work(rank: Rank) -> None:
        if rank.rank == 0:
            dist.all_reduce(rank.tensor(1.0), group=rank.group, async_op=True)

    with pytest.raises(RuntimeError, match="Rank 0 waits for collective 1 of all 0, and no other rank goes on"):
        on_ranks(work)


# --- the virtual clock ------------------------------------------------------------------------------------------------
def test_it_begins_when_the_last_rank_is_ready_and_ends_everywhere_at_once() -> None:
    """The second device computes at a tenth of the speed."""

    def work(rank: Rank) -> float:
        flat = rank.tensor(*[1.0] * 100)
        flat.add_(1.0)
        dist.all_reduce(flat, group=rank.group, async_op=True).wait()
        return rank.device.compute_stream().time

    first, second = on_ranks(work, rates=lambda rank: Rates(memory=1e3 / 10**rank, network=1e3, latency=0.5))
    alone = on_ranks(work, rates=lambda _: Rates(memory=1e3 / 10, network=1e3, latency=0.5))
    assert first == second == alone[0]


def test_those_of_a_group_take_their_time_one_after_the_other_and_those_of_two_do_not() -> None:
    network = SimulatedNetwork(2)

    def work(number: int) -> tuple[float, float]:
        rank = Rank(network, number)
        other = SimulatedGroup("other", network, rank.device, number, range(2))
        with rank.device:
            for group in (rank.group, rank.group, other):
                rank.device.collectives.clear()  # Here two groups may run at a time.
                handle = dist.all_reduce(rank.tensor(1.0), group=group, async_op=True)
            handle.wait()
            between = rank.device.compute_stream().time
            return between, rank.device.elapsed

    assert network.run(work) == [(pytest.approx(0.504), pytest.approx(1.008))] * 2
