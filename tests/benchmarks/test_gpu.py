"""The program for a GPU: it orders its parts, stops in time, survives what fails, and shows what it found."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import beside, carry, gpu, gpu_cases, gpu_report, systems, transfers
from benchmarks.gpu import FIRST, PARTS, SECOND, Part, main, run_stage
from benchmarks.gpu_cases import CASES, Measured
from lightning_protrain.planner.lanes import Work
from lightning_protrain.profiler import gpu_specs
from lightning_protrain.strategy.overlap import plan_overlap


def outcomes(folder: Path, stage: str) -> dict[str, Any]:
    return json.loads((folder / f"{stage}.json").read_text())["parts"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_it_refuses_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no CUDA device"):
        main(["first", "--out", str(tmp_path)])


def test_every_part_is_known_and_every_case_is_a_part() -> None:
    tests = {part.name for part in PARTS.values() if part.tests}
    assert PARTS.keys() - tests == CASES.keys() | {"machine", "smoke", "hardware", "host beside"}
    assert len(PARTS) == len(FIRST) + len(SECOND)


def test_without_time_every_part_says_so(tmp_path: Path) -> None:
    main(["first", "--device", "cpu", "--seconds", "0", "--out", str(tmp_path)])
    main(["only", "3b plain", "smoke", "--device", "cpu", "--seconds", "0", "--out", str(tmp_path)])
    assert list(outcomes(tmp_path, "first")) == [part.name for part in FIRST]
    assert list(outcomes(tmp_path, "only")) == ["3b plain", "smoke"]
    assert {one["status"] for stage in ("first", "only") for one in outcomes(tmp_path, stage).values()} == {"no time"}


@pytest.mark.parametrize("arguments", [["only"], ["only", "4b auto"], ["first"]])
def test_a_command_without_parts_or_a_folder_is_refused(arguments: Sequence[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, *(["--out", str(tmp_path)] if arguments[0] == "only" else [])])


def test_measuring_does_not_keep_gradients_out_of_the_memory_of_copies() -> None:
    case = CASES["3b auto"].tiny()
    module = gpu_cases.Llama(case, "cpu")
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[Measured(case, "cpu")])
    assert plan_overlap("auto", trainer, module, [module.configure_optimizers()], "cuda").lends


ENDS = {
    "works": ("open(sys.argv[1], 'w').write('{\"a\": 1}')", "done"),
    "fails": ("raise SystemExit('no room')", "failed (1)"),
    "fails late": ("open(sys.argv[1], 'w').write('{\"a\": 1}'); raise SystemExit(3)", "failed (3)"),
    "hangs": ("import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])", "out of time"),
}


def test_parts_that_fail_or_hang_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = "import sys; line = sys.stdin.readline(); line or sys.exit(9)"

    def command(part: Part, device: str, seconds: float, result: Path, trace: Path) -> list[str]:
        return [sys.executable, "-c", f"{released}; {ENDS[part.name][0]}", str(result)]

    monkeypatch.setattr(gpu, "_command", command)
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0)
    parts = [Part(name, 0.5 if name == "hangs" else 20) for name in ENDS]
    found = run_stage("only", [*parts, Part("other", 9, requires="no_such_package")], "cpu", 60, tmp_path, {})["parts"]
    assert {name: found[name]["status"] for name in ENDS} == {name: status for name, (_, status) in ENDS.items()}
    assert [name for name in ENDS if "result" in found[name]] == ["works", "fails late"]
    assert "no room" in found["fails"]["output"]
    assert found["other"]["status"] == "skipped"
    assert outcomes(tmp_path, "only") == found
    with gzip.open(tmp_path / "only.log.gz", "rt") as stream:
        assert "no room" in stream.read()


def test_the_next_part_imports_while_one_runs_and_ends_unreleased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process is started before the first has ended, and killed if there is no time to run it."""
    code = "import sys, time; open(sys.argv[1], 'w').write('{}'); sys.stdin.readline() and time.sleep(2)"
    started: list[str] = []

    def command(part: Part, device: str, seconds: float, result: Path, trace: Path) -> list[str]:
        started.append(part.name)
        return [sys.executable, "-c", code, str(tmp_path / part.name)]

    monkeypatch.setattr(gpu, "_command", command)
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 4)
    found = run_stage("only", [Part("one", 20), Part("two", 20), Part("three", 20)], "cpu", 5.5, tmp_path, {})["parts"]
    assert [part["status"] for part in found.values()] == ["done", "no time", "no time"]
    assert started == ["one", "two"]


def test_a_part_whose_program_is_gone_does_nothing(tmp_path: Path) -> None:
    gpu.run_part("3b auto", "cpu", tmp_path / "result", tmp_path / "trace", io.StringIO(""))
    assert not [*tmp_path.iterdir()]


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:Settings of the plan that were not given take these values")
@pytest.mark.parametrize("name", [name for name in CASES if name not in gpu.GPU_ONLY and "fsdp2" not in name])
def test_every_case_trains(name: str) -> None:
    if CASES[name].four_bits:
        pytest.importorskip("bitsandbytes")
    found = gpu_cases.train("cpu", CASES[name].tiny())
    assert len(found["measured"]["losses"]) == (gpu_cases.WARM_UP + 1) * CASES[name].tiny().accumulate
    assert name in gpu_report.table_of({name: {"status": "done", "result": found}}, {})


def test_the_hosts_step_is_timed_beside_a_loop_by_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "SECONDS", 0.01)
    found = gpu_cases.host_beside("cpu")
    assert found["rates"].keys() == beside.OPTIMIZERS.keys()
    for numbers in found["rates"].values():
        assert numbers.keys() == {str(number) for number in beside.NUMBERS}
        assert all(value > 0 for one in numbers.values() for value in one.values())
    assert "AdamW" in gpu_report.table_of({"host beside": {"status": "done", "result": found}}, {})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_parts_of_both_stages_run_on_a_cpu(tmp_path: Path) -> None:
    names = ["machine", "smoke", "3b fsdp2", "3b auto", "3b torchao", "tests of the device", "hardware"]
    command = [sys.executable, "-m", "benchmarks.gpu", "only", *names, "--device", "cpu", "--seconds", "500"]
    subprocess.run([*command, "--out", str(tmp_path)], cwd=gpu.ROOT, check=True)
    found = outcomes(tmp_path, "only")
    assert {name: part["status"] for name, part in found.items()} == {
        name: "skipped" if name in gpu.GPU_ONLY else "done" for name in names
    }
    smoke = found["smoke"]["result"]
    assert smoke["counts"] == "15 of 15 ran, 15 bitwise, worst loss difference 0"
    assert not smoke["failed"]
    table = (tmp_path / "only.txt").read_text()
    assert all(name in table for name in names)


# --- other systems ----------------------------------------------------------------------------------------------------


def test_fsdp2_leaves_offloaded_weights_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = systems.SYSTEMS["FSDP2 with CPUOffloadPolicy"].strategy("cuda")
    module = L.LightningModule()
    module.layer = torch.nn.Linear(2, 2)
    strategy._lightning_module = module
    monkeypatch.setattr(type(strategy), "root_device", torch.device("meta"))
    strategy.model_to_device()
    assert module.layer.weight.device.type == "cpu"
    assert module.device.type == "meta"


def test_torchao_gets_gradients_to_offload_and_what_lightning_asks_of_an_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    class CPUOffloadOptimizer:
        def __init__(self, parameters: list[Any], kind: Any, **options: Any) -> None:
            given.update(options, parameters=parameters, kind=kind)

    monkeypatch.setitem(sys.modules, "torchao.optim", SimpleNamespace(CPUOffloadOptimizer=CPUOffloadOptimizer))
    weight = torch.nn.Parameter(torch.zeros(2))
    made = systems.SYSTEMS["torchao CPUOffloadOptimizer"].optimizer(iter([weight]))
    assert (made.state, made.defaults) == ({}, {})
    assert given["offload_gradients"] is True
    assert given["parameters"] == [weight]


def test_only_cases_of_memory_limit_the_allocator() -> None:
    """At the limit the allocator retries, which disturbs times."""
    limited = {name for name, case in CASES.items() if case.memory}
    assert limited == {"3b capped", "memory: bf16-true", "memory: fp32", "memory: LoRA"}
    assert CASES["3b torchao"].memory is None  # It does not fit 22 GiB.


def test_the_hardware_is_measured_on_a_device_with_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def opened(device: torch.device, log: Any) -> Any:
        asked.append(device)
        raise LookupError

    monkeypatch.setattr(gpu_cases, "open_device", opened)
    for device in ("cuda", "cpu"):
        with pytest.raises(LookupError):
            gpu_cases.hardware(device)
    assert asked == [torch.device("cuda", 0), torch.device("cpu")]


# --- traces -----------------------------------------------------------------------------------------------------------


class Traced:
    """An event as Kineto reports it: nanoseconds of an arbitrary clock."""

    def __init__(self, name: str, begin: int, duration: int, device: DeviceType = DeviceType.CUDA) -> None:
        self._values = {"name": name, "start_ns": 10**18 + begin, "duration_ns": duration, "device_type": device}

    def __getattr__(self, name: str) -> Any:
        return lambda: self._values.get(name, False)


EVENTS = [
    Traced("aten::mm", 0, 10_000_000, DeviceType.CPU),
    Traced("fill", 0, 1_000),
    Traced("gemm", 1_000_000, 3_000_000),
    Traced("gemm", 4_010_000, 990_000),  # 10 microseconds after the one before: one piece of work
    Traced("Memcpy HtoD (Pinned -> Device)", 4_000_000, 2_000_000),
    Traced("Memcpy DtoH (Device -> Pinned)", 6_000_000, 500_000),
    Traced("Memset (Device)", 7_000_000, 500_000),
]


def test_a_trace_has_lanes_beside_the_predicted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(
        start=lambda: None,
        stop=lambda: None,
        profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: EVENTS)),
    )
    monkeypatch.setattr(transfers, "profile", lambda **_: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(transfers, "predicted_lanes", lambda strategy: [Work("compute", 0.0, 0.5, "forward")])
    case = replace(CASES["3b auto"].tiny(), steps=1)
    results: list[dict[str, Any]] = []
    monkeypatch.setattr(Measured, "_traces", lambda measured: True)
    gpu_cases.train("cpu", case, results.append)
    (found,) = results
    assert found["hidden_share"] == pytest.approx(0.5, rel=0.02)
    lanes = found["lanes"]
    assert lanes["compute"]["predicted"] == 0.5
    assert lanes["compute"]["traced"] == pytest.approx(4.0e-3 / gpu_cases.TRACED, rel=1e-2)
    assert lanes["upload"]["traced"] == pytest.approx(2e-3 / gpu_cases.TRACED)
    assert lanes["download"]["traced"] == pytest.approx(0.5e-3 / gpu_cases.TRACED)
    assert lanes["host"]["recorded"] > 0
    assert len(found["measured"]["losses"]) == gpu_cases.WARM_UP + 1 + gpu_cases.TRACED
    names = {event["args"]["name"] for event in found["trace"]["traceEvents"] if event["name"] == "process_name"}
    assert names == {"predicted", "measured", "profiler"}


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_compares_losses_with_the_plain_run_of_an_earlier_stage() -> None:
    def run(losses: Sequence[float], **more: Any) -> dict[str, Any]:
        measured = {"step_seconds": 2.0, "losses": losses, "host_peak_bytes": 3 << 30, **more}
        predicted = {"step_seconds": 1.6, "device_bytes": 4 << 30}
        return {"status": "done", "seconds": 7.0, "result": {"measured": measured, "predicted": predicted}}

    plain = {"3b plain": run([1.0, 2.0])}
    auto = {"3b auto": run([1.0, 2.5, 3.0], peak_bytes=3 << 30, reserved_bytes=5 << 30)}
    failing = {"tests": {"status": "failed (1)", "result": {"counts": "1 failed in 3 s", "failed": ["FAILED one"]}}}
    head, row, tests, failed = gpu_report.table_of({**auto, **failing}, plain).splitlines()
    cells = "3b auto done 7 2.000 1.600 1.25 3.00 5.00 4.00 0.750 - 3.0 0.5"
    assert " ".join(row.split()) == cells
    assert len(head.split()) == 14
    assert "1 failed" in tests
    assert "FAILED one" in failed


# --- what is made of results ------------------------------------------------------------------------------------------


def test_what_is_made_of_the_kept_results_is_up_to_date(tmp_path: Path) -> None:
    """`python -m benchmarks.gpu publish` changes nothing."""
    made = ("README.md", "docs/gpu.md", "lightning_protrain/profiler/calibration.json")
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((gpu.ROOT / name).read_text())
    gpu_report.publish(tmp_path, gpu.ROOT / "benchmarks" / "results")
    for name in made:
        assert (tmp_path / name).read_text() == (gpu.ROOT / name).read_text(), name


def kept(folder: Path, name: str, parts: dict[str, Any], gpu: str = "NVIDIA H100 80GB HBM3") -> None:
    (folder / "2027-01-01-gpu").mkdir(exist_ok=True)
    about = {"date": "2027-01-01", "commit": "1" * 7, "gpu": gpu, "command": "python -m x"}
    (folder / "2027-01-01-gpu" / f"{name}.json").write_text(json.dumps({**about, "parts": parts}))


def a_run(step: float, told: float = 1.0, peak: float = 0.95, alpha: float = 1.0, **case: Any) -> dict[str, Any]:
    return {
        "status": "done",
        "result": {
            "case": {"system": "protrain", "four_bits": False, "precision": "bf16-mixed", **case},
            "measured": {"step_seconds": step, "losses": [1.0], "host_peak_bytes": 1 << 30, "alpha": alpha},
            "predicted": {"step_seconds": told, "device_bytes": 1 << 30},
            "measured over predicted": {"step": step / told, "peak": peak},
            "hidden_share": 0.7,
        },
    }


def test_results_are_held_against_goals_and_the_newest_counts(tmp_path: Path) -> None:
    kept(tmp_path, "first", {"3b auto": a_run(9.0), "3b fsdp2": a_run(3.0), "smoke": {"status": "done"}})
    kept(tmp_path, "second", {"3b auto": a_run(1.5, alpha=1.2), "3b fsdp2": {"status": "out of time"}})
    others = {"7b whole": a_run(1.0, alpha=1.1, loss_chunk_tokens=1024), "3b plain": a_run(4.0)}
    kept(tmp_path, "third", {**others, "8b lora auto": a_run(6.0)}, gpu="another")
    found = gpu_report.Results.read(sorted(tmp_path.glob("*-gpu")))
    rows = {row[0]: row[1:] for row in (goal.row(found) for goal in gpu_report.GOALS)}
    assert rows["3B in 22 GiB: step of FSDP2 with CPU offload over ours"] == ("at least 1.5", "2", "yes")
    assert rows["3B with all weights in 22 GiB: step measured / predicted"] == ("0.85 to 1.15", "1.5", "no")
    assert rows["3B with all weights in 22 GiB: peak measured / predicted"] == ("0.9 to 1", "0.95", "yes")
    assert rows["3B with all weights in 22 GiB: share of uploads hidden behind computing"][-1] == "no"
    assert rows["everything resident: step over plain"][-1] == "not measured"
    assert "3B with all weights in 22 GiB and 8B LoRA in 12 GiB; [figures]" in gpu_report.sentence(found)
    assert "8B QLoRA in 6 GiB" in gpu_report.sentence(found).partition("Not run")[2]
    # Dry runs plan for a loss that never holds all logits.
    assert gpu_report.calibrate(found) == {"gpus": {}, "alpha": {"float32": 1.1}}
    # Times of two GPUs have no ratio.
    assert found.step("8b lora auto") == 6.0
    assert found.over("3b auto", "3b plain") is None


def test_a_measured_machine_calibrates_dry_runs_of_its_gpu(tmp_path: Path) -> None:
    profile = gpu_specs.gpu("H100 SXM", 1 << 36, 8)
    measured = json.loads(replace(profile, name="NVIDIA H100 80GB HBM3", flops={"bfloat16": 1.23456e14}).to_json())
    kept(tmp_path, "first", {"hardware": {"status": "done", "result": measured}})
    found = gpu_report.calibrate(gpu_report.Results.read(sorted(tmp_path.glob("*-gpu"))))
    rates = found["gpus"]["H100 SXM"]
    assert rates.pop("flops") == {"bfloat16": 1.23e14, "float16": 1.23e14}
    assert rates == {name: pytest.approx(getattr(profile, name), rel=5e-3) for name in rates}
    assert not {"host_step", "host_memory", "device_bytes", "host_bytes"} & rates.keys()


@pytest.mark.parametrize(
    ("lines", "counts", "failed"),
    [
        (["FAILED a::b - x", "=== 1 failed, 2 passed in 3.1s ==="], "1 failed, 2 passed in 3.1s", ["FAILED a::b - x"]),
        (["[gw0] PASSED a", "[gw1] FAILED b"], "ended: 1 passed, 1 failed, 0 error, 0 skipped", ["[gw1] FAILED b"]),
    ],
)
def test_tests_that_were_ended_are_counted(lines: list[str], counts: str, failed: list[str]) -> None:
    assert gpu.counted(lines) == {"counts": counts, "failed": failed}


def test_what_is_carried_has_the_versions_of_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def download(command: list[str], **_: Any) -> None:
        commands.append(command)
        (tmp_path / "one.whl").write_bytes(bytes(3 << 20))

    monkeypatch.setattr(carry.subprocess, "run", download)
    carry.main([str(tmp_path), "datasets", "no-such-package"])
    version = carry.pinned((carry.ROOT / "constraints.txt").read_text())["datasets"]
    assert commands[0][-2:] == [f"datasets=={version}", "no-such-package"]
    assert "3.0 MiB  together" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"3\.0 MiB are more than the 2 MiB"):
        carry.main([str(tmp_path), "--mib", "2"])
