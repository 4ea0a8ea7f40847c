"""Programs that measure run in a small size, print what they should, and refuse other losses. No time is checked."""

from __future__ import annotations

import builtins
import importlib
import json
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from benchmarks import (
    checkpoint,
    compiled,
    distributed,
    fragmentation,
    hook_time,
    optimizer,
    rehearsal,
    start,
    step_overhead,
)
from benchmarks.checkpoint import HOW, SAVERS
from benchmarks.fragmentation import build
from benchmarks.hook_time import BLOCKS
from benchmarks.optimizer import SLOW, Arrive, Model
from benchmarks.pairs import Comparison, median_ratio
from benchmarks.start import FirstStepError, Imports, launch
from benchmarks.subjects import Facts, Step
from lightning_protrain import cli
from lightning_protrain.runtime.optim.host_step import HostStep
from lightning_protrain.strategy.protrain import ProTrainStrategy

SMALL = ["--mebibytes=1", "--tensors=2", "--rounds=1", "--width=8", "--depth=1", "--batch=2", "--fits=1"]


def test_everything_has_its_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = torch.get_num_threads()
    checkpoint.main([*SMALL, "--every=2", "--windows=2", f"--folder={tmp_path}", f"--json={tmp_path / 'times.json'}"])
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


NUMBER = r"\d+\.\d{3}"
RATIO = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"


@pytest.mark.slow
def test_every_factor_has_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    rehearsal.main(["--factors", "2", "--runs=1", "--steps=1"])
    printed = capsys.readouterr().out
    assert re.search(rf"\n\| 2 of the measured ones \| {NUMBER} \| {NUMBER} \| {NUMBER} \| \S+ s \|$", printed.rstrip())
    assert torch.get_num_threads() == before


def test_every_case_has_its_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = torch.get_num_threads()
    optimizer.main(["--quick", "--threads", "1", "2", f"--json={tmp_path / 'times.json'}"])
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "times.json").read_text(encoding="utf-8"))
    assert [(row["threads"], row["case"]) for row in results] == [*product((1, 2), optimizer.CASES)]
    for result in results:
        name, threads = result["case"], result["threads"]
        bound = r"- \| -" if optimizer.CASES[name] is None else rf"<= {optimizer.CASES[name]} \| (yes|no|busy)"
        beside = rf"{RATIO} \| {RATIO}" if threads == 1 else r"- \| -"
        line = rf"\| {name} \| {threads} \| {RATIO} \| {bound} \| {RATIO} \| [\d.e-]+ s \| {beside} \|"
        assert re.search(line, printed)
        number = 1 if name in SLOW else 2
        assert len(result["steps"]) == len(result["peers"]) == number
        assert len(result["beside"]) == number * (threads == 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("arrive", get_args(Arrive))
def test_the_cases_compute_the_same(arrive: Arrive) -> None:
    """Both cases cast the gradients, so their results are equal."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(20_000, 10_000))
    ours, peer = models
    low_precision = arrive != "fp32"
    for parameter, gradient in ours.gradients.items() if low_precision else ():
        assert parameter.grad is not None
        parameter.grad.copy_(torch.full_like(gradient, torch.nan))
    ours.chunked(HostStep(1), arrive)
    if low_precision:
        peer.separate_passes()
    else:
        peer.variant(fused=True).step()
    for one, other in zip(ours.parameters, peer.parameters, strict=True):
        assert torch.equal(one, other)
        copies = ours.gradients if arrive == "lent" else ours.copies
        assert not low_precision or torch.equal(copies[one], peer.copies[other])


SIZES = ["--params=1e6", "--batch=1", "--sequence=16", "--pairs=2", "--warmup=1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shard"])
def test_a_case_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    distributed.main(["--case", name, *SIZES])
    assert re.search(rf"\| {name} \| {distributed.CASES[name].peer} \| {NUMBER} \(", capsys.readouterr().out)


def test_other_losses_are_no_result() -> None:
    losses = {"resident": [1.0], "DDP": [1.1]}
    with pytest.raises(RuntimeError, match=r"losses differ by 0\.1"):
        distributed._row("resident", distributed.CASES["resident"], median_ratio([1.0]), losses, losses)


def test_every_block_has_its_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = torch.get_num_threads()
    hook_time.main(["--blocks=2", "--pairs=2", f"--json={tmp_path / 'times.json'}"])
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "times.json").read_text(encoding="utf-8"))
    assert list(results) == list(BLOCKS)
    for name, count in {"linear": 1, "llama": 9}.items():
        assert re.search(rf"\| {name} \| {count} \| -?\d+ \(-?\d+ to -?\d+\) \| <= 100 \| (yes|no) \| \d+ \|", printed)
        assert len(results[name]["offloaded"]) == len(results[name]["plain"]) == 2
    assert torch.get_num_threads() == before


def test_a_run_that_computes_something_else_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_time.Net, "load_state_dict", lambda self, state: None)
    with pytest.raises(RuntimeError, match="linear: the gradients differ"):
        hook_time.main(["--blocks=2", "--pairs=1", "--block", "linear"])


OVERHEAD_SIZES = ["--params=1e6", "--tokens=2x16", "--pairs=2", "--warmup=1", "--launches=1"]


@pytest.mark.slow
def test_cases_run_with_hooks_and_without(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cases = {name: step_overhead.CASES[name] for name in ("resident", "offload")}
    step_overhead.main(["--case", *cases, *OVERHEAD_SIZES, f"--json={tmp_path / 'times.json'}"])
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
        step_overhead.main(["--case", case, *OVERHEAD_SIZES])


def test_other_losses_of_a_step_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_comparison(monkeypatch, num_hooks=0, peer_loss=1.5)
    with pytest.raises(RuntimeError, match="resident: the losses differ"):
        step_overhead.main(["--case", "resident", *OVERHEAD_SIZES])


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


def test_without_a_cuda_device_it_says_so_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        fragmentation.main([])
    assert ended.value.code == 2
    assert "measures the allocator of a CUDA device and there is none" in capsys.readouterr().err


def test_weights_of_four_bits_are_packed_and_do_not_train() -> None:
    pytest.importorskip("bitsandbytes")
    model: Any = build("uint8", 128, 1).to("cpu").train()
    packed = [parameter for parameter in model.parameters() if parameter.dtype is torch.uint8]
    assert len(packed) == 7
    assert not any(parameter.requires_grad for parameter in packed)
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)


@pytest.mark.slow
def test_compiled_blocks_have_a_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    compiled.main(["--params=1e5", "--pairs=2"])
    printed = capsys.readouterr().out
    for name in compiled.PLANS:
        (differ,) = re.findall(rf"\| {name} \| -?\d+ s \| {RATIO} \| \S+ s \| (\S+) \|", printed)
        assert float(differ) < 1e-4
