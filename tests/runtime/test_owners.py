"""Owners of parameters have about the same to step, and every rank finds the same ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_protrain.device.host import PAGE, HostMemory
from lightning_protrain.planner.plan import ChunkPlan
from lightning_protrain.runtime.comm import shared_memory
from lightning_protrain.runtime.comm.shared_memory import assign_owners, share_chunks, shared_bytes

CHUNKS = st.lists(st.lists(st.integers(0, 10_000), max_size=7), max_size=7)


def excess(chunks: list[list[int]], found: list[list[int]], num_ranks: int) -> float:
    """How far the rank with the most is above what is allowed: the mean and one parameter."""
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


def test_one_rank_owns_everything() -> None:
    assert assign_owners([[3, 1], [], [2]], 1) == [[0, 0], [], [0]]


def test_nothing_offloaded_shares_nothing() -> None:
    assert shared_bytes((), {"a": 4}, 2) == 0


class _Room:
    """Stands for the memory of a node, of the size that was asked for."""

    def __init__(self, ranks: Any, nbytes: int, host: HostMemory, num_counters: int) -> None:
        self.nbytes = nbytes
        self.num_counters = num_counters


def _chunk(nbytes: int, *names: str, streamed: str | None = None) -> ChunkPlan:
    return ChunkPlan(names, "unit", "float32", True, nbytes, False, streamed)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_rank_learns_what_it_has_of_each_chunk(local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "open_node_memory", _Room)
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in {"a": 300, "b": 200, "c": 2000}.items()}
    chunks = (_chunk(2560, "a", "b"), _chunk(4096, "c", streamed="bfloat16"))
    ranks: Any = SimpleNamespace(local_rank=local_rank, local_size=2)
    shares = share_chunks(chunks, parameters, ranks, HostMemory())
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
