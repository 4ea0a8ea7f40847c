"""Comparisons: ratios of pairs of runs, subjects and systems that compute the same, reports that can be repeated."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.strategies import Strategy
from torch import nn

from benchmarks import pairs, report
from benchmarks.pairs import Comparison, compare, median_ratio
from benchmarks.subjects import NUM_LAYERS, Facts, Llama, Step, Subject, llama_config
from benchmarks.systems import SYSTEMS, System

positive = st.floats(0.01, 100.0)


@given(st.lists(positive, min_size=6, max_size=60))
def test_the_interval_holds_the_median_of_the_pairs(ratios: list[float]) -> None:
    ratio = median_ratio(ratios)
    assert min(ratios) <= ratio.lower <= ratio.median <= ratio.upper <= max(ratios)
    assert 0.95 <= ratio.confidence < 1


@given(st.lists(positive, min_size=1, max_size=21).filter(lambda ratios: len(ratios) % 2 == 1))
def test_the_peer_over_the_subject_is_the_reciprocal(ratios: list[float]) -> None:
    forth, back = median_ratio(ratios), median_ratio([1 / ratio for ratio in ratios])
    assert (back.median, back.lower, back.upper) == pytest.approx((1 / forth.median, 1 / forth.upper, 1 / forth.lower))


@pytest.mark.parametrize("num_pairs", [6, 11, 12, 40])
def test_the_interval_holds_the_true_median_as_often_as_it_says(num_pairs: int) -> None:
    draw = random.Random(3)
    trials = [median_ratio([math.exp(draw.gauss(0, 0.1)) for _ in range(num_pairs)]) for _ in range(2000)]
    held = sum(trial.lower <= 1 <= trial.upper for trial in trials) / len(trials)
    assert held == pytest.approx(trials[0].confidence, abs=0.02)


@pytest.mark.parametrize(("num_pairs", "confidence"), [(1, 0.0), (2, 0.5), (5, 0.9375)])
def test_few_pairs_give_their_range_and_say_what_it_is_worth(num_pairs: int, confidence: float) -> None:
    ratios = [1.0 + 0.1 * index for index in range(num_pairs)]
    ratio = median_ratio(ratios)
    assert (ratio.lower, ratio.upper) == (ratios[0], ratios[-1])
    assert ratio.confidence == pytest.approx(confidence)


def test_one_disturbed_pair_does_not_move_the_interval() -> None:
    ratios = [0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06]
    disturbed = median_ratio([*ratios[:-1], 50.0])
    assert disturbed.upper < 1.06
    assert disturbed.median == median_ratio(ratios).median


def _steps(*losses: float) -> tuple[Step, ...]:
    return tuple(Step(wall_seconds=2.0 + i, cpu_seconds=1.0, loss=loss) for i, loss in enumerate(losses))


def test_losses_are_compared_bit_for_bit() -> None:
    facts = Facts(num_params=1)
    same = Comparison(_steps(1.0, 0.5), _steps(1.0, 0.5), facts, facts)
    other = Comparison(_steps(1.0, 0.5), _steps(1.0, math.nextafter(0.5, 1)), facts, facts)
    assert same.same_losses
    assert not other.same_losses
    assert same.wall.median == same.cpu.median == 1.0


def test_pairs_of_all_launches_count(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(num_params=1)
    launches = [
        Comparison(_steps(1.0, 0.5), _steps(1.0, 0.5), facts, facts),
        Comparison(_steps(2.0), _steps(2.0), facts, facts),
    ]
    monkeypatch.setattr(pairs, "_launch", lambda *_: launches.pop(0))
    comparison = compare(Subject("a", None, steps=2), Subject("b", None, steps=2), warmup=1, launches=2)
    assert [step.loss for step in comparison.steps] == [step.loss for step in comparison.peer_steps] == [1.0, 0.5, 2.0]


def test_both_runs_must_be_of_the_same_length() -> None:
    with pytest.raises(AssertionError):
        compare(Subject("a", None, steps=3), Subject("b", None, steps=4), warmup=1)


FACTS = {"date": "2020-02-03", "hardware": "8-core CPU", "commit": "0" * 40}


def test_table() -> None:
    assert report.table(("a", "b"), [(1, "x")]) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_a_result_says_where_when_and_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "environment", lambda: FACTS)
    folder = report.write_result("a-test", "benchmarks.some", ["--pairs", "2"], {"cases": {}}, "The text.")
    assert folder == tmp_path / "benchmarks" / "results" / "2020-02-03-a-test"
    document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert document == {"environment": FACTS, "command": "python -m benchmarks.some --pairs 2", "cases": {}}
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert all(part in page for part in ("The text.", "python -m benchmarks.some --pairs 2", *FACTS.values()))


def test_every_kept_result_names_its_commit_and_its_command() -> None:
    folders = [path for path in (report.ROOT / "benchmarks" / "results").iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+", folder.name)
        assert re.match(r"[0-9a-f]{40}\b", document["environment"]["commit"])
        assert document["command"].startswith("python -m benchmarks.")
        assert (folder / "README.md").is_file()


@pytest.mark.parametrize("num_params", [1_700_000, 100_000_000, 3_000_000_000])
def test_the_model_is_about_as_large_as_asked_for(num_params: int) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama_config(num_params, sequence=16))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(num_params, rel=0.1)
    assert len(model.model.layers) == NUM_LAYERS


def test_the_checkpointed_peer_computes_the_same_and_calls_every_block_twice() -> None:
    tokens = torch.arange(16).view(2, 8)
    gradients, calls = [], []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        module = Llama(llama_config(1_700_000, sequence=8), checkpointed)
        counted: list[int] = []
        for block in module.model.model.layers:
            block.mlp.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
        module.training_step([tokens], 0).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
        calls.append(len(counted))
    assert calls == [NUM_LAYERS, 2 * NUM_LAYERS]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


INSTALLED = [name for name, system in SYSTEMS.items() if system.is_installed]


@pytest.mark.parametrize("name", [name for name in INSTALLED if SYSTEMS[name].requires is None])
def test_what_needs_nothing_can_be_made(name: str) -> None:
    strategy = SYSTEMS[name].strategy()
    assert strategy == "auto" or isinstance(strategy, Strategy)
    optimizer = SYSTEMS[name].optimizer(nn.Linear(2, 2).parameters())
    assert isinstance(optimizer, torch.optim.AdamW)


@pytest.mark.parametrize(("package", "installed"), [(None, True), ("torch", True), ("no_such_package", False)])
def test_is_installed(package: str | None, installed: bool) -> None:
    assert System(lambda: "auto", requires=package).is_installed is installed


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [name for name, system in SYSTEMS.items() if not system.is_installed] == [
        "DeepSpeed ZeRO-3 Offload",
        "torchao CPUOffloadOptimizer",
    ]
