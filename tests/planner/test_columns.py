"""What comes when, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_protrain.planner.columns import columns_of, traffic
from lightning_protrain.planner.training import Training
from lightning_protrain.profiler.records import OperationCost, Pass
from tests.planner.virtual import Case, hardware_of, plan_of, profile_of, rates_of


def test_a_tied_chunk_comes_again_unless_it_is_still_there() -> None:
    needs, sizes = [[0], [1], [2], [0]], [5, 7, 7]
    assert traffic(needs, range(4), sizes, 3).nbytes == (5, 7, 7, 0)
    found = traffic(needs, range(4), sizes, 2)
    assert (found.nbytes, found.waits) == ((5, 7, 7, 5), (-1, -1, 0, 1))


def test_chunks_of_one_position_come_as_their_buffers_are_free() -> None:
    found = traffic([[0, 1], [2, 3]], range(2), [1, 2, 4, 8], 3)
    assert (found.nbytes, found.late, found.waits) == ((3, 12), (3, 8), (-1, 0))
    assert found.live == (1, 2, 3)


def test_bad_input_is_named() -> None:
    case = Case()
    layout, profile = profile_of(8, 16, False)
    plan, hardware = plan_of(case, layout, profile), hardware_of(rates_of(case, layout, profile))
    with pytest.raises(ValueError, match="no segments"):
        columns_of(replace(profile, segments=()), layout, plan, hardware, Training())
    strange = replace(profile.segments[1], unit="other.block")
    with pytest.raises(ValueError, match=r"units that are not in the model \('other.block'\)"):
        columns_of(replace(profile, segments=(strange,)), layout, plan, hardware, Training())
    cost = OperationCost(8, 8, "float8")
    unknown = replace(profile.segments[1], forward=Pass(operations=(cost,)))
    with pytest.raises(ValueError, match="float8 is not known"):
        columns_of(replace(profile, segments=(unknown,)), layout, plan, hardware, Training())
    with pytest.raises(ValueError, match="plan lacks"):
        columns_of(profile, layout, replace(plan, chunks=plan.chunks[1:]), hardware, Training())
