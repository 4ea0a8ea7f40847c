"""Programs that measure run in a small size, print what they should, and refuse other losses. No time is checked."""

from __future__ import annotations

import builtins
import importlib
import json
import re
import sys
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import checkpoint, distributed, fragmentation, hook_time, optimizer, start, step_overhead
from benchmarks.checkpoint import HOW, SAVERS, content, pause, rate, step_ratio, windows_of, write_plain
from benchmarks.distributed import ARMS, Case
from benchmarks.fragmentation import DTYPES, VOCABULARY, Peaks, build, row
from benchmarks.hook_time import BLOCKS, extra
from benchmarks.optimizer import SLOW, Arrive, Beside, Measurement, Model, Row, Times
from benchmarks.pairs import Comparison, median_ratio
from benchmarks.start import FirstStepError, Imports, launch, render
from benchmarks.subjects import Facts, Step
from lightning_protrain import cli
from lightning_protrain.planner.problem import ALPHA, ALPHA_4BIT
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


NUMBER = r"\d+\.\d{3}"
RATIO = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"


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


def test_tiles_of_other_sizes_are_rows_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tile-bytes", "16384", "65536"]
    optimizer.main(["--quick", "--threads=1", "--case", "fused", "chunked-bf16", *sizes])
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


def test_a_disturbed_peer_proves_nothing() -> None:
    def met(peer: float, fastest: float) -> str:
        steps, peers = [Times(1.0, 1.0)] * 6, [Times(peer, peer)] * 6
        row = Row("chunked-bf16", 1, 1.25, Measurement(steps, peers, [Beside(1.0, 1.0)] * 6))
        return optimizer._cells(row, fastest)[4]

    assert met(1.0, 1.0) == "yes"
    assert met(0.5, 0.5) == "no"
    assert met(4.0, 1.0) == "busy"


SIZES = ["--params=1e6", "--batch=1", "--sequence=16", "--pairs=2", "--warmup=1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shard"])
def test_a_case_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    distributed.main(["--case", name, *SIZES])
    assert re.search(rf"\| {name} \| {distributed.CASES[name].peer} \| {NUMBER} \(", capsys.readouterr().out)


def test_every_case_has_its_arms() -> None:
    assert {arm for case in distributed.CASES.values() for arm in (case.ours, case.peer)} == set(ARMS)


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


def test_the_cost_is_the_difference_per_block() -> None:
    ratio = extra([0.003, 0.004, 0.009], [0.001, 0.001, 0.001], num_blocks=10)
    assert (ratio.lower, ratio.median, ratio.upper) == pytest.approx((200.0, 300.0, 800.0))


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


@pytest.mark.parametrize(("most", "met"), [(4.9, "yes"), (5.1, "no")])
def test_the_most_decides(most: float, met: str) -> None:
    rows = [{"seconds": value, "cpu_seconds": 1.0, "imports": 6.0, "cpu_imports": 5.0} for value in (1.0, 2.0, most)]
    first, second = render(rows).splitlines()[2:]
    assert (
        first
        == f"| to the first step, imports apart | 2.00 s (1.00 to {most:.2f}) | 1.00 s (1.00 to 1.00) | < 5 s | {met} |"
    )
    assert second == "| imports | 6.00 s (6.00 to 6.00) | 5.00 s (5.00 to 5.00) | - | - |"


def test_without_a_cuda_device_it_says_so_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        fragmentation.main([])
    assert ended.value.code == 2
    assert "measures the allocator of a CUDA device and there is none" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "constant"), [("float32", ALPHA), ("bfloat16", ALPHA), ("uint8", ALPHA_4BIT)])
def test_the_factor_stands_beside_the_constant(dtype: str, constant: float) -> None:
    assert row(dtype, Peaks(2**30, 5 * 2**28)) == [dtype, "1.000 GiB", "1.250 GiB", "1.250", f"{constant:.2f}"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_is_of_that_dtype_and_trains(dtype: str) -> None:
    model: Any = build(dtype, 128, 1).train()
    assert isinstance(model, LlamaForCausalLM)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    ids = torch.arange(4).reshape(1, 4)
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)
    assert model.config.vocab_size == VOCABULARY


def test_weights_of_four_bits_are_packed_and_do_not_train() -> None:
    pytest.importorskip("bitsandbytes")
    model: Any = build("uint8", 128, 1).to("cpu").train()
    packed = [parameter for parameter in model.parameters() if parameter.dtype is torch.uint8]
    assert len(packed) == 7
    assert not any(parameter.requires_grad for parameter in packed)
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)


def test_every_dtype_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def measure(dtype: str, args: Any) -> Peaks:
        asked.append(dtype)
        return Peaks(100, 110)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(fragmentation, "measure", measure)
    monkeypatch.setattr(fragmentation.importlib, "util", SimpleNamespace(find_spec=lambda name: True))
    fragmentation.main([])
    assert asked == list(DTYPES)
    shown = capsys.readouterr().out
    assert "a GPU" in shown
    assert shown.count("1.100") == 3


@pytest.mark.parametrize("wrong", [["--hidden", "100"], ["--steps", "0"], ["--dtype", "int3"]])
def test_bad_input(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fragmentation.main(wrong)
    assert ended.value.code == 2


WRONG = {
    checkpoint: ["--rounds=0", "--every=0", "--windows=0", "--mebibytes=0", "--part=none"],
    optimizer: ["--pairs=0", "--threads=0", "--elements=0", "--tile-bytes=0", "--case=adam"],
    distributed: ["--pairs=0", "--threads=0", "--ranks=0", "--params=0", "--case=swap", "--warmup=-1"],
    hook_time: ["--blocks=0", "--pairs=0", "--block=none"],
    step_overhead: ["--pairs=0", "--threads=0", "--launches=0", "--tokens=4", "--tokens=0x8", "--case=swap"],
}


@pytest.mark.parametrize(
    ("program", "wrong"), [(program, each) for program, arguments in WRONG.items() for each in arguments]
)
def test_wrong_arguments_are_refused(program: ModuleType, wrong: str) -> None:
    with pytest.raises(SystemExit):
        program.main([wrong])
