"""Ranks of a node share one copy of the weights under no name that stays behind; owners step equal parts."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_protrain.config import format_bytes
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.device.host import PAGE, HostMemory
from lightning_protrain.planner.plan import ChunkPlan
from lightning_protrain.runtime.comm import shared_memory
from lightning_protrain.runtime.comm.shared_memory import (
    NodeMemory,
    assign_owners,
    open_node_memory,
    pages,
    share_chunks,
    shared_bytes,
)
from tests.support.ranks import kill_this_rank, run_ranks, values

SHAPES = ((300, 7), (1,), (0, 4), (64, 64))


def alone(nbytes: int, folder: Path, fills: bool = True, host: HostMemory | None = None) -> NodeMemory:
    path = folder / "memory"
    path.write_bytes(bytes(nbytes))
    return NodeMemory(os.open(path, os.O_RDWR), nbytes, host or HostMemory(), fills)


@given(st.integers(0, 10 * PAGE))
def test_pages_are_whole_and_no_more_than_needed(nbytes: int) -> None:
    assert pages(nbytes) % PAGE == 0
    assert max(nbytes, 1) <= pages(nbytes) < max(nbytes, 1) + PAGE


def test_blocks_begin_a_page_and_do_not_meet(tmp_path: Path) -> None:
    memory = alone(4 * PAGE, tmp_path)
    blocks = [memory.empty(nbytes) for nbytes in (1, PAGE + 1, PAGE)]
    for value, block in enumerate(blocks):
        block[:] = bytes([value]) * len(block)
        assert torch.frombuffer(block, dtype=torch.uint8).data_ptr() % PAGE == 0
    assert [set(block) for block in blocks] == [{0}, {1}, {2}]


def test_more_than_there_is_is_our_mistake(tmp_path: Path) -> None:
    memory = alone(PAGE, tmp_path)
    memory.empty(PAGE)
    with pytest.raises(AssertionError, match=f"{2 * PAGE} bytes of node memory are wanted, {PAGE} are there"):
        memory.empty(1)


def test_counters_lie_behind_all_blocks(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(2 * PAGE))
    memory = NodeMemory(os.open(path, os.O_RDWR), 2 * PAGE, HostMemory(), True, num_counters=3)
    assert memory.counters.tolist() == [0, 0, 0]
    memory.counters[2] = 1 << 40
    block = memory.empty(PAGE)
    block[:] = b"x" * PAGE
    assert memory.counters.tolist() == [0, 0, 1 << 40]
    with pytest.raises(AssertionError, match=f"are wanted, {2 * PAGE - 24} are there"):
        memory.empty(PAGE)


def _count(rank: int, folder: Path, rounds: int) -> int:
    """Reads and writes one number again and again, which is never right without a lock."""
    memory = open_node_memory(_ranks(rank), 0, HostMemory(), folder, num_counters=1)

    def add(_: int) -> None:
        with memory.alone():
            before = memory.counters[0]
            time.sleep(1e-4)
            memory.counters[0] = before + 1

    with ThreadPoolExecutor(2) as pool:  # Record locks are of a process; its threads need another one.
        list(pool.map(add, range(rounds)))
    dist.barrier()
    return int(memory.counters[0])


def test_one_thread_of_one_rank_is_alone(tmp_path: Path) -> None:
    assert values(run_ranks(_count, 2, tmp_path, tmp_path, 20)) == [40, 40]


def test_without_its_lock_nobody_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeMemory, "alone", lambda memory: nullcontext())
    assert max(values(run_ranks(_count, 2, tmp_path, tmp_path, 20))) < 40


def _look_for(rank: int, folder: Path) -> list[bool]:
    """Return whether rank 1 holds the memory: at first, and after it was killed.

    Its parent has not reaped it by then, and a child of it still runs.
    """
    memory = open_node_memory(_ranks(rank), PAGE, HostMemory(), folder)
    found = [memory.is_held(1 - rank)]
    dist.barrier()
    if rank == 1:
        if os.fork() == 0:  # As a worker of a DataLoader: it outlives its parent.
            while not (folder / "looked").exists():
                time.sleep(0.01)
            os._exit(0)
        kill_this_rank()
    try:
        while memory.is_held(1):  # A rank that would stay there hangs.
            time.sleep(0.01)
    finally:
        (folder / "looked").touch()
    return [*found, memory.is_held(1)]


def test_a_rank_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    alone, killed = run_ranks(_look_for, 2, tmp_path, tmp_path)
    assert alone.value == [True, False]
    assert killed.value is None


@pytest.mark.parametrize("fills", [True, False])
def test_a_parameter_is_adopted_with_its_values_or_those_that_are_there(fills: bool, tmp_path: Path) -> None:
    memory = alone(PAGE, tmp_path, fills)
    parameter = nn.Parameter(torch.ones(5, 3).t())
    memory.adopt(parameter)
    assert torch.equal(parameter, torch.full((3, 5), float(fills)))
    assert parameter.stride() == (1, 3)
    empty = nn.Parameter(torch.ones(0, 2))
    memory.adopt(empty)  # It takes no page.
    assert empty.shape == (0, 2)


def test_the_mapping_is_page_locked_until_the_host_lets_go(tmp_path: Path) -> None:
    locked: list[int] = []
    host = HostMemory(lambda address, nbytes: bool(locked.append(nbytes) or True), lambda address: locked.clear())
    memory = alone(3 * PAGE, tmp_path, host=host)
    assert locked == []  # It would allocate what is not filled yet.
    memory.lock()
    assert locked == [3 * PAGE]
    assert host.locked_bytes == 3 * PAGE
    host.close()
    assert locked == []


@pytest.mark.parametrize("fills", [True, False])
def test_who_fills_the_memory_spreads_it_over_numa_nodes(
    fills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(shared_memory, "interleave", lambda block, nodes: asked.append((len(block), nodes)))
    alone(2 * PAGE, tmp_path, fills).interleave([0, 1])
    assert asked == ([(2 * PAGE, [0, 1])] if fills else [])


def test_memory_is_taken_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "memory"
    path.touch()
    os.truncate(path, 6 * PAGE)
    memory = NodeMemory(os.open(path, os.O_RDWR), 6 * PAGE, HostMemory(), True, 1)
    taken = [os.fstat(memory._descriptor).st_blocks * 512]
    for _ in range(2):
        memory.empty(2 * PAGE)
        taken.append(os.fstat(memory._descriptor).st_blocks * 512)
    assert taken == [PAGE, 3 * PAGE, 5 * PAGE]
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: os.rmdir("missing"))
    with pytest.raises(ValueError, match=r"ends at 16\.00 KiB \(16384 bytes\) of 24\.00 KiB"):
        memory.empty(1)


def _ranks(rank: int, local_size: int = 2) -> Any:
    local_rank = rank % local_size
    return SimpleNamespace(
        rank=rank,
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        local_size=local_size,
        first_of_node=rank - local_rank,
    )


def _share(rank: int, folder: Path, local_size: int) -> tuple[list[int], list[float], list[str]]:
    """Offsets of the weights, what this rank sees of them, and the names that are left."""
    ranks = _ranks(rank, local_size)
    nbytes = sum(pages(4 * torch.Size(shape).numel()) for shape in SHAPES)
    memory = open_node_memory(ranks, nbytes, HostMemory(), folder)
    dist.barrier()
    left = [path.name for path in folder.iterdir() if path.name.startswith("protrain-")]
    parameters = [nn.Parameter(torch.full(shape, 10.0 * rank + at)) for at, shape in enumerate(SHAPES)]
    start = torch.frombuffer(memory._block, dtype=torch.uint8).data_ptr()
    for parameter in parameters:
        memory.adopt(parameter)
    dist.barrier()
    seen = [parameter.sum().item() / max(parameter.numel(), 1) for parameter in parameters]
    dist.barrier()
    if ranks.local_rank == 1:
        with torch.no_grad():
            parameters[0].fill_(77.0 + rank)
    dist.barrier()
    seen.append(parameters[0].mean().item())
    return [parameter.data_ptr() - start for parameter in parameters if parameter.numel()], seen, left


def _refusals(rank: int, folder: Path) -> list[str]:
    """Return the error for each of several unusable folders, and the names of files that are left."""
    patch = pytest.MonkeyPatch()

    def attempt(folder: Path) -> str:
        try:
            open_node_memory(_ranks(rank), 5 * PAGE, HostMemory(), folder)
        except ValueError as error:
            return str(error)
        finally:
            patch.undo()
        return ""

    found = [attempt(folder / "missing")]
    room = SimpleNamespace(f_bavail=2, f_frsize=PAGE)
    patch.setattr(os, "statvfs", lambda path: room)
    patch.setattr(os, "truncate", None)  # Never reached.
    found.append(attempt(folder))
    patch.setattr(os, "truncate", lambda *args: os.rmdir("missing"))
    found.append(attempt(folder))
    patch.setattr(shared_memory.tempfile, "mkstemp", lambda **options: os.open("missing", os.O_RDWR))
    found.append(attempt(folder))
    if rank == 1:
        patch.setattr(shared_memory, "_open", lambda path, first=shared_memory._open: first(path + "-elsewhere"))
    found.append(attempt(folder))
    dist.barrier()
    return [*found, *(path.name for path in folder.iterdir() if path.name.startswith("protrain-"))]


def test_two_ranks_see_the_same_weight_at_the_same_place(tmp_path: Path) -> None:
    (offsets, seen, left), other = values(run_ranks(_share, 2, tmp_path, tmp_path, 2))
    assert other == (offsets, seen, left)
    assert left == []
    assert seen == [0.0, 1.0, 0.0, 3.0, 78.0]


def test_every_node_has_a_copy_of_its_own(tmp_path: Path) -> None:
    found = values(run_ranks(_share, 4, tmp_path, tmp_path, 2))
    assert [seen for _, seen, _ in found] == [
        *[[0.0, 1.0, 0.0, 3.0, 78.0]] * 2,
        *[[20.0, 21.0, 0.0, 23.0, 80.0]] * 2,
    ]


def test_where_memory_cannot_be_shared_all_ranks_say_why(tmp_path: Path) -> None:
    found, other = values(run_ranks(_refusals, 2, tmp_path, tmp_path))
    assert found == other
    wanted = f'sharding="shard" keeps {format_bytes(5 * PAGE)} of weights in memory that the ranks of a node share, and'
    beginnings = (
        f"{wanted} {tmp_path / 'missing'} has 0 bytes free.",
        f"{wanted} {tmp_path} has {format_bytes(2 * PAGE)} free.",
        f"{tmp_path} does not give the {format_bytes(5 * PAGE)} that the weights of a node need: [Errno 2]",
        f"{tmp_path} does not take files, and the ranks of a node share weights there: [Errno 2]",
        'Rank 1: sharding="shard" needs memory that the ranks of a node share, and this one does not see',
    )
    assert len(found) == len(beginnings), "a name has been left behind"
    for text, beginning in zip(found, beginnings, strict=True):
        assert text.startswith(beginning), text


CHUNKS = st.lists(st.lists(st.integers(0, 10_000), max_size=7), max_size=7)


def excess(chunks: list[list[int]], found: list[list[int]], num_ranks: int) -> float:
    """Return by how much the rank with the most elements exceeds the mean plus one parameter."""
    sizes = [nbytes for chunk in chunks for nbytes in chunk]
    loads = [0] * num_ranks
    for chunk, mine in zip(chunks, found, strict=True):
        for nbytes, owner in zip(chunk, mine, strict=True):
            loads[owner] += nbytes
    return max(loads) - (sum(sizes) / num_ranks + max(sizes, default=0))


@given(CHUNKS, st.integers(1, 8))
def test_no_rank_has_more_than_the_mean_and_one_parameter(chunks: list[list[int]], num_ranks: int) -> None:
    found = assign_owners(chunks, num_ranks)
    assert [len(mine) for mine in found] == [len(chunk) for chunk in chunks]
    assert all(0 <= owner < num_ranks for mine in found for owner in mine)
    for end in range(len(chunks) + 1):  # After every chunk, not only at the end.
        assert excess(chunks[:end], found[:end], num_ranks) <= 0


@given(CHUNKS, st.integers(1, 8))
def test_owners_are_the_same_on_every_rank(chunks: list[list[int]], num_ranks: int) -> None:
    assert assign_owners(chunks, num_ranks) == assign_owners([list(chunk) for chunk in chunks], num_ranks)


def test_the_bound_finds_parameters_that_are_dealt_in_turn() -> None:
    chunks = [[100, 1, 100, 1, 100, 1, 100, 1]]
    in_turn = [[at % 2 for at in range(8)]]
    assert excess(chunks, in_turn, 2) > 0
    assert excess(chunks, assign_owners(chunks, 2), 2) <= 0


def test_nothing_offloaded_shares_nothing() -> None:
    assert shared_bytes((), {"a": 4}, 2) == 0


class _Room:
    """Stands for the memory of a node, of the size that was asked for."""

    def __init__(self, ranks: Any, nbytes: int, host: HostMemory, num_counters: int) -> None:
        self.nbytes = nbytes
        self.num_counters = num_counters
        self.nodes: list[int] = []

    def interleave(self, nodes: list[int]) -> None:
        self.nodes = nodes


def _chunk(nbytes: int, *names: str, streamed: str | None = None) -> ChunkPlan:
    return ChunkPlan(names, "unit", "float32", True, nbytes, False, streamed)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_rank_learns_what_it_has_of_each_chunk(local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "open_node_memory", _Room)
    # Of four ranks, those of this node are next to NUMA nodes 1 and 3.
    monkeypatch.setattr(dist, "all_gather_object", lambda told, mine: told.__setitem__(slice(None), [0, 0, 1, 3]))
    monkeypatch.setattr(shared_memory, "nodes_to_fill", list)
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in {"a": 300, "b": 200, "c": 2000}.items()}
    chunks = (_chunk(2560, "a", "b"), _chunk(4096, "c", streamed="bfloat16"))
    ranks: Any = SimpleNamespace(local_rank=local_rank, local_size=2, world_size=4, first_of_node=2)
    shares = share_chunks(chunks, parameters, ranks, CPUDevice(torch.device("cpu")))
    assert shares[0].memory.nodes == [1, 3]
    sizes = {name: parameter.nbytes for name, parameter in parameters.items()}
    assert [share.owns(0) for share in shares] == [local_rank == 0, local_rank == 1]
    # What is asked for, and a page for numbers.
    assert shared_bytes(chunks, sizes, 2) == shares[0].memory.nbytes + PAGE
    assert [share.owners for share in shares] == [(0, 1), (1,)]
    assert {share.local_rank for share in shares} == {local_rank}
    assert shares[0].memory is shares[1].memory
    # Whole pages of each chunk, and of the master of what is streamed as a copy: 8,000 bytes.
    assert shares[0].memory.nbytes == PAGE + PAGE + 2 * PAGE
    # Of each rank: what it has begun, what it has left, and what it has stepped of either chunk.
    assert shares[0].memory.num_counters == 2 * (1 + 1 + 2)
