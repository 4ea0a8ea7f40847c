"""Policies block by block are tried beside counts of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks import planner_policies
from benchmarks.planner import main
from benchmarks.planner_policies import SHARES, compare, problem_for, render
from lightning_protrain.config import Knobs
from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.search import find

LOOP = "overlap backward"
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}


@pytest.fixture(scope="module", autouse=True)
def _tiny() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(planner_policies.MODELS, "Llama", {"model_type": "llama", "num_key_value_heads": 4, **TINY})
        yield


@pytest.fixture(scope="module")
def problem(_tiny: None) -> Problem:
    return problem_for("Llama", 4, blocks=2, sequence=16)


def test_counts_are_never_faster_and_all_policies_are_tried(problem: Problem) -> None:
    row = compare("Llama", 4, problem, LOOP)
    assert set(row.ratios) == set(SHARES)
    assert min(row.ratios.values()) >= 1.0
    # 4 x 4 policies for each number of resident chunks and of buffers.
    assert row.plans % 16 == 0
    assert row.plans > 16
    assert set(row.policies) == {share for share, ratio in row.ratios.items() if ratio > 1 + 1e-9}


def test_a_layout_that_loses_is_seen(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the counts had nothing but recomputation to choose from."""
    monkeypatch.setattr(planner_policies, "lay_out", lambda count, *_: (BlockPolicy.CHECKPOINT,) * count)
    row = compare("Llama", 4, problem, LOOP)
    assert max(row.ratios.values()) > 1.0
    assert row.policies
    assert all(counts == "cc" and best != "cc" for best, counts in row.policies.values())
    assert "for cc" in render([row])


def test_counts_are_those_of_the_search(problem: Problem) -> None:
    trials = list(planner_policies._trials(problem))
    counted = {(trial.plan.blocks, trial.plan.num_offloaded_chunks) for trial in trials if trial.counted}
    assert 0 < len(counted) < len({(trial.plan.blocks, trial.plan.num_offloaded_chunks) for trial in trials})
    for limit in sorted({trial.nbytes for trial in trials})[-20::4]:
        plan = find(replace(problem, device_bytes=limit), Knobs()).plan
        assert (plan.blocks, plan.num_offloaded_chunks) in counted


def test_the_program_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["policies", "--models", "Llama", "--batches", "1", "--loops", LOOP, "--blocks", "2", "--sequence", "16"])
    printed = capsys.readouterr().out
    assert "counts / block by block" in printed
    assert "| Llama | 1 | overlap backward |" in printed
