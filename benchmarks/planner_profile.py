"""Benchmark of the time and memory of profiling a model without weights.

    python -m benchmarks.planner_profile "Llama 2 7B"

prints one measurement as JSON. Each measurement runs in its own process, because of the peak of memory.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.families import FAMILIES, LLAMA, Size
from benchmarks.largest import SEQUENCE, build, step_of
from benchmarks.report import ROOT, quiet, table
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.strategy.precision import ProTrainPrecision

SMALL = "a real step"
# Models without weights, except the last one, of which a real step is run.
SIZES = {size.name: size for size in LLAMA} | {
    "tiny": Size("tiny", 0.0, 64, 128, 2, 4, 4, 512),
    SMALL: Size(SMALL, 0.1, 768, 2048, 12, 12, 12, 8192),
}
MODELS = ("Llama 2 7B", "Llama 3.1 70B")
MIB = 1 << 20
REPEATS = 3
HEADER = (
    "model", "parameters", "blocks", "built: CPU s", "CPU s", "elapsed s", "peak MiB", "of it before", "of a real step",
)  # fmt: skip


@dataclass(frozen=True)
class Profiling:
    """One model.

    Attributes:
        model: Name of the model.
        params: Number of parameters.
        blocks: Number of blocks.
        build_seconds: Processor time of building the model.
        seconds: Processor time of profiling a step, or of the real step; the first one, and repetitions.
        wall_seconds: Elapsed time of profiling a step, or of the real step.
        before_bytes: Peak of resident memory before profiling.
        peak_bytes: Peak of resident memory at the end.
    """

    model: str
    params: int
    blocks: int
    build_seconds: float
    seconds: tuple[float, ...]
    wall_seconds: tuple[float, ...]
    before_bytes: int
    peak_bytes: int


def measure(name: str, sequence: int = SEQUENCE) -> Profiling:
    """Profile a model on the meta device, or run a small one, in mixed precision with one sequence."""
    torch.set_num_threads(1)
    size = SIZES[name]
    precision = ProTrainPrecision("bf16-mixed")
    precision.open("cpu")
    begin = time.process_time()
    config = FAMILIES["Llama"].config(size, sequence)
    if name == SMALL:
        module = CausalLMModule(config=config)
        module.configure_model()
    else:
        module = build(config, "full", precision)
    build_seconds = time.process_time() - begin
    step = step_of(module, 1, sequence)
    work: Callable[[], object] = partial(_run, step, precision)
    if name != SMALL:
        layout = describe_model(module)
        work = partial(profile_model, module, layout, step, precision.train_step_context)
    before = peak_bytes()
    spent = [_timed(work) for _ in range(REPEATS)]
    return Profiling(
        name,
        sum(weight.numel() for weight in module.parameters()),
        size.layers,
        build_seconds,
        tuple(cpu for cpu, _ in spent),
        tuple(wall for _, wall in spent),
        before,
        peak_bytes(),
    )


def peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return this process' peak of resident memory, bytes; `getrusage` would include the parent's."""
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def measure_elsewhere(name: str) -> Profiling:
    """Measure in another process."""
    command = [sys.executable, "-m", "benchmarks.planner_profile", name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = Profiling(**json.loads(done.stdout.splitlines()[-1]))
    return replace(found, seconds=tuple(found.seconds), wall_seconds=tuple(found.wall_seconds))


def run(models: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the table and its rows."""
    rows = [measure_elsewhere(name) for name in (*models, SMALL)]
    return render(rows), {"rows": [asdict(row) for row in rows]}


def render(rows: Sequence[Profiling]) -> str:
    """Return the table; the last row is the real step."""
    real = _settled(rows[-1].seconds)
    lines = [
        (
            row.model,
            f"{row.params / 1e9:.2f} billion",
            row.blocks,
            f"{row.build_seconds:.1f}",
            f"{row.seconds[0]:.2f} (again: {_settled(row.seconds):.2f})",
            f"{row.wall_seconds[0]:.2f} (again: {_settled(row.wall_seconds):.2f})",
            f"{row.peak_bytes / MIB:,.0f}",
            f"{row.before_bytes / MIB:,.0f}",
            f"{row.seconds[0] / real:.2f}",
        )
        for row in rows
    ]
    return table(HEADER, lines)


def _settled(seconds: Sequence[float]) -> float:
    """Return the median without the first value."""
    return statistics.median(seconds[1:])


def _run(step: Callable[[], torch.Tensor], precision: ProTrainPrecision) -> None:
    with precision.train_step_context():
        loss = step()
    loss.backward()


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    begin = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - begin[0], time.perf_counter() - begin[1]


@quiet()
def main(arguments: Sequence[str]) -> None:
    """Measure one model in this process."""
    (name,) = arguments
    print(json.dumps(asdict(measure(name))))


if __name__ == "__main__":
    main(sys.argv[1:])
