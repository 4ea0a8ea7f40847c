"""The search benchmark counts what it says and finds what trying all plans finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import planner_search
from benchmarks.families import Size
from benchmarks.planner import main
from benchmarks.planner_search import MODELS, TRIED, measure, num_candidates, problem_for, render, tight, try_all
from lightning_protrain.planner.problem import Problem
from tests.planner.brute import all_candidates

TINY = Size("", 0.0, 64, 128, 3, 4, 4, 512)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return replace(problem_for(TINY, 2, 16), chunk_bytes=(None,))


def test_models_have_their_blocks() -> None:
    assert all(name.startswith(f"{size.layers} blocks") for name, (size, _) in (MODELS | TRIED).items())
    assert all(("head" in name) == (batch > 1) for name, (_, batch) in (MODELS | TRIED).items())


def test_candidates_are_those_of_the_enumeration(problem: Problem) -> None:
    for sizes in ((None,), (None, 1 << 14)):
        both = replace(problem, chunk_bytes=sizes)
        found = {(one.packing.chunk_bytes, one.point) for one in all_candidates(both, planner_search.Knobs())}
        assert num_candidates(both) == len(found)


def test_the_search_finds_the_best(problem: Problem) -> None:
    trial = try_all("tiny", tight(problem))
    assert trial.ratio == pytest.approx(1.0, abs=1e-6)
    assert trial.plans > trial.candidates > 0


def test_a_slower_plan_is_noticed(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = tight(problem)
    worst = planner_search.Knobs(num_persistent_chunks=0, num_checkpoint_blocks=3)
    real = planner_search.find
    monkeypatch.setattr(planner_search, "find", lambda problem, knobs: real(problem, worst))
    trial = try_all("tiny", budget)
    assert trial.ratio > 1.0


def test_the_tables(problem: Problem) -> None:
    row = replace(measure("tiny", problem), seconds=(0.06, 0.03, 0.09))
    trial = planner_search.Trial("small", 5, 20, 2.0, 0.5, 10, 1.0)
    text = render([row], [trial])
    assert "| 0.060 (0.030 to 0.090) | 1.0 |" in text
    assert text.endswith("| small | 5 | 10 | 20 | 2.00 | 0.500 | 1.0000000 |")


def test_divided_models_are_searched_for_every_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = [(loop.overlap, loop.accumulate > 1, loop.clips) for loop in planner_search.LOOPS.values()]
    assert [loop[0] for loop in loops[:3]] == ["off", "backward", "forward"]
    assert loops[3:] == [("forward", False, True), ("forward", True, True)]
    monkeypatch.setitem(MODELS, "tiny", (TINY, 1))
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
