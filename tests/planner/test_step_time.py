"""The time of a step: its parts, and the virtual clock of the real runtime."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_protrain.planner.problem import Training
from lightning_protrain.planner.step_time import StepTime, step_time
from tests.planner.virtual import (
    CHECKPOINT,
    KEEP,
    SWAP,
    Case,
    measure,
    plan_of,
    problem_of,
    profile_of,
)

WAYS = [("off", False), ("backward", False), ("forward", False), ("off", True), ("forward", True)]


def predict(case: Case) -> StepTime:
    layout, profile = profile_of(case.num_blocks, case.num_tokens, case.tied)
    return step_time(problem_of(case), plan_of(case, layout, profile))


@pytest.mark.parametrize(("overlap", "clips"), WAYS)
def test_parts_add_up(overlap: Any, clips: bool) -> None:
    found = predict(Case(Training(overlap, 2, clips), resident=2, link=2.0, host=1.0))
    assert found.forward + found.backward == pytest.approx(found.seconds)
    assert found.compute <= found.seconds


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
