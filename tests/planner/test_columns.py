"""What comes when, and what is refused."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from lightning_protrain.planner.activity import Columns
from lightning_protrain.planner.columns import columns_of, held_seconds, traffic
from lightning_protrain.planner.network import Gathering, incoming, last_window
from lightning_protrain.planner.training import Training
from lightning_protrain.profiler.records import OperationCost, Pass
from tests.machines import CPU
from tests.planner.virtual import KEEP, SWAP, Case, hardware_of, plan_of, profile_of, rates_of


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


@pytest.mark.parametrize(("ranks", "link", "factor"), [(2, 1e30, 1 / 2), (4, 1e30, 1 / 4), (4, None, None)])
def test_only_what_brings_chunks_is_gathered(ranks: int, link: float | None, factor: float | None) -> None:
    case = Case(policies=lambda index: SWAP if index == 2 else KEEP, num_tokens=64)
    layout, profile = profile_of(case.num_blocks, case.num_tokens, case.tied)
    hardware = hardware_of(rates_of(case, layout, profile))
    known = profile, layout, plan_of(case, layout, profile), hardware, Training()
    whole, parts = columns_of(*known), columns_of(*known, Gathering(ranks, link, window=0))
    # At the rate of downloads alone three of four parts come from others.
    factor = factor or 3 / 4 * hardware.upload_beside / hardware.download
    comes = {"upload_forward", "late_forward", "upload_backward", "late_backward", "tail"}
    assert whole.swap_in.sum() > 0
    for field in fields(Columns):
        before, after = getattr(whole, field.name), getattr(parts, field.name)
        expected = before * factor if field.name in comes else before
        assert after == pytest.approx(expected), field.name


@pytest.mark.parametrize(
    ("gathering", "seconds"),
    [
        (None, [0.0, 3.0, 12.0]),
        # Half as long, and the gather of a window's other half, at 1000 bytes per second.
        (Gathering(2, 1000.0, window=400), [0.0, 1.5 + 0.15, 6.0 + 0.2]),
        # Gathers take longer than uploads: before the first one a window's part is uploaded.
        (Gathering(4, 300.0, window=400), [0.0, 0.75 + 0.75, 3.0 + 1.0]),
        (Gathering(4, 100.0, window=400), [0.0, 2.25 + 0.75, 9.0 + 1.0]),
    ],
    ids=str,
)
def test_what_waited_for_its_buffers_has_one_window_more(gathering: Gathering | None, seconds: list[float]) -> None:
    machine = replace(CPU, upload=100.0, upload_beside=100.0, asynchronous=True)
    nbytes, rate = np.array([[0], [300], [1200]]), np.array([[incoming(machine, gathering).upload]])
    found = held_seconds(nbytes, rate, last_window(machine, gathering), gathering)
    assert found[:, 0].tolist() == pytest.approx(seconds)
    assert last_window(replace(machine, asynchronous=False), gathering) == 0.0
