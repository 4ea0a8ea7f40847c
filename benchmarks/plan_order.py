"""Whether plans are as fast, one after the other, as the planner's clock says.

    python -m benchmarks.plan_order
    python -m benchmarks.plan_order --steps 12 --results planner-order

One Llama is trained under six plans on the CPU with one thread: a process for each plan, which take turns step by step
as in `benchmarks.subjects`; who begins changes from round to round. Before that the hardware is measured and the step
of every plan predicted from it. The figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.pairs import _give_leave, _process, _receive
from benchmarks.planner import ADAMW_STATE_BYTES, CHECKPOINT, KEEP
from benchmarks.report import table, write_result
from benchmarks.subjects import VOCABULARY, Llama, Step, Subject, llama_config
from lightning_protrain.device import open_device
from lightning_protrain.planner.chunks import pack_chunks, with_residency
from lightning_protrain.planner.memory import memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.plan import BlockPlan, Plan
from lightning_protrain.planner.steptime import StepTime, Training, step_time
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.cache import is_busy
from lightning_protrain.profiler.hardware import profile_hardware
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.model import profile_model
from lightning_protrain.profiler.records import ModelLayout, ModelProfile

# By name: which part of the chunks is resident, and which part of the blocks checkpoint.
PLANS = {
    "resident, keep": (1.0, 0.0),
    "resident, half checkpoint": (1.0, 0.5),
    "resident, checkpoint": (1.0, 1.0),
    "half resident, keep": (0.5, 0.0),
    "offload, keep": (0.0, 0.0),
    "offload, half checkpoint": (0.0, 0.5),
    "offload, checkpoint": (0.0, 1.0),
}
TIE = 0.05
WARM_UP = 2
HEADER = (
    "plan", "predicted ms", "compute", "copies", "host", "measured ms", "CPU ms", "measured / predicted",
    "against resident, keep: predicted", "measured",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One plan.

    Attributes:
        name: Of `PLANS`.
        predicted: What the clock says.
        steps: Timed steps; of each round one.
    """

    name: str
    predicted: StepTime
    steps: tuple[Step, ...]

    @property
    def wall(self) -> float:
        """Median of elapsed seconds."""
        return statistics.median(step.wall_seconds for step in self.steps)

    @property
    def cpu(self) -> float:
        """Median of processor seconds."""
        return statistics.median(step.cpu_seconds for step in self.steps)


@dataclass(frozen=True)
class Pair:
    """Two plans, the first of which is predicted to be faster.

    Attributes:
        faster: Name of the first.
        slower: Name of the second.
        predicted: Time of the second over that of the first.
        measured: The same, the median over rounds.
        cpu: The same of processor time.
    """

    faster: str
    slower: str
    predicted: float
    measured: float
    cpu: float

    @property
    def is_tie(self) -> bool:
        """Whether one of both says that they are as good as equal."""
        return self.predicted <= 1 + TIE or abs(self.measured - 1) <= TIE

    @property
    def is_right(self) -> bool:
        """Whether the order is that which was predicted."""
        return self.is_tie or self.measured > 1


def profile_of(subject: Subject) -> tuple[ModelLayout, ModelProfile]:
    """What the planner knows of the subject's model."""
    with torch.device("meta"):
        module = Llama(llama_config(subject.num_params, subject.sequence), checkpointed=False)
    layout = describe_model(module)
    tokens = torch.zeros(subject.batch, subject.sequence, dtype=torch.int64) % VOCABULARY
    return layout, profile_model(module, layout, partial(module.training_step, [tokens], 0))


def plan_of(layout: ModelLayout, resident: float, checkpointed: float) -> Plan:
    """A plan with the first chunks resident and the first blocks checkpointed, of both such a part."""
    packed = pack_chunks(layout)
    chunks = tuple(with_residency(layout, chunk, at < resident * len(packed)) for at, chunk in enumerate(packed))
    count = checkpointed * len(layout.blocks)
    blocks = tuple(BlockPlan(block.name, CHECKPOINT if at < count else KEEP) for at, block in enumerate(layout.blocks))
    num_buffers = 0 if resident == 1 else max(minimum_chunk_buffers(layout, chunks), 2)
    memory = memory_terms(layout, chunks, num_buffers, ADAMW_STATE_BYTES, blocks)
    return Plan(chunks, blocks, num_buffers, memory, {info.fqn: info.shape for info in layout.parameters})


def take_turns(subjects: Sequence[Subject]) -> list[tuple[Step, ...]]:
    """Runs all subjects, a step each in turn; the timed steps of each.

    Raises:
        RuntimeError: A run ended early, or two computed different losses.
    """
    steps: list[list[Step]] = [[] for _ in subjects]
    with ExitStack() as stack:
        runs = [stack.enter_context(_process(subject)) for subject in subjects]
        for run in runs:
            assert _receive(run) is None
        for turn in range(subjects[0].steps):
            for offset in range(len(runs)):
                index = (turn + offset) % len(runs)
                steps[index].append(_give_leave(runs[index]))
        for run in runs:
            _give_leave(run)
    for subject, found in zip(subjects[1:], steps[1:], strict=True):
        if [step.loss for step in found] != [step.loss for step in steps[0]]:
            raise RuntimeError(f"{subject.name!r} computes other losses than {subjects[0].name!r}.")
    return [tuple(found[WARM_UP:]) for found in steps]


def measure(subject: Subject, names: Sequence[str], hardware: HardwareProfile) -> list[Row]:
    """Predicts, then runs all plans."""
    layout, profile = profile_of(subject)
    plans = [plan_of(layout, *PLANS[name]) for name in names]
    predicted = [step_time(profile, layout, plan, hardware, Training()) for plan in plans]
    subjects = [replace(subject, name=name, plan={"plan": plan}) for name, plan in zip(names, plans, strict=True)]
    return [Row(*row) for row in zip(names, predicted, take_turns(subjects), strict=True)]


def pairs_of(rows: Sequence[Row]) -> list[Pair]:
    """Every two plans."""
    pairs = []
    for first, second in itertools.combinations(sorted(rows, key=lambda row: row.predicted.seconds), 2):
        both = list(zip(second.steps, first.steps, strict=True))
        pairs.append(
            Pair(
                first.name,
                second.name,
                second.predicted.seconds / first.predicted.seconds,
                statistics.median(a.wall_seconds / b.wall_seconds for a, b in both),
                statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in both),
            )
        )
    return pairs


def render(rows: Sequence[Row], pairs: Sequence[Pair]) -> str:
    """Both tables."""
    lines = []
    for row in sorted(rows, key=lambda row: row.predicted.seconds):
        time, base = row.predicted, rows[0]
        shares = (time.seconds, time.compute, time.upload + time.download, time.host, row.wall, row.cpu)
        ratios = (
            row.wall / time.seconds,
            time.seconds / base.predicted.seconds,
            statistics.median(a.wall_seconds / b.wall_seconds for a, b in zip(row.steps, base.steps, strict=True)),
        )
        lines.append((row.name, *(f"{1e3 * value:.1f}" for value in shares), *(f"{value:.3f}" for value in ratios)))
    wrong = [pair for pair in pairs if not pair.is_right]
    ties = sum(pair.is_tie for pair in pairs)
    sentence = f"Of {len(pairs)} pairs {ties} are ties within {TIE:.0%}, {len(wrong)} are in the wrong order"
    listed = [
        f"- {pair.slower} / {pair.faster}: predicted {pair.predicted:.3f}, measured {pair.measured:.3f} "
        f"(CPU time {pair.cpu:.3f})"
        for pair in wrong
    ]
    return "\n".join([table(HEADER, lines), "", sentence + (":" if wrong else "."), *listed])


def main(arguments: Sequence[str]) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Whether plans are as fast as the planner says.")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--params", type=float, default=30e6, help="parameters of the Llama")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=14, help=f"of each plan; the first {WARM_UP} do not count")
    parser.add_argument("--results", help="name of the folder in which the result is kept")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    subject = Subject("", None, num_params=int(options.params), batch=options.batch, sequence=options.sequence)
    subject = replace(subject, steps=options.steps)
    load = [os.getloadavg()[0]]
    hardware = profile_hardware(open_device(torch.device("cpu"), print), [torch.float32])
    rows = measure(subject, options.plans, hardware)
    load.append(os.getloadavg()[0])
    pairs = pairs_of(rows)
    note = f"Load of the machine: {load[0]:.1f} before, {load[1]:.1f} after{' (busy)' if is_busy() else ''}."
    text = f"{render(rows, pairs)}\n\n{note}"
    print(text)
    if options.results:
        result: dict[str, Any] = {"load": load, "hardware": hardware.to_json()}
        result |= {"rows": [asdict(row) for row in rows], "pairs": [asdict(pair) for pair in pairs]}
        write_result(options.results, "benchmarks.plan_order", arguments, result, text)


if __name__ == "__main__":
    main(sys.argv[1:])
