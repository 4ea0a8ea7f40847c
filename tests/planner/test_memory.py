"""The memory model by hand and by property: phases, units that did not run, and the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.memory import (
    HostUse,
    StatesProblem,
    check_fits,
    format_bytes,
    host_bytes,
    memory_terms,
    minimum_buffer_bytes,
    minimum_chunk_buffers,
)
from lightning_protrain.planner.memory_timeline import LiveChunks, MemoryTimeline, memory_timeline
from lightning_protrain.planner.packing import chunks_of, pack_chunks, with_residency
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, ChunkPlan, Plan, gathers_gradients
from lightning_protrain.planner.problem import Problem, Reserve, Training, without_gradients
from lightning_protrain.profiler.records import (
    Backward,
    Forward,
    HardwareProfile,
    ModelLayout,
    ModelProfile,
    Segment,
    UnitInfo,
)
from tests.planner.hand_computed import BLOCK, BUFFERS, EDGE, LAYOUT, NORM, PROFILE, SEGMENTS, K
from tests.planner.layouts import forward_of, is_inside, layout_of, layouts, parameter, transformer


def place(layout: ModelLayout, mask: int, chunk_bytes: int | None = None) -> tuple[ChunkPlan, ...]:
    """Chunks whose residency is bit by bit that of `mask`."""
    chunks = pack_chunks(layout, chunk_bytes)
    return tuple(chunk._replace(resident=bool(mask >> index & 1)) for index, chunk in enumerate(chunks))


def live_sets(layout: ModelLayout, chunks: tuple[ChunkPlan, ...]) -> list[set[int]]:
    """Return the sets of chunks on the device during a walk through the module tree, derived from names alone."""
    needed = chunks_of(layout, chunks)
    return [
        {
            index
            for outer in layout.units
            if outer.name == unit.name or is_inside(unit.name, outer.name)
            for index in needed[outer.name]
            if not chunks[index].resident
        }
        for unit in layout.units
    ]


MASKS = st.integers(0, 2**40)
CHUNK_BYTES = st.none() | st.integers(1, 4096)


@given(layouts(), MASKS, CHUNK_BYTES)
def test_minimum_is_the_deepest_state_of_a_walk(layout: ModelLayout, mask: int, chunk_bytes: int | None) -> None:
    chunks = place(layout, mask, chunk_bytes)
    states = live_sets(layout, chunks)
    assert minimum_chunk_buffers(layout, chunks) == max(len(state) for state in states)
    heaviest = max(sum(chunks[index].nbytes for index in state) for state in states)
    assert minimum_buffer_bytes(layout, chunks) == heaviest


@given(layouts(), MASKS, CHUNK_BYTES, st.integers(0, 12))
def test_chunk_buffers_are_the_heaviest_neighbours(
    layout: ModelLayout, mask: int, chunk_bytes: int | None, num: int
) -> None:
    chunks = place(layout, mask, chunk_bytes)
    sizes = [chunk.nbytes for chunk in chunks if not chunk.resident]
    heaviest = max((sum(sizes[i : i + num]) for i in range(len(sizes))), default=0)
    terms = memory_terms(layout, chunks, num, 0.0)
    assert terms.chunk_buffers == max(heaviest, minimum_buffer_bytes(layout, chunks))
    assert terms.chunk_buffers <= sum(sizes)
    assert terms.module_buffers == layout.buffer_bytes


@given(layouts(), MASKS)
def test_more_buffers_never_cost_less(layout: ModelLayout, mask: int) -> None:
    chunks = place(layout, mask)
    totals = [memory_terms(layout, chunks, num, 4.0).total for num in range(len(chunks) + 2)]
    assert all(left <= right for left, right in pairwise(totals))


@given(layouts(), MASKS, MASKS, st.sampled_from([0.0, 4.0, 8.0, 12.0]))
def test_states_are_conserved_between_device_and_host(
    layout: ModelLayout, one: int, other: int, state_bytes: float
) -> None:
    sums = {
        memory_terms(layout, chunks, 0, state_bytes).resident_states + host_bytes(layout, chunks, state_bytes)
        for chunks in (place(layout, one), place(layout, other))
    }
    trainable = [info for info in layout.parameters if info.trainable]
    states = sum(state_bytes * info.numel for info in trainable)
    parameters = sum(chunk.nbytes * (2 if chunk.trainable else 1) for chunk in pack_chunks(layout))
    assert sums == {parameters + int(states)}


@given(layouts())
def test_resident_chunks_need_no_buffers(layout: ModelLayout) -> None:
    chunks = place(layout, -1)
    terms = memory_terms(layout, chunks, 0, 8.0)
    assert (terms.chunk_buffers, terms.gradients_in_flight) == (0, 0)
    assert (minimum_chunk_buffers(layout, chunks), minimum_buffer_bytes(layout, chunks)) == (0, 0)
    assert host_bytes(layout, chunks, 8.0) == 0


@given(layouts(), MASKS)
def test_gradients_in_flight_lie_between_the_largest_and_all(layout: ModelLayout, mask: int) -> None:
    chunks = place(layout, mask)
    streamed = [
        layout.parameter(fqn) for chunk in chunks if not chunk.resident and chunk.trainable for fqn in chunk.parameters
    ]
    gradients = memory_terms(layout, chunks, 1, 0.0).gradients_in_flight
    tied = sum(info.nbytes for info in streamed if len(info.sites) > 1)
    assert max(tied, max((info.nbytes for info in streamed), default=0)) <= gradients
    each = zip(chunks, gathers_gradients(layout, chunks), strict=True)
    gathered = [chunk.nbytes for chunk, gathers in each if gathers and not chunk.resident]
    assert gradients <= sum(info.nbytes for info in streamed) + 3 * max(gathered, default=0)


@pytest.mark.parametrize(
    ("tied", "resident_embedding", "expected"),
    [
        (True, False, 4096 * 4 + 2 * 1024 * 4),  # the tied embedding accumulates while two matrices of a block land
        (True, True, 2 * 1024 * 4),
        (False, False, 2 * 4096 * 4),
        (False, True, 4096 * 4 + 1024 * 4),  # the head and a matrix of a block
    ],
)
def test_gradients_in_flight_of_a_transformer(tied: bool, resident_embedding: bool, expected: int) -> None:
    layout = transformer(tied=tied)
    chunks = place(layout, int(resident_embedding))
    assert memory_terms(layout, chunks, 2, 8.0).gradients_in_flight == expected


def test_a_parameter_that_two_modules_of_a_block_share_accumulates_its_gradient() -> None:
    layout = transformer(tied=False)
    shared = [
        replace(each, sites=(each.fqn, f"{each.fqn}.again")) if ".up" in each.fqn else each
        for each in layout.parameters
    ]
    layout = replace(layout, parameters=tuple(shared))
    assert memory_terms(layout, place(layout, 0), 2, 8.0).gradients_in_flight == 4 * 1024 * 4 + 2 * 4096 * 4


def test_frozen_parameters_have_neither_gradients_nor_states() -> None:
    layout = layout_of([parameter("a.w", 64, trainable=False), parameter("b.w", 64)], {"a": ["a.w"], "b": ["b.w"]})
    assert memory_terms(layout, place(layout, 0b11), 0, 8.0).resident_states == 256 + 2 * 256 + 8 * 64
    assert memory_terms(layout, place(layout, 0b01), 1, 8.0).resident_states == 256
    assert host_bytes(layout, place(layout, 0b01), 8.0) == 2 * 256 + 8 * 64
    assert memory_terms(layout, place(layout, 0b10), 1, 8.0).gradients_in_flight == 0


@pytest.mark.parametrize(
    ("use", "more"),
    [
        (HostUse(), 0),
        (HostUse(accumulate=3), 0),
        (HostUse(sharers=4), 3 * 100),
        (HostUse(sharers=4, accumulate=3), 3 * (100 + 256)),
    ],
    ids=str,
)
def test_ranks_that_share_a_host_swap_and_collect_gradients_each(use: HostUse, more: int) -> None:
    layout = layout_of([parameter("a.w", 64, trainable=False), parameter("b.w", 64)], {"a": ["a.w"], "b": ["b.w"]})
    blocks = [BlockPlan("a", BlockPolicy.SWAP, 100), BlockPlan("b", BlockPolicy.KEEP)]
    needed = host_bytes(layout, place(layout, 0b00), 8.0, blocks, use)
    assert needed == 256 + 2 * 256 + 8 * 64 + 100 + more


@pytest.mark.parametrize(("state_bytes", "expected"), [(0.0, 512), (8.0, 512 + 512), (2.03, 512 + 130)])
def test_state_bytes_may_be_fractions(state_bytes: float, expected: int) -> None:
    layout = layout_of([parameter("a.w", 64)], {"a": ["a.w"]})
    assert memory_terms(layout, place(layout, 1), 0, state_bytes).resident_states == expected


def test_containers_around_a_block_count_with_it() -> None:
    layout = layout_of(
        [parameter("scale"), parameter("tower.position", 128), parameter("tower.0.w", 64), parameter("head.w", 512)],
        {"": ["scale"], "tower": ["tower.position"], "tower.0": ["tower.0.w"], "head": ["head.w"]},
        blocks=["tower.0"],
    )
    chunks = pack_chunks(layout)
    assert minimum_chunk_buffers(layout, chunks) == 3
    assert minimum_buffer_bytes(layout, chunks) == 256 + 2048  # the root and the head, in two chunks


def test_a_module_shared_by_two_blocks_does_not_add_them_up() -> None:
    parameters = [parameter("a.w"), parameter("a.mlp.w", sites=("b.mlp.w",)), parameter("b.w")]
    layout = ModelLayout(
        parameters=tuple(parameters),
        units=(
            UnitInfo("a", True, ("a.w", "a.mlp.w"), encloses=("a.mlp",)),
            UnitInfo("a.mlp", False, ("a.mlp.w",)),
            UnitInfo("b", True, ("a.mlp.w", "b.w"), encloses=("a.mlp",)),
        ),
        buffer_bytes=0,
    )
    assert minimum_chunk_buffers(layout, pack_chunks(layout)) == 2


def swapping(layout: ModelLayout, sizes: Sequence[int]) -> tuple[BlockPlan, ...]:
    """Return blocks that swap `sizes` bytes; blocks of size 0 keep their activations."""
    policies = (BlockPolicy.SWAP if size else BlockPolicy.KEEP for size in sizes)
    return tuple(map(BlockPlan, (block.name for block in layout.blocks), policies, sizes))


@given(layouts(), st.data())
def test_swapped_activations_are_the_heaviest_neighbours(layout: ModelLayout, data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(0, 2**40)) for _ in layout.blocks]
    chunks, blocks = place(layout, 0), swapping(layout, sizes)
    terms = memory_terms(layout, chunks, 1, 8.0, blocks)
    assert terms.swapped_activations == max((sum(sizes[i : i + 2]) for i in range(len(sizes))), default=0)
    assert replace(terms, swapped_activations=0) == memory_terms(layout, chunks, 1, 8.0)
    assert host_bytes(layout, chunks, 8.0, blocks) == host_bytes(layout, chunks, 8.0) + sum(sizes)


def make(layout: ModelLayout, num_chunk_buffers: int, mask: int = 0, sizes: Sequence[int] = (0, 0, 0, 0)) -> Plan:
    chunks, blocks = place(layout, mask), swapping(layout, sizes)
    return Plan(
        chunks,
        blocks,
        num_chunk_buffers,
        memory_terms(layout, chunks, num_chunk_buffers, 8.0, blocks),
        {info.fqn: info.shape for info in layout.parameters},
    )


@pytest.mark.parametrize("mask", [0, 1, 0b101, -1])
@pytest.mark.parametrize("slack", [0, 1, inf])
def test_check_fits_accepts_what_fits(mask: int, slack: float) -> None:
    layout = transformer()
    plan = make(layout, 1, mask)
    check_fits(plan, StatesProblem(layout, 0.0, None if slack == inf else plan.memory.total + int(slack)))
    assert minimum_chunk_buffers(layout, plan.chunks) <= 1


def test_check_fits_refuses_too_few_buffers() -> None:
    layout = layout_of([parameter("w"), parameter("a.w")], {"": ["w"], "a": ["a.w"]}, blocks=["a"])
    with pytest.raises(ValueError, match="num_chunk_buffers=1, this model needs at least 2"):
        check_fits(make(layout, 1), StatesProblem(layout, 0.0, None))


@pytest.mark.parametrize(
    ("term", "mask", "noun"),
    [("chunk_buffers", 0, "chunks"), ("resident_states", -1, "chunks"), ("swapped_activations", -1, "swapped blocks")],
)
def test_check_fits_refuses_understated_terms(term: str, mask: int, noun: str) -> None:
    layout = transformer()
    plan = make(layout, 2, mask, (2048, 4096, 0, 0))
    with pytest.raises(ValueError, match=rf"memory\.{term} is 1 byte, its {noun} need at least \d+\.\d+ KiB"):
        check_fits(replace(plan, memory=replace(plan.memory, **{term: 1})), StatesProblem(layout, 0.0, None))


def test_check_fits_refuses_a_budget_that_is_one_byte_short() -> None:
    layout = transformer()
    plan = make(layout, 2)
    total = plan.memory.total
    with pytest.raises(ValueError, match=rf"needs .*\({total} bytes\).* \({total - 1} bytes\) are allowed"):
        check_fits(plan, StatesProblem(layout, 0.0, total - 1))


def test_check_fits_refuses_too_little_host_memory() -> None:
    layout = transformer()
    plan = make(layout, 2, 0b10, (2048, 0, 4096, 0))
    needed = host_bytes(layout, plan.chunks, 8.0) + 2048 + 4096
    check_fits(plan, StatesProblem(layout, 8.0, None, needed))
    with pytest.raises(
        ValueError, match=rf"\({needed} bytes\) of host memory, .*\({needed - 1} bytes\) are .*swap fewer"
    ):
        check_fits(plan, StatesProblem(layout, 8.0, None, needed - 1))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB (1024 bytes)"),
        (3 * 2**20, "3.00 MiB (3145728 bytes)"),
        (3 * 2**29, "1.50 GiB (1610612736 bytes)"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


KEEP, SELECTIVE, CHECKPOINT, SWAP = BlockPolicy
CPU = HardwareProfile("CPU", *(1.0,) * 4, {"float32": 1.0}, *(1.0,) * 4, 1, 1, asynchronous=False)
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
    last = replace(SEGMENTS[2], forward=forward_of(1200 * K, 3200 * K, 1000 * K))
    profile = replace(PROFILE, segments=(*SEGMENTS[:2], last, SEGMENTS[3]))
    # Before it 2400 K less 2 x 1000 K; then the 2000 K of its forward.
    assert timeline(plan_of(False, CHECKPOINT, CHECKPOINT), profile).phase("backward").device["activations"] == 2400 * K


def test_an_input_that_two_blocks_keep_alive_counts_once() -> None:
    segments = [replace(each, lost_inputs=300 * K) if each.unit.startswith("layers") else each for each in SEGMENTS]
    phase = timeline(plan_of(False, CHECKPOINT, CHECKPOINT), replace(PROFILE, segments=tuple(segments))).phase(
        "backward"
    )
    # Beside the first block's 1600 K; the second block needs its 1700 K as without such an input.
    assert (phase.unit, phase.device["activations"]) == ("layers.0", 1900 * K)


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
    segments = tuple(Segment(name, Forward(), Backward(0, 1), between=not name) for name in units)
    profile = ModelProfile((), (), 0, 0, segments)
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


def test_nothing_is_reserved_where_all_blocks_ran() -> None:
    reserve = Reserve.of(PROFILE, LAYOUT)
    assert reserve.names == ("norm",)
    assert reserve.total({"layers.0": KEEP, "layers.1": KEEP}) == 0


def test_a_block_that_did_not_run_takes_what_one_of_its_size_took() -> None:
    reserve = Reserve.of(replace(PROFILE, segments=(*SEGMENTS[:2], SEGMENTS[3])), LAYOUT)
    assert reserve.names == ("layers.1", "norm")
    totals = [reserve.total({"layers.0": KEEP, "layers.1": policy}) for policy in (KEEP, CHECKPOINT, SWAP)]
    # While it runs 1300 K: its backward, and what it has saved.
    assert totals == [1100 * K + 1300 * K, 100 * K + 1300 * K, 1300 * K]


def test_a_unit_that_ran_and_got_no_gradient_never_will() -> None:
    unreached = replace(SEGMENTS[2], backward=Backward(), gradients=())
    assert without_gradients(PROFILE, LAYOUT) == frozenset()
    profile = replace(PROFILE, segments=(*SEGMENTS[:2], unreached, SEGMENTS[3]))
    assert without_gradients(profile, LAYOUT) == {"layers.1.up", "layers.1.down"}
    some = replace(SEGMENTS[2], gradients=("layers.1.up",))  # an expert that no token came to
    assert without_gradients(replace(PROFILE, segments=(*SEGMENTS[:2], some, SEGMENTS[3])), LAYOUT) == frozenset()
