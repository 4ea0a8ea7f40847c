"""The program runs in a small size and prints what it should. No time is checked."""

from __future__ import annotations

import re

import pytest

from benchmarks import distributed
from benchmarks.distributed import ARMS, CASES, Case, main
from benchmarks.pairs import median_ratio

NUMBER = r"\d+\.\d{3}"
SIZES = ["--params=1e6", "--batch=1", "--sequence=16", "--pairs=2", "--warmup=1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shard"])
def test_a_case_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--case", name, *SIZES])
    assert re.search(rf"\| {name} \| {CASES[name].peer} \| {NUMBER} \(", capsys.readouterr().out)


def test_every_case_has_its_arms() -> None:
    assert {arm for case in CASES.values() for arm in (case.ours, case.peer)} == set(ARMS)


@pytest.mark.parametrize(("ours", "met"), [(1.0, "yes"), (2.0, "no")])
def test_a_case_is_met_by_its_median(ours: float, met: str) -> None:
    case = Case("resident", "DDP", 0.98)
    steps = {"resident": [ours], "DDP": [1.0]}
    losses = {"resident": [1.0], "DDP": [1.0]}
    row = distributed._row("resident", case, median_ratio([1.0 / ours]), steps, losses)
    assert (row[4], row[7]) == (met, "equal")


def test_other_losses_are_no_result() -> None:
    losses = {"resident": [1.0], "DDP": [1.1]}
    with pytest.raises(RuntimeError, match=r"losses differ by 0\.1"):
        distributed._row("resident", CASES["resident"], median_ratio([1.0]), losses, losses)


@pytest.mark.parametrize("wrong", ["--pairs=0", "--threads=0", "--ranks=0", "--params=0", "--case=swap", "--warmup=-1"])
def test_wrong_arguments_are_refused(wrong: str) -> None:
    with pytest.raises(SystemExit):
        main([wrong])
