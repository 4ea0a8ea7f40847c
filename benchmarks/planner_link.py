"""Benchmark of plans on links that are slower than expected.

    python -m benchmarks.planner link --results planner-link

A plan is searched with the rates of the catalogue, and its step is predicted again with slower links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.largest import GIB
from benchmarks.report import table
from lightning_protrain.models.published import find_config
from lightning_protrain.models.repeated_blocks import planner_for
from lightning_protrain.planner import search
from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.step_time import step_time
from lightning_protrain.plans import TrainingOptions
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware

GPU, HOST_MEMORY, CORES = "RTX 4090", "64GiB", 16
MODEL = "Qwen/Qwen3-8B"
LENGTHS = (1024, 1536, 2048, 4096)
RATES = (1.0, 0.5, 0.25)
HEADER = (
    "tokens", "plan", "streamed", "buffers", "swap, recompute", "copied GiB a step",
    *(f"step at {rate:g} of the link, ms" for rate in RATES),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A plan, with its predicted step under several rates of the link.

    Attributes:
        tokens: Tokens of a micro-batch.
        way: What was searched for.
        streamed: Number of streamed chunks.
        buffers: Number of chunk buffers.
        policies: Number of blocks that swap, and that recompute.
        copied: Bytes copied over the link in a step, both directions.
        seconds: Predicted step time for each of `RATES`.
    """

    tokens: int
    way: str
    streamed: int
    buffers: int
    policies: tuple[int, int]
    copied: float
    seconds: tuple[float, ...]


def problem_for(length: int) -> tuple[Problem, Plan]:
    """Return the problem of training adapters, and the plan that `lightning-protrain plan` prints."""
    hardware = DryRunHardware((GPU,), host_memory=HOST_MEMORY, host_cores=CORES)
    planner = planner_for(TrainingOptions("lora", length=length).of(find_config(MODEL), GPU), hardware)
    request = replace(planner.request, workload=planner.known[GPU], profile_on=None)
    plan = request.plan(hardware.nodes[GPU])
    return request.here(hardware.nodes[GPU]), plan


def with_link(problem: Problem, share: float) -> Problem:
    """Return the problem with a link of `share` times the rates."""
    names = ("upload", "upload_beside", "download", "download_beside")
    slower = {name: share * getattr(problem.hardware, name) for name in names}
    return replace(problem, hardware=replace(problem.hardware, **slower))


def run() -> list[Row]:
    """Return a row for the fastest plan, and one for the plan that a search returns, for each length."""
    rows = []
    for length in LENGTHS:
        problem, plan = problem_for(length)
        worth, search.WORTH = search.WORTH, 0.0
        try:
            fastest = search.search(problem, search.Knobs())
        finally:
            search.WORTH = worth
        rows += [_row(length, way, problem, made) for way, made in (("fastest", fastest), ("fewest copies", plan))]
    return rows


def _row(length: int, way: str, problem: Problem, plan: Plan) -> Row:
    hardware, time = problem.hardware, step_time(problem, plan)
    counts = [sum(block.policy is policy for block in plan.blocks) for policy in BlockPolicy]
    by_name = dict(zip((str(policy) for policy in BlockPolicy), counts, strict=True))
    return Row(
        length,
        way,
        plan.num_offloaded_chunks,
        plan.num_chunk_buffers,
        (by_name["swap"], by_name["checkpoint"] + by_name["selective"]),
        time.upload * hardware.upload + time.download * hardware.download,
        tuple(step_time(with_link(problem, rate), plan).seconds for rate in RATES),
    )


def render(rows: Sequence[Row]) -> str:
    """Return the table."""
    lines = [
        (
            f"{row.tokens:,}", row.way, row.streamed, row.buffers, "{}, {}".format(*row.policies),
            f"{row.copied / GIB:.2f}", *(f"{1e3 * seconds:.0f}" for seconds in row.seconds),
        )
        for row in rows
    ]  # fmt: skip
    return table(HEADER, lines)
