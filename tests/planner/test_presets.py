"""Presets of plans, and plans that swap: which blocks, how many bytes, and what cannot be."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.config import Preset, parse_bytes
from lightning_protrain.planner.memory import host_bytes, memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.packing import pack_chunks
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.presets import Knobs
from lightning_protrain.profiler.records import ModelLayout
from tests.planner.layouts import layout_of, layouts, parameter, transformer
from tests.planner.preset_plans import CHECKPOINT, KEEP, SAVED, STATE_BYTES, SWAP, pinned, plan_of, policies

EMBEDDING, BLOCK, NORM = 16384, 8192, 256  # bytes of the chunks of `transformer()`


def smallest_budget(make: Callable[[int], Plan]) -> int:
    """The smallest device budget, as the refusal of one byte names it."""
    with pytest.raises(ValueError, match=r"needs at least .* are allowed") as caught:
        make(1)
    found = re.search(r"at least (?:.*?\()?(\d+) bytes", str(caught.value))
    assert found is not None
    return int(found[1])


def cheapest_offload(layout: ModelLayout) -> int:
    chunks = pack_chunks(layout)
    return memory_terms(layout, chunks, minimum_chunk_buffers(layout, chunks), STATE_BYTES).total


@pytest.mark.parametrize("preset", ["auto", "resident"])
def test_without_a_budget_everything_is_resident(preset: Preset) -> None:
    plan = plan_of(transformer(), preset)
    assert (plan.num_offloaded_chunks, plan.num_chunk_buffers) == (0, 0)
    assert policies(plan) == [KEEP] * 4
    weights = EMBEDDING + 4 * BLOCK + NORM
    assert plan.memory.total == 2 * weights + 8 * weights // 4 + 96


def test_resident_that_does_not_fit_names_what_offload_needs() -> None:
    needed = plan_of(transformer(), "resident").memory.total
    offload = smallest_budget(lambda device: plan_of(transformer(), "offload", device))
    assert plan_of(transformer(), "resident", needed).memory.total == needed
    message = (
        rf'"resident" needs .*\({needed} bytes\).*\({needed - 1} bytes\) are allowed.*"offload".*\({offload} bytes\)'
    )
    with pytest.raises(ValueError, match=message):
        plan_of(transformer(), "resident", needed - 1)


def test_offload_streams_everything_and_checkpoints_every_block() -> None:
    plan = plan_of(transformer(), "offload")
    assert plan.num_offloaded_chunks == len(plan.chunks) == 6
    assert policies(plan) == [CHECKPOINT] * 4
    assert plan.num_chunk_buffers == 2
    assert plan.memory.resident_states == 0
    assert plan.memory.chunk_buffers == EMBEDDING + BLOCK


@pytest.mark.parametrize(("chunk_bytes", "buffers"), [(None, 2), (8192, 2), (4096, 4), (100, 4)])
def test_offload_prefetches_a_whole_unit(chunk_bytes: int | None, buffers: int) -> None:
    knobs = {} if chunk_bytes is None else {"chunk_bytes": chunk_bytes}
    assert plan_of(transformer(), "offload", **knobs).num_chunk_buffers == buffers


def test_offload_lowers_its_buffers_to_what_fits() -> None:
    # Blocks of two chunks: two buffers and two gradients of 4096 bytes, that of the tied embedding, and module buffers.
    least = 2 * 4096 + 2 * 4096 + NORM + 96
    for more, buffers in ((0, 2), (4095, 2), (4096, 3), (8191, 3), (8192, 4), (10**6, 4)):
        plan = plan_of(transformer(vocabulary=64), "offload", least + more, chunk_bytes=4096)
        assert plan.num_chunk_buffers == buffers


@given(layouts(), st.sampled_from(["offload", "auto"]), st.none() | st.integers(1, 4096))
def test_the_budget_that_is_named_is_the_smallest(layout: ModelLayout, preset: Preset, chunk_bytes: int | None) -> None:
    knobs = {} if chunk_bytes is None else {"chunk_bytes": chunk_bytes}
    unlimited = plan_of(layout, "offload", **knobs)
    if unlimited.memory.total <= 1 or plan_of(layout).memory.total <= 1:
        return
    budget = smallest_budget(lambda device: plan_of(layout, preset, device, **knobs))
    if preset == "auto" and plan_of(layout).memory.total < budget:
        return  # padding and gradients in flight can make a tiny model cheaper when resident
    assert plan_of(layout, preset, budget, **knobs).memory.total == budget
    with pytest.raises(ValueError, match="are allowed"):
        plan_of(layout, preset, budget - 1, **knobs)


@given(layouts(), st.integers(1, 60_000), st.integers(1, 500))
def test_auto_fits_or_refuses(layout: ModelLayout, device: int, min_num_params: int) -> None:
    resident = plan_of(layout)
    least = min(resident.memory.total, cheapest_offload(layout))
    if device < least:
        with pytest.raises(ValueError, match="are allowed"):
            plan_of(layout, device=device, min_num_params=min_num_params)
        return
    plan = plan_of(layout, device=device, min_num_params=min_num_params)
    assert plan.memory.total <= device
    assert (plan == resident) == (resident.memory.total <= device or plan.num_offloaded_chunks == 0 == len(plan.blocks))
    assert plan.num_chunk_buffers >= minimum_chunk_buffers(layout, plan.chunks)


@pytest.mark.parametrize(
    ("tied", "room", "resident"),
    [
        # With two buffers: the states of the embedding come, its gradient and its buffer go.
        (True, 49151, []),
        (True, 49152, ["embed"]),
        # The head's gradient and buffer stay, until its states come too; a matrix of a block lands beside it.
        (False, 53503, []),
        (False, 53504, ["embed"]),
        (False, 106495, ["embed"]),
        (False, 106496, ["embed", "head"]),
    ],
)
def test_auto_keeps_large_embeddings_while_they_fit(tied: bool, room: int, resident: list[str]) -> None:
    layout = transformer(num_blocks=30, tied=tied)
    needed = smallest_budget(lambda device: plan_of(layout, device=device))
    plan = plan_of(layout, device=needed + room, min_num_params=4096)
    assert [chunk.unit for chunk in plan.chunks if chunk.resident] == resident
    assert policies(plan) == [CHECKPOINT] * 30


def test_blocks_are_never_kept_for_their_size() -> None:
    layout = transformer(num_blocks=30)
    plan = plan_of(layout, device=plan_of(layout).memory.total - 1, min_num_params=1)
    assert {chunk.unit for chunk in plan.chunks if chunk.resident} == {"embed", "norm"}


@pytest.mark.parametrize("preset", ["resident", "offload"])
@pytest.mark.parametrize("name", [field.name for field in fields(Knobs)])
def test_no_preset_ignores_a_knob(preset: Preset, name: str) -> None:
    value = 0 if name == "num_swap_blocks" else 4096
    if (preset, name) == ("offload", "chunk_bytes"):
        assert len(plan_of(transformer(), preset, chunk_bytes=value).chunks) == 10
        return
    with pytest.raises(ValueError, match=f'plan="{preset}" makes all decisions and would ignore {name}={value}'):
        plan_of(transformer(), preset, **{name: value})


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="plan='ofload': give one of 'auto', 'resident', 'offload'"):
        plan_of(transformer(), "ofload")  # type: ignore[arg-type]


def test_chunk_bytes_alone_changes_nothing_else() -> None:
    layout = transformer()
    device = plan_of(layout).memory.total - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_of(layout, device=device, chunk_bytes=BLOCK)
    assert plan == plan_of(layout, "offload", device=device, chunk_bytes=BLOCK)


@pytest.mark.parametrize(
    ("knobs", "taken"),
    [
        ({"num_chunk_buffers": 3}, {"num_persistent_chunks": 0, "num_swap_blocks": 0, "num_checkpoint_blocks": 0}),
        ({"num_persistent_chunks": 6}, {"num_chunk_buffers": 0, "num_keep_offloaded_blocks": 0}),
        ({"num_persistent_chunks": 2}, {"num_chunk_buffers": 2, "num_keep_offloaded_blocks": 3}),
        ({"num_keep_offloaded_blocks": 1}, {"num_checkpoint_blocks": 3, "num_persistent_chunks": 0}),
    ],
)
def test_one_warning_names_all_knobs_that_were_left_open(knobs: dict[str, int], taken: dict[str, int]) -> None:
    with pytest.warns(UserWarning, match="not given take these values") as caught:
        plan_of(transformer(), **knobs)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert all(f"{name}={value}" in message for name, value in taken.items())
    assert not any(name in message for name in knobs)
    assert caught[0].filename.endswith("preset_plans.py")


def test_all_knobs_given_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_of(
            transformer(),
            num_persistent_chunks=2,
            num_chunk_buffers=2,
            num_swap_blocks=0,
            num_checkpoint_blocks=2,
            num_keep_offloaded_blocks=2,
        )
    assert [chunk.resident for chunk in plan.chunks] == [True] * 2 + [False] * 4
    assert policies(plan) == [CHECKPOINT] * 2 + [KEEP] * 2


@pytest.mark.parametrize("persistent", range(7))
@pytest.mark.parametrize("keep", range(5))
def test_checkpoints_follow_from_the_kept_offloaded_blocks(persistent: int, keep: int) -> None:
    layout = transformer()
    streamed = 4 - min(max(persistent - 1, 0), 4)
    knobs = {"num_persistent_chunks": persistent, "num_keep_offloaded_blocks": keep}
    if keep > streamed:
        with pytest.raises(
            ValueError, match=f"={keep}: {streamed} of 4 blocks have offloaded chunks. Give at most {streamed}"
        ):
            pinned(layout, **knobs)
        return
    plan = pinned(layout, **knobs)
    offloaded = {chunk.unit for chunk in plan.chunks if not chunk.resident}
    assert sum(block.policy is KEEP and block.name in offloaded for block in plan.blocks) == keep


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_persistent_chunks": 7}, "num_persistent_chunks=7: this model has 6 chunks"),
        ({"num_checkpoint_blocks": 5}, "num_checkpoint_blocks=5: this model has 4 blocks"),
        ({"num_chunk_buffers": 0}, "num_chunk_buffers=0: this model needs at least 1"),
        ({"num_chunk_buffers": 1, "chunk_bytes": 4096}, "num_chunk_buffers=1: this model needs at least 2"),
        (
            {"num_checkpoint_blocks": 1, "num_keep_offloaded_blocks": 2},
            "num_keep_offloaded_blocks=2 contradicts num_checkpoint_blocks=1, which leaves 3 blocks",
        ),
        ({"num_checkpoint_blocks": 5, "num_keep_offloaded_blocks": 0}, "num_checkpoint_blocks=5: this model has 4"),
    ],
)
def test_knobs_that_the_model_contradicts(knobs: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pinned(transformer(), **knobs)


@pytest.mark.parametrize("chunk_bytes", [None, 4096, 100])
def test_open_buffers_hold_one_block_while_the_next_is_prefetched(chunk_bytes: int | None) -> None:
    plan = pinned(transformer(), num_checkpoint_blocks=1, chunk_bytes=chunk_bytes)
    chunks_of_block = sum(chunk.unit == "layers.1" for chunk in plan.chunks)
    assert plan.num_chunk_buffers == 2 * chunks_of_block


def test_open_buffers_are_raised_to_what_the_model_needs() -> None:
    infos = [parameter("w"), parameter("a.w"), parameter("a.b", dtype="bfloat16")]
    layout = layout_of(infos, {"": ["w"], "a": ["a.w", "a.b"]}, blocks=["a"])
    assert pinned(layout, num_checkpoint_blocks=1).num_chunk_buffers == 3


@pytest.mark.parametrize(
    "knobs", [{"num_checkpoint_blocks": 2}, {"num_chunk_buffers": 3}, {"num_persistent_chunks": 3}]
)
def test_pinned_plans_name_the_smallest_budget_for_their_knobs(knobs: dict[str, int]) -> None:
    budget = smallest_budget(lambda device: pinned(transformer(), device, **knobs))
    assert pinned(transformer(), budget, **knobs).memory.total == budget
    with pytest.raises(ValueError, match="are allowed"):
        pinned(transformer(), budget - 1, **knobs)


@pytest.mark.parametrize("preset", ["offload", "auto"])
def test_host_memory(preset: Preset) -> None:
    layout = transformer(num_blocks=30)
    device = plan_of(layout).memory.total - 1
    needed = host_bytes(layout, plan_of(layout, preset, device).chunks, STATE_BYTES)
    assert plan_of(layout, preset, device, needed).num_offloaded_chunks
    with pytest.raises(
        ValueError, match=rf"\({needed} bytes\) of host memory.*\({needed - 1} bytes\) are available.*Raise"
    ):
        plan_of(layout, preset, device, needed - 1)


def test_resident_needs_no_host_memory() -> None:
    assert plan_of(transformer(), "resident", host=0).num_offloaded_chunks == 0


@pytest.mark.parametrize("preset", ["auto", "resident", "offload"])
def test_a_model_without_parameters(preset: Preset) -> None:
    plan = plan_of(layout_of([], {}, buffers=8), preset, device=8)
    assert (plan.chunks, plan.blocks, plan.memory.total) == ((), (), 8)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (2**40, 2**40),
        ("1", 1),
        ("1073741824", 2**30),
        ("100B", 100),
        ("22GiB", 22 * 2**30),
        ("512MiB", 2**29),
        ("3KiB", 3072),
        ("0.5TiB", 2**39),
        ("1.5GB", 1_500_000_000),
        ("2TB", 2 * 10**12),
        ("7MB", 7_000_000),
        ("8KB", 8000),
        (" 22 GiB ", 22 * 2**30),
        ("0.1GB", 100_000_000),
        ("1.0000000000001KB", 1000),
    ],
)
def test_parse_bytes(value: int | str, nbytes: int) -> None:
    assert parse_bytes(value) == nbytes


@pytest.mark.parametrize(
    "value",
    [
        *["", "GiB", "22G", "22gib", "22 Gi B", "1e9", "-1GiB", "1,5GB", "22GiBs", "auto", ".5GB", "5.GB", "0", "0.1B"],
        *["22PiB", "22iB", "NaN", "1 000", "\u0663GiB", 0, -5, True, False, 1.5, None, b"1GiB"],
    ],
)
def test_parse_bytes_refuses(value: object) -> None:
    message = f'{value!r} is not an amount of memory. Give e.g. "22GiB", "512MiB", "1.5GB", or a number of bytes.'
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_bytes(value)  # type: ignore[arg-type]


@given(st.integers(1, 10**15))
def test_parse_bytes_reads_digits(value: int) -> None:
    assert parse_bytes(str(value)) == parse_bytes(value) == value


def test_to_forbid_kept_blocks_with_offloaded_chunks_asks_for_nothing() -> None:
    """A model that fits keeps its activations, and offloaded blocks of one that does not fit recompute anyway."""
    layout = transformer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for preset in ("auto", "resident", "offload"):
            assert plan_of(layout, preset, num_keep_offloaded_blocks=0) == plan_of(layout, preset)
        least = plan_of(layout, "offload").memory.total
        plan = plan_of(layout, device=least, num_keep_offloaded_blocks=0)
    assert plan.num_offloaded_chunks
    assert KEEP not in policies(plan)
    with pytest.raises(ValueError, match="ignore num_keep_offloaded_blocks=1"):
        plan_of(layout, "offload", num_keep_offloaded_blocks=1)


@pytest.mark.parametrize(
    ("num_swap", "num_checkpoint", "letters"),
    [
        (2, 4, "SCCSCCKK"),
        (3, 3, "SCSCSCKK"),
        (4, 2, "SSCSSCKK"),
        (3, 0, "SSSKKKKK"),
        (1, 7, "SCCCCCCC"),
        (0, 2, "CCKKKKKK"),
    ],
)
def test_swapped_blocks_come_early_between_checkpointed_ones(num_swap: int, num_checkpoint: int, letters: str) -> None:
    plan = pinned(transformer(num_blocks=8), num_swap_blocks=num_swap, num_checkpoint_blocks=num_checkpoint)
    assert "".join(policy.name[0] for policy in policies(plan)) == letters
    assert all(block.swap_bytes == SAVED[block.name] * (block.policy is SWAP) for block in plan.blocks)
    neighbours = (sum(block.swap_bytes for block in plan.blocks[index : index + 2]) for index in range(8))
    assert plan.memory.swapped_activations == max(neighbours)


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 10))
def test_the_numbers_of_blocks_are_those_of_the_knobs(num_swap: int, num_checkpoint: int, persistent: int) -> None:
    knobs = {"num_swap_blocks": num_swap, "num_persistent_chunks": persistent}
    if num_swap + num_checkpoint > 8:
        with pytest.raises(ValueError, match=f"num_checkpoint_blocks={num_checkpoint}: this model has 8 blocks"):
            pinned(transformer(num_blocks=8), num_checkpoint_blocks=num_checkpoint, **knobs)
        return
    plan = pinned(transformer(num_blocks=8), num_checkpoint_blocks=num_checkpoint, **knobs)
    found = policies(plan)
    assert (found.count(SWAP), found.count(CHECKPOINT)) == (num_swap, num_checkpoint)
    assert found[num_swap + num_checkpoint :] == [KEEP] * (8 - num_swap - num_checkpoint)
    # Pinned by what they leave instead.
    streamed = {chunk.unit for chunk in plan.chunks if not chunk.resident}
    keep = sum(block.policy is KEEP and block.name in streamed for block in plan.blocks)
    again = pinned(transformer(num_blocks=8), num_keep_offloaded_blocks=keep, **knobs)
    assert sum(block.policy is KEEP and block.name in streamed for block in again.blocks) == keep
    assert policies(again).count(SWAP) == num_swap


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_swap_blocks": 1, "saved": None}, "num_swap_blocks=1: the activations of this model are not known"),
        ({"num_swap_blocks": 2, "saved": {"layers.0": 1}}, r"of block 'layers\.1' are known.*\['layers\.0'\]"),
        ({"num_swap_blocks": 1, "saved": {"layers.0": 0}}, r"of block 'layers\.0' are known"),
        ({"num_swap_blocks": 5}, "num_swap_blocks=5: this model has 4 blocks"),
        (
            {"num_swap_blocks": 2, "num_checkpoint_blocks": 3},
            "num_swap_blocks=2 and num_checkpoint_blocks=3: this model has 4 blocks",
        ),
        (
            {"num_swap_blocks": 2, "num_keep_offloaded_blocks": 3},
            "num_keep_offloaded_blocks=3 contradicts .*checkpoint_blocks=0 and num_swap_blocks=2, which leave 2 blocks",
        ),
    ],
)
def test_swap_that_cannot_be(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pinned(transformer(), **knobs)


def test_a_model_without_blocks_cannot_swap() -> None:
    layout = layout_of([parameter("w")], {"": ["w"]}, blocks=[""])
    with pytest.raises(ValueError, match="num_swap_blocks=1: this model has no repeated list of blocks"):
        pinned(layout, num_swap_blocks=1)


def test_host_memory_for_swapped_activations() -> None:
    plan = pinned(transformer(), num_swap_blocks=2, num_persistent_chunks=6)
    needed = host_bytes(transformer(), plan.chunks, STATE_BYTES, plan.blocks)
    assert needed == SAVED["layers.0"] + SAVED["layers.1"]
    knobs = {"num_swap_blocks": 2, "num_persistent_chunks": 6}
    assert pinned(transformer(), host=needed, **knobs) == plan
    with pytest.raises(ValueError, match=rf"\({needed} bytes\) of host memory.*swap fewer blocks"):
        pinned(transformer(), host=needed - 1, **knobs)
