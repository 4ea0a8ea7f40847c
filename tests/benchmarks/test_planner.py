"""Benchmarks of the planner: predictions, searches and orders of plans are held against what they are said to be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks import planner, planner_profile, planner_search, subjects
from benchmarks.families import Size
from benchmarks.logical import LogicalBytes
from benchmarks.planner import CPU, WANTED, main
from benchmarks.planner_order import GRID, Row, plan_of, problem_of
from benchmarks.planner_profile import SIZES, SMALL, Profiling
from benchmarks.planner_search import TRIED, num_candidates, tight, try_all
from benchmarks.subjects import NUM_LAYERS, Step
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.planner.memory import StatesProblem, check_fits
from lightning_protrain.planner.plan import BlockPolicy, check_plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.search import WORTH
from lightning_protrain.planner.step_time import StepTime
from tests.planner.brute import all_candidates


@pytest.mark.slow
def test_measured_over_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["gpt2/resident/fp32", "llama/keep/fp32", "gemma2/offload/fp32", "lora/keep/bf16"]
    for entry in planner.compare(rows):
        assert WANTED[0] <= entry["ratio"] <= WANTED[1], entry["row"]
    main(["memory", "--rows", "bert/half/fp32"])
    assert capsys.readouterr().out.strip().endswith("| yes |")


def test_logical_bytes_of_autograd_and_of_the_host() -> None:
    weight, host, inputs = nn.Parameter(torch.ones(64, 64)), torch.ones(64, 64), torch.ones(8, 64)
    device = CPUDevice(torch.device("cpu"))
    with LogicalBytes([weight], [inputs], device) as counted:
        static = counted.now
        hidden: Tensor = (inputs @ weight).relu()  # Autograd keeps it.
        host.mul(2)
        assert counted.peak == static + 2 * hidden.nbytes
        storage = torch.UntypedStorage(0)
        device.resize(storage, 10_000)
        assert counted.peak == static + hidden.nbytes + 10_000
        device.resize(storage, 0)
        counted.restart([])
        assert counted.now == static + hidden.nbytes
        hidden.sum().backward()
        del hidden
        counted.restart([])
        assert counted.now == static + weight.nbytes
    assert "resize" not in vars(device)


def test_one_measurement(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, SMALL, SIZES["tiny"])
    planner_profile.main(["tiny"])
    found = Profiling(**json.loads(capsys.readouterr().out))
    assert (found.model, found.blocks, len(found.seconds)) == ("tiny", 2, 3)
    assert found.before_bytes <= found.peak_bytes
    real = planner_profile.measure(SMALL, sequence=16)
    assert real.params == found.params


TINY = Size("", 0.0, 64, 128, 3, 4, 4, 512)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return replace(planner_search.problem_for(TINY, 2, 16), chunk_bytes=(None,))


def test_candidates_are_those_of_the_enumeration(problem: Problem) -> None:
    for sizes in ((None,), (None, 1 << 14)):
        both = replace(problem, chunk_bytes=sizes)
        found = {(one.packing.chunk_bytes, one.point) for one in all_candidates(both, planner_search.Knobs())}
        assert num_candidates(both) == len(found)


def test_the_search_finds_one_of_the_best(problem: Problem) -> None:
    """Of plans that are about as fast, it takes the one with the fewest copies."""
    trial = try_all("tiny", tight(problem))
    assert 1.0 - 1e-6 <= trial.ratio <= 1.0 + WORTH
    assert trial.plans > trial.candidates > 0


def test_a_slower_plan_is_noticed(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = tight(problem)
    worst = planner_search.Knobs(num_persistent_chunks=0, num_checkpoint_blocks=3)
    real = planner_search.find_any
    monkeypatch.setattr(planner_search, "find_any", lambda problem, knobs: real(problem, worst))
    trial = try_all("tiny", budget)
    assert trial.ratio > 1.0


def test_divided_models_are_searched_for_every_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = [(loop.overlap, loop.accumulate > 1, loop.clips) for loop in planner_search.LOOPS.values()]
    assert [loop[0] for loop in loops[:3]] == ["off", "backward", "forward"]
    assert loops[3:] == [("forward", False, True), ("forward", True, True)]
    monkeypatch.setitem(planner_search.MODELS, "tiny", (TINY, 1))
    monkeypatch.setitem(planner_search.DIVIDED, "tiny", 1 << 13)
    monkeypatch.setitem(planner_search.TARGETS, "tiny", 0.05)
    text, rows = planner_search.run(("tiny",), (), 16)
    divided = [row for row in rows["searches"] if "divided" in row["model"]]
    assert [row["model"] for row in divided[::2]] == [f"tiny, divided, {loop}" for loop in planner_search.LOOPS]
    whole = rows["searches"][0]
    assert all(row["chunks"] > whole["chunks"] and row["evaluations"] > 0 for row in divided)
    assert text.count("| tiny, divided, overlap forward |") == 2
    assert all(row["target"] == 0.05 for row in divided)
    assert whole["target"] is None
    assert text.count("| 0.05 |") == len(divided)


def test_the_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRIED, "tiny", (TINY, 1))
    main(["search", "--models", "--tried", "tiny", "--sequence=16"])
    assert capsys.readouterr().out.strip().endswith(" |")


RATES = ("upload", "download", "upload_beside", "download_beside")
MACHINE = replace(
    CPU, **dict.fromkeys(RATES, 1e9), flops={"float32": 1e11}, memory=1e10, device_step=1e9, host_step=1e9,
    host_memory=1e10,
)  # fmt: skip


@pytest.fixture(scope="module")
def order_problem() -> Problem:
    return problem_of(subjects.Subject("", None, num_params=1, batch=2, sequence=16), MACHINE)


@pytest.mark.parametrize("name", GRID)
def test_plans_of_the_grid_can_run(name: str, order_problem: Problem) -> None:
    resident, checkpointed, swapped = GRID[name]
    plan = plan_of(order_problem, resident, checkpointed, swapped)
    check_plan(plan, order_problem.layout, None)
    check_fits(plan, StatesProblem(order_problem.layout, 0.0))
    policies = [block.policy for block in plan.blocks]
    assert policies.count(BlockPolicy.CHECKPOINT) == checkpointed * NUM_LAYERS
    assert policies.count(BlockPolicy.SWAP) == swapped * NUM_LAYERS
    assert plan.num_offloaded_chunks == len(plan.chunks) - round(resident * len(plan.chunks) + 0.1)


def row(name: str, device_bytes: int, predicted: float, seconds: Sequence[float]) -> Row:
    time = StepTime(predicted, 0.0, 0.0, predicted, 0.0, 0.0)
    return Row(name, device_bytes, time, tuple(Step(2 * value, value, 0.0) for value in seconds))


@pytest.mark.slow
def test_a_tiny_run(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--params=1e6", "--batch=1", "--sequence=16", "--steps=4"]
    main(["order", "--plans", "resident, keep", "offload, swap", "--budgets", "0.5", *sizes])
    printed = capsys.readouterr().out
    assert "Rank correlation (Spearman) of 3 plans:" in printed
    assert "| 50% of the first | " in printed
