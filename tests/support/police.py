"""Checks that a test leaves nothing behind; `conftest.py` runs them around every test.

[Note: Watch]
A *watch* reads one piece of global state and can put it back. A test that changes it fails, unless it says so with
`@pytest.mark.leaves("name of the watch")`; either way the next test finds the state as it was.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.modules.module as module_hooks
from lightning.pytorch.strategies import StrategyRegistry

GRACE_SECONDS = 3.0
# Far above the resolution of the times that a file system keeps.
CLOCK_TICK_NS = 100_000_000

# Threads of libraries that live as long as the process, by name or class, with the reason why that is no leak.
LASTING_THREADS = {
    "fsspecIO": "fsspec keeps one event loop thread for all remote file systems",
    "TMonitor": "tqdm keeps one daemon thread that refreshes stalled bars",
}
# Child processes by a word of their command line.
LASTING_PROCESSES = {
    "orted": "where mpi4py is installed, Lightning asks it for the ranks, and Open MPI keeps a daemon for the process",
    "resource_tracker": "multiprocessing keeps one tracker of shared memory for the whole process",
    "forkserver": "multiprocessing keeps one fork server for the whole process",
}
# Environment variables that libraries set as a matter of course; they are put back in silence.
SILENT_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest names the running test and phase",
    "CUDA_DEVICE_ORDER": "Lightning's accelerator for CUDA",
    "PL_GLOBAL_SEED": "seed_everything",
    "PL_SEED_WORKERS": "seed_everything",
    "MASTER_ADDR": "Lightning's own cluster environment",
    "MASTER_PORT": "Lightning's own cluster environment",
    "NODE_RANK": "Lightning's own cluster environment",
    "LOCAL_RANK": "Lightning's own cluster environment",
    "WORLD_SIZE": "Lightning's own cluster environment",
}
# Folders in which files come and go with any run.
CACHES = {".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv", "__pycache__", "build", "dist"}
# Somebody may be editing while the tests run; no test writes sources.
SOURCES = {".md", ".py", ".pyi", ".toml", ".yaml", ".yml", ".swp", ".tmp"}


@dataclass(frozen=True)
class Watch:
    """One piece of global state, see [Note: Watch]."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], None]


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _set_cudnn(state: tuple[bool, bool]) -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = state


def _set_registry(entries: dict[str, Any]) -> None:
    StrategyRegistry.clear()
    StrategyRegistry.update(entries)


def _signal_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


def _set_signal_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


def _module_hooks() -> tuple[dict[int, Any], ...]:
    return tuple(dict(getattr(module_hooks, name)) for name in _GLOBAL_HOOKS)


def _set_module_hooks(states: tuple[dict[int, Any], ...]) -> None:
    for name, hooks in zip(_GLOBAL_HOOKS, states, strict=True):
        getattr(module_hooks, name).clear()
        getattr(module_hooks, name).update(hooks)


def _close_process_group(was_open: bool) -> None:
    # A group cannot be brought back; one that was opened can be closed.
    if torch.distributed.is_initialized() and not was_open:
        torch.distributed.destroy_process_group()


WATCHES = (
    Watch("default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    Watch("default_device", torch.get_default_device, torch.set_default_device),
    Watch("num_threads", torch.get_num_threads, torch.set_num_threads),
    Watch("grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
    Watch("anomaly_detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Watch(
        "deterministic_algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    Watch(
        "cudnn_flags",
        lambda: (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        _set_cudnn,
    ),
    Watch("matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Watch("process_group", torch.distributed.is_initialized, _close_process_group),
    Watch("module_hooks", _module_hooks, _set_module_hooks),
    Watch("strategy_registry", lambda: dict(StrategyRegistry), _set_registry),
    Watch("signal_handlers", _signal_handlers, _set_signal_handlers),
)


def read_all(watches: Iterable[Watch] = WATCHES) -> dict[str, Any]:
    """State of every watch by name."""
    return {watch.name: watch.read() for watch in watches}


def restore_changed(before: Mapping[str, Any], declared: Iterable[str] = ()) -> list[str]:
    """Puts back what changed since `before` and says what; names in `declared` are put back in silence."""
    findings = []
    for watch in WATCHES:
        now = watch.read()
        if now != before[watch.name]:
            watch.restore(before[watch.name])
            if watch.name not in declared:
                findings.append(f"{watch.name} changed from {before[watch.name]!r} to {now!r}")
    return findings


def restore_environment(before: Mapping[str, str], declared: Iterable[str] = ()) -> list[str]:
    """Puts the environment back and says which variables were set, changed or deleted."""
    now = dict(os.environ)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    for name in changed:
        if name == "PYTEST_CURRENT_TEST":
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name} changed" for name in changed if name not in {*SILENT_VARIABLES, *declared}]


def leaked_threads(before: Iterable[threading.Thread], grace: float = GRACE_SECONDS) -> list[str]:
    """Names of the Python threads that run now, did not run `before`, and do not end within `grace` seconds."""
    known = set(before)
    deadline = time.monotonic() + grace
    while True:
        leaked = [
            thread.name
            for thread in threading.enumerate()
            # A dummy stands for a thread that native code started and that called into Python.
            if thread not in known
            and not LASTING_THREADS.keys() & {thread.name, type(thread).__name__}
            and "Dummy" not in type(thread).__name__
        ]
        if not leaked or time.monotonic() > deadline:
            return [f"thread {name!r} still runs" for name in sorted(leaked)]
        time.sleep(0.02)


def child_processes() -> set[psutil.Process]:
    """All descendants of this process; equality takes the time of creation into account."""
    try:  # Linux lists the children of a thread, which is faster than to look through all processes.
        if not any(path.read_bytes() for path in Path("/proc/self/task").glob("*/children")):
            return set()
    except OSError:  # a thread has ended in the meantime
        pass
    return set(psutil.Process().children(recursive=True))


def _describe(process: psutil.Process) -> str | None:
    """Command line of a process, or None where it has ended in the meantime or may last."""
    try:
        command = " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return None
    return None if any(word in command for word in LASTING_PROCESSES) else command


def leaked_processes(before: Iterable[psutil.Process], grace: float = GRACE_SECONDS) -> list[str]:
    """Child processes that were not there `before` and do not end within `grace` seconds; they are ended."""
    known = set(before)
    deadline = time.monotonic() + grace
    while True:
        # A list of pairs, not a comprehension over one call: a process may end between the two questions.
        leaked = [(process, _describe(process)) for process in child_processes() - known]
        leaked = [(process, command) for process, command in leaked if command is not None]
        if not leaked or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for process, _ in leaked:
        try:
            process.kill()
            process.wait(1.0)
        except (psutil.NoSuchProcess, psutil.TimeoutExpired):
            continue
    return sorted(f"process {process.pid} still runs: {(command or '')[:120]}" for process, command in leaked)


# Modification time of a folder that was listed, with what was in it: folders, and files that are no sources.
_listed: dict[str, tuple[int, list[str], list[str]]] = {}


def _list_folder(folder: str) -> tuple[list[str], list[str]]:
    """Return the folders and files in a folder, which is read again only after something came or went."""
    changed = os.stat(folder).st_mtime_ns
    known = _listed.get(folder)
    if known is not None and known[0] == changed:
        return known[1], known[2]
    with os.scandir(folder) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    folders = [name for name, is_folder in entries if is_folder and name not in CACHES]
    folders = [name for name in folders if not name.endswith(".egg-info")]
    files = [name for name, is_folder in entries if not is_folder and os.path.splitext(name)[1] not in SOURCES]
    if time.time_ns() - changed > CLOCK_TICK_NS:  # what comes within the same tick of the clock changes no time
        _listed[folder] = changed, folders, files
    return folders, files


def files_below(root: Path) -> set[str]:
    """Paths below `root`, relative to it, without caches and sources."""
    found = set()
    waiting = [""]
    while waiting:
        relative = waiting.pop()
        try:
            folders, files = _list_folder(os.path.join(root, relative))
        except FileNotFoundError:  # removed in the meantime
            continue
        below = [os.path.join(relative, name) for name in folders]
        found.update(below, (os.path.join(relative, name) for name in files))
        waiting += below
    return found


def new_files(root: Path, before: set[str]) -> list[str]:
    """Files and folders that appeared below `root`, but for what git ignores: a run beside the tests writes it."""
    found = files_below(root) - before
    if found:
        command = ["git", "-C", str(root), "check-ignore", "--stdin"]
        ignored = subprocess.run(command, input="\n".join(found), capture_output=True, text=True, check=False)
        found -= set(ignored.stdout.splitlines())
    return [f"file {path} appeared in {root.name}" for path in sorted(found)]
