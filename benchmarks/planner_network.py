"""Compares plans that know the network with plans made as for one rank, in the planner's model.

Both plans are timed with the sums that they send. Rates of networks are round figures of what such machines reach.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.largest import GIB, learn, problem_of
from benchmarks.planner_search import CORES, LOOPS
from benchmarks.planner_selective import MODEL
from benchmarks.report import table
from lightning_protrain.config import Knobs
from lightning_protrain.planner.network import Network, Route
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.search import find
from lightning_protrain.planner.step_time import step_time
from lightning_protrain.profiler.gpu_specs import gpu

SEQUENCE = 2048
# By name: bytes of the host.
MACHINES = {"RTX 4090": 256 * GIB, "A100 80GB SXM": 1024 * GIB}
# By name: sums to all ranks; of shared copies also to an owner, among the owners of all machines, and ranks of each.
NETWORKS = {
    "replicate, 4 GPUs on PCIe": Network(Route(40e-6, 8e9)),
    "shard, 4 GPUs on PCIe": Network(Route(40e-6, 8e9), Route(30e-6, 12e9), None, 4),
    "shard, 8 GPUs on NVLink": Network(Route(30e-6, 100e9), Route(20e-6, 150e9), None, 8),
    "shard, 2 x 8, 100 Gbit/s": Network(Route(60e-6, 6e9), Route(20e-6, 150e9), Route(60e-6, 1.5e9), 8),
}
BATCHES = (1, 4)
TRAINED = ("overlap backward", "overlap forward, clipping, 3 micro-batches")
HEADER = ("GPU", "network", "batch", "loop", "as for one rank / with the network", "CPU s", "resident chunks")


@dataclass(frozen=True)
class Row:
    """Two searches.

    Attributes:
        machine: The GPU.
        network: How ranks sum.
        batch: Sequences of each.
        loop: The training loop.
        ratio: Predicted step of the plan that was searched for as for one rank, over that of the other plan.
        seconds: Processor time of the second search.
        resident: Resident chunks of both.
    """

    machine: str
    network: str
    batch: int
    loop: str
    ratio: float
    seconds: float
    resident: tuple[int, int]


def compare(machine: str, network: str, batch: int, loop: str, problem: Problem) -> Row:
    """Search without and with the network."""
    known = NETWORKS[network]
    hardware = replace(problem.hardware, host_step=problem.hardware.host_step * known.owners)
    problem = replace(problem, training=LOOPS[loop], hardware=hardware, host_bytes=None)
    without = find(problem, Knobs()).plan
    begun = time.process_time()
    found = find(replace(problem, network=known), Knobs()).plan
    seconds = time.process_time() - begun
    ratio = _seconds(problem, without, known) / _seconds(problem, found, known)
    return Row(machine, network, batch, loop, ratio, seconds, (_resident(without), _resident(found)))


def _seconds(problem: Problem, plan: Plan, network: Network) -> float:
    return step_time(replace(problem, network=network), plan).seconds


def _resident(plan: Plan) -> int:
    return sum(chunk.resident for chunk in plan.chunks)


def run(batches: Sequence[int] = BATCHES, sequence: int = SEQUENCE, **changes: Any) -> tuple[str, dict[str, Any]]:
    """Return the table and its rows.

    Args:
        batches: Sequences in a batch.
        sequence: Tokens in a sequence.
        changes: Changes of the model's config.
    """
    rows, config = [], {**MODEL, "max_position_embeddings": sequence, **changes}
    for batch in batches:
        known = learn(config, "full", "bf16-mixed", batch, sequence)
        for (machine, host), network, loop in product(MACHINES.items(), NETWORKS, TRAINED):
            rows.append(compare(machine, network, batch, loop, problem_of(known, gpu(machine, host, CORES))))
    lines = [
        (row.machine, row.network, row.batch, row.loop, f"{row.ratio:.3f}", f"{row.seconds:.2f}",
         f"{row.resident[0]} / {row.resident[1]}")
        for row in rows
    ]  # fmt: skip
    return table(HEADER, lines), {"rows": [vars(row) for row in rows]}
