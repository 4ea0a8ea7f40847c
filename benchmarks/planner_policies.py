"""Compares policies chosen block by block with counts of policies, by trying all plans of small models.

The search decides how many blocks swap and how many checkpoint; [Note: Layout of policies] says which ones. Here every
block may have any policy, combined with all numbers of resident chunks and of buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.largest import learn, problem_of
from benchmarks.planner_search import LOOPS, MACHINE
from benchmarks.report import table
from lightning_protrain.config import Knobs
from lightning_protrain.planner.candidates import packings
from lightning_protrain.planner.memory import memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.packing import lay_out, pack_chunks, with_residency
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, ChunkPlan, Plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.step_time import step_time
from lightning_protrain.profiler.gpu_specs import gpu

SEQUENCE = 1024
BLOCKS = 4
# By name: a configuration of so many blocks. In the second one every other block has experts: blocks differ.
_COMMON = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 32000}
_EXPERTS = {"decoder_sparse_step": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1408}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"model_type": "llama", "num_key_value_heads": 16, **_COMMON},
    "Qwen3, experts in every other block": {"model_type": "qwen3_moe", "num_key_value_heads": 4, **_COMMON, **_EXPERTS},
}
BATCHES = (1, 8, 32)
# Of what lies between the plan that needs least and the one that needs most.
SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
# A block that keeps its products alone is light.
LETTERS = {
    BlockPolicy.KEEP: "k", BlockPolicy.SELECTIVE: "l", BlockPolicy.CHECKPOINT: "c", BlockPolicy.SWAP: "s"
}  # fmt: skip
HEADER = ("model", "batch", "loop", "plans", "budgets", "counts / block by block, most", "where they differ")


@dataclass(frozen=True)
class Row:
    """One model in one training loop, on devices of several sizes.

    Attributes:
        model: Which model.
        batch: Sequences.
        loop: Which loop.
        plans: So many were tried.
        ratios: By share of memory: the best step of counts over the best of all.
        policies: The same of plans that are faster: policies of all, of counts, by `LETTERS`.
    """

    model: str
    batch: int
    loop: str
    plans: int
    ratios: dict[float, float]
    policies: dict[float, tuple[str, str]]


@dataclass(frozen=True)
class _Trial:
    plan: Plan
    nbytes: int
    counted: bool


def problem_for(name: str, batch: int, blocks: int = BLOCKS, sequence: int = SEQUENCE) -> Problem:
    """Return the search problem for one of `MODELS` in mixed precision, all weights trained."""
    own = {"num_hidden_layers": blocks, "max_position_embeddings": sequence, "tie_word_embeddings": False}
    config = {**MODELS[name], **own}
    known = learn(config, "full", "bf16-mixed", batch, sequence)
    return replace(problem_of(known, gpu(MACHINE, 64 << 40, 32)), host_bytes=None, chunk_bytes=(None,))


def compare(name: str, batch: int, problem: Problem, loop: str) -> Row:
    """Try all plans, and find the best of each kind for each share of the memory."""
    problem = replace(problem, training=LOOPS[loop])
    trials = list(_trials(problem))
    seconds = _seconds(problem, [trial.plan for trial in trials])
    nbytes, counted = np.array([trial.nbytes for trial in trials]), np.array([trial.counted for trial in trials])
    ratios, policies = {}, {}
    for share in SHARES:
        fits = nbytes <= nbytes.min() + share * (nbytes.max() - nbytes.min())
        best, of_counts = (int(np.where(some, seconds, np.inf).argmin()) for some in (fits, fits & counted))
        ratios[share] = float(seconds[of_counts] / seconds[best])
        if ratios[share] > 1 + 1e-9:
            policies[share] = _letters(trials[best].plan), _letters(trials[of_counts].plan)
    return Row(name, batch, loop, len(trials), ratios, policies)


def _trials(problem: Problem) -> Iterator[_Trial]:
    layout = problem.layout
    packed = pack_chunks(layout, None)
    (packing,) = packings(problem, Knobs())
    names = [block.name for block in layout.blocks]
    counted = {
        lay_out(len(names), packing.steps, packing.places[:swaps], steps)
        for swaps in range(len(packing.places) + 1)
        for steps in range(len(packing.steps) + 1)
    }
    for persistent in range(len(packed) + 1):
        chunks = tuple(with_residency(layout, chunk, index < persistent) for index, chunk in enumerate(packed))
        low = frozenset(fqn for chunk in chunks if chunk.streamed_dtype for fqn in chunk.parameters)
        saved = problem.profile.swap_bytes(low)
        for kinds in product(BlockPolicy, repeat=len(names)):
            blocks = tuple(
                BlockPlan(block, kind, saved[block] if kind is BlockPolicy.SWAP else 0)
                for block, kind in zip(names, kinds, strict=True)
            )
            for plan, nbytes in _with_buffers(problem, chunks, blocks):
                yield _Trial(plan, nbytes, kinds in counted)


def _with_buffers(
    problem: Problem, chunks: tuple[ChunkPlan, ...], blocks: tuple[BlockPlan, ...]
) -> Iterator[tuple[Plan, int]]:
    """Plans with all numbers of buffers, and their bytes on the device."""
    layout = problem.layout
    shapes = {info.fqn: info.shape for info in layout.parameters}
    without = None
    for buffers in range(minimum_chunk_buffers(layout, chunks), sum(not chunk.resident for chunk in chunks) + 1):
        memory = memory_terms(layout, chunks, buffers, problem.state_bytes, blocks)
        plan = Plan(chunks, blocks, buffers, memory, shapes)
        if without is None:
            without = memory_timeline(problem, plan).device_peak - memory.chunk_buffers
        yield plan, without + memory.chunk_buffers


def _seconds(problem: Problem, plans: Sequence[Plan]) -> NDArray[np.float64]:
    return np.array([step_time(problem, plan).seconds for plan in plans])


def _letters(plan: Plan) -> str:
    return "".join(LETTERS[block.policy] for block in plan.blocks)


def render(rows: Sequence[Row]) -> str:
    """Return the table."""
    lines = [
        (
            row.model, row.batch, row.loop, f"{row.plans:,}", len(row.ratios), f"{max(row.ratios.values()):.4f}",
            "; ".join(f"{share:.0%}: {best} for {counts}" for share, (best, counts) in row.policies.items()) or "-",
        )
        for row in rows
    ]  # fmt: skip
    return table(HEADER, lines)


def run(
    models: Sequence[str] = tuple(MODELS),
    batches: Sequence[int] = BATCHES,
    loops: Sequence[str] = tuple(LOOPS),
    blocks: int = BLOCKS,
    sequence: int = SEQUENCE,
) -> tuple[str, dict[str, Any]]:
    """Return the table and its rows.

    Args:
        models: Keys of `MODELS`.
        batches: Sequences in a batch.
        loops: Keys of `LOOPS`.
        blocks: Number of blocks of each model.
        sequence: Tokens in a sequence.
    """
    rows = []
    for name, batch in product(models, batches):
        problem = problem_for(name, batch, blocks, sequence)
        rows += [compare(name, batch, problem, loop) for loop in loops]
    return render(rows), {"rows": [vars(row) for row in rows]}
