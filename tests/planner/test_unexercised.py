"""Reserves for what the profiled batch did not run."""

from __future__ import annotations

from dataclasses import replace

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.planner.problem import Reserve, without_gradients
from lightning_protrain.profiler.records import Pass
from tests.planner.hand_computed import LAYOUT, PROFILE, SEGMENTS, K

KEEP, SELECTIVE, CHECKPOINT, SWAP = BlockPolicy


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
    unreached = replace(SEGMENTS[2], backward=Pass(), gradients=())
    assert without_gradients(PROFILE, LAYOUT) == frozenset()
    profile = replace(PROFILE, segments=(*SEGMENTS[:2], unreached, SEGMENTS[3]))
    assert without_gradients(profile, LAYOUT) == {"layers.1.up", "layers.1.down"}
    some = replace(SEGMENTS[2], gradients=("layers.1.up",))  # an expert that no token came to
    assert without_gradients(replace(PROFILE, segments=(*SEGMENTS[:2], some, SEGMENTS[3])), LAYOUT) == frozenset()
