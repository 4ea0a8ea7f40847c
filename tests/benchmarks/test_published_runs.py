"""Predictions beside published runs: the page shows what the program computes, and keeps what it promises."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import asdict, replace
from typing import Any

import pytest

from benchmarks.published_runs import (
    LIMIT,
    MEDIAN,
    PAGE,
    RUNS,
    Run,
    compare,
    forecast,
    fused,
    newest,
    problem_of,
    render,
)
from lightning_protrain.profiler.records import Backward, Forward, ModelProfile, OperationCost, Segment


def stored(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((newest() / f"{name}.json").read_text(encoding="utf-8"))["runs"]
    return found


AFTER, BEFORE = stored("after"), stored("before")


def label(run: Run) -> str:
    return f"{run.system}, {run.cards} x {run.gpu}, {run.model}, {run.batch} x {run.accumulate}, {run.method}"


def test_the_page_shows_the_stored_figures() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- table -->\n")
    assert rest.partition("\n<!-- end -->")[0] == render(AFTER, BEFORE)


def test_figures_are_stored_for_every_run() -> None:
    assert [entry["run"] for entry in AFTER] == [asdict(run) for run in RUNS]
    assert [(entry["run"]["model"], entry["run"]["measured"]) for entry in BEFORE] == [
        (run.model, run.measured) for run in RUNS
    ]
    assert len({label(run) for run in RUNS}) == len(RUNS) >= 30


def test_half_of_the_forecasts_are_near_and_the_others_have_a_reason() -> None:
    errors = [abs(entry["error"]) for entry in AFTER]
    assert statistics.median(errors) <= MEDIAN
    assert statistics.median(errors) < statistics.median(abs(entry["error"]) for entry in BEFORE)
    assert [error > LIMIT for error in errors] == [bool(run.reason) for run in RUNS]


@pytest.mark.parametrize("run", RUNS, ids=label)
def test_a_source_is_an_address_at_a_commit(run: Run) -> None:
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/(blob|tree)/[0-9a-f]{7,40}/\S+", run.source)


# Cheap runs of each kind: resident, streamed under a host that steps in backward, and one that steps after it.
CHEAP = [
    next(at for at, run in enumerate(RUNS) if (run.system, run.gpu, run.model[-2:]) == kind)
    for kind in (
        ("LLMQ", "H100 SXM", "7B"),
        ("LLMQ", "RTX 4090", "7B"),
        ("DeepSpeed ZeRO-3 offload", "RTX 4090", "8B"),
    )
]


@pytest.mark.parametrize("at", CHEAP, ids=lambda at: label(RUNS[at]))
def test_the_program_computes_the_stored_forecast(at: int) -> None:
    assert forecast(RUNS[at]) == pytest.approx(AFTER[at]["forecast"], rel=0.01)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(RUNS)), ids=lambda at: label(RUNS[at]))
def test_the_program_computes_stored_figures(at: int) -> None:
    found = compare(RUNS[at])
    assert found.forecast == pytest.approx(AFTER[at]["forecast"], rel=0.01)
    if AFTER[at]["here"] is None:
        assert found.here is None
        return
    # The search may take another plan that is about as fast.
    assert found.here == pytest.approx(AFTER[at]["here"], rel=0.03)


def test_fused_kernels_leave_products_and_one_pass_over_their_bytes() -> None:
    product = OperationCost(flops=8, nbytes=6, dtype="bfloat16", count=2, is_product=True)
    other = OperationCost(flops=0, nbytes=100, dtype="float32", count=5)
    segment = Segment("block", Forward(operations=(other, product)), Backward(operations=(other, product)))
    (found,) = fused(ModelProfile((), (), 0, 0, (segment,))).segments
    for each in (found.forward, found.backward):
        assert each.operations == (product, replace(product, flops=0))


def test_a_forecast_is_for_the_run_as_it_was() -> None:
    run = RUNS[CHEAP[-1]]
    problem = problem_of(run)
    assert (problem.training.overlap, problem.training.accumulate, problem.state_bytes) == ("off", 1, 8.0)
    streamed = forecast(run)
    assert streamed < forecast(replace(run, serial=False))
    assert streamed < forecast(replace(run, recomputed="feed-forward")) < forecast(replace(run, recomputed="nothing"))
