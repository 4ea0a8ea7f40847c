"""Plans that are searched for with the network are held against those without."""

from __future__ import annotations

import pytest

from benchmarks import planner_network, planner_selective
from benchmarks.planner import main
from tests.benchmarks.test_planner_selective import TINY


def test_a_row_for_every_case_and_none_is_slower() -> None:
    text, result = planner_network.run((2,), 16, **TINY)
    rows = result["rows"]
    expected = len(planner_network.MACHINES) * len(planner_network.NETWORKS) * len(planner_network.TRAINED)
    assert len(rows) == expected
    assert all(row["ratio"] > 1 - 1e-6 for row in rows)
    assert text.count("\n") >= expected


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in TINY.items():
        monkeypatch.setitem(planner_selective.MODEL, name, value)
    main(["network", "--batches", "2", "--sequence", "16"])
    assert "with the network" in capsys.readouterr().out
