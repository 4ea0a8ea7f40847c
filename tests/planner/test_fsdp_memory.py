"""The memory of FSDP2, added up by hand, and the fewest blocks that have to recompute to fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.fsdp_memory import (
    FSDPProblem,
    FSDPRanks,
    FSDPTooLarge,
    fewest_checkpointed,
    fit_fsdp,
    fsdp_memory,
)
from lightning_protrain.profiler.records import Backward, ModelProfile, Segment
from tests.planner.layouts import forward_of, layouts, transformer

K, STATE_BYTES, BLOCKS = 1000, 8.0, 4
LAYOUT = transformer(num_blocks=BLOCKS, numel=1024, vocabulary=4096, tied=False)
# Bytes of weights: the root has two embeddings and a norm, a block two weights.
ROOT, BLOCK, BUFFERS, LOSS = 2 * 16384 + 256, 8192, 96, 512
WEIGHTS = ROOT + BLOCKS * BLOCK


def block(index: int) -> Segment:
    """Saves 1000 K, makes 100 K, has 200 K more while it runs, and is given 100 K."""
    live, names = 1100 * K * index + 100 * K, (f"layers.{index}.up", f"layers.{index}.down")
    forward, backward = forward_of(live, live + 1200 * K, 1000 * K), Backward(live + 1200 * K, live + 1500 * K)
    return Segment(f"layers.{index}", forward, backward, 100 * K, gradients=names)


END = 1100 * K * BLOCKS
PROFILE = ModelProfile(
    *((), (), END, 0),
    segments=(
        Segment("embed", forward_of(0, 100 * K), Backward(100 * K, 200 * K), gradients=("embed.weight",)),
        *map(block, range(BLOCKS)),
        Segment("head", forward_of(END + 100 * K, END + 200 * K), Backward(END + 200 * K, END + 300 * K)),
    ),
)


def problem(num_nodes: int = 2, here: int = 2, shard_size: int | None = None, **options: object) -> FSDPProblem:
    ranks = FSDPRanks(num_nodes, here, shard_size, bool(options.pop("cpu_offload", False)))
    return FSDPProblem(LAYOUT, ranks, STATE_BYTES, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("shard_size", "parts"), [(None, 4), (2, 2), (1, 1)])
def test_states_are_divided_by_the_ranks_of_a_copy(shard_size: int | None, parts: int) -> None:
    found = fsdp_memory(problem(shard_size=shard_size))
    states = {"sharded_parameters": WEIGHTS // parts, "gradients": WEIGHTS // parts}
    states |= {"optimizer_states": 2 * WEIGHTS // parts, "module_buffers": BUFFERS}
    # One shard is the whole: it is copied without a buffer.
    buffers = 3 if parts > 1 else 1
    gathered = {"gathered_root": ROOT, "gathered_units": buffers * BLOCK}
    by_name = {phase.name: phase for phase in found.phases}
    if parts == 1:
        assert by_name["forward"].device == states | gathered
    else:  # Nothing is known of activations, so the most is there when the root has just been gathered.
        assert by_name["forward"].device == states | {"gathered_root": 2 * ROOT, "gathered_units": 2 * BLOCK}
    assert by_name["backward"].device == states | (
        {"gathered_root": ROOT, "gathered_units": min(buffers, 2) * BLOCK, "unreduced_gradients": ROOT + 2 * BLOCK}
    )
    assert by_name["step"].device == states | {"temporaries": WEIGHTS // parts}
    assert by_name["loading"].device_bytes == WEIGHTS // parts + BUFFERS + ROOT
    # Each rank builds the whole model, and afterwards has nothing on the host.
    assert (found.host_bytes, found.node_host_bytes) == (WEIGHTS, 2 * WEIGHTS)
    assert not sum(by_name["step"].host.values())
    assert not found.counts_activations


def test_offloaded_shards_are_on_the_host_in_powers_of_two_where_they_are_pinned() -> None:
    plain, pinned = (
        {phase.name: phase for phase in fsdp_memory(problem(cpu_offload=True, on_gpu=on_gpu)).phases}
        for on_gpu in (False, True)
    )
    assert plain["step"].device_bytes == BUFFERS
    assert sum(plain["step"].host.values()) == 4 * WEIGHTS // 4
    assert plain["step"].host == pinned["step"].host  # All shards are powers of two.


@pytest.mark.parametrize(("shape", "on_gpu", "shards"), [((-1, 3), False, 3), ((-1, 3), True, 4), ((3, -1), False, 4)])
def test_shards_are_padded_and_pinned_ones_rounded_up(shape: tuple[int, int], on_gpu: bool, shards: int) -> None:
    infos = tuple(
        replace(info, shape=tuple(info.numel if size < 0 else size for size in shape), nbytes=3 * info.nbytes)
        for info in LAYOUT.parameters
    )
    case = replace(problem(cpu_offload=True, on_gpu=on_gpu), layout=replace(LAYOUT, parameters=infos))
    # A part of three columns; or one of three rows on each of four ranks, the last of which has padding.
    assert fsdp_memory(case).phases[-1].host["gradients"] == shards * WEIGHTS // 4


def test_mixed_precision_gathers_two_bytes_and_reduces_four() -> None:
    found = {phase.name: phase.device for phase in fsdp_memory(problem(compute_dtype="bfloat16")).phases}
    assert found["forward"]["gathered_root"] == 2 * ROOT // 2
    assert found["backward"]["gathered_units"] == 2 * BLOCK // 2
    # In the end all gradients of the root, in two bytes, and the input of their reduction.
    assert found["backward"]["sharded_parameters"] == WEIGHTS // 4
    assert max(ROOT // 2 + BLOCK // 2 + BLOCK + ROOT // 2 + 2 * BLOCK // 2, ROOT // 2 + ROOT) == sum(
        nbytes for term, nbytes in found["backward"].items() if "gathered" in term or "unreduced" in term
    )


def test_gradients_that_are_accumulated_are_whole() -> None:
    assert {phase.name: phase for phase in fsdp_memory(problem(accumulates=True)).phases}["forward"].device[
        "gradients"
    ] == WEIGHTS


@pytest.mark.parametrize("count", range(BLOCKS + 1))
def test_activations_are_those_of_the_memory_model(count: int) -> None:
    names = [f"layers.{index}" for index in range(count)]
    found = fsdp_memory(problem(profile=PROFILE, on_gpu=False), names)
    backward = next(phase.device for phase in found.phases if phase.name == "backward")
    # Before the last block all have saved; what a recomputed one has saved is back, one at a time.
    expected = END - 1100 * K + 100 * K + 1500 * K - 1000 * K * min(count, BLOCKS - 1)
    assert backward["activations"] == expected
    assert found.checkpointed == tuple(names)


def test_the_fewest_blocks_recompute() -> None:
    case = problem(profile=PROFILE, on_gpu=False)
    needed = [fsdp_memory(case, case.block_names[:count]).device_bytes for count in range(BLOCKS + 1)]
    assert needed[0] > needed[1] > needed[2] > needed[3] == needed[4]
    assert fewest_checkpointed(case, None).checkpointed == ()
    for count, budget in enumerate(needed[:BLOCKS]):
        assert fewest_checkpointed(case, budget).checkpointed == case.block_names[:count]
    assert fewest_checkpointed(case, needed[1] - 1).checkpointed == case.block_names[:2]


def test_what_fits_nowhere_is_refused_with_what_would() -> None:
    case = problem(shard_size=2, profile=PROFILE, on_gpu=False, accumulates=True)
    needed = fsdp_memory(case, case.block_names).device_bytes
    with pytest.raises(ValueError, match=r"all 4 blocks recomputed") as caught:
        fewest_checkpointed(case, needed - 1)
    text = str(caught.value)
    assert f"({needed} bytes) on each device" in text
    assert f"({needed - 1} bytes) are allowed" in text
    assert all(way in text for way in ("sync_each_batch=True", 'sharding_strategy="FULL_SHARD"', "cpu_offload=True"))
    with pytest.raises(ValueError, match=r"Train on more ranks, or with a smaller batch"):
        fewest_checkpointed(case, 1000)


def test_hsdp_by_nodes_is_taken_where_a_node_holds_the_model() -> None:
    case = problem(profile=PROFILE, on_gpu=False)
    by_nodes, whole = case.ranks.meshes
    assert (by_nodes.divisor, whole.divisor) == (2, 4)
    alone = replace(case, ranks=FSDPRanks(1, 1))
    assert problem(num_nodes=1, here=4).ranks.meshes == (FSDPRanks(1, 4),)
    least = fsdp_memory(replace(case, ranks=by_nodes), case.block_names).device_bytes
    for budget, divisor in ((None, 2), (least, 2), (least - 1, 4)):
        assert fit_fsdp(case, budget).ranks.divisor == divisor
    assert fit_fsdp(case, least, meshes=[whole]).ranks == whole
    assert "2 copies, each sharded over 2 ranks, 3 of 4 blocks recomputed" in fit_fsdp(case, least).describe()
    assert "sharded over all 4 ranks" in fit_fsdp(case, least - 1).describe()
    assert "on the host of each node at most (on one rank, " in fit_fsdp(alone, None).describe()


def test_a_number_of_blocks_that_is_given_is_kept_to() -> None:
    case = problem(profile=PROFILE, on_gpu=False)
    assert fit_fsdp(case, None, count=3).checkpointed == case.block_names[:3]
    needed = fsdp_memory(case, case.block_names[:1]).device_bytes
    with pytest.raises(FSDPTooLarge, match=r"with 1 of 4 blocks recomputed.*activation_checkpointing=\"auto\""):
        fit_fsdp(case, needed - 1, count=1, meshes=[FSDPRanks(2, 2)])


def test_hosts_that_are_too_small_are_refused() -> None:
    case = problem(profile=PROFILE, on_gpu=False, cpu_offload=True)
    by_nodes, whole = (fsdp_memory(replace(case, ranks=ranks)).node_host_bytes for ranks in case.ranks.meshes)
    assert by_nodes == 2 * whole == 4 * WEIGHTS
    assert fit_fsdp(case, None, by_nodes).ranks.divisor == 2
    assert fit_fsdp(case, None, by_nodes - 1).ranks.divisor == 4
    with pytest.raises(FSDPTooLarge, match=rf"{whole} bytes\) on the host of each node.*Leave cpu_offload out"):
        fit_fsdp(case, None, whole - 1)


def test_ranks_hold_whole_copies() -> None:
    with pytest.raises(ValueError, match=r"6 ranks \(3 x 2\) cannot be divided into groups of 4"):
        FSDPRanks(3, 2, 4)


@given(layouts(), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.booleans())
def test_more_ranks_take_no_more_of_each(layout: object, parts: int, cpu_offload: bool, accumulates: bool) -> None:
    def device(shard_size: int) -> dict[str, int]:
        case = FSDPProblem(layout, FSDPRanks(2, 4, shard_size, cpu_offload), STATE_BYTES, accumulates=accumulates)  # type: ignore[arg-type]
        return fsdp_memory(case).phases[0].device | fsdp_memory(case).phases[-1].host

    states = ("sharded_parameters", "optimizer_states")
    assert all(device(parts)[name] >= device(2 * parts if parts < 8 else parts)[name] for name in states)
    whole, one = device(1), device(parts)
    assert parts * one["sharded_parameters"] >= whole["sharded_parameters"]
