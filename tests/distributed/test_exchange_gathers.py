"""Chunks that ranks gather from parts, of which other machines have stepped some: the bits of chunks that are whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_protrain.runtime import parts
from lightning_protrain.runtime.script import Walk
from tests.distributed.test_exchange import CLIP, Case, fit, module_of
from tests.distributed.test_gathers import Wild
from tests.distributed.test_overlap import accumulating, differing, slow_steps
from tests.distributed.test_parity import KINDS, Module
from tests.ranks import run_ranks, values

WAYS: list[tuple[str, int, dict[str, Any]]] = [("backward", 1, {}), ("forward", 3, CLIP)]
MORE: list[tuple[str, int, dict[str, Any]]] = [("off", 3, {}), ("backward", 3, {}), ("forward", 1, CLIP)]
LOW: list[tuple[str, int, dict[str, Any]]] = [
    (overlap, accumulate, {"precision": "bf16-mixed"})
    for overlap, accumulate in (("off", 1), ("backward", 1), ("forward", 3))
]


def _whole(rank: int, module: Any, accumulate: int, given: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of machines that step everything and upload it whole."""
    torch.set_num_threads(1)
    options = {**accumulating(accumulate), **given}
    return fit(rank, module(), Case(False, 2, "off", trainer=options))[0]


def _in_parts(
    rank: int, module: Any, overlap: str, accumulate: int, given: dict[str, Any]
) -> tuple[dict[str, Tensor], bool]:
    """The weights of those that divide steps and gather chunks, and whether anything was gathered."""
    parts.WINDOW = 2048
    given = {**accumulating(accumulate), **given}
    # Some rank is late in turn, so that others wait for it.
    with slow_steps(0.002 if rank == accumulate % 4 else 0.0):
        found, trainer = fit(rank, module(), Case(True, 2, overlap, trainer=given, gather="device"))
    return found, trainer.strategy.counters.gathers > 0


def _compare(rank: int, kind: str, ways: list[tuple[str, int, dict[str, Any]]]) -> list[str]:
    wrong, wanted = [], {}
    for way in ways:
        if str(way[1:]) not in wanted:
            wanted[str(way[1:])] = _whole(rank, lambda: module_of(kind), *way[1:])
        found, gathers = _in_parts(rank, lambda: module_of(kind), *way)
        wrong += [f"{way}: {name}" for name in differing(wanted[str(way[1:])], found)[:1]]
        wrong += [] if gathers else [f"{way}: nothing is gathered"]
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_two_machines_come_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    assert values(run_ranks(_compare, 4, tmp_path, kind, WAYS)) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "tied", "lora"])
def test_so_do_they_in_other_ways(kind: str, tmp_path: Path) -> None:
    assert values(run_ranks(_compare, 4, tmp_path, kind, MORE)) == [[]] * 4


def test_copies_in_low_precision_are_gathered(tmp_path: Path) -> None:
    assert values(run_ranks(_compare, 4, tmp_path, "lora", LOW)) == [[]] * 4


def _go_wild(rank: int, seed: int) -> tuple[list[str], int]:
    """What differs where ranks take ways of their own, and how often this one left a script."""
    patch, left, end = pytest.MonkeyPatch(), [], Walk.end
    patch.setattr(Walk, "end", lambda walk: (end(walk), left.append(walk.left))[0])
    own, common = random.Random(f"{seed} {rank}"), random.Random(seed)
    accumulate, overlap = common.choice([1, 2]), common.choice(["backward", "forward"])
    batches = range(10 * accumulate)
    ways = {at: own.choice([[1, 2], [0, 1], [0, 0, 1, 2], [1, 0, 2]]) for at in batches if own.random() < 0.08}
    looks = [at for at in batches if own.random() < 0.04]
    mine: type[Module] = type("Mine", (Wild,), {"ways": ways, "looks": looks})
    expected = _whole(rank, lambda: module_of(cls=mine), accumulate, {"max_steps": 10})
    found, _ = _in_parts(rank, lambda: module_of(cls=mine), overlap, accumulate, {"max_steps": 10})
    patch.undo()
    return differing(expected, found), sum(left)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_ranks_that_leave_anywhere_come_to_the_same_bits(seed: int, tmp_path: Path) -> None:
    found = values(run_ranks(_go_wild, 4, tmp_path, seed))
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert sum(left for _, left in found) > 0
