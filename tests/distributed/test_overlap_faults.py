"""A rank that fails in its part of a step: all ranks leave soon, and nobody saves half of a step."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_protrain.runtime.optim.host_step import StepSchedule
from tests.support.overlap_faults import AT, Faulty, Saving
from tests.support.overlapped_ranks import Case, differing, fit, module_of, slow_steps
from tests.support.ranks import BOUND, kill_this_rank, run_ranks, values


def _fail_in_step(module: Faulty) -> None:
    """On the worker of rank 1, when some chunks of the step at `AT` have been stepped and others have not."""
    finish, calls = StepSchedule.finish, 0

    def failing(steps: StepSchedule, portion: Any) -> None:
        nonlocal calls
        calls += module.trainer.global_step >= AT
        if calls == 2 and module.fault == "raise in step":
            raise ValueError("boom")
        if calls == 2 and module.fault == "kill in step":
            time.sleep(0.5)  # Everybody waits for it.
            kill_this_rank()
        finish(steps, portion)

    if module.rank == 1:
        StepSchedule.finish = failing  # type: ignore[method-assign]  # This process ends with the test.


def _train(rank: int, overlap: str, fault: str) -> Any:
    expected, _ = fit(rank, 2, module_of(), Case(None), max_steps=AT)
    module, saving = module_of(cls=Faulty), Saving()
    module.fault, module.rank = fault, rank
    _fail_in_step(module)
    begin = time.monotonic()
    try:
        with slow_steps(0.01 if fault == "raise in forward" else 0.0):
            fit(rank, 2, module, Case(overlap), callbacks=[saving])
    except (RuntimeError, ValueError) as error:
        found = saving.found if isinstance(saving.found, str) else differing(expected, saving.found)
        return f"{type(error).__name__}: {error}", found, time.monotonic() - begin
    return "", [], 0.0


FAILED = "rank 1 failed (training at step "


def is_refused(found: Any) -> bool:
    """Whether weights that belong to no step were not saved."""
    return isinstance(found, str) and ("The weights are partially stepped" in found or "is missing" in found)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("fault", ["raise in forward", "raise in backward", "raise in step"])
def test_a_rank_that_raises_ends_all(fault: str, overlap: str, tmp_path: Path) -> None:
    (other, saved_there, long), (error, saved, _) = values(run_ranks(_train, 2, tmp_path, overlap, fault))
    assert error.startswith("ValueError: boom")
    assert f"ends on rank 0: {FAILED}" in other
    assert "with ValueError: boom" in other
    assert long < BOUND
    if fault == "raise in step" or (fault, overlap) == ("raise in backward", "backward"):
        assert is_refused(saved_there)
        assert is_refused(saved)
    else:  # Steps that have been launched are made.
        assert saved == []
        # Behind backward nobody knows of a step that others may have begun.
        assert saved_there == [] or (overlap == "backward" and is_refused(saved_there))


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_an_owner_that_is_killed_is_named_with_what_it_leaves_undone(overlap: str, tmp_path: Path) -> None:
    alone, killed = run_ranks(_train, 2, tmp_path, overlap, "kill in step")
    assert killed.error == "killed"
    assert alone.seconds < BOUND
    error, saved, _ = alone.value
    assert re.match(r"RuntimeError: Training at step \d ends on rank 0: rank 1 is gone without a word", error), error
    assert is_refused(saved)
    # Behind backward rank 0 may have been waiting for averages.
    assert overlap == "backward" or re.search(r"its part of step \d of 'model\.", error), error
