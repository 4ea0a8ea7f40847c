"""Host memory by purpose."""

from __future__ import annotations

from dataclasses import replace
from mmap import PAGESIZE

import pytest

from lightning_protrain.planner.memory import HostUse, host_bytes, host_terms, loading_terms, memory_terms
from lightning_protrain.planner.packing import pack_chunks, with_residency
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, Plan
from lightning_protrain.planner.prediction import OTHER_RANKS
from lightning_protrain.profiler.records import ModelLayout
from tests.planner.layouts import transformer

LAYOUT = transformer(num_blocks=2, numel=1024, vocabulary=4096, tied=False)
PAGES = 4 + 2 + 2 + 1 + 4  # embedding, blocks, norm, head
ELEMENTS = 2 * 4096 + 4 * 1024 + 64


def plan_of(layout: ModelLayout, resident: bool = False, swap_bytes: int = 0) -> Plan:
    chunks = tuple(with_residency(layout, chunk, resident) for chunk in pack_chunks(layout))
    blocks = (BlockPlan("layers.0", BlockPolicy.SWAP, swap_bytes), BlockPlan("layers.1", BlockPolicy.KEEP))
    return Plan(chunks, blocks, 2, memory_terms(layout, chunks, 2, 8.0), {})


def test_offloaded() -> None:
    assert host_terms(LAYOUT, plan_of(LAYOUT, swap_bytes=4096), 8.0) == {
        "parameters": PAGES * PAGESIZE,
        "low_precision_copies": 0,
        "gradients": PAGES * PAGESIZE,
        "optimizer_states": 8 * ELEMENTS,
        "landing_gradients": 0,
        "swapped_activations": 4096,
    }


def test_sums_wait_for_two_chunks_on_an_asynchronous_device() -> None:
    plan = plan_of(LAYOUT)
    waiting = host_terms(LAYOUT, plan, 8.0, HostUse(accumulate=2))["landing_gradients"]
    # As many of each size as there are, since two of the largest and one more would be all of them.
    assert waiting == PAGES * PAGESIZE
    assert host_terms(LAYOUT, plan, 8.0, HostUse(accumulate=2), asynchronous=False)["landing_gradients"] == waiting


def test_copies_of_lower_precision() -> None:
    low = LAYOUT.streaming({"layers.0.up", "layers.0.down"}, "bfloat16")
    terms = host_terms(low, plan_of(low), 8.0)
    assert terms["low_precision_copies"] == PAGESIZE
    assert terms["landing_gradients"] == PAGESIZE
    assert terms["gradients"] == PAGES * PAGESIZE


def test_gradients_in_the_memory_of_copies() -> None:
    low = replace(LAYOUT.streaming({"layers.0.up", "layers.0.down"}, "bfloat16"), lends_copies=True)
    terms = host_terms(low, plan_of(low), 8.0)
    assert terms["low_precision_copies"] == PAGESIZE
    assert terms["gradients"] == (PAGES - 2) * PAGESIZE
    assert terms["landing_gradients"] == 2 * 1024 * 4  # One chunk of them is cast at one time.
    chunks = plan_of(low).chunks
    assert host_bytes(low, chunks, 8.0) == host_bytes(replace(low, lends_copies=False), chunks, 8.0) - 2 * 1024 * 4
    other = replace(LAYOUT, lends_copies=True)
    assert host_terms(other, plan_of(other), 8.0) == host_terms(LAYOUT, plan_of(LAYOUT), 8.0)


def test_resident() -> None:
    assert not any(host_terms(LAYOUT, plan_of(LAYOUT, resident=True), 8.0).values())
    weights = sum(info.nbytes for info in LAYOUT.parameters)
    assert loading_terms(LAYOUT, plan_of(LAYOUT, resident=True), True)["parameters"] == weights


def test_loading_has_one_chunk_twice() -> None:
    assert loading_terms(LAYOUT, plan_of(LAYOUT), True)["parameters"] == (PAGES + 4) * PAGESIZE


LOW = LAYOUT.streaming({"layers.0.up", "layers.0.down"}, "bfloat16")


@pytest.mark.parametrize(
    ("layout", "accumulate", "sharers", "pages"),
    [
        # What is swapped, 3 times; two blocks have two matrices each, whose averages may come to two owners.
        (LAYOUT, 1, 4, 3 * 2 + 2),
        (LOW, 1, 4, 3 * 2 + 2),
        # Also gradients of earlier micro-batches, and of those the ones that wait to be added.
        (LAYOUT, 2, 4, 3 * (2 + PAGES + PAGES)),
        (LAYOUT, 2, 2, 2 + PAGES + PAGES),
    ],
    ids=["averaged", "cast", "accumulated", "two ranks"],
)
def test_ranks_that_share_one_copy_have_the_rest_of_their_own(
    layout: ModelLayout, accumulate: int, sharers: int, pages: int
) -> None:
    plan = plan_of(layout, swap_bytes=2 * PAGESIZE)
    alone = host_terms(layout, plan, 8.0, HostUse(1, accumulate))
    if accumulate == 1:
        alone["landing_gradients"] = 0  # Averages are cast on the device.
    shared = host_terms(layout, plan, 8.0, HostUse(sharers, accumulate))
    assert shared == {**alone, OTHER_RANKS: pages * PAGESIZE}


def test_nothing_is_shared_by_one_rank() -> None:
    plan = plan_of(LAYOUT, swap_bytes=4096)
    assert host_terms(LAYOUT, plan, 8.0, HostUse(1)) == host_terms(LAYOUT, plan, 8.0)
    assert OTHER_RANKS not in host_terms(LAYOUT, plan, 8.0)
