"""Plans with blocks that keep their products, and with the network, are searched beside plans without."""

from __future__ import annotations

import pytest

from benchmarks import planner_network, planner_selective
from benchmarks.planner import main

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 512, "num_hidden_layers": 4,
}  # fmt: skip


def test_a_row_for_every_case_and_none_is_slower_where_products_may_be_kept() -> None:
    text, result = planner_selective.run((2,), 16, **TINY)
    rows = result["rows"]
    expected = len(planner_selective.METHODS) * len(planner_selective.MACHINES) * len(planner_selective.TRAINED)
    assert len(rows) == expected
    assert all(row["ratio"] > 0.99 for row in rows)
    assert all("selective" not in row["without"] for row in rows)
    assert text.count("\n") >= expected


def test_a_row_for_every_case_and_none_is_slower_with_the_network() -> None:
    text, result = planner_network.run((2,), 16, **TINY)
    rows = result["rows"]
    expected = len(planner_network.MACHINES) * len(planner_network.NETWORKS) * len(planner_network.TRAINED)
    assert len(rows) == expected
    assert all(row["ratio"] > 1 - 1e-6 for row in rows)
    assert text.count("\n") >= expected


@pytest.mark.parametrize(("name", "said"), [("selective", "without / with"), ("network", "with the network")])
def test_the_command_line(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in TINY.items():
        monkeypatch.setitem(planner_selective.MODEL, key, value)
    main([name, "--batches", "2", "--sequence", "16"])
    assert said in capsys.readouterr().out
