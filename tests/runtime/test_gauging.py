"""Rates of sums over ranks: the same on all of them, those of the slowest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import Sharding
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime.comm.collectives import make_rank_mesh, measure_collectives
from tests.planner.layouts import layout_of, parameter
from tests.support.ranks import run_ranks, values

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
