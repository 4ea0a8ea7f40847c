"""Comparisons: ratios of pairs of runs, subjects and systems that compute the same, reports that can be repeated."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import report
from benchmarks.pairs import Comparison, median_ratio
from benchmarks.subjects import NUM_LAYERS, Facts, Llama, Step, llama_config

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


def _steps(*losses: float) -> tuple[Step, ...]:
    return tuple(Step(wall_seconds=2.0 + i, cpu_seconds=1.0, loss=loss) for i, loss in enumerate(losses))


def test_losses_are_compared_bit_for_bit() -> None:
    facts = Facts(num_params=1)
    same = Comparison(_steps(1.0, 0.5), _steps(1.0, 0.5), facts, facts)
    other = Comparison(_steps(1.0, 0.5), _steps(1.0, math.nextafter(0.5, 1)), facts, facts)
    assert same.same_losses
    assert not other.same_losses
    assert same.wall.median == same.cpu.median == 1.0


FACTS = {"date": "2020-02-03", "hardware": "8-core CPU", "commit": "0" * 40}


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
        assert (folder / "README.md").is_file()
        if folder.name.endswith("-gpu"):  # Several stages, on a machine without git.
            for file in folder.glob("*.json"):
                document = json.loads(file.read_text(encoding="utf-8"))
                assert re.match(r"[0-9a-f]{7,40}\b", document["commit"])
                assert document["date"]
                assert document["gpu"]
            continue
        if folder.name.endswith("-published-runs"):  # Predictions before and after a calibration.
            for name in ("before", "after"):
                document = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
                assert re.match(r"[0-9a-f]{40}\b", document["commit"])
            continue
        document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+", folder.name)
        assert re.match(r"[0-9a-f]{40}\b", document["environment"]["commit"])
        assert document["command"].startswith("python -m benchmarks.")


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
