"""What the strategy is set beside: importing them needs nothing, and what is missing has a row that says so."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from benchmarks import gpu_step, pairs
from benchmarks.gpu_step import CLIP, measure_alone, render_alone
from benchmarks.subjects import Facts, Step, Subject
from benchmarks.systems import SYSTEMS, System
from lightning_protrain import ProTrainStrategy

STEPS = (Step(0.5, 0.1, 1.25), Step(0.5, 0.1, 1.0))
FACTS = Facts(num_params=1, peak_bytes=3 << 30)
INSTALLED = [name for name, system in SYSTEMS.items() if system.is_installed]


@pytest.mark.parametrize("name", [name for name in INSTALLED if SYSTEMS[name].requires is None])
def test_what_needs_nothing_can_be_made(name: str) -> None:
    strategy = SYSTEMS[name].strategy()
    assert strategy == "auto" or isinstance(strategy, Strategy)
    optimizer = SYSTEMS[name].optimizer(nn.Linear(2, 2).parameters())
    assert isinstance(optimizer, torch.optim.AdamW)


def test_each_overlap_of_ours_has_a_row() -> None:
    ours = [system.strategy() for name, system in SYSTEMS.items() if name.startswith("protrain")]
    assert all(isinstance(strategy, ProTrainStrategy) for strategy in ours)
    assert [strategy._overlap_choice for strategy in ours] == ["off", "backward", "forward"]


@pytest.mark.parametrize(("package", "installed"), [(None, True), ("torch", True), ("no_such_package", False)])
def test_is_installed(package: str | None, installed: bool) -> None:
    assert System(lambda: "auto", requires=package).is_installed is installed


def test_what_is_not_installed_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pairs, "run_subject", None)
    assert measure_alone("DeepSpeed ZeRO-3 Offload", Subject("x", None), 1) == "not installed"
    assert not SYSTEMS["torchao CPUOffloadOptimizer"].is_installed


@pytest.mark.parametrize("name", SYSTEMS)
def test_gradients_are_clipped_where_they_can_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Subject] = []
    monkeypatch.setitem(SYSTEMS, name, dataclasses.replace(SYSTEMS[name], requires=None))
    monkeypatch.setattr(gpu_step, "run_alone", lambda subject, warmup: started.append(subject))
    measure_alone(name, Subject("peer", None, steps=3), 1)
    assert [(subject.system, subject.clip) for subject in started] == [(name, CLIP if SYSTEMS[name].clips else None)]


def test_the_table() -> None:
    others = (Step(0.25, 0.1, 1.5), Step(0.25, 0.1, 1.0))
    runs = {
        "plain Lightning": "ended early",
        "protrain, offload, overlap off": (STEPS, FACTS),
        "protrain, offload, overlap backward": (others, FACTS),
        "protrain, offload, overlap forward": (others, FACTS),
        "DeepSpeed ZeRO-3 Offload": "not installed",
    }
    rows = render_alone(runs, 1000).splitlines()[2:]
    assert rows == [
        "| plain Lightning | yes | ended early | - | - | - |",
        "| protrain, offload, overlap off | yes | 2000 | 0.5 s | 3.000 GiB | 0 |",
        "| protrain, offload, overlap backward | no | 4000 | 0.25 s | 3.000 GiB | - |",
        "| protrain, offload, overlap forward | yes | 4000 | 0.25 s | 3.000 GiB | 0.25 |",
        "| DeepSpeed ZeRO-3 Offload | yes | not installed | - | - | - |",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in INSTALLED if name.startswith(("plain", "protrain"))])
def test_a_system_runs_alone(name: str) -> None:
    subject = Subject("peer", None, num_params=1_700_000, batch=2, sequence=16, steps=3)
    measured = measure_alone(name, subject, warmup=1)
    assert not isinstance(measured, str)
    steps, facts = measured
    assert len(steps) == 2
    assert facts.num_params > 1_000_000
    assert (facts.num_hooks is not None) is name.startswith("protrain")


def test_a_run_that_ends_early_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(subject: Subject, warmup: int) -> None:
        raise RuntimeError("A run of the comparison ended early; its own message is above.")

    monkeypatch.setattr(gpu_step, "run_alone", fail)
    assert measure_alone("plain Lightning", Subject("x", None), 1) == "ended early"
