"""The program runs in a small size and prints what it should. No time is checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import step_overhead
from benchmarks.pairs import Comparison
from benchmarks.step_overhead import CASES, main
from benchmarks.subjects import Facts, Step

NUMBER = r"\d+\.\d{3}"
RATIO = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"
SIZES = ["--params=1e6", "--tokens=2x16", "--pairs=2", "--warmup=1", "--launches=1"]


@pytest.mark.slow
def test_cases_run_with_hooks_and_without(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cases = {name: CASES[name] for name in ("resident", "offload")}
    main(["--case", *cases, *SIZES, f"--json={tmp_path / 'times.json'}"])
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "times.json").read_text(encoding="utf-8"))
    assert set(results) == set(cases)
    for name, case in cases.items():
        row = rf"\| {name} \| {RATIO} \| <= {case.wanted} \| (yes|no) \| {RATIO} \| [\d.e-]+ s \| yes \|"
        assert re.search(row, printed)
        assert len(results[name]["steps"]) == len(results[name]["peer_steps"]) == 2
        assert bool(results[name]["facts"]["num_hooks"]) is case.hooked
        assert bool(results[name]["facts"]["counters"].get("uploads")) is case.hooked
        assert results[name]["peer_facts"]["num_hooks"] is None


def _with_comparison(monkeypatch: pytest.MonkeyPatch, num_hooks: int, peer_loss: float = 1.0) -> None:
    comparison = Comparison(
        (Step(1.0, 1.0, 1.0),), (Step(1.0, 1.0, peer_loss),), Facts(1, num_hooks=num_hooks), Facts(1)
    )
    monkeypatch.setattr(step_overhead, "compare", lambda *_: comparison)


@pytest.mark.parametrize(("case", "num_hooks"), [("resident", 1), ("offload", 0), ("keep", 0), ("plain", 2)])
def test_a_run_with_the_wrong_hooks_is_no_result(monkeypatch: pytest.MonkeyPatch, case: str, num_hooks: int) -> None:
    _with_comparison(monkeypatch, num_hooks)
    with pytest.raises(RuntimeError, match=f"{case}: {num_hooks} hooks"):
        main(["--case", case, *SIZES])


def test_a_run_that_computes_something_else_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_comparison(monkeypatch, num_hooks=0, peer_loss=1.5)
    with pytest.raises(RuntimeError, match="resident: the losses differ"):
        main(["--case", "resident", *SIZES])


@pytest.mark.parametrize(
    "wrong", ["--pairs=0", "--threads=0", "--launches=0", "--tokens=4", "--tokens=0x8", "--case=swap"]
)
def test_wrong_arguments_are_refused(wrong: str) -> None:
    with pytest.raises(SystemExit):
        main([wrong])
