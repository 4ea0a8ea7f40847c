"""The fastest plan by trying all of them, one by one: what the search is held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from lightning_protrain.planner.activations import ActivationCurve
from lightning_protrain.planner.averages import averages_of
from lightning_protrain.planner.chunks import pack_chunks, with_residency
from lightning_protrain.planner.clock import simulate
from lightning_protrain.planner.columns import columns_of
from lightning_protrain.planner.host import host_terms, loading_terms
from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.memory import HostUse, host_bytes, memory_terms, minimum_chunk_buffers, resident_bytes
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, ChunkPlan, Plan
from lightning_protrain.planner.problem import Packing, Problem
from lightning_protrain.profiler.records import ModelLayout


@dataclass(frozen=True)
class Candidate:
    """One plan, what it takes, and its knobs in the order in which ties are broken."""

    plan: Plan
    device: int
    host: int
    order: tuple[int, ...]


def all_candidates(problem: Problem, knobs: Knobs, selective: bool = True) -> Iterator[Candidate]:
    """Every plan that the knobs allow, whether it fits or not; only if `selective`, blocks keep products alone."""
    sizes = problem.chunk_bytes if knobs.chunk_bytes is None else (knobs.chunk_bytes,)
    for index, size in enumerate(sizes):
        packing = Packing(problem, size, knobs.num_swap_blocks, selective=selective and knobs.leave_policies)
        yield from _over(problem, knobs, index, size, packing.places, packing.steps)


def _over(
    problem: Problem,
    knobs: Knobs,
    packing: int,
    size: int | None,
    places: tuple[int, ...],
    steps: tuple[tuple[int, BlockPolicy], ...],
) -> Iterator[Candidate]:
    layout, training = problem.layout, problem.training
    streamed = pack_chunks(layout, size)
    names = [block.name for block in layout.blocks]

    def policies(num_swap: int, num_steps: int) -> list[BlockPolicy]:
        found, left = [BlockPolicy.KEEP] * len(names), num_steps
        for index in places[:num_swap]:
            found[index] = BlockPolicy.SWAP
        for index, policy in steps:
            if found[index] is not BlockPolicy.SWAP and left > 0:
                found[index], left = policy, left - 1
        return found

    curve = ActivationCurve(
        problem.profile, layout, streamed, policies, problem.hardware.asynchronous, training.accumulate,
        problem.alpha, problem.foreach, any(policy is BlockPolicy.SELECTIVE for _, policy in steps),
    )  # fmt: skip
    for persistent in _range(knobs.num_persistent_chunks, 0, len(streamed)):
        if persistent > len(streamed):
            continue  # A pin that other sizes of chunks allow.
        chunks = [with_residency(layout, chunk, place < persistent) for place, chunk in enumerate(streamed)]
        low = frozenset(fqn for chunk in chunks if chunk.streamed_dtype for fqn in chunk.parameters)
        swap_bytes = problem.profile.swap_bytes(low)
        fixed = sum(resident_bytes(layout, chunk, problem.state_bytes) for chunk in chunks if chunk.resident)
        offloaded = len(chunks) - persistent
        least = minimum_chunk_buffers(layout, chunks)
        for num_swap in _range(knobs.num_swap_blocks, 0, len(places)):
            left = sum(index not in places[:num_swap] for index, _ in steps)
            for num_steps in _range(knobs.num_checkpoint_blocks, 0, left):
                if num_steps > left:
                    continue
                kinds = policies(num_swap, num_steps)
                blocks = [
                    BlockPlan(name, kind, swap_bytes[name] if kind is BlockPolicy.SWAP else 0)
                    for name, kind in zip(names, kinds, strict=True)
                ]
                if knobs.num_keep_offloaded_blocks not in (None, _keeps(layout, chunks, blocks)):
                    continue
                one = [np.array([number]) for number in (num_steps, num_swap, persistent)]
                held = int(curve.held(one[2])[0]) + int(curve.peaks(*one)[0]) + fixed + layout.buffer_bytes
                for buffers in _range(knobs.num_chunk_buffers, least, offloaded):
                    if buffers < least:
                        continue
                    memory = memory_terms(layout, chunks, buffers, problem.state_bytes, blocks)
                    plan = Plan(
                        tuple(chunks), tuple(blocks), buffers, memory, {i.fqn: i.shape for i in layout.parameters}
                    )
                    yield Candidate(
                        plan,
                        max(held + memory.chunk_buffers, memory.total),
                        _host(problem, plan),
                        (packing, num_swap, num_steps, offloaded, -buffers),
                    )


def _range(pinned: int | None, first: int, last: int) -> range:
    if pinned is None:
        return range(first, last + 1)
    return range(pinned, pinned + 1)


def _keeps(layout: ModelLayout, chunks: list[ChunkPlan], blocks: list[BlockPlan]) -> int:
    offloaded = {fqn for chunk in chunks if not chunk.resident for fqn in chunk.parameters}
    streamed = {unit.name for unit in layout.units if offloaded & set(unit.parameters)}
    return sum(block.policy is BlockPolicy.KEEP and block.name in streamed for block in blocks)


def _host(problem: Problem, plan: Plan) -> int:
    layout, machine, again = problem.layout, problem.hardware, problem.training.accumulate
    use = HostUse(problem.sharers, again)
    return max(
        host_bytes(layout, plan.chunks, problem.state_bytes, plan.blocks, use),
        sum(host_terms(layout, plan, problem.state_bytes, again, machine.asynchronous, problem.sharers).values()),
        sum(loading_terms(layout, plan, machine.asynchronous).values()),
    )


def times(problem: Problem, candidates: list[Candidate]) -> list[float]:
    """Seconds of one step of each."""
    columns = [
        columns_of(problem.profile, problem.layout, candidate.plan, problem.hardware, problem.training)
        for candidate in candidates
    ]
    if not columns:
        return []
    averages = None
    if problem.network is not None:
        known = problem.hardware, problem.training.accumulate > 1, problem.network
        averages = _stacked(
            [averages_of(problem.profile, problem.layout, candidate.plan, *known) for candidate in candidates]
        )
    return simulate(_stacked(columns), problem.training, problem.hardware.asynchronous, averages).tolist()


def _stacked(columns: list[Any]) -> Any:
    """One column each, side by side."""
    return type(columns[0])(**{
        field.name: np.concatenate([getattr(column, field.name) for column in columns], axis=-1)
        for field in fields(columns[0])
    })  # fmt: skip
