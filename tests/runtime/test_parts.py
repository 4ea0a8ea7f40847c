"""Chunks are cut without padding, come in parts behind fences, and memory is left alone that others may write to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_protrain.device import CPUDevice
from lightning_protrain.host import HostWorker
from lightning_protrain.runtime import parts
from lightning_protrain.runtime.comm import Communicator
from lightning_protrain.runtime.parts import GRAIN, Parts, windows
from lightning_protrain.simulation.device import SimulatedDevice
from lightning_protrain.simulation.network import SimulatedNetwork
from lightning_protrain.simulation.streams import RaceError
from tests.simulation import ranked

NBYTES = 5 * 256


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("most", [1, 100, 256, 1000, 1 << 20])
@pytest.mark.parametrize("nbytes", [0, 256, 768, 1280, 65536])
def test_windows_cover_a_chunk_once(nbytes: int, most: int, num_ranks: int) -> None:
    cut, end = windows(nbytes, num_ranks, most)
    covered = [at for window in cut for place in range(num_ranks) for at in range(nbytes)[window.mine(place)]]
    assert covered == list(range(end))
    assert 0 <= nbytes - end < GRAIN * num_ranks
    assert all(window.part % GRAIN == 0 < window.part for window in cut)
    assert all(num_ranks * window.part <= max(most, GRAIN * num_ranks) for window in cut)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_powers_of_two_leave_no_rest(num_ranks: int) -> None:
    """Chunks are whole multiples of 256 bytes."""
    assert all(windows(256 * size, num_ranks)[1] == 256 * size for size in range(50))


def test_windows_are_as_large_as_the_constant_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(windows(4 * parts.WINDOW, 2)[0]) == 4
    monkeypatch.setattr(parts, "WINDOW", 512)
    assert len(windows(4 * 512, 2)[0]) == 4


# --- on simulated devices ---------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """One of several that have the same chunk in host memory."""

    device: SimulatedDevice
    parts: Parts
    source: Tensor
    target: Tensor

    def loaded(self) -> list[int]:
        """What computing finds on the device."""
        return self.target.bitwise_or(0).tolist()  # type: ignore[no-any-return]


VALUES = torch.arange(NBYTES).remainder(251).to(torch.uint8)


def on_ranks(work: Callable[[int, Rank], Any], num_ranks: int = 2) -> list[Any]:
    case = ranked.Case(node_size=num_ranks, gathers=True)
    network = SimulatedNetwork(num_ranks)

    def run(number: int) -> Any:
        device = SimulatedDevice()
        with device:
            communicator = Communicator(ranked.ranks_of(case, network, device, number), device)
            source = torch.frombuffer(device.host.empty(NBYTES), dtype=torch.uint8)[:NBYTES]
            source.copy_(VALUES)
            target = torch.empty(NBYTES, dtype=torch.uint8)
            device.resize(target.untyped_storage(), NBYTES)
            return work(number, Rank(device, Parts(communicator, device, NBYTES), source, target))

    return network.run(run)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "WINDOW", 512)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_ranks_have_all_of_it(num_ranks: int) -> None:
    def work(number: int, rank: Rank) -> Any:
        arrival = rank.parts.upload(rank.source, rank.target)
        arrival.wait()
        arrival.wait()  # Once is enough.
        return rank.loaded(), rank.device.counters

    cut, end = windows(NBYTES, num_ranks)
    for loaded, counters in on_ranks(work, num_ranks):
        assert loaded == VALUES.tolist()
        assert counters.gathers == counters.collectives == len(cut)
        assert counters.communicated_bytes == end // num_ranks
        assert counters.uploaded_bytes == end // num_ranks + NBYTES - end


def test_those_behind_a_pending_step_are_gathered_in_order() -> None:
    def work(number: int, rank: Rank) -> list[int]:
        with rank.device.unattributed():
            rank.source.zero_()
        job = rank.device.worker.submit(lambda: rank.source.copy_(VALUES))
        first = rank.parts.upload(rank.source, rank.target, job)
        whole, other = torch.frombuffer(rank.device.host.empty(NBYTES), dtype=torch.uint8), torch.empty(NBYTES).byte()
        rank.device.resize(other.untyped_storage(), NBYTES)
        second = rank.parts.upload(whole[:NBYTES], other)
        begun = rank.device.counters.gathers
        if number:  # One rank needs the second first.
            second.wait()
        first.wait()
        second.wait()
        return [begun, rank.device.counters.gathers, rank.loaded() == VALUES.tolist()]

    assert on_ranks(work) == [[0, 6, True]] * 2


def test_one_rank_gives_what_the_other_needs() -> None:
    def work(number: int, rank: Rank) -> Any:
        if number:
            rank.parts.give(rank.source)
            rank.parts.wait_until_given()
            rank.parts.finish()
            return rank.device.counters.gathers
        rank.parts.upload(rank.source, rank.target).wait()
        return rank.loaded()

    assert on_ranks(work) == [VALUES.tolist(), 3]


def test_memory_for_others_is_one_window() -> None:
    sizes: list[int] = []

    def work(number: int, rank: Rank) -> None:
        resize = rank.device.resize
        rank.device.resize = lambda storage, nbytes: (sizes.append(nbytes), resize(storage, nbytes))[1]  # type: ignore[method-assign]
        rank.parts.give(rank.source)
        rank.parts.give(rank.source)
        rank.parts.finish()
        rank.parts.finish()

    on_ranks(work)
    assert sorted(sizes) == [0, 0, 512, 512]


def test_the_host_may_write_when_its_parts_have_landed() -> None:
    def work(lands: bool, rank: Rank) -> None:
        arrival = rank.parts.upload(rank.source, rank.target)
        if lands:
            arrival.land()
        rank.source.zero_()

    on_ranks(lambda number, rank: work(True, rank))
    with pytest.raises(RaceError, match="host writes in aten::zero_ what up may still read in copy"):
        on_ranks(lambda number, rank: work(False, rank))


def test_whoever_has_what_is_sent_behind_what_was_given_may_write() -> None:
    """The owner of weights steps them when it has the sums of their gradients."""

    def work(waits: bool, rank: Rank) -> None:
        rank.parts.give(rank.source)
        if waits:
            rank.parts.wait_until_given()
        sums, host = torch.ones(1), rank.device.host.empty_like(torch.ones(1))
        rank.device.set_place(sums, "device")
        rank.device.land(rank.device.download(sums, host))
        rank.source.zero_()

    on_ranks(lambda number, rank: work(True, rank))
    with pytest.raises(RaceError, match="host writes in aten::zero_ what up may still read in copy"):
        on_ranks(lambda number, rank: work(False, rank))


def test_memory_is_freed_behind_a_gather_that_nobody_used() -> None:
    def work(waits: bool, rank: Rank) -> None:
        arrival = rank.parts.upload(rank.source, rank.target)
        if waits:
            arrival.wait()
        rank.device.resize(rank.target.untyped_storage(), 0)

    on_ranks(lambda number, rank: work(True, rank))
    with pytest.raises(RaceError, match=r"compute writes in resize what (up|gathering) wrote"):
        on_ranks(lambda number, rank: work(False, rank))


def test_what_comes_first_for_others_waits_for_its_memory() -> None:
    def work(number: int, rank: Rank) -> None:
        rank.parts._given.append(None)  # type: ignore[arg-type]
        rank.parts.give(rank.source)

    with pytest.raises(RaceError, match="up writes in copy what compute wrote in resize"):
        on_ranks(work)


def test_nobody_waits_after_an_exception() -> None:
    def work(number: int, rank: Rank) -> Any:
        arrival = rank.parts.upload(rank.source, rank.target)
        rank.parts.give(rank.source)
        rank.parts.abandon()
        ended: list[Any] = []
        rank.parts.end = lambda arrival: ended.append(arrival)  # type: ignore[method-assign]
        arrival.wait()
        rank.parts.begin_all()
        rank.parts.finish()
        return arrival.abandoned, ended

    assert on_ranks(work) == [(True, [])] * 2


# --- on the CPU -------------------------------------------------------------------------------------------------------


class Works:
    """What a communicator on the CPU would do, and whom it would wait for."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.ranks = ranked.Ranks(0, 2, 0, 2, None, None, None)  # type: ignore[arg-type]

    def begin_gather(self, whole: Tensor, part: Tensor) -> int:
        self.log.append((whole.data_ptr(), part.clone().tolist()))
        return len(self.log)

    def end_gather(self, work: int) -> None:
        self.log.append(work)


def test_on_the_cpu_what_is_given_has_memory_of_its_own_until_the_end() -> None:
    """There nothing but the host waits, and it must not before the step has ended."""
    works: Any = Works()
    found = Parts(works, CPUDevice(torch.device("cpu")), NBYTES)
    found.give(VALUES)
    assert [part for _, part in works.log] == [VALUES[window.mine(0)].tolist() for window in windows(NBYTES, 2)[0]]
    assert len({pointer for pointer, _ in works.log}) == 3
    works.log.clear()
    found.finish()
    assert works.log == [1, 2, 3]


def test_on_the_cpu_the_host_waits_for_the_step_of_a_part() -> None:
    works: Any = Works()
    device, worker = CPUDevice(torch.device("cpu")), HostWorker(1)
    source = torch.zeros(NBYTES, dtype=torch.uint8)
    job = worker.submit(lambda: source.copy_(VALUES))
    arrival = Parts(works, device, NBYTES).upload(source, torch.empty_like(source), job)
    arrival.wait()
    worker.close()
    assert [each[1] for each in works.log[:3]] == [VALUES[window.mine(0)].tolist() for window in windows(NBYTES, 2)[0]]
    assert works.log[3:] == [1, 2, 3]
