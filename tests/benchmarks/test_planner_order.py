"""The benchmark of the order of plans: its plans, its choices and its judgement; one tiny run is slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.planner import CPU, main
from benchmarks.planner_order import (
    GRID,
    Choice,
    Row,
    choose,
    judge,
    plan_of,
    problem_of,
    rank_correlation,
    ranks,
    render,
)
from benchmarks.subjects import NUM_LAYERS, Step, Subject
from lightning_protrain.planner.memory import StatesProblem, check_fits
from lightning_protrain.planner.plan import BlockPolicy, check_plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.step_time import StepTime

RATES = ("upload", "download", "upload_beside", "download_beside", "upload_pageable", "download_pageable")
MACHINE = replace(
    CPU, **dict.fromkeys(RATES, 1e9), flops={"float32": 1e11}, memory=1e10, device_step=1e9, host_step=1e9,
    host_memory=1e10,
)  # fmt: skip


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(Subject("", None, num_params=1, batch=2, sequence=16), MACHINE)


@pytest.mark.parametrize("name", GRID)
def test_plans_of_the_grid_can_run(name: str, problem: Problem) -> None:
    resident, checkpointed, swapped = GRID[name]
    plan = plan_of(problem, resident, checkpointed, swapped)
    check_plan(plan, problem.layout, None)
    check_fits(plan, StatesProblem(problem.layout, 0.0))
    policies = [block.policy for block in plan.blocks]
    assert policies.count(BlockPolicy.CHECKPOINT) == checkpointed * NUM_LAYERS
    assert policies.count(BlockPolicy.SWAP) == swapped * NUM_LAYERS
    assert plan.num_offloaded_chunks == len(plan.chunks) - round(resident * len(plan.chunks) + 0.1)


def test_the_grid_has_eight_plans_or_more(problem: Problem) -> None:
    assert len({plan_of(problem, *knobs).to_json() for knobs in GRID.values()}) >= 8


def test_choices_within_budgets(problem: Problem) -> None:
    plans = {name: plan_of(problem, *GRID[name]) for name in ("resident, keep", "offload, checkpoint")}
    found = choose(problem, plans, (None, 0.7, 0.01))
    assert [choice.row for choice in found] == ["resident, keep", "auto, 70% of the first", ""]
    assert plans["auto, 70% of the first"].num_offloaded_chunks


def test_ranks() -> None:
    assert ranks([0.5, 0.1, 0.3]) == [3, 1, 2]
    assert rank_correlation([1.0, 2.0, 9.0], [0.1, 0.2, 0.3]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 9.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)


def row(name: str, device_bytes: int, predicted: float, seconds: Sequence[float]) -> Row:
    time = StepTime(predicted, predicted, 0.0, 0.0, 0.0, predicted, 0.0, 0.0)
    return Row(name, device_bytes, time, tuple(Step(2 * value, value, 0.0) for value in seconds))


ROWS = [row("a", 30 << 20, 1.0, (1.0, 1.1)), row("b", 20 << 20, 2.0, (1.5, 1.6)), row("c", 10 << 20, 3.0, (2.0, 2.4))]


def test_judgement_takes_the_best_that_fits() -> None:
    free, tight = judge(ROWS, Choice("none", None, "c")), judge(ROWS, Choice("tight", 20 << 20, "c"))
    assert (free["best"], free["fitting"], free["met"]) == ("a", 3, False)
    assert (tight["best"], tight["fitting"]) == ("b", 2)
    assert tight["cpu"]["median"] == pytest.approx((2.0 / 1.5 + 2.4 / 1.6) / 2)
    assert judge(ROWS, Choice("none", None, "a"))["met"]
    assert judge(ROWS, Choice("little", 0, ""))["auto"] == "no plan"


def test_the_tables() -> None:
    text = render(ROWS, [judge(ROWS, Choice("none", None, "a")), judge(ROWS, Choice("little", 0, ""))])
    assert "| a | 30 | 1000.0 | 1050.0 | 2100.0 | 1.050 | 1 | 1 | 1.000 | 1.000 |" in text
    assert "Rank correlation (Spearman) of 3 plans: 1.000." in text
    assert "| none | 3 | a | a | 1.000 (1.000 to 1.000) | 1.000 | yes |" in text
    assert text.endswith("| little | 0 | no plan | - | - | - | - |")


@pytest.mark.slow
def test_a_tiny_run(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--params=1e6", "--batch=1", "--sequence=16", "--steps=4"]
    main(["order", "--plans", "resident, keep", "offload, swap", "--budgets", "0.5", *sizes])
    printed = capsys.readouterr().out
    assert "Rank correlation (Spearman) of 3 plans:" in printed
    assert "| 50% of the first | " in printed
