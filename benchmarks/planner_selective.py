"""Compares selective recomputation with whole recomputation and swapping, in the planner's model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.largest import GIB, Method, learn, problem_of
from benchmarks.planner_search import CORES, LOOPS
from benchmarks.report import table
from lightning_protrain.config import Knobs
from lightning_protrain.planner.infeasible import NoFeasiblePlan
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.search import find
from lightning_protrain.profiler.gpu_specs import gpu

SEQUENCE = 2048
# As Llama 3.1 8B.
MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "num_hidden_layers": 32, "tie_word_embeddings": False,
}  # fmt: skip
# By name: bytes of the host.
MACHINES = {"RTX 3090": 128 * GIB, "A100 80GB SXM": 512 * GIB, "H100 SXM": 512 * GIB}
METHODS: tuple[Method, ...] = ("full", "LoRA")
BATCHES = (2, 8)
TRAINED = ("overlap backward", "overlap forward, clipping, 3 micro-batches")
HEADER = ("trained", "batch", "GPU", "loop", "without / with", "blocks without", "blocks with")


@dataclass(frozen=True)
class Row:
    """One search with and one without.

    Attributes:
        method: What is trained.
        batch: Sequences.
        machine: The GPU.
        loop: The training loop.
        ratio: Predicted seconds of a step without, over those with; 0: no plan fits.
        without: How many blocks have which policy.
        chosen: The same of the plan with.
    """

    method: str
    batch: int
    machine: str
    loop: str
    ratio: float
    without: str
    chosen: str


def without_products(problem: Problem) -> Problem:
    """Return the search problem in which no block can keep its products."""
    segments = tuple(replace(segment, product_bytes=None) for segment in problem.profile.segments)
    return replace(problem, profile=replace(problem.profile, segments=segments))


def compare(method: Method, batch: int, machine: str, loop: str, problem: Problem) -> Row:
    """Search with and without selective recomputation."""
    problem = replace(problem, training=LOOPS[loop])
    try:
        without, chosen = find(without_products(problem), Knobs()), find(problem, Knobs())
    except NoFeasiblePlan:
        return Row(method, batch, machine, loop, 0.0, "-", "-")
    ratio = without.seconds / chosen.seconds
    return Row(method, batch, machine, loop, ratio, _policies(without.plan), _policies(chosen.plan))


def _policies(plan: Plan) -> str:
    counts = Counter(block.policy.value for block in plan.blocks)
    return ", ".join(f"{count} {policy}" for policy, count in sorted(counts.items()))


def render(rows: Sequence[Row]) -> str:
    """Return the table."""
    lines = [
        (row.method, row.batch, row.machine, row.loop, f"{row.ratio:.4f}", row.without, row.chosen) for row in rows
    ]
    return table(HEADER, lines)


def run(batches: Sequence[int] = BATCHES, sequence: int = SEQUENCE, **changes: Any) -> tuple[str, dict[str, Any]]:
    """Return the table and its rows.

    Args:
        batches: Sequences in a batch.
        sequence: Tokens in a sequence.
        changes: Changes of `MODEL`.
    """
    rows = []
    config = {**MODEL, "max_position_embeddings": sequence, **changes}
    for method, batch in product(METHODS, batches):
        known = learn(config, method, "bf16-mixed" if method == "full" else "bf16-true", batch, sequence)
        for machine, host in MACHINES.items():
            problem = problem_of(known, gpu(machine, host, CORES))
            rows += [compare(method, batch, machine, loop, problem) for loop in TRAINED]
    return render(rows), {"rows": [vars(row) for row in rows]}
