"""A forward that is computed by hand is replayed under each activation policy."""

from __future__ import annotations

import pytest

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.planner.replay import (
    Footprint,
    Rule,
    footprint,
    from_products,
    kept,
    peak,
    products_kept,
    unsaved,
)
from lightning_protrain.profiler.records import Backward, Forward, Segment, Storage

K, AFTER = 1 << 20, 5
# Four operations: a cast of a weight, a product of it, an activation function, and an output.
CAST = Storage(K, made=1, freed=3, gone=AFTER, is_saved=True, is_cast=True, is_alone=True)
PRODUCT = Storage(4 * K, made=2, freed=4, gone=AFTER, is_product=True, is_saved=True, is_alone=True)
FUNCTION = Storage(8 * K, made=3, freed=AFTER, gone=AFTER, is_saved=True, is_alone=True)
INPUT = Storage(2 * K, made=0, freed=2, gone=2)
OUTPUT = Storage(2 * K, made=4, freed=AFTER, gone=AFTER)
FORWARD = Forward(10 * K, storages=(CAST, PRODUCT, FUNCTION, INPUT, OUTPUT), last_saved=3)


@pytest.mark.parametrize(
    ("rule", "rises"),
    [
        (kept, (-2 + 1 + 4 + 8 + 2, -2 + 4 + 8 + 2)),
        (unsaved, (-2 + 4 + 8, -2 + 4 + 8)),  # The product is freed before the output is made, the cast earlier.
        (products_kept, (-2 + 4 + 8 + 2, -2 + 4 + 8 + 2)),
        (from_products, (-2 + 1 + 4 + 8 + 2, -2 + 4 + 8 + 2)),
    ],
)
def test_the_peak_of_a_forward_under_each_rule(rule: Rule, rises: tuple[int, int]) -> None:
    assert tuple(peak(FORWARD, rule, casts) for casts in (True, False)) == tuple((10 + rise) * K for rise in rises)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (BlockPolicy.KEEP, Footprint(23, 40, 0)),
        (BlockPolicy.SWAP, Footprint(23, 40, 13)),
        (BlockPolicy.CHECKPOINT, Footprint(20, 43, 13)),
        (BlockPolicy.SELECTIVE, Footprint(22, 43, 9)),
    ],
)
def test_the_memory_of_a_segment_under_each_policy(policy: BlockPolicy, expected: Footprint) -> None:
    segment = Segment("block", FORWARD, Backward(23 * K, 40 * K))
    assert footprint(segment, policy, 3 * K, True) == Footprint(*(K * number for number in expected))


def test_a_recomputation_may_take_more_than_backward() -> None:
    segment = Segment("block", FORWARD, Backward(23 * K, 20 * K, asked_live=30 * K))
    assert footprint(segment, BlockPolicy.CHECKPOINT, 0, True).backward == (23 - 13 + 13) * K
    assert footprint(segment, BlockPolicy.SELECTIVE, 0, True).backward == (30 - 13 + 13) * K
