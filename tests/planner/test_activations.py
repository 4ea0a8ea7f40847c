"""The curve is an upper bound of the timeline and monotone, on random problems."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightning_protrain.planner.activations import ActivationCurve
from lightning_protrain.planner.chunks import pack_chunks, with_residency
from lightning_protrain.planner.memory import memory_terms, minimum_chunk_buffers, resident_bytes
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, ChunkPlan, Plan
from lightning_protrain.planner.policies import lay_out, spread
from lightning_protrain.planner.timeline import memory_timeline
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile
from tests.planner.problems import random_layout, random_profile

STATE_BYTES = 8.0
RATES = (1.0,) * 6


def hardware(asynchronous: bool) -> HardwareProfile:
    return HardwareProfile("any", *RATES, {"float32": 1.0}, *RATES[:4], 1, 1, asynchronous)


def problem(seed: int, num_blocks: int = 6) -> tuple[random.Random, ModelLayout, ModelProfile, tuple[ChunkPlan, ...]]:
    source = random.Random(seed)
    layout = random_layout(source, num_blocks, 2, tied=source.random() < 0.5, low=source.random() < 0.5)
    profile = random_profile(source, layout)
    # What a real profile may have, too: a block without backward, and one that costs more than it frees.
    segments = [
        replace(
            segment,
            checkpoint_saving=segment.checkpoint_saving - source.choice([0, 0, 3000]),
            peak_with_gradients=segment.backward.peak_bytes + source.randint(0, 5000),
        )
        for segment in profile.segments
    ]
    return source, layout, replace(profile, segments=tuple(segments)), pack_chunks(layout, source.choice([None, 4096]))


def assignment(num_blocks: int, num_swap: int, num_checkpoint: int) -> Sequence[BlockPolicy]:
    order = sorted(range(num_blocks), key=lambda index: index * 7 % 5)  # not by place
    steps = [(index, BlockPolicy.CHECKPOINT) for index in order]
    return lay_out(num_blocks, steps, spread(num_swap, num_blocks) if num_swap else (), num_checkpoint)


def plan_of(
    layout: ModelLayout, profile: ModelProfile, chunks: Sequence[ChunkPlan], counts: tuple[int, int, int]
) -> Plan:
    num_checkpoint, num_swap, num_persistent = counts
    placed = tuple(with_residency(layout, chunk, at < num_persistent) for at, chunk in enumerate(chunks))
    policies = assignment(len(layout.blocks), num_swap, num_checkpoint)
    saved = profile.swap_bytes()
    blocks = tuple(
        BlockPlan(block.name, policy, max(saved.get(block.name, 0), 1) if policy is BlockPolicy.SWAP else 0)
        for block, policy in zip(layout.blocks, policies, strict=True)
    )
    num_buffers = max(minimum_chunk_buffers(layout, placed), 2)
    memory = memory_terms(layout, placed, num_buffers, STATE_BYTES, blocks)
    return Plan(placed, blocks, num_buffers, memory, {info.fqn: info.shape for info in layout.parameters})


@pytest.mark.parametrize("seed", range(40))
def test_it_is_never_below_the_timeline(seed: int) -> None:
    source, layout, profile, chunks = problem(seed)
    asynchronous, accumulate, alpha = source.random() < 0.5, source.choice([1, 2]), source.choice([0.8, 1.0, 1.1])
    foreach = source.random() < 0.5
    count = len(layout.blocks)
    curve = ActivationCurve(
        profile, layout, chunks, lambda s, c: assignment(count, s, c), asynchronous, accumulate, alpha, foreach
    )
    for _ in range(12):
        num_swap = source.randint(0, count // 2)
        counts = source.randint(0, count - num_swap), num_swap, source.randint(0, len(chunks))
        plan = plan_of(layout, profile, chunks, counts)
        timeline = memory_timeline(
            profile, layout, plan, hardware(asynchronous), STATE_BYTES, accumulate, alpha, foreach
        )
        arrays = [np.array([value]) for value in counts]
        states = sum(resident_bytes(layout, chunk, STATE_BYTES) for chunk in plan.chunks if chunk.resident)
        buffers = plan.memory.chunk_buffers if plan.num_offloaded_chunks else 0
        total = states + buffers + layout.buffer_bytes + int(curve.peaks(*arrays)[0] + curve.held(arrays[2])[0])
        for name in ("forward", "backward", "step"):
            assert timeline.phase(name).total <= total


@pytest.mark.parametrize("seed", range(40))
def test_it_is_monotone(seed: int) -> None:
    source, layout, profile, chunks = problem(seed)
    count = len(layout.blocks)
    curve = ActivationCurve(
        profile, layout, chunks, lambda s, c: assignment(count, s, c), True, source.choice([1, 2]), 1.1
    )
    persistent = np.arange(len(chunks) + 1)
    for num_swap in range(count // 2):
        checkpointed = np.arange(count - num_swap + 1)
        columns = [axis.ravel() for axis in np.meshgrid(checkpointed, persistent, indexing="ij")]
        peaks = curve.peaks(columns[0], np.full(columns[0].shape, num_swap), columns[1])
        peaks = peaks.reshape(len(checkpointed), len(persistent))
        assert (np.diff(peaks, axis=0) <= 0).all()
        assert (np.diff(peaks, axis=1) >= 0).all()
    weights = np.cumsum([0, *(chunk.nbytes for chunk in chunks)])
    assert (np.diff(curve.held(persistent) + weights) >= 0).all(), "what is held falls by no more than becomes resident"


def test_many_candidates_are_those_candidates_one_by_one() -> None:
    _, layout, profile, chunks = problem(3)
    count = len(layout.blocks)
    curve = ActivationCurve(profile, layout, chunks, lambda s, c: assignment(count, s, c), True)
    checkpointed, swapped, persistent = np.array([0, 3, 3, 5]), np.array([0, 1, 1, 0]), np.array([2, 0, 4, 1])
    together = curve.peaks(checkpointed, swapped, persistent)
    alone = [
        curve.peaks(*(values[at : at + 1] for values in (checkpointed, swapped, persistent)))[0] for at in range(4)
    ]
    assert together.tolist() == alone


def test_a_profile_without_backward_is_refused() -> None:
    _, layout, profile, chunks = problem(0)
    with pytest.raises(ValueError, match="has no backward"):
        ActivationCurve(replace(profile, segments=()), layout, chunks, lambda s, c: (), True)
