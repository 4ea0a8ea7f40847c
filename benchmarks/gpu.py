"""Tests of correctness, predictions and speed (relative to other systems) on a GPU, in two commands of ten minutes.

    python -m benchmarks.gpu first --seconds 280 --out results
    python -m benchmarks.gpu second --seconds 580 --out results
    python -m benchmarks.gpu only "3b auto" "3b plain" --seconds 120 --out results
    python -m benchmarks.gpu second --seconds 300 --out results --device cpu
    python -m benchmarks.gpu publish

The most valuable parts run first. Each part is a process of its own, which is killed at its time limit. After each one
`STAGE.json`, a table `STAGE.txt` and `STAGE.log.gz` are written again; some parts add a trace for ui.perfetto.dev. A
part that fails stops nothing. While a part runs, the process of the next one already imports its packages. No part
needs a network, git, or packages beyond those of the strategy; parts whose package is missing are skipped.
`--device cpu` tries the program itself with tiny sizes. `publish` makes docs/gpu.md, a sentence of the README and the
calibration of dry runs from the results in benchmarks/results/*-gpu.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gzip
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TextIO

# Heavy packages are imported by the processes of parts only.
from benchmarks import report
from benchmarks.gpu_report import publish, table_of

ROOT = Path(__file__).resolve().parent.parent
TAIL = 60_000  # Characters of each part's output that are kept.
LEAST_SECONDS = 15  # A part is not begun with less time.


@dataclass(frozen=True)
class Part:
    """A part of the program.

    Attributes:
        name: Name of the part; `gpu_cases.run_part` knows it, unless `tests` are given.
        seconds: Time limit.
        requires: Package that must be installed; None: no further package.
        tests: Arguments of pytest, for a part that runs tests.
    """

    name: str
    seconds: float
    requires: str | None = None
    tests: tuple[str, ...] = ()


# These tests look at the free memory and at times of the device, or fill it, so nothing runs beside them.
ALONE = (
    "tests/cuda/test_cuda_device.py",
    "tests/cuda/test_cuda_runs.py::test_a_fit_works_after_one_that_ran_out_of_memory",
    "tests/cuda/test_cuda_runs.py::test_weights_of_half_a_step_are_not_trained_on",
    "tests/cuda/test_cuda_runs.py::test_transfers_are_hidden_behind_long_computation",
)
_REST = ("tests/cuda", *(part for path in ALONE for part in ("--deselect", path)))
FIRST = (
    Part("machine", 45),
    Part("smoke", 80),
    Part("tests of the device", 50, tests=ALONE),
    Part("3b auto", 110),
    Part("tests", 140, tests=_REST),
    Part("hardware", 40),
)
SECOND = (
    Part("8b qlora auto", 90, requires="bitsandbytes"),
    Part("8b qlora plain", 60, requires="bitsandbytes"),
    Part("resident", 45),
    Part("resident plain", 45),
    Part("8b lora auto", 90),
    Part("8b lora plain", 60),
    Part("3b plain", 60),
    Part("3b fsdp2", 120),
    Part("7b whole", 90),
    Part("8b long", 150),
    Part("memory: bf16-true", 60),
    Part("memory: fp32", 60),
    Part("memory: LoRA", 60),
    Part("host beside", 60),
    Part("3b torchao", 90, requires="torchao"),
    Part("8b masters", 150),
    Part("3b deepspeed", 150, requires="deepspeed"),
    Part("3b capped", 90),
    Part("3b clipped", 90),
    Part("3b offload", 90),
    Part("memory: swap", 60),
)
STAGES = {"first": FIRST, "second": SECOND}
PARTS = {part.name: part for stage in STAGES.values() for part in stage}
# Left out on a CPU: these systems ask for a GPU.
GPU_ONLY = {"3b torchao", "3b deepspeed"}


class Running:
    """The process of a part. It waits after its imports until it is released.

    Args:
        part: The part.
        device: `"cuda"` or `"cpu"`.
        seconds: Time limit of a part that runs tests, which is told to pytest.
        folder: Folder for its output and its result.
    """

    def __init__(self, part: Part, device: str, seconds: float, folder: Path) -> None:
        self.part = part
        name = part.name.replace(":", "").replace(" ", "-").replace(",", "")
        self.log, self.result, self.trace = (folder / f"{name}{end}" for end in (".log", ".json", "-trace.json.gz"))
        environment = {**os.environ, **ENVIRONMENT}
        if part.name.endswith((" plain", " fsdp2", " torchao", " deepspeed")):
            # The strategy sets this itself; without it, other systems would lose memory to fragments.
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        if part.tests:
            environment["OMP_NUM_THREADS"] = "1"
        with self.log.open("wb") as stream:
            self._process = subprocess.Popen(
                _command(part, device, seconds, self.result, self.trace),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=True,
            )

    def run(self, seconds: float) -> dict[str, Any]:
        """Release the process, wait for it, and return its status and result."""
        began = time.monotonic()
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # It has ended already.
                self._process.stdin.write(f"{seconds}\n".encode())
                self._process.stdin.close()
            code = self._process.wait(seconds)
            status = "done" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            self.kill()
        outcome: dict[str, Any] = {"status": status, "seconds": time.monotonic() - began}
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""
        with contextlib.suppress(OSError, ValueError):
            outcome["result"] = json.loads(self.result.read_text(encoding="utf-8"))
        if self.part.tests:
            outcome["result"] = counted(text.splitlines())
        if status != "done":
            outcome["output"] = text[-4000:]
        return outcome

    def kill(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


# Machines without a network: NCCL and gloo shall not look for one.
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}


def _command(part: Part, device: str, seconds: float, result: Path, trace: Path) -> list[str]:
    if not part.tests:
        own = [sys.executable, "-m", "benchmarks.gpu", "part", part.name, "--device", device]
        return [*own, "--out", str(result), "--trace", str(trace)]
    several = part.tests == _REST and importlib.util.find_spec("xdist")
    cores = min(len(os.sched_getaffinity(0)), 16)
    workers = ["-n", str(max(cores - 2, min(cores, 2))), "--dist", "worksteal"] if several else []
    if device != "cuda":
        workers += ["-m", "slow or not slow"]  # These are the tests of a GPU, on the CPU.
    # Ended by pytest itself, the session still shows why tests have failed.
    ends = ["--timeout", "90", "--session-timeout", str(max(int(seconds) - 15, 1))]
    options = ["-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", *ends, *workers]
    return [sys.executable, "-m", "pytest", *options, *part.tests]


def counted(lines: Sequence[str]) -> dict[str, Any]:
    """Return the counts of pytest's output, and the names of failed tests."""
    last = lines[-1].strip("= ") if lines else ""
    if " in " not in last:  # It was ended.
        words = ("PASSED", "FAILED", "ERROR", "SKIPPED")
        last = "ended: " + ", ".join(f"{sum(f' {word}' in line for line in lines)} {word.lower()}" for word in words)
    failed = {line[:300] for line in lines if line.startswith(("FAILED", "ERROR")) or " FAILED" in line}
    return {"counts": last, "failed": sorted(failed)}


def run_stage(
    stage: str, parts: Sequence[Part], device: str, seconds: float, out: Path, about: Mapping[str, str]
) -> dict[str, Any]:
    """Run parts one after another, and publish the results after each of them.

    Args:
        stage: Name of the files.
        parts: The parts in their order.
        device: `"cuda"` or `"cpu"`.
        seconds: Time for all parts.
        out: Folder of the files; the table compares losses with those of other stages in it.
        about: Where and when the parts run, for the file.
    """
    end = time.monotonic() + seconds
    document: dict[str, Any] = {**about, "parts": {}}
    slower = 1 if device == "cuda" else 4
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder, ready = Path(name), dict[str, Running]()

        def prepare(part: Part, seconds: float = 0.0) -> Running:
            if part.name not in ready:
                ready[part.name] = Running(part, device, seconds, folder)
            return ready[part.name]

        waiting = list(parts)
        try:
            while waiting:
                part = waiting.pop(0)
                left = end - time.monotonic()
                if not _may_run(part, device):
                    outcome: dict[str, Any] = {"status": f"needs {part.requires}" if device == "cuda" else "skipped"}
                elif left < LEAST_SECONDS:
                    outcome = {"status": "no time"}
                else:
                    limit = min(part.seconds * slower, left - 3)
                    running = prepare(part, limit)
                    following = next((one for one in waiting if _may_run(one, device)), None)
                    if following is not None and not following.tests:  # Tests would not wait.
                        prepare(following)
                    outcome = running.run(limit)
                    if running.trace.is_file():
                        (out / running.trace.name).write_bytes(running.trace.read_bytes())
                document["parts"][part.name] = outcome
                print(f"{part.name}: {outcome['status']}, {outcome.get('seconds', 0):.0f} s", flush=True)
                _publish(stage, document, out, folder)
        finally:
            for running in ready.values():
                running.kill()
    return document


def _may_run(part: Part, device: str) -> bool:
    installed = part.requires is None or importlib.util.find_spec(part.requires) is not None
    return installed and (device == "cuda" or part.name not in GPU_ONLY)


def about(device: str, arguments: Sequence[str], commit: str) -> dict[str, str]:
    """Return the date, the GPU, the commit and the command of a run."""
    gpu = "no GPU"
    if device == "cuda":
        ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    command = f"python -m benchmarks.gpu {shlex.join(arguments)}"
    return {"date": date.today().isoformat(), "gpu": gpu, "commit": commit or report.commit(), "command": command}


def _publish(stage: str, document: Mapping[str, Any], out: Path, folder: Path) -> None:
    earlier: dict[str, Any] = {}
    for file in sorted(out.glob("*.json")):
        if file.stem != stage:
            earlier |= json.loads(file.read_text(encoding="utf-8"))["parts"]
    _write(out / f"{stage}.json", json.dumps(document, indent=1) + "\n")
    _write(out / f"{stage}.txt", table_of(document["parts"], earlier) + "\n")
    with gzip.open(out / f"{stage}.log.gz", "wt", encoding="utf-8") as stream:
        for log in sorted(folder.glob("*.log")):
            stream.write(f"##### {log.name}\n{log.read_text(encoding='utf-8', errors='replace')[-TAIL:]}\n")


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def run_part(name: str, device: str, out: Path, trace: Path, released: TextIO) -> None:
    """Run a part in this process, once a line with its time limit can be read from `released`."""
    from benchmarks import gpu_cases

    line = released.readline()
    if not line:  # The program has ended, or has no time left.
        return
    faulthandler.dump_traceback_later(max(float(line) - 2, 1))

    def save(result: dict[str, Any]) -> None:
        if (steps := result.pop("trace", None)) is not None:
            with gzip.open(trace, "wt", encoding="utf-8") as stream:
                json.dump(steps, stream)
        _write(out, json.dumps(result))
        if "measured" in result:  # The process ends here: gigabytes of states need not be moved to the host.
            sys.stdout.flush()
            os._exit(0)

    gpu_cases.run_part(name, device, save)


def main(arguments: Sequence[str]) -> None:
    """Run a stage or a part, or publish results."""
    args = _parse(arguments)
    if args.what == "publish":
        publish(ROOT, ROOT / "benchmarks" / "results")
    elif args.what == "part":
        run_part(args.names[0], args.device, args.out, args.trace, sys.stdin)
    elif args.device == "cuda" and shutil.which("nvidia-smi") is None:
        sys.exit("There is no CUDA device. `--device cpu` tries the program itself with tiny sizes.")
    else:
        parts = STAGES.get(args.what) or [PARTS[name] for name in args.names]
        facts = about(args.device, arguments, args.commit)
        run_stage(args.what, parts, args.device, args.seconds, args.out, facts)
        print((args.out / f"{args.what}.txt").read_text(encoding="utf-8"))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*STAGES, "only", "part", "publish"))
    parser.add_argument("names", nargs="*", help="parts of `only`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="a CPU only tests the program")
    parser.add_argument("--seconds", type=float, default=580.0, help="time limit of the stage")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--commit", default="", help="commit of the package, if it runs outside of its repository")
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.what == "only" and not (args.names and set(args.names) <= PARTS.keys()):
        parser.error(f"`only` takes names of parts: {', '.join(PARTS)}")
    if args.what != "publish" and args.out is None:
        parser.error("name a folder with --out")
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
