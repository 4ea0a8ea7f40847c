"""The profiling benchmark measures a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planner_profile import MIB, MODELS, SIZES, SMALL, Profiling, main, measure, peak_bytes, render


def test_models_are_known() -> None:
    assert {*MODELS, SMALL} <= SIZES.keys()


def test_peak_bytes(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmPeak:\t 9 kB\nVmHWM:\t  2048 kB\nVmRSS:\t 1 kB\n", encoding="utf-8")
    assert peak_bytes(status) == 2 * MIB
    assert peak_bytes() > MIB


def test_one_measurement(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, SMALL, SIZES["tiny"])
    main(["tiny"])
    found = Profiling(**json.loads(capsys.readouterr().out))
    assert (found.model, found.blocks, len(found.seconds)) == ("tiny", 2, 3)
    assert found.before_bytes <= found.peak_bytes
    real = measure(SMALL, sequence=16)
    assert real.params == found.params


def test_the_table_holds_profiles_against_a_real_step() -> None:
    profile = Profiling("a", 10**9, 8, 1.0, (3.0, 2.0, 4.0), (6.0, 5.0, 7.0), 100 * MIB, 200 * MIB)
    real = Profiling(SMALL, 10**8, 4, 1.0, (9.0, 1.5, 1.5), (1.0, 1.0, 1.0), 100 * MIB, 300 * MIB)
    line = "| a | 1.00 billion | 8 | 1.0 | 3.00 (again: 3.00) | 6.00 (again: 6.00) | 200 | 100 | 2.00 |"
    assert line in render([profile, real])
