"""The program for a GPU: it orders its parts, stops in time, survives what fails, and its page shows what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from benchmarks import carry, gpu
from benchmarks.gpu import Case, Part, main, page, parts_of, run_part
from lightning_protrain.strategy.overlap import plan_overlap


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_it_refuses_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no CUDA device"):
        main(["--json", str(tmp_path / "out.json")])


def test_without_time_every_part_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    names = [part.name for part in parts_of("cpu")]
    for only in ([], names[2:4]):
        main(["--device", "cpu", "--minutes", "0", "--json", str(out), *(["--only", *only] if only else [])])
        found = json.loads(out.read_text())["parts"]
        assert list(found) == (only or names)
        assert {outcome["status"] for outcome in found.values()} == {"no time left"}


def test_measuring_does_not_keep_gradients_out_of_the_memory_of_copies() -> None:
    case = gpu.speed_cases(True)[0]
    module = gpu.Llama(case, "cpu")
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[gpu.Measured(case, "cpu")])
    assert plan_overlap("auto", trainer, module, [module.configure_optimizers()], "cuda").lends


@pytest.mark.parametrize(
    ("code", "seconds", "status"),
    [
        ("import sys; open(sys.argv[-1], 'w').write('{\"a\": 1}')", 30, "done"),
        ("raise SystemExit('no room')", 30, "failed"),
        ("pass", 30, "failed"),
        ("import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])", 1, "out of time"),
    ],
)
def test_a_part_that_fails_or_hangs_is_survived(
    code: str, seconds: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-c", code, *command[-1:]], **options))
        return started[-1]

    monkeypatch.setattr(gpu.subprocess, "Popen", start)
    outcome = run_part(Part("some part", 1, lambda device: {}), "cpu", seconds)
    assert outcome["status"] == status
    assert outcome.get("result") == ({"a": 1} if status == "done" else None)
    if "no room" in code:
        assert "no room" in outcome["output"]
    assert started[0].poll() is not None


@pytest.mark.filterwarnings("ignore:Settings of the plan that were not given take these values")
@pytest.mark.parametrize("case", [*gpu.speed_cases(True), *gpu.memory_cases(True)], ids=lambda case: case.name)
def test_every_case_trains(case: Case) -> None:
    assert gpu.train("cpu", case)["measured"]["losses"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_whole_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "speed_cases", lambda tiny: [Case("auto", hidden=64, layers=2, steps=2)])
    out = tmp_path / "out.json"
    main(["--device", "cpu", "--minutes", "8", "--json", str(out)])
    document = json.loads(out.read_text())
    assert {name: outcome["status"] for name, outcome in document["parts"].items()} == dict.fromkeys(
        [part.name for part in parts_of("cpu")], "done"
    )
    assert all(name in page(document) for name in document["parts"])


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
