"""Benchmark of optimizer steps on the CPU, relative to `torch.optim.AdamW(fused=True).step()` in the same run.

    python -m benchmarks.optimizer --results optimizer-step
    python -m benchmarks.optimizer --threads 1 --case chunked-bf16 --tile 262144 1048576

All cases step the same tensors (`split`: equal ones in bfloat16), alternately with the fused step, with one thread and
with all cores. In addition, each case runs in a thread while the main thread runs a Python loop: the results are the
remaining rate of the loop, and the slowdown of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.pairs import Ratio, median_ratio
from benchmarks.report import table, write_result
from lightning_protrain import SplitAdamW
from lightning_protrain.runtime.optim.host_step import TILE, Given, HostStep, ParamUpdate, hyperparameters

HEADER = (
    "case",
    "threads",
    "step / fused (95 %)",
    "wanted",
    "met",
    "CPU time / fused (95 %)",
    "fused step",
    "loop's rate beside it (95 %)",
    "step beside the loop / alone (95 %)",
)
CASES = {
    "fused": None,
    "chunked-fp32": 1.00,
    "chunked-bf16": 1.25,
    "chunked-bf16-apart": 1.25,
    "separate-passes": None,
    "split-float32": None,
    "split-bfloat16": None,
    "split-8bit": None,
    "split-bfloat16-no-masters": None,
    "for-loop": None,
    "foreach": None,
}
# Slow cases, for which a quarter of the pairs is enough.
SLOW = ("for-loop", "foreach")
WANTED_RATE = 0.9
# A row is marked as busy if its fused step is slower than the fastest one by this factor.
DISTURBED = 1.5
WIDTH = 1024
Work = Callable[[], object]
# Gradients: fp32; bf16 in the memory of the shadow copy, as in a run; or bf16 in separate memory.
Arrive = Literal["fp32", "lent", "apart"]


class Model:
    """Parameters in chunks, with gradients, optimizer states and bf16 copies.

    Args:
        elements: Approximate number of elements of all parameters.
        chunk: Approximate number of elements of a chunk, which has two matrices and two vectors.
    """

    def __init__(self, elements: int, chunk: int) -> None:
        rows = max(chunk // WIDTH, 4)
        shapes = [(rows * 3 // 4, WIDTH), (WIDTH,), (rows - rows * 3 // 4, WIDTH), (WIDTH - 1,)]
        self.chunks = [[nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(max(elements // chunk, 1))]
        self.parameters = [parameter for chunk in self.chunks for parameter in chunk]
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.gradients = {parameter: _gradient(parameter).bfloat16() for parameter in self.parameters}
        self.copies = {parameter: torch.empty_like(parameter, dtype=torch.bfloat16) for parameter in self.parameters}
        self.fused = AdamW(self.parameters, fused=True)
        self.fused.step()

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    def variant(self, **choice: bool) -> AdamW:
        """Return another implementation of AdamW with the same state."""
        optimizer = AdamW(self.parameters, **choice)
        optimizer.state = self.fused.state
        return optimizer

    def separate_passes(self) -> None:
        """Step without tiles: cast all gradients, run one fused step, cast all weights."""
        with torch.no_grad():
            for parameter, gradient in self.gradients.items():
                _gradient(parameter).copy_(gradient)
            self.fused.step()
            for parameter, copy in self.copies.items():
                copy.copy_(parameter)

    def chunked(self, host: HostStep, arrive: Arrive) -> None:
        """Step one chunk after the other."""
        group = hyperparameters(self.fused.param_groups[0])
        for chunk in self.chunks:
            host.step(self.fused, self._given(group, chunk, arrive))

    def split(self, host: HostStep, name: str) -> Work:
        """Return a step of equal weights in bfloat16 by SplitAdamW, on the host."""
        weights = {each: nn.Parameter(each.detach().bfloat16()) for each in self.parameters}
        moments, _, rest = name.removeprefix("split-").partition("-")
        optimizer = SplitAdamW(weights.values(), moments=moments, masters=not rest)
        group = hyperparameters(optimizer.param_groups[0])
        chunks = [[ParamUpdate(weights[each], self.gradients[each]) for each in chunk] for chunk in self.chunks]
        return lambda: [host.step(optimizer, [(group, chunk)]) for chunk in chunks]

    def _given(self, group: dict[str, Any], chunk: list[nn.Parameter], arrive: Arrive) -> Given:
        if arrive == "fp32":
            return [(group, [ParamUpdate(each, _gradient(each)) for each in chunk])]
        copies = self.copies if arrive == "apart" else self.gradients
        return [(group, [ParamUpdate(each, self.gradients[each], copies[each]) for each in chunk])]


@dataclass(frozen=True)
class Times:
    """Time of one step.

    Attributes:
        wall: Elapsed time, seconds.
        cpu: Processor time of all threads, seconds.
    """

    wall: float
    cpu: float


@dataclass(frozen=True)
class Beside:
    """A step in a thread while a Python loop runs on the main thread.

    Attributes:
        rate: Rate of the loop during the step, relative to its rate alone.
        slowdown: Time of the step during the loop, relative to its time alone.
    """

    rate: float
    slowdown: float


@dataclass(frozen=True)
class Measurement:
    """All pairs of a case.

    Attributes:
        steps: Times of the case.
        peers: Times of the fused step.
        beside: Measurements with the Python loop, with one compute thread; may be empty.
    """

    steps: list[Times]
    peers: list[Times]
    beside: list[Beside]

    def ratio(self, what: str) -> Ratio:
        """Return the ratio of `wall` or `cpu` to that of the fused step."""
        pairs = zip(self.steps, self.peers, strict=True)
        return median_ratio([getattr(step, what) / getattr(peer, what) for step, peer in pairs])

    def loop(self, what: str) -> Ratio:
        """Return the median of `rate` or `slowdown`, with its interval."""
        return median_ratio([getattr(each, what) for each in self.beside])


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        label: Name of the case, with the size of tiles if it is not the default.
        threads: Number of compute threads.
        wanted: Maximum ratio to the fused step; None if there is no target.
        measurement: The measurement.
    """

    label: str
    threads: int
    wanted: float | None
    measurement: Measurement


def main(arguments: Sequence[str]) -> None:
    args = _parse(arguments)
    torch.manual_seed(0)
    load, before = os.getloadavg()[0], torch.get_num_threads()
    model = Model(args.elements, args.chunk)
    rows: list[Row] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name in args.case:
            tiled = name.startswith("chunked-bf16")
            for tile in args.tile if tiled else args.tile[:1]:
                label = f"{name} {tile >> 10} Ki" if tiled and tile != TILE else name
                rows.append(Row(label, threads, CASES[name], _measure(model, name, tile, threads, args)))
                print(_table(rows[-1:]), flush=True)
    torch.set_num_threads(before)
    text = (
        f"AdamW, {model.numel / 1e6:.3g} million parameters in {len(model.chunks)} chunks, {args.pairs} pairs; beside "
        f"the loop 1 thread, {args.loops} pairs; a quarter of that for {', '.join(SLOW)}. Of the loop's rate >= "
        f"{WANTED_RATE} is wanted. Load average of the machine at the start and at the end: {load:.1f}, "
        f"{os.getloadavg()[0]:.1f}. `busy`: the fused step took more than {DISTURBED} times its fastest with as many "
        f"threads, so its threads waited for cores.\n\n{_table(rows)}"
    )
    results = [{"case": row.label, "threads": row.threads, **_as_json(row.measurement)} for row in rows]
    print(f"\n{text}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.results:
        print(write_result(args.results, "benchmarks.optimizer", arguments, {"cases": results}, text))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--elements", type=_integer, default=100_000_000, help="elements of all parameters, e.g. 1e8")
    parser.add_argument("--chunk", type=_integer, default=16_000_000, help="elements of a chunk")
    parser.add_argument("--tile", type=int, nargs="+", default=[TILE], help="elements of tiles in the bf16 cases")
    parser.add_argument("--pairs", type=int, default=40, help="timed pairs of each case, after one for warm-up")
    parser.add_argument("--loops", type=int, default=20, help="pairs with a Python loop")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, _num_cores()}), help="numbers of compute threads"
    )
    parser.add_argument("--quick", action="store_true", help="a small model and few pairs, to test this program")
    parser.add_argument("--json", type=Path, help="file for all times")
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    args = parser.parse_args(arguments)
    if args.quick:
        args.elements, args.chunk, args.pairs, args.loops = 200_000, 50_000, 2, 2
    if min(args.elements, args.chunk, args.pairs, args.loops, *args.threads, *args.tile) < 1:
        parser.error("give positive numbers")
    return args


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _integer(text: str) -> int:
    return int(float(text))


def _work(model: Model, host: HostStep, name: str) -> Work:
    works: dict[str, Work] = {
        "fused": model.fused.step,
        "chunked-fp32": lambda: model.chunked(host, "fp32"),
        "chunked-bf16": lambda: model.chunked(host, "lent"),
        "chunked-bf16-apart": lambda: model.chunked(host, "apart"),
        "separate-passes": model.separate_passes,
        "for-loop": model.variant(foreach=False).step,
        "foreach": model.variant(foreach=True).step,
    }
    return model.split(host, name) if name.startswith("split") else works[name]


def _measure(model: Model, name: str, tile: int, threads: int, args: argparse.Namespace) -> Measurement:
    share = 4 if name in SLOW else 1
    with closing(HostStep(threads, tile=tile)) as host:
        work, num = _work(model, host, name), -(-args.pairs // share) + 1
        pairs = [_pair(work, model.fused.step, swap=index % 2 == 1) for index in range(num)][1:]
    beside: list[Beside] = []
    if threads == args.threads[0]:
        # One compute thread, so that the loop has a free core and only waits for the GIL.
        work = _work(model, HostStep(1, tile=tile), name)
        with ThreadPoolExecutor(1, initializer=_alone) as other:
            beside = [_beside(work, other) for _ in range(-(-args.loops // share) + 1)][1:]
        torch.set_num_threads(threads)
    return Measurement([step for step, _ in pairs], [peer for _, peer in pairs], beside)


def _alone() -> None:
    torch.set_num_threads(1)


def _pair(work: Work, peer: Work, swap: bool) -> tuple[Times, Times]:
    if swap:
        second = _time(peer)
        return _time(work), second
    return _time(work), _time(peer)


def _time(work: Work) -> Times:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def _beside(work: Work, other: ThreadPoolExecutor) -> Beside:
    alone = other.submit(_time, work).result().wall
    until = time.perf_counter() + max(alone, 0.01)
    idle = _rate(lambda: time.perf_counter() >= until)
    step: Future[Times] = other.submit(_time, work)
    rate = _rate(step.done)
    return Beside(rate / idle, step.result().wall / alone)


def _rate(ended: Callable[[], bool]) -> float:
    rounds, begin = 0, time.perf_counter()
    while True:
        for _ in range(1000):
            rounds += 1
        if ended():
            return rounds / (time.perf_counter() - begin)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _table(rows: Sequence[Row]) -> str:
    fastest: dict[int, float] = {}
    for row in rows:
        peer = min(step.wall for step in row.measurement.peers)
        fastest[row.threads] = min(peer, fastest.get(row.threads, peer))
    return table(HEADER, [_cells(row, fastest[row.threads]) for row in rows])


def _cells(row: Row, fastest: float) -> list[str]:
    wall, peer = row.measurement.ratio("wall"), statistics.median(step.wall for step in row.measurement.peers)
    bound, met = "-", "-"
    if row.wanted is not None:
        bound, met = f"<= {row.wanted}", "yes" if wall.upper <= row.wanted else "no"
        met = "busy" if peer > DISTURBED * fastest else met
    loop = [str(row.measurement.loop(what)) if row.measurement.beside else "-" for what in ("rate", "slowdown")]
    times = [str(wall), bound, met, str(row.measurement.ratio("cpu")), f"{peer:.3g} s"]
    return [row.label, str(row.threads), *times, *loop]


def _as_json(measurement: Measurement) -> dict[str, Any]:
    ratios = {what: asdict(measurement.ratio(what)) for what in ("wall", "cpu")}
    loops = {what: asdict(measurement.loop(what)) for what in ("rate", "slowdown") if measurement.beside}
    return {**ratios, **loops, **asdict(measurement)}


if __name__ == "__main__":
    main(sys.argv[1:])
