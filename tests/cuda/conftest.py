"""Fixtures around every test on a GPU: exact matrix products, and no measurements of other tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_protrain.strategy import plan_session
from lightning_protrain.strategy.rehearsal import Rehearsal


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
