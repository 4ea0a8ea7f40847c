"""Host memory by purpose, and what every rank has free at least."""

from __future__ import annotations

from dataclasses import replace
from mmap import PAGESIZE

import pytest

from lightning_protrain.planner.free_memory import FreeMemory, least, shortages
from lightning_protrain.planner.memory import (
    HostUse,
    gradient_buffers_of,
    host_bytes,
    host_terms,
    loading_terms,
    memory_terms,
)
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


# Of each size, two units of the largest and two more: 4 pages each of embedding and head, 1 of the norm, 2 of a block.
@pytest.mark.parametrize(
    ("num_blocks", "asynchronous", "pages"),
    [(2, True, PAGES), (2, False, PAGES), (10, True, 9 + (4 + 2) * 2), (10, False, 9 + 2 * 2)],
)
def test_sums_wait_for_two_units_on_an_asynchronous_device(num_blocks: int, asynchronous: bool, pages: int) -> None:
    layout = transformer(num_blocks=num_blocks, numel=1024, vocabulary=4096, tied=False)
    terms = host_terms(layout, plan_of(layout), 8.0, HostUse(accumulate=2), asynchronous=asynchronous)
    assert terms["landing_gradients"] == pages * PAGESIZE


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


def test_gradients_in_passing() -> None:
    """Two blocks of one chunk each and units of one: three buffers of the largest chunk, which has 4 pages."""
    layout = replace(transformer(num_blocks=10, numel=8192, vocabulary=4096, tied=False), passes_gradients=True)
    plan = plan_of(layout)
    whole = host_terms(layout, plan, 8.0)
    largest = max(chunk.nbytes for chunk in plan.chunks)
    count = gradient_buffers_of(layout, plan.chunks, 8.0)
    assert count == 3
    passing = replace(plan, gradient_buffers=count)
    assert host_terms(layout, passing, 8.0) == {**whole, "gradients": 3 * largest}
    saved = whole["gradients"] - 3 * largest
    assert (
        host_bytes(layout, plan.chunks, 8.0) - host_bytes(layout, plan.chunks, 8.0, use=HostUse(gradient_buffers=3))
        == saved
    )
    # A run whose gradients wait has memory for all of them, whatever the plan says.
    assert host_terms(replace(layout, passes_gradients=False), passing, 8.0) == whole


@pytest.mark.parametrize(("state_bytes", "part"), [(0.0, 1.0), (2.0, 0.5), (3.0, 0.25)])
def test_the_first_step_keeps_all_gradients_in_the_memory_of_states(state_bytes: float, part: float) -> None:
    layout = replace(transformer(num_blocks=100, numel=8192, vocabulary=64, tied=False), passes_gradients=True)
    plan = replace(plan_of(layout), gradient_buffers=3)
    whole, passing = (host_terms(layout, one, state_bytes)["gradients"] for one in (plan_of(layout), plan))
    largest = max(chunk.nbytes for chunk in plan.chunks)
    assert passing == pytest.approx(min(max(part * whole + largest, 3 * largest), whole), rel=0.05)


def test_few_chunks_save_nothing() -> None:
    layout = replace(transformer(num_blocks=1, numel=8192, vocabulary=4096, tied=False), passes_gradients=True)
    assert gradient_buffers_of(layout, plan_of(layout).chunks, 8.0) == 0


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


GIB = 1 << 30


@pytest.mark.parametrize(
    ("host", "weights", "copies", "share"),
    [
        (100, 30, 1, 130),  # One rank, whose weights are there.
        (100, 60, 1, 130),  # Two ranks that have loaded each, and will share one copy.
        (100, 60, 2, 80),  # ... and will have one each.
        (100, 30, 2, 65),  # One of the two has loaded, and the other one will have a copy, too.
        (0, 0, 4, 0),
    ],
)
def test_what_the_weights_take_is_counted_once_for_each_copy(host: int, weights: int, copies: int, share: int) -> None:
    assert FreeMemory(None, host, weights).share(copies, 30) == share


@pytest.mark.parametrize(
    ("found", "local_size", "expected"),
    [
        ([(10, 100, 5)], 1, (10, 100, 5)),
        ([(10, 100, 5), (8, 90, 0)], 2, (8, 90, 5)),  # One machine: its host is looked at twice.
        ([(10, 100, 5), (12, 90, 5)], 1, (10, 90, 5)),  # Two machines.
        ([(10, 100, 5), (10, 99, 0), (9, 98, 0), (9, 97, 5)], 2, (9, 97, 5)),
        # What weights take of a host is there for the plan as well.
        ([(10, 100, 5), (10, 96, 20)], 1, (10, 100, 5)),
        ([(None, 100, 5), (None, 90, 5)], 2, (None, 90, 10)),
        ([(7, None, 5), (6, None, 5)], 2, (6, None, 10)),
    ],
)
def test_the_least_of_all_ranks(
    found: list[tuple[int | None, int | None, int]], local_size: int, expected: tuple[int | None, int | None, int]
) -> None:
    assert least([FreeMemory(*each) for each in found], local_size) == FreeMemory(*expected)


@pytest.mark.parametrize(
    ("shared", "local_size", "expected"),
    [
        ([100, 100], 2, (100, 0)),
        ([100, 100, 64, 64], 2, (64, 2)),  # The second machine has less.
        ([100, 64], 2, (64, 1)),  # Ranks of one machine in containers of their own.
        ([0, 0], 2, (0, 0)),
        ([None, None], 1, (None, 0)),
    ],
)
def test_the_least_that_can_be_shared_is_that_of_a_rank(
    shared: list[int | None], local_size: int, expected: tuple[int | None, int]
) -> None:
    found = least([FreeMemory(None, 10, 5, nbytes) for nbytes in shared], local_size)
    assert (found.shared, found.shared_at) == expected


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([(10, 10), (10, 10)], []),
        ([(10, 10), (9.6, 9.6)], []),
        ([(10, 10), (20, 20)], []),
        (
            [(10, 10), (9, 10), (8, 10)],
            ["Rank 2 has 8.0 GiB of its device free, rank 0 10.0 GiB: the plan of all ranks is made for 8.0 GiB."],
        ),
        (
            [(10, 10), (10, 5)],
            ["Rank 1 has 5.0 GiB of its host free, rank 0 10.0 GiB: the plan of all ranks is made for 5.0 GiB."],
        ),
        ([(None, None), (None, None)], []),
    ],
    ids=str,
)
def test_a_rank_with_much_less_memory_than_rank_0_is_named(
    found: list[tuple[float | None, float | None]], said: list[str]
) -> None:
    told = [FreeMemory(*(None if value is None else int(value * GIB) for value in each), 0) for each in found]
    assert shortages(told) == said
