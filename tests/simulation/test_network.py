"""Ranks in threads: one runs at a time, in an order that is always the same, and nobody waits in vain."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.simulated.network import SimulatedNetwork


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_hears_what_all_have_said(world_size: int) -> None:
    network = SimulatedNetwork(world_size)
    members = range(world_size)

    def talk(rank: int) -> list[Any]:
        return [network.exchange(f"place {place}", rank, members, (rank, place)) for place in range(3)]

    expected = [[(rank, place) for rank in members] for place in range(3)]
    assert network.run(talk) == [expected] * world_size


def test_a_part_of_the_ranks_meets_by_itself() -> None:
    network = SimulatedNetwork(4)

    def talk(rank: int) -> list[int]:
        return network.exchange(f"place {rank % 2}", rank, range(rank % 2, 4, 2), rank)

    assert network.run(talk) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_one_rank_runs_at_a_time_and_always_in_the_same_order() -> None:
    orders = set()
    for _ in range(5):
        network, calls, inside = SimulatedNetwork(3), [], threading.Lock()

        def work(
            rank: int, network: SimulatedNetwork = network, calls: list[int] = calls, inside: Any = inside
        ) -> None:
            for step in range(4):
                assert inside.acquire(blocking=False), "two ranks run at once"
                calls.append(rank)
                inside.release()
                network.exchange(f"step {step}", rank, range(3), None)

        network.run(work)
        orders.add(tuple(calls))
    (order,) = orders
    assert order[:3] == (0, 1, 2)
    assert sorted(order) == sorted([0, 1, 2] * 4)


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


def test_ranks_that_wait_for_each_other_in_different_places_do_not_hang() -> None:
    network = SimulatedNetwork(2)
    with pytest.raises(RuntimeError, match="Rank 0 waits for place 0, and no other rank goes on"):
        network.run(lambda rank: network.exchange(f"place {rank}", rank, range(2), None))


def test_a_rank_waits_for_something_that_another_one_does() -> None:
    network, done = SimulatedNetwork(2), []

    def work(rank: int) -> list[str]:
        if rank == 0:
            network.wait(0, lambda: bool(done), "the work")
            return list(done)
        done.append("work")
        return []

    assert network.run(work) == [["work"], []]
