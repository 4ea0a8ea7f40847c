"""Which chunks are on the device, position by position."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_protrain.planner.chunks import pack_chunks, with_residency
from lightning_protrain.planner.live import LiveChunks
from lightning_protrain.planner.memory import memory_terms
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.records import ModelLayout
from tests.planner.layouts import layout_of, parameter

UNITS = ["a", "b", "", "c", "d"]
SIZES = {"a": 1024, "b": 2048, "c": 4096, "d": 8192}
LAYOUT = layout_of([parameter(f"{name}.w", size // 4) for name, size in SIZES.items()], {n: [f"{n}.w"] for n in SIZES})


def plan_of(layout: ModelLayout, num_buffers: int) -> Plan:
    chunks = pack_chunks(layout)
    return Plan(chunks, (), num_buffers, memory_terms(layout, chunks, num_buffers, 0.0), {})


@pytest.mark.parametrize(
    ("num_buffers", "forward", "backward", "evaluation"),
    [
        (1, [1024, 2048, 2048, 4096, 8192], [1024, 2048, 4096, 4096, 8192], [1024, 2048, 2048, 4096, 8192]),
        (2, [3072, 6144, 6144, 12288, 12288], [3072, 3072, 6144, 6144, 12288], [3072, 6144, 6144, 12288, 12288]),
        (4, [15360] * 5, [15360] * 5, [15360] * 5),
    ],
)
def test_those_that_are_needed_next(
    num_buffers: int, forward: list[int], backward: list[int], evaluation: list[int]
) -> None:
    live = LiveChunks(LAYOUT, plan_of(LAYOUT, num_buffers), UNITS)
    assert list(live.forward) == forward
    assert list(live.backward) == backward
    assert list(live.evaluation) == evaluation


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_what_was_used_last_is_there_until_the_first_unit_that_streams(num_buffers: int) -> None:
    plan = plan_of(LAYOUT, num_buffers)
    resident = [with_residency(LAYOUT, chunk, index < 2) for index, chunk in enumerate(plan.chunks)]
    live = LiveChunks(LAYOUT, replace(plan, chunks=tuple(resident)), UNITS)
    streamed = [chunk.nbytes for chunk in plan.chunks[2:]][:num_buffers]
    assert live.forward[0] == live.forward[1] == live.evaluation[0] == sum(streamed)


def test_never_more_than_the_buffers_have() -> None:
    plan = plan_of(LAYOUT, 2)
    few = replace(plan, memory=replace(plan.memory, chunk_buffers=9000))
    assert max(LiveChunks(LAYOUT, few, UNITS).forward) == 9000


def test_what_is_around_a_unit_is_there_while_it_runs() -> None:
    infos = [parameter("tower.w", 256), parameter("tower.x.w", 512), parameter("y.w", 1024)]
    layout = layout_of(infos, {"tower": ["tower.w"], "tower.x": ["tower.x.w"], "y": ["y.w"]})
    live = LiveChunks(layout, plan_of(layout, 2), ["tower.x", "y"])
    assert live.forward[0] == 1024 + 2048
    assert live.backward[0] == 1024 + 2048
