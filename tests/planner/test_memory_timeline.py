"""The timeline of a model whose figures can be added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_protrain.planner.memory import memory_terms
from lightning_protrain.planner.memory_timeline import LiveChunks, MemoryTimeline, memory_timeline
from lightning_protrain.planner.packing import pack_chunks, with_residency
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, Plan
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout, ModelProfile, Pass, Segment
from tests.planner.hand_computed import BLOCK, BUFFERS, EDGE, LAYOUT, NORM, PROFILE, SEGMENTS, K
from tests.planner.layouts import layout_of, parameter

KEEP, SELECTIVE, CHECKPOINT, SWAP = BlockPolicy
CPU = HardwareProfile("CPU", *(1.0,) * 6, {"float32": 1.0}, *(1.0,) * 4, 1, 1, asynchronous=False)
STATE_BYTES, LOSS = 8.0, 512


def plan_of(resident: bool, *policies: BlockPolicy, inputs: int = 0) -> Plan:
    chunks = tuple(with_residency(LAYOUT, chunk, resident) for chunk in pack_chunks(LAYOUT))
    given = {KEEP: 0, SELECTIVE: 0, CHECKPOINT: inputs, SWAP: 1000 * K}
    blocks = [BlockPlan(f"layers.{at}", policy, given[policy]) for at, policy in enumerate(policies)]
    memory = memory_terms(LAYOUT, chunks, 2, STATE_BYTES, blocks)
    return Plan(
        chunks, tuple(blocks), 0 if resident else 2, memory, {info.fqn: info.shape for info in LAYOUT.parameters}
    )


def problem_of(profile: ModelProfile, accumulate: int = 1, **changes: Any) -> Problem:
    problem = Problem(profile, LAYOUT, CPU, Training("off", accumulate), STATE_BYTES, None, None)
    return replace(problem, **changes)


def timeline(plan: Plan, profile: ModelProfile = PROFILE, **options: Any) -> MemoryTimeline:
    return memory_timeline(problem_of(profile, **options), plan)


WEIGHTS = 2 * EDGE + 2 * BLOCK + NORM
RESIDENT = 3 * WEIGHTS + BUFFERS


def test_resident_and_kept() -> None:
    found = timeline(plan_of(True, KEEP, KEEP))
    assert found.phase("loading").total == WEIGHTS + BUFFERS
    # The gradients of the step before are there until the loss is known.
    assert found.phase("forward").total == RESIDENT + WEIGHTS + 2400 * K + LOSS
    # At the last block: the head's gradient, that of the norm, which no segment makes in this profile, is never.
    assert found.phase("backward").unit == "layers.1"
    assert found.phase("backward").device["gradients"] == EDGE + NORM + 4096
    assert found.phase("backward").device["activations"] == 2700 * K
    # AdamW parameter by parameter: a root and a quotient.
    assert found.phase("step").total == RESIDENT + WEIGHTS + 2 * EDGE
    assert found.device_peak == found.phase("backward").total
    assert found.host_peak == WEIGHTS
    assert not any(found.phase("step").host.values())


@pytest.mark.parametrize(
    ("policies", "unit", "activations", "swapped"),
    [
        ((KEEP, KEEP), "layers.1", 2700 * K, 0),
        ((CHECKPOINT, KEEP), "layers.1", 1700 * K, 0),
        ((CHECKPOINT, CHECKPOINT), "layers.1", 1700 * K, 0),
        ((KEEP, CHECKPOINT), "layers.1", 2700 * K, 0),
        ((SWAP, KEEP), "layers.1", 1700 * K, 1000 * K),
        ((SWAP, SWAP), "layers.1", 1700 * K, 1000 * K),
    ],
)
def test_policies(policies: tuple[BlockPolicy, ...], unit: str, activations: int, swapped: int) -> None:
    phase = timeline(plan_of(False, *policies)).phase("backward")
    assert (phase.unit, phase.device["activations"], phase.device["swapped_activations"]) == (
        unit,
        activations,
        swapped,
    )
    assert phase.device["gradients"] == phase.device["gradients_in_flight"] == 0
    assert phase.device["chunk_buffers"] == 2 * BLOCK


def test_inputs_that_are_swapped() -> None:
    kept, swapped = (timeline(plan_of(False, CHECKPOINT, KEEP, inputs=nbytes)) for nbytes in (0, 100 * K))
    less = kept.phase("backward").device["activations"] - swapped.phase("backward").device["activations"]
    assert less == swapped.phase("backward").device["swapped_activations"] == 100 * K


def test_a_recomputation_that_takes_more_than_its_backward() -> None:
    last = replace(SEGMENTS[2], forward=Pass(1200 * K, 3200 * K))
    profile = replace(PROFILE, segments=(*SEGMENTS[:2], last, SEGMENTS[3]))
    # Before it 2400 K less 2 x 1000 K; then the 2000 K of its forward.
    assert timeline(plan_of(False, CHECKPOINT, CHECKPOINT), profile).phase("backward").device["activations"] == 2400 * K


def test_accumulated_gradients_are_all_there() -> None:
    phase = timeline(plan_of(True, KEEP, KEEP), accumulate=2).phase("backward")
    assert phase.device["gradients"] == WEIGHTS


def test_fragmentation_counts_on_an_asynchronous_device_and_never_deflates() -> None:
    plan = plan_of(False, KEEP, KEEP)
    gpu = replace(CPU, asynchronous=True)
    plain, more, less = (
        memory_timeline(problem_of(PROFILE, hardware=gpu, alpha=alpha), plan) for alpha in (1, 1.1, 0.75)
    )
    assert more.device_peak - plain.device_peak == pytest.approx(270 * K, abs=1)  # rounded up
    assert less.device_peak == plain.device_peak
    assert less.phase("backward").fragmentation == -675 * K
    assert plain.phase("backward").device["gradients_in_flight"] == EDGE
    assert timeline(plan, alpha=1.1).phase("backward").fragmentation == 0


def test_foreach_takes_as_much_as_all_resident_parameters() -> None:
    found = timeline(plan_of(True, KEEP, KEEP), foreach=True)
    assert found.phase("step").device["temporaries"] == WEIGHTS


def test_what_the_batch_did_not_run_is_reserved_for_and_named() -> None:
    found = timeline(plan_of(False, KEEP, KEEP), replace(PROFILE, segments=(*SEGMENTS[:2], SEGMENTS[3])))
    assert found.unexercised == ("layers.1", "norm")
    assert found.phase("backward").device["unexercised"] >= 1000 * K


def test_a_profile_without_backward_is_refused() -> None:
    with pytest.raises(ValueError, match="has no backward"):
        timeline(plan_of(True, KEEP, KEEP), replace(PROFILE, segments=()))


def test_there_are_five_phases() -> None:
    found = timeline(plan_of(True, KEEP, KEEP))
    assert [phase.name for phase in found.phases] == ["loading", "forward", "backward", "step", "evaluation"]
    with pytest.raises(KeyError):
        found.phase("lunch")


# --- which chunks are on the device, position by position -------------------------------------------------------------

STREAMED_UNITS = ["a", "b", "", "c", "d"]
STREAMED_SIZES = {"a": 1024, "b": 2048, "c": 4096, "d": 8192}
STREAMED = layout_of(
    [parameter(f"{name}.w", size // 4) for name, size in STREAMED_SIZES.items()],
    {name: [f"{name}.w"] for name in STREAMED_SIZES},
)


def streamed_plan(layout: ModelLayout, num_buffers: int) -> Plan:
    chunks = pack_chunks(layout)
    return Plan(chunks, (), num_buffers, memory_terms(layout, chunks, num_buffers, 0.0), {})


def live_of(layout: ModelLayout, plan: Plan, units: list[str]) -> Any:
    """Live chunks of a step through these units."""
    segments = tuple(Segment(name, Pass(0, 1), Pass(0, 1), between=not name) for name in units)
    profile = ModelProfile((), (), 0, (), 0, 0, 0, segments)
    return LiveChunks(Problem(profile, layout, CPU, Training(), 0.0, None, None), plan)


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
    live = live_of(STREAMED, streamed_plan(STREAMED, num_buffers), STREAMED_UNITS)
    assert list(live.forward) == forward
    assert list(live.backward) == backward
    assert list(live.evaluation) == evaluation


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_what_was_used_last_is_there_until_the_first_unit_that_streams(num_buffers: int) -> None:
    plan = streamed_plan(STREAMED, num_buffers)
    resident = [with_residency(STREAMED, chunk, index < 2) for index, chunk in enumerate(plan.chunks)]
    live = live_of(STREAMED, replace(plan, chunks=tuple(resident)), STREAMED_UNITS)
    streamed = [chunk.nbytes for chunk in plan.chunks[2:]][:num_buffers]
    assert live.forward[0] == live.forward[1] == live.evaluation[0] == sum(streamed)


def test_never_more_than_the_buffers_have() -> None:
    plan = streamed_plan(STREAMED, 2)
    few = replace(plan, memory=replace(plan.memory, chunk_buffers=9000))
    assert max(live_of(STREAMED, few, STREAMED_UNITS).forward) == 9000


def test_what_is_around_a_unit_is_there_while_it_runs() -> None:
    infos = [parameter("tower.w", 256), parameter("tower.x.w", 512), parameter("y.w", 1024)]
    layout = layout_of(infos, {"tower": ["tower.w"], "tower.x": ["tower.x.w"], "y": ["y.w"]})
    live = live_of(layout, streamed_plan(layout, 2), ["tower.x", "y"])
    assert live.forward[0] == 1024 + 2048
    assert live.backward[0] == 1024 + 2048
