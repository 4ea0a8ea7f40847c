"""The program runs in a small size and prints what it should. No time is checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import hook_time
from benchmarks.hook_time import BLOCKS, extra, main


def test_every_block_has_its_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = torch.get_num_threads()
    main(["--blocks=2", "--pairs=2", f"--json={tmp_path / 'times.json'}"])
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "times.json").read_text(encoding="utf-8"))
    assert list(results) == list(BLOCKS)
    for name, count in {"linear": 1, "llama": 9}.items():
        assert re.search(rf"\| {name} \| {count} \| -?\d+ \(-?\d+ to -?\d+\) \| <= 100 \| (yes|no) \| \d+ \|", printed)
        assert len(results[name]["offloaded"]) == len(results[name]["plain"]) == 2
    assert torch.get_num_threads() == before


def test_the_cost_is_the_difference_per_block() -> None:
    ratio = extra([0.003, 0.004, 0.009], [0.001, 0.001, 0.001], num_blocks=10)
    assert (ratio.lower, ratio.median, ratio.upper) == pytest.approx((200.0, 300.0, 800.0))


def test_a_run_that_computes_something_else_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_time.Net, "load_state_dict", lambda self, state: None)
    with pytest.raises(RuntimeError, match="linear: the gradients differ"):
        main(["--blocks=2", "--pairs=1", "--block", "linear"])


@pytest.mark.parametrize("wrong", ["--blocks=0", "--pairs=0", "--block=none"])
def test_wrong_arguments_are_refused(wrong: str) -> None:
    with pytest.raises(SystemExit):
        main([wrong])
