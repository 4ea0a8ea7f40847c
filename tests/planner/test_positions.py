"""Segments as arrays."""

from __future__ import annotations

import numpy as np

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.planner.positions import NOWHERE, Positions, before
from lightning_protrain.profiler.records import Pass
from tests.planner.test_timeline import LAYOUT, PROFILE, SEGMENTS, K


def test_blocks_and_those_before_them() -> None:
    positions = Positions.of(PROFILE, LAYOUT)
    assert positions.block.tolist() == [NOWHERE, 0, 1, NOWHERE]
    assert positions.previous.tolist() == [NOWHERE, NOWHERE, 1, 2]
    swaps = positions.policies([BlockPolicy.KEEP, BlockPolicy.SWAP], BlockPolicy.SWAP)
    assert swaps.tolist() == [False, False, True, False]
    assert positions.window(positions.swap_bytes[:, None], swaps[:, None])[:, 0].tolist() == [0, 0, 0, 1000 * K]


def test_sums_of_what_came_before() -> None:
    assert before(np.array([[1, 2], [3, 4], [5, 6]])).tolist() == [[0, 0], [1, 2], [4, 6]]


def test_a_recomputation() -> None:
    # The level without what it frees, and what its forward takes.
    assert Positions.of(PROFILE, LAYOUT).recomputation().tolist()[1:3] == [1500 * K, 2600 * K]
    assert SEGMENTS[1].forward == Pass(100 * K, 1300 * K)
