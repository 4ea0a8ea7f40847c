"""The program that times the start of a run: what it counts, and what it shows."""

from __future__ import annotations

import builtins
import importlib
import sys
from pathlib import Path

import pytest

from benchmarks import start
from benchmarks.start import FirstStepError, Imports, launch, render
from lightning_protrain import cli
from lightning_protrain.strategy.protrain import ProTrainStrategy


@pytest.mark.parametrize("by", ["statement", "function"])
def test_imports_of_new_modules_are_counted(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner_of_start.py").write_text("import time\ntime.sleep(0.02)\n", encoding="utf-8")
    (tmp_path / "outer_of_start.py").write_text("import inner_of_start\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    imports, real = Imports(), builtins.__import__
    with imports.counted():
        import json  # noqa: F401

        assert imports.seconds == 0.0
        if by == "statement":
            import outer_of_start  # type: ignore[import-not-found]  # noqa: F401
        else:
            importlib.import_module("outer_of_start")
    assert 0.02 <= imports.seconds < 1.0
    assert builtins.__import__ is real
    for name in ("inner_of_start", "outer_of_start"):
        del sys.modules[name]


@pytest.mark.parametrize("step", start.FIRST_STEPS)
def test_a_launch_ends_at_the_first_step(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in start.FIRST_STEPS:
        monkeypatch.setattr(ProTrainStrategy, name, getattr(ProTrainStrategy, name))  # To be put back.
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(cli, "main", lambda: getattr(ProTrainStrategy, step)(None))
    found = launch("some.yaml")
    assert sys.argv[1:] == ["fit", "--config", "some.yaml"]
    assert set(found) == {"seconds", "cpu_seconds", "imports", "cpu_imports"}
    assert all(seconds >= 0 for seconds in found.values())


def test_a_run_without_a_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in start.FIRST_STEPS:
        monkeypatch.setattr(ProTrainStrategy, name, getattr(ProTrainStrategy, name))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(cli, "main", lambda: None)
    with pytest.raises(RuntimeError, match=r"some\.yaml came to its end without a step"):
        launch("some.yaml")
    assert not issubclass(FirstStepError, Exception)


@pytest.mark.parametrize(("most", "met"), [(4.9, "yes"), (5.1, "no")])
def test_the_most_decides(most: float, met: str) -> None:
    rows = [{"seconds": value, "cpu_seconds": 1.0, "imports": 6.0, "cpu_imports": 5.0} for value in (1.0, 2.0, most)]
    first, second = render(rows).splitlines()[2:]
    assert (
        first
        == f"| to the first step, imports apart | 2.00 s (1.00 to {most:.2f}) | 1.00 s (1.00 to 1.00) | < 5 s | {met} |"
    )
    assert second == "| imports | 6.00 s (6.00 to 6.00) | 5.00 s (5.00 to 5.00) | - | - |"
