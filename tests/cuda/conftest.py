"""Fixtures around every test on a GPU: exact matrix products, no measurements of other tests, and no race is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_protrain.strategy import plan_session
from lightning_protrain.strategy.rehearsal import Rehearsal
from tests.support.gpus import STAND_IN


@pytest.fixture(autouse=True)
def _exact_matmul() -> Iterator[None]:
    """TF32 would hide real errors below its own; cuDNN, which runs an LSTM, has a switch of its own that is on."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    yield
    for switch, allowed in zip(switches, before, strict=True):
        switch.allow_tf32 = allowed


@pytest.fixture(autouse=True)
def _first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide caches of earlier runs; rates of the hardware are measured once for all tests."""
    monkeypatch.setattr(plan_session, "Rehearsal", lambda folder, *args: Rehearsal(tmp_path, *args))


def _look_for_races() -> None:
    """Raise if memory was freed too early, which is found at the next access."""
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda")


@pytest.fixture(autouse=True)
def _no_race_is_left() -> Iterator[None]:
    yield
    if STAND_IN:
        _look_for_races()


@pytest.fixture
def plants_races() -> Iterator[None]:
    """Allow what a test has planted to be found after it."""
    yield
    with contextlib.suppress(RuntimeError):
        _look_for_races()
