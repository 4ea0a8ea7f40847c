"""What the strategy is set beside: importing them needs nothing, and what is missing says so."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from benchmarks.systems import SYSTEMS, System

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
