"""Chunks are exchanged in the order of the plan, whatever the order of steps; nothing waits for what never comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.runtime.exchange import Exchange

NUM_CHUNKS = 3


class Work:
    """A collective that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return


class Slot:
    def __init__(self, value: float, machine: int, writes: bool = True) -> None:
        self.host = nn.Parameter(torch.full((2, 3), value))
        self.machine = machine
        self.owned = machine == 0
        self.writes = writes
        self.copy: Tensor | None = None
        self.casts = 0

    def renew_copy(self) -> None:
        self.casts += 1


class Peer:
    """Stands for a rank of another machine, which has 7 everywhere, and for what reaches it."""

    def __init__(self) -> None:
        self.ranks = SimpleNamespace(local_rank=1, local_size=2, world_size=4, attendance=self)
        self.sent: list[tuple[int, float]] = []
        self.counted = 0
        self.waits: list[tuple[list[int], str]] = []
        self.broken = False

    def count_weights(self, weights: Tensor) -> None:
        self.counted += weights.nbytes

    def send_weights(self, flat: Tensor, machine: int) -> Work:
        values = flat.view(torch.float32)
        self.sent.append((machine, float(values[0])))
        if machine:
            values.fill_(7.0)
        return Work()

    def wait_for_peers(self, work: Work, members: Any, what: str) -> None:
        self.waits.append((list(members), what))
        if self.broken:
            raise RuntimeError("rank 3 is gone")


class Chunk:
    def __init__(self, name: str, *slots: Slot) -> None:
        self.plan = SimpleNamespace(unit=name)
        self.slots = slots

    def machine(self, slot: Slot) -> int:
        return slot.machine


def made() -> tuple[Peer, list[Slot], Exchange]:
    """Two slots in each chunk: one that this rank writes and, in the second chunk only, has from the other machine."""
    peer: Any = Peer()
    mine = [Slot(float(at), int(at == 1)) for at in range(NUM_CHUNKS)]
    chunks: Any = [Chunk(f"layers.{at}", slot, Slot(9.0, 0, writes=False)) for at, slot in enumerate(mine)]
    exchange = Exchange(chunks, peer)
    exchange.begin([slot.host for slot in mine])
    return peer, mine, exchange


def step(exchange: Exchange, order: list[int], then: Callable[[int], object] = lambda index: None) -> list[Any]:
    jobs = []
    for index in order:
        exchange.choose(index)
        jobs.append(exchange.add(index, lambda index=index: then(index)))
    return jobs


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_the_order_is_that_of_the_plan(order: list[int]) -> None:
    peer, mine, exchange = made()
    there: list[int] = []
    for _ in range(2):
        for job in step(exchange, order, there.append):
            assert job.exception() is None
    assert peer.sent == [(0, 0.0), (1, 1.0), (0, 2.0), (0, 0.0), (1, 7.0), (0, 2.0)]
    assert there == [0, 1, 2] * 2
    assert mine[1].host.unique().tolist() == [7.0]
    assert mine[1].host._version == 0
    assert peer.counted == 2 * NUM_CHUNKS * 6 * 4
    assert peer.waits[1] == ([1, 3], "a part of the step of 'layers.1'")
    exchange.close()


def test_nothing_is_sent_before_what_comes_before_it() -> None:
    peer, _, exchange = made()
    (last,) = step(exchange, [2])
    assert not last.done()
    assert peer.sent == []
    step(exchange, [0, 1])
    assert last.exception() is None
    exchange.close()


def test_copies_of_what_comes_are_cast_before_others_hear_of_it() -> None:
    _, mine, exchange = made()
    seen = []
    for slot in mine:
        slot.copy = torch.empty(2, 3, dtype=torch.bfloat16)
    for job in step(exchange, [0, 1, 2], lambda index: seen.append(mine[index].casts)):
        job.result()
    assert seen == [0, 1, 0]
    exchange.close()


def test_only_what_its_optimizer_steps_is_sent() -> None:
    peer, mine, exchange = made()
    exchange.begin([mine[1].host])
    for job in step(exchange, [0, 1, 2]):
        job.result()
    assert peer.sent == [(1, 1.0)]
    exchange.close()


def test_what_was_trained_is_sent_when_it_is_frozen_and_what_never_was_is_not() -> None:
    peer, mine, exchange = made()
    mine[0].host.requires_grad_(False)
    for job in step(exchange, [0, 1, 2]):
        job.result()
    exchange.close()
    assert len(peer.sent) == 3
    peer, mine, exchange = made()
    exchange._trained.clear()
    mine[2].host.requires_grad_(False)
    for job in step(exchange, [0, 1, 2]):
        job.result()
    assert len(peer.sent) == 2
    exchange.close()


def test_a_failure_ends_what_waits_and_what_comes_later() -> None:
    peer, _, exchange = made()
    peer.broken = True
    third, second = step(exchange, [2, 1])
    (first,) = step(exchange, [0])
    for job in (first, second, third):
        assert str(job.exception()) == "rank 3 is gone"
    assert len(peer.sent) == 1
    exchange.close()
    assert str(exchange.add(0, lambda: None).exception()) == "rank 3 is gone"


def test_who_gives_up_leaves_nobody_waiting() -> None:
    _, _, exchange = made()
    (job,) = step(exchange, [1])
    waiting = threading.Thread(target=job.exception)
    waiting.start()
    exchange.fail(RuntimeError("a step was broken off"))
    waiting.join(timeout=20)
    assert not waiting.is_alive()
    exchange.close()
