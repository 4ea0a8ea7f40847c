"""Every check of the police catches a planted leak, stays quiet without one, and is wired into the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from tests.support import police

ROOT = Path(__file__).resolve().parent.parent


def _register_strategy() -> None:
    StrategyRegistry["planted"] = {}


def _hook_all_modules() -> None:
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)


def _open_process_group() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def _detect_anomalies() -> None:
    torch.autograd.set_detect_anomaly(True)


PLANTED: dict[str, Callable[[], Any]] = {
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "default_device": lambda: torch.set_default_device("meta"),
    "num_threads": lambda: torch.set_num_threads(2),
    "grad_enabled": lambda: torch.set_grad_enabled(False),
    "anomaly_detection": _detect_anomalies,
    "deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "cudnn_flags": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "process_group": _open_process_group,
    "module_hooks": _hook_all_modules,
    "strategy_registry": _register_strategy,
    "signal_handlers": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
}


def test_every_watch_has_a_planted_change() -> None:
    assert set(PLANTED) == {watch.name for watch in police.WATCHES}


@pytest.mark.parametrize("name", PLANTED)
def test_a_changed_state_is_found_and_put_back(name: str) -> None:
    before = police.read_all()
    PLANTED[name]()
    findings = police.restore_changed(before)
    assert [finding.split()[0] for finding in findings] == [name]
    assert police.read_all() == before
    assert police.restore_changed(before) == []


def test_a_declared_change_is_put_back_in_silence() -> None:
    before = police.read_all()
    torch.set_default_dtype(torch.float64)
    assert police.restore_changed(before, declared={"default_dtype"}) == []
    assert torch.get_default_dtype() is torch.float32


def test_changed_environment_variables_are_found_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_OLD", "1")
    monkeypatch.setenv("PLANTED_GONE", "1")
    before = dict(os.environ)
    os.environ.update({"PLANTED_OLD": "2", "PLANTED_NEW": "1", "PL_GLOBAL_SEED": "7"})
    del os.environ["PLANTED_GONE"]
    findings = police.restore_environment(before)
    assert findings == [f"environment variable PLANTED_{name} changed" for name in ("GONE", "NEW", "OLD")]
    assert dict(os.environ) == before


def test_a_leaked_thread_is_named() -> None:
    before = threading.enumerate()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="planted")
    thread.start()
    try:
        assert police.leaked_threads(before, grace=0.0) == ["thread 'planted' still runs"]
    finally:
        stop.set()
    assert police.leaked_threads(before) == []
    thread.join()


def test_a_leaked_process_is_found_and_ended() -> None:
    before = police.child_processes()
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    findings = police.leaked_processes(before, grace=0.0)
    process.wait(10)
    assert process.stdin is not None
    process.stdin.close()
    assert len(findings) == 1
    assert f"process {process.pid}" in findings[0]
    assert police.leaked_processes(before, grace=0.0) == []


@pytest.mark.parametrize("name", ["model.ckpt", "logs/metrics.csv"])
def test_a_new_file_is_found(name: str, tmp_path: Path) -> None:
    before = police.files_below(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert any(name in finding for finding in police.new_files(tmp_path, before))


@pytest.mark.parametrize("name", [".git/index", "__pycache__/x.pyc", "edited.py"])
def test_caches_and_sources_are_no_finding(name: str, tmp_path: Path) -> None:
    before = police.files_below(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert police.new_files(tmp_path, before) == []


def test_what_git_ignores_is_no_finding(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("logs/\n*.ckpt\n")
    before = police.files_below(tmp_path)
    (tmp_path / "logs" / "run").mkdir(parents=True)
    for name in ("logs/run/metrics.csv", "x.ckpt", "left.bin"):
        (tmp_path / name).touch()
    assert police.new_files(tmp_path, before) == [f"file left.bin appeared in {tmp_path.name}"]


def test_tests_run_in_their_own_folder_with_one_thread(tmp_path: Path) -> None:
    assert Path.cwd() == tmp_path
    assert torch.get_num_threads() == 1
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.slow
def test_the_police_is_wired_into_every_test(tmp_path: Path) -> None:
    planted = tmp_path / "test_planted.py"
    planted.write_text(
        "import os, pathlib, torch, pytest\n"
        "def test_environment(): os.environ['PLANTED'] = '1'\n"
        "def test_dtype(): torch.set_default_dtype(torch.float64)\n"
        "@pytest.mark.leaves('default_dtype')\n"
        "def test_declared(): torch.set_default_dtype(torch.float64)\n"
        "def test_clean(): assert 'PLANTED' not in os.environ and torch.get_default_dtype() == torch.float32\n"
        "@pytest.fixture(scope='module')\n"
        "def seeded(): os.environ['PL_GLOBAL_SEED'] = '7'\n"
        "def test_shared(seeded): assert os.environ['PL_GLOBAL_SEED'] == '7'\n"
    )
    following = tmp_path / "test_planted_next.py"
    following.write_text("import os\ndef test_unseeded(): assert 'PL_GLOBAL_SEED' not in os.environ\n")
    arguments = ["-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    arguments += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(planted), str(following)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "6 passed, 2 errors" in result.stdout, result.stdout + result.stderr
    assert "environment variable PLANTED changed" in result.stdout
    assert "default_dtype changed from torch.float32 to torch.float64" in result.stdout
