"""The program runs in a small size, prints what it should, and its savers save the same. No time is checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint
from benchmarks.checkpoint import HOW, SAVERS, content, main, pause, rate, step_ratio, windows_of, write_plain

SMALL = ["--mebibytes=1", "--tensors=2", "--rounds=1", "--width=8", "--depth=1", "--batch=2", "--fits=1"]


def test_everything_has_its_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = torch.get_num_threads()
    main([*SMALL, "--every=2", "--windows=2", f"--folder={tmp_path}", f"--json={tmp_path / 'times.json'}"])
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "times.json").read_text(encoding="utf-8"))
    assert list(results["saves"]) == list(SAVERS)
    assert list(results["fits"]) == list(HOW)
    assert re.search(r"\| lightning_protrain \| \d\.\d+ \| \d\.\d+ \| .* \| >= 0\.9 \| (yes|no) \|", printed)
    assert re.search(r"\| behind \| .* \| <= 1\.05 \| (yes|no) \| .* \| -?\d+ \|", printed)
    assert re.search(r"\| weights alone \| 0\.3 \| 0\.33 \| ", printed)
    assert re.search(r"\| one rank of 4 \| 1\.\d \| 0\.\d\d \| ", printed)
    assert len(results["fits"]["behind"]["steps"][0]) == 15
    assert [path.name for path in tmp_path.iterdir()] == ["times.json"]
    assert torch.get_num_threads() == before


def test_the_plain_file_has_the_bytes_of_the_tensors_in_order(tmp_path: Path) -> None:
    made = content(1, 3)
    write_plain(made, tmp_path / "plain")
    data = (tmp_path / "plain").read_bytes()
    weights = b"".join(tensor.numpy().tobytes() for tensor in made["state_dict"].values())
    assert data.startswith(weights)
    assert len(data) == 3 * len(weights)
    assert 0.99 < len(data) / (1 << 20) <= 1


def test_a_rate_is_that_of_the_same_round() -> None:
    assert rate([(2.0, 0.0), (8.0, 0.0)], [(1.0, 0.0), (2.0, 0.0)]).median == pytest.approx(0.375)


def _fit(saving: float) -> list[tuple[float, float]]:
    """Four pairs of windows of two steps; the save of the first pair takes much longer. The last step is not there."""
    steps = [(9.0 if number == 4 else saving if number % 4 == 0 else 1.0, 1.0) for number in range(1, 20)]
    assert len(windows_of(steps, 2)) == 3
    return steps


def test_steps_that_save_are_held_against_those_that_do_not() -> None:
    assert step_ratio([_fit(3.0)], 2).median == pytest.approx(2.0)
    assert step_ratio([_fit(3.0)], 2, 1).median == pytest.approx(1.0)
    assert pause([_fit(1.5), _fit(1.5)], 2) == pytest.approx(500.0)


def test_what_is_loaded_is_what_is_read(tmp_path: Path) -> None:
    found = checkpoint.measure_reads(content(1, 2), tmp_path)
    assert [each.name for each in found] == ["everything", "weights alone", "one rank of 2", "one rank of 4"]
    everything, weights, *ranks = found
    assert everything.files == everything.whole > 2.9 * weights.files
    own = next(iter(content(1, 2)["state_dict"].values())).nbytes
    for each, others in zip(ranks, (1, 3), strict=True):
        assert each.whole - each.files == pytest.approx(others * own, rel=0.05)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["--rounds=0", "--every=0", "--windows=0", "--mebibytes=0", "--part=none"])
def test_wrong_arguments_are_refused(wrong: str) -> None:
    with pytest.raises(SystemExit):
        main([wrong])
