"""The time of a step: its parts, and the virtual clock of the real runtime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_protrain.planner.network import Gathering, Network, Route
from lightning_protrain.planner.plan import Sharding
from lightning_protrain.planner.steptime import StepTime, Training, step_time
from tests.planner import together
from tests.planner.virtual import (
    CHECKPOINT,
    KEEP,
    SWAP,
    Case,
    hardware_of,
    measure,
    plan_of,
    profile_of,
    rates_of,
    to_the_end,
)

WAYS = [("off", False), ("backward", False), ("forward", False), ("off", True), ("forward", True)]


def predict(case: Case) -> StepTime:
    layout, profile = profile_of(case.num_blocks, case.num_tokens, case.tied)
    hardware = hardware_of(rates_of(case, layout, profile))
    return step_time(profile, layout, plan_of(case, layout, profile), hardware, case.training)


@pytest.mark.parametrize(("overlap", "clips"), WAYS)
def test_parts_add_up(overlap: Any, clips: bool) -> None:
    found = predict(Case(Training(overlap, 2, clips), resident=2, link=2.0, host=1.0))
    assert found.compute + found.link_exposed + found.host_exposed == pytest.approx(found.seconds)
    assert found.forward + found.backward == pytest.approx(found.seconds)
    assert min(found.link_exposed, found.host_exposed) >= 0


def test_what_bounds_a_step() -> None:
    assert predict(Case(link=0.1, host=0.1)).bound == "compute"
    assert predict(Case(link=9.0, host=0.1)).bound == "link"
    assert predict(Case(link=0.1, host=9.0)).bound == "host"


def test_a_resident_plan_is_computation_and_the_device_step() -> None:
    found = predict(Case(resident=11))
    assert found.seconds == pytest.approx(found.compute)
    assert (found.upload, found.download, found.host) == (0, 0, 0)


# --- the virtual clock ------------------------------------------------------------------------------------------------

TOLERANCE = 0.03
CASES = [
    *(Case(Training(overlap, accumulate, clips)) for accumulate in (1, 4) for overlap, clips in WAYS),
    *(Case(Training("forward"), num_buffers=number, link=1.0) for number in (2, 4, 6)),
    *(Case(Training("off"), link=link, host=0.25) for link in (0.25, 2.0, 4.0)),
    *(Case(Training("forward", clips=True), host=host) for host in (0.25, 1.0, 4.0)),
    Case(Training("backward"), num_blocks=16, link=1.0),
    Case(policies=lambda index: CHECKPOINT),
    Case(Training("forward"), policies=lambda index: CHECKPOINT if index < 4 else KEEP),
    Case(policies=lambda index: SWAP if index in (0, 3) else KEEP, num_tokens=64),
    Case(policies=lambda index: SWAP, num_tokens=64, host=0.1),
    Case(Training("backward"), policies=lambda index: SWAP if index % 4 == 0 else CHECKPOINT, num_tokens=64),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.training.overlap}-{CASES.index(case)}")
def test_the_virtual_clock_agrees(case: Case) -> None:
    assert predict(case).seconds == pytest.approx(measure(case), rel=TOLERANCE)


# --- ranks that gather, on the virtual clock --------------------------------------------------------------------------

# Ranks; what chunks and gradients take on their links over computing, whole; buffers; of a chunk, how many windows.
GATHERED = {
    "the link to the host": (2, 4.0, 0.1, "off", 3, 16),
    "that between devices": (2, 1.0, 1.0, "backward", 3, 16),
    "neither": (2, 2.0, 0.1, "backward", 3, 16),
    "both alike": (2, 2.0, 0.5, "off", 3, 16),
    "few windows": (2, 4.0, 0.5, "off", 3, 4),
    "four ranks": (4, 4.0, 0.3, "backward", 3, 16),
    "one buffer and window": (2, 2.0, 0.3, "off", 1, 1),
}


@pytest.mark.parametrize("waits_for", GATHERED)
def test_steps_of_ranks_that_gather_take_what_is_predicted(waits_for: str) -> None:
    size, link, ratio, overlap, num_buffers, num_windows = GATHERED[waits_for]
    case = Case(
        Training(overlap),  # type: ignore[arg-type]
        link=link,
        host=0.2,
        num_blocks=6,
        num_tokens=64,
        num_buffers=num_buffers,
        policies=lambda _: CHECKPOINT,
    )
    layout, profile = profile_of(6, 64, False)
    rates, plan = together.rates_of(case, ratio), plan_of(case, layout, profile)
    hardware, route = hardware_of(rates), Route(0.0, rates.network)
    hardware = replace(hardware, host_step=size * hardware.host_step)  # Each rank steps its part.
    known = to_the_end(profile), layout, plan, hardware, case.training, Network(route, route, owners=size)
    # Of what a collective brings the simulation counts the own part, too.
    window = max(chunk.nbytes for chunk in plan.chunks) // num_windows
    gathering = Gathering(size, (size - 1) / size * rates.network, window=window)
    with set_checkpoint_early_stop(False):
        measured = together.measure(case, ratio, Sharding.SHARD, 6, size, window)
    predicted = step_time(*known, gathering).seconds
    assert predicted == pytest.approx(measured, rel=TOLERANCE)
    # With whole chunks it would be another time.
    assert abs(step_time(*known).seconds / measured - 1) > 2 * TOLERANCE
