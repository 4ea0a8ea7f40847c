"""Plans whose evaluation fits the device, as their training does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_protrain import searching
from tests.machines import GIB
from tests.test_planning import case


def _with_evaluation(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """Evaluation takes `more` bytes than what the plan is expected to take at most."""
    expected = searching.expected_memory

    def larger(problem: Any, plan: Any) -> Any:
        timeline = expected(problem, plan)
        last = replace(timeline.phases[-1], device={"activations": timeline.device_peak + more})
        return replace(timeline, phases=(*timeline.phases[:-1], last))

    monkeypatch.setattr(searching, "expected_memory", larger)


@pytest.mark.parametrize("more", [6_500, 10_000, 20_000])
def test_evaluation_fits_too(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    whole = case(GIB).plan().prediction.device_bytes
    free = case(device_memory=whole - 1).plan()
    _with_evaluation(monkeypatch, more)
    found = case(device_memory=whole - 1).plan()
    assert free.prediction.device_bytes + more > whole - 1
    assert found.prediction.device_bytes + more <= whole - 1


def test_evaluation_that_fits_nowhere_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = case(GIB).plan().prediction.device_bytes
    free = case(device_memory=whole - 1).plan()
    _with_evaluation(monkeypatch, GIB)
    with caplog.at_level("INFO"):
        assert case(device_memory=whole - 1).plan().chunks == free.chunks
    assert "Evaluation may take 1.00 GiB" in caplog.text
