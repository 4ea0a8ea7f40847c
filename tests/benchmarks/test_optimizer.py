"""The program runs in a small size and prints what it should. No time is checked."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks import optimizer
from benchmarks.optimizer import CASES, SLOW, Arrive, Beside, Measurement, Model, Row, Times, main
from lightning_protrain.runtime.optim.host_step import HostStep

NUMBER = r"\d+\.\d{3}"
RATIO = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"


def test_every_case_has_its_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = torch.get_num_threads()
    main(["--quick", "--threads", "1", "2", f"--json={tmp_path / 'times.json'}"])
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "times.json").read_text(encoding="utf-8"))
    assert [(row["threads"], row["case"]) for row in results] == [*product((1, 2), CASES)]
    for row in results:
        name, threads = row["case"], row["threads"]
        bound = r"- \| -" if CASES[name] is None else rf"<= {CASES[name]} \| (yes|no|busy)"
        beside = rf"{RATIO} \| {RATIO}" if threads == 1 else r"- \| -"
        line = rf"\| {name} \| {threads} \| {RATIO} \| {bound} \| {RATIO} \| [\d.e-]+ s \| {beside} \|"
        assert re.search(line, printed)
        number = 1 if name in SLOW else 2
        assert len(row["steps"]) == len(row["peers"]) == number
        assert len(row["beside"]) == number * (threads == 1)
    assert torch.get_num_threads() == before


def test_tiles_of_other_sizes_are_rows_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tile-bytes", "16384", "65536"]
    main(["--quick", "--threads=1", "--case", "fused", "chunked-bf16", *sizes])
    printed = capsys.readouterr().out
    assert all(f"| chunked-bf16 {size} KiB |" in printed for size in (16, 64))
    assert "| fused |" in printed


@pytest.mark.parametrize("arrive", get_args(Arrive))
def test_the_cases_compute_the_same(arrive: Arrive) -> None:
    """Only the casts of the gradients make a difference, and they are made in both."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(20_000, 10_000))
    ours, peer = models
    low_precision = arrive != "fp32"
    for parameter, gradient in ours.gradients.items() if low_precision else ():
        assert parameter.grad is not None
        parameter.grad.copy_(torch.full_like(gradient, torch.nan))
    host = HostStep(1)
    try:
        ours.chunked(host, arrive)
    finally:
        host.close()
    if low_precision:
        peer.separate_passes()
    else:
        peer.variant(fused=True).step()
    for one, other in zip(ours.parameters, peer.parameters, strict=True):
        assert torch.equal(one, other)
        copies = ours.gradients if arrive == "lent" else ours.copies
        assert not low_precision or torch.equal(copies[one], peer.copies[other])


@pytest.mark.parametrize("wrong", ["--pairs=0", "--threads=0", "--elements=0", "--tile-bytes=0", "--case=adam"])
def test_wrong_arguments_are_refused(wrong: str) -> None:
    with pytest.raises(SystemExit):
        optimizer.main([wrong])


def test_a_disturbed_peer_proves_nothing() -> None:
    def met(peer: float, fastest: float) -> str:
        steps, peers = [Times(1.0, 1.0)] * 6, [Times(peer, peer)] * 6
        row = Row("chunked-bf16", 1, 1.25, Measurement(steps, peers, [Beside(1.0, 1.0)] * 6))
        return optimizer._cells(row, fastest)[4]

    assert met(1.0, 1.0) == "yes"
    assert met(0.5, 0.5) == "no"
    assert met(4.0, 1.0) == "busy"
