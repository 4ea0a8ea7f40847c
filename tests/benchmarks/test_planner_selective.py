"""Plans with blocks that keep their products are searched beside plans without."""

from __future__ import annotations

import pytest

from benchmarks import planner_selective
from benchmarks.planner import main

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 512, "num_hidden_layers": 4,
}  # fmt: skip


def test_a_row_for_every_case_and_none_is_slower() -> None:
    text, result = planner_selective.run((2,), 16, **TINY)
    rows = result["rows"]
    expected = len(planner_selective.METHODS) * len(planner_selective.MACHINES) * len(planner_selective.TRAINED)
    assert len(rows) == expected
    assert all(row["ratio"] > 0.99 for row in rows)
    assert all("selective" not in row["without"] for row in rows)
    assert text.count("\n") >= expected


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in TINY.items():
        monkeypatch.setitem(planner_selective.MODEL, name, value)
    main(["selective", "--batches", "2", "--sequence", "16"])
    assert "without / with" in capsys.readouterr().out
