"""Rates of sums over ranks: the same on all of them, those of the slowest."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import Sharding
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime import gauging
from lightning_protrain.runtime.comm import find_ranks
from lightning_protrain.runtime.gauging import gauge, gauge_gathers, gauge_rows
from tests.planner.layouts import layout_of, parameter
from tests.ranks import run_ranks, values

CPU = torch.device("cpu")
LAYOUT: ModelLayout = layout_of([parameter("a.w", 1 << 18)], {"a": ["a.w"]})


def _gauge(rank: int, local_size: int, sharding: Sharding, slow: int = -1) -> Network:
    ranks = find_ranks(rank % local_size, local_size)
    plain = dist.all_reduce

    def late(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() > 1000:
            time.sleep(0.2)
        return plain(tensor, *args, **kwargs)

    if rank == slow:
        dist.all_reduce = late  # Of this process.
    return gauge(ranks, CPU, sharding, LAYOUT, torch.bfloat16 if slow >= 0 else None)


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


def _gauge_divided(rank: int, local_size: int) -> tuple[Network, set[tuple[str, int]]]:
    """With the sums and messages to one that are made, and among how many ranks."""
    ranks, made = find_ranks(rank % local_size, local_size).dividing_steps(), set()

    def noting(plain: Any, name: str, flat: Any, *, group: Any, **how: Any) -> Any:
        made.add((name, dist.get_world_size(group)))
        return plain(flat, group=group, **how)

    for name in ("reduce", "broadcast"):
        setattr(dist, name, partial(noting, getattr(dist, name), name))  # Of this process.
    return gauge(ranks, CPU, Sharding.SHARD, LAYOUT), made


def test_machines_that_divide_steps_measure_what_they_will_send(tmp_path: Path) -> None:
    (first, made), *others = values(run_ranks(_gauge_divided, 3, tmp_path, 1))
    assert [network for network, _ in others] == [first] * 2
    assert made == {("reduce", 1), ("reduce", 3), ("broadcast", 3)}
    assert first.exchange is not None
    assert 1e6 < first.exchange.rate < 1e12


def test_the_slowest_rank_counts(tmp_path: Path) -> None:
    first, second = values(run_ranks(_gauge, 2, tmp_path, 2, Sharding.REPLICATE, 1))
    assert first == second
    assert first.element == 2
    assert first.everyone.rate < LAYOUT.parameters[0].nbytes / 0.19


def _gauge_gathers(rank: int, local_size: int, slow: int = -1) -> tuple[float, set[int]]:
    ranks = find_ranks(rank % local_size, local_size)
    plain, sizes = gauging.begin_all_gather, set()

    def noting(whole: Any, part: Any, group: Any) -> Any:
        sizes.add(dist.get_world_size(group))
        assert local_size * part.numel() == whole.numel()
        if rank == slow:
            time.sleep(0.2)
        return plain(whole, part, group)

    gauging.begin_all_gather = noting  # Of this process.
    return gauge_gathers(ranks, CPU, LAYOUT), sizes


@pytest.mark.parametrize(("world_size", "local_size"), [(2, 2), (3, 3), (4, 2)])
def test_ranks_of_a_machine_gather_at_the_same_rate(world_size: int, local_size: int, tmp_path: Path) -> None:
    first, *others = values(run_ranks(_gauge_gathers, world_size, tmp_path, local_size))
    assert others == [first] * (world_size - 1)
    rate, sizes = first
    assert sizes == {local_size}
    assert 1e6 < rate < 1e12


def test_the_slowest_rank_counts_in_gathers_too(tmp_path: Path) -> None:
    (first, _), (second, _) = values(run_ranks(_gauge_gathers, 2, tmp_path, 2, 1))
    assert first == second
    assert first < LAYOUT.parameters[0].nbytes / 2 / 0.19


def _gauge_rows(rank: int, local_size: int) -> tuple[float, set[tuple[int, int, int]], Network]:
    ranks, made = find_ranks(rank % local_size, local_size).dividing_weights(), set()
    plain = dist.broadcast

    def noting(flat: Any, *, group: Any, group_src: int, **how: Any) -> Any:
        made.add((dist.get_world_size(group), group_src, flat.nbytes))
        return plain(flat, group=group, group_src=group_src, **how)

    dist.broadcast = noting  # Of this process.
    rate = gauge_rows(ranks, CPU, LAYOUT)
    return rate, made, gauge(ranks, CPU, Sharding.SHARD, LAYOUT)


@pytest.mark.parametrize(("world_size", "local_size"), [(2, 1), (4, 2)])
def test_machines_that_divide_weights_send_rows_at_the_same_rate(
    world_size: int, local_size: int, tmp_path: Path
) -> None:
    first, *others = values(run_ranks(_gauge_rows, world_size, tmp_path, local_size))
    assert others == [first] * (world_size - 1)
    rate, made, network = first
    nbytes = LAYOUT.parameters[0].nbytes // world_size  # Ranks of a machine get parts of what all of them need.
    assert made == {(2, 0, nbytes), (2, 1, nbytes)}
    assert 1e6 < rate < 1e12
    assert network.exchange is None
    assert network.peers is not None
