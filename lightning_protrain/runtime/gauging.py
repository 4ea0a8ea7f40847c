"""How fast the ranks of a run sum gradients: measured with what they will send, when they can."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_protrain.planner.network import Network, Route
from lightning_protrain.planner.plan import Sharding
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime.comm import Ranks

# Bytes of a sum that tells the latency, and of the largest one; sums of each size, of which the fastest counts.
_SMALL, _LARGEST = 1 << 10, 64 << 20
_REPEATS = 3


def gauge(
    ranks: Ranks, device: torch.device, sharding: Sharding, layout: ModelLayout, dtype: torch.dtype | None = None
) -> Network:
    """Measures the sums that a plan would send; every rank calls it, and all get the figures of the slowest.

    Args:
        ranks: Who they are.
        device: Where gradients are averaged.
        sharding: Who holds offloaded chunks.
        layout: What is trained: the gradients of its largest unit are a chunk that is sent.
        dtype: In which gradients are sent; None: that of their parameters.

    Raises:
        RuntimeError: A rank is gone, or has failed.
    """
    element = None if dtype is None else dtype.itemsize
    shards = sharding is Sharding.SHARD
    sums: dict[str, Callable[[torch.Tensor], list[Any]]] = {
        "everyone": lambda flat: [dist.all_reduce(flat, group=ranks.everyone, async_op=True)],
    }
    if shards:
        node = ranks.node or ranks.everyone
        sums["owner"] = lambda flat: [dist.reduce(flat, group=node, async_op=True, group_dst=0)]
        if ranks.peers is not None:
            sums["peers"] = lambda flat: [dist.all_reduce(flat, group=ranks.peers, async_op=True)]
    large = max(min(_largest(layout), _LARGEST), 2 * _SMALL)
    seconds = [_seconds(begin, size, device, ranks) for begin in sums.values() for size in (_SMALL, large)]
    told = torch.tensor(seconds, dtype=torch.float64)
    work = dist.all_reduce(told, dist.ReduceOp.MAX, group=ranks.meeting, async_op=True)
    ranks.attendance.wait(work, "the rates of the network")
    slowest = told.tolist()
    routes = {name: _route(slowest[2 * at], slowest[2 * at + 1], large) for at, name in enumerate(sums)}
    return Network(**routes, owners=ranks.local_size if shards else 1, element=element)


def _largest(layout: ModelLayout) -> int:
    trained = {info.fqn: info.nbytes for info in layout.parameters if info.trainable}
    return max((sum(trained.get(fqn, 0) for fqn in unit.parameters) for unit in layout.units), default=0)


def _route(small: float, large: float, nbytes: int) -> Route:
    """From the seconds of a small and of a large sum; where the large one is no slower, all of it is its bytes."""
    beside = large - small
    if beside <= 0.5 * large:
        return Route(min(small, large), nbytes / large)
    return Route(small, (nbytes - _SMALL) / beside)


def _seconds(begin: Callable[[torch.Tensor], list[Any]], nbytes: int, device: torch.device, ranks: Ranks) -> float:
    """Of one sum, the fastest of several behind one that opens connections."""
    flat = torch.zeros(nbytes // 4, device=device)
    found = []
    for _ in range(_REPEATS + 1):
        together = torch.zeros(1)
        _wait(ranks, [dist.all_reduce(together, group=ranks.meeting, async_op=True)], together)
        started = time.perf_counter()
        _wait(ranks, begin(flat), flat)
        found.append(time.perf_counter() - started)
    return min(found[1:])


def _wait(ranks: Ranks, works: Sequence[Any], flat: torch.Tensor) -> None:
    _end(ranks, works, flat)
    flat[:1].tolist()  # The host waits for it.


def _end(ranks: Ranks, works: Sequence[Any], flat: torch.Tensor) -> None:
    for work in works:
        if flat.device.type == "cpu":
            ranks.attendance.wait(work, "the rates of the network")
        else:
            work.wait()  # Of the compute stream; what is read of the sum comes after it.
