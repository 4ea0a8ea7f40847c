"""Comparison of the predicted and the measured order of plans by speed, and of the plans that the search chooses.

First the hardware is measured, and the step of every plan in a grid is predicted. Then a Llama is trained with each
plan on the CPU with one thread, in one process for each plan; the processes alternate step by step as in
`benchmarks.subjects`. The plans that the search chooses with several memory budgets run in the same rounds.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.pairs import _give_leave, _process, _receive, median_ratio
from benchmarks.report import table
from benchmarks.subjects import Llama, Step, Subject, llama_config
from lightning_protrain.config import Knobs
from lightning_protrain.device.device import open_device
from lightning_protrain.planner.memory import memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.packing import by_place, lay_out, pack_chunks, spread, with_residency
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, Plan
from lightning_protrain.planner.problem import Training
from lightning_protrain.planner.search import NoFeasiblePlan, Problem, search
from lightning_protrain.planner.step_time import StepTime, step_time
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.hardware import profile_hardware
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import HardwareProfile

# By name: which part of the chunks is resident, and which part of the blocks checkpoints or swaps.
GRID = {
    "resident, keep": (1.0, 0.0, 0.0),
    "resident, half checkpoint": (1.0, 0.5, 0.0),
    "resident, checkpoint": (1.0, 1.0, 0.0),
    "half resident, keep": (0.5, 0.0, 0.0),
    "half resident, checkpoint": (0.5, 1.0, 0.0),
    "offload, keep": (0.0, 0.0, 0.0),
    "offload, half checkpoint": (0.0, 0.5, 0.0),
    "offload, checkpoint": (0.0, 1.0, 0.0),
    "offload, half swap, half checkpoint": (0.0, 0.5, 0.5),
    "offload, swap": (0.0, 0.0, 1.0),
}
# Of what the first plan takes at its peak; None: no limit.
BUDGETS = (None, 0.7, 0.5)
ADAMW_STATE_BYTES = 8.0
WANTED = 1.05
WARM_UP = 2
HEADER = (
    "plan", "device MiB", "predicted ms", "CPU ms", "elapsed ms", "CPU / predicted", "rank predicted", "rank measured",
    "against the first: predicted", "CPU",
)  # fmt: skip
AUTO_HEADER = ("budget", "plans that fit", "auto takes", "best measured", "CPU time / best (95 %)", "elapsed", "met")


@dataclass(frozen=True)
class Row:
    """One plan.

    Attributes:
        name: Key of `GRID`, or the budget of the search.
        device_bytes: Predicted peak of device memory.
        predicted: Predicted time of a step, seconds.
        steps: Timed steps, one in each round.
    """

    name: str
    device_bytes: int
    predicted: StepTime
    steps: tuple[Step, ...]

    @property
    def cpu(self) -> float:
        """Median of processor seconds."""
        return statistics.median(step.cpu_seconds for step in self.steps)

    @property
    def wall(self) -> float:
        """Median of elapsed seconds."""
        return statistics.median(step.wall_seconds for step in self.steps)


@dataclass(frozen=True)
class Choice:
    """The plan that the search chooses within a budget.

    Attributes:
        budget: Name of the budget.
        device_bytes: The budget; None means no limit.
        row: Name of the row that is the chosen plan.
    """

    budget: str
    device_bytes: int | None
    row: str


def problem_of(subject: Subject, hardware: HardwareProfile) -> Problem:
    """Return the search problem for the subject's model on the CPU, without budgets."""
    with torch.device("meta"):
        module = Llama(llama_config(subject.num_params, subject.sequence), checkpointed=False)
    layout = describe_model(module)
    tokens = torch.zeros(subject.batch, subject.sequence, dtype=torch.int64)
    profile = profile_model(module, layout, partial(module.training_step, [tokens], 0))
    return Problem(profile, layout, hardware, Training(), ADAMW_STATE_BYTES, None, None)


def plan_of(problem: Problem, resident: float, checkpointed: float, swapped: float) -> Plan:
    """Return a plan of the grid: the first chunks are resident, swapped blocks are spread evenly."""
    layout = problem.layout
    packed = pack_chunks(layout)
    chunks = tuple(with_residency(layout, chunk, at < resident * len(packed)) for at, chunk in enumerate(packed))
    count = len(layout.blocks)
    policies = lay_out(count, by_place(count), spread(round(swapped * count), count), round(checkpointed * count))
    saved = problem.profile.swap_bytes(frozenset())
    blocks = tuple(
        BlockPlan(block.name, policy, saved[block.name] if policy is BlockPolicy.SWAP else 0)
        for block, policy in zip(layout.blocks, policies, strict=True)
    )
    num_buffers = 0 if resident == 1 else max(minimum_chunk_buffers(layout, chunks), 2)
    memory = memory_terms(layout, chunks, num_buffers, ADAMW_STATE_BYTES, blocks)
    return Plan(chunks, blocks, num_buffers, memory, {info.fqn: info.shape for info in layout.parameters})


def choose(problem: Problem, plans: dict[str, Plan], budgets: Sequence[float | None]) -> list[Choice]:
    """Search within each budget; a chosen plan that is new is added to `plans`."""
    most = memory_timeline(problem, next(iter(plans.values()))).device_peak
    choices = []
    for part in budgets:
        limit = None if part is None else int(part * most)
        name = "none" if part is None else f"{part:.0%} of the first"
        try:
            plan = search(replace(problem, device_bytes=limit), Knobs())
        except NoFeasiblePlan:
            choices.append(Choice(name, limit, ""))
            continue
        known = [key for key, other in plans.items() if other == plan]
        row = known[0] if known else f"auto, {name}"
        plans[row] = plan
        choices.append(Choice(name, limit, row))
    return choices


def take_turns(subjects: Sequence[Subject]) -> list[tuple[Step, ...]]:
    """Run all subjects alternately, one step each, and return the timed steps of each.

    Raises:
        RuntimeError: If a run ended early, or two computed different losses.
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


def measure(
    subject: Subject, names: Sequence[str], budgets: Sequence[float | None], hardware: HardwareProfile
) -> tuple[list[Row], list[Choice]]:
    """Predict, search, and run all plans."""
    problem = problem_of(subject, hardware)
    plans = {name: plan_of(problem, *GRID[name]) for name in names}
    choices = choose(problem, plans, budgets)
    predicted = [step_time(replace(problem, hardware=hardware, training=Training()), plan) for plan in plans.values()]
    peaks = [memory_timeline(problem, plan).device_peak for plan in plans.values()]
    subjects = [replace(subject, name=name, plan={"plan": plan}) for name, plan in plans.items()]
    rows = [Row(*row) for row in zip(plans, peaks, predicted, take_turns(subjects), strict=True)]
    return rows, choices


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation of values without ties."""
    return statistics.correlation(*(list(map(float, ranks(values))) for values in (first, second)))


def ranks(values: Sequence[float]) -> list[int]:
    """Return the rank of each value, from 1."""
    return [sorted(values).index(value) + 1 for value in values]


def judge(rows: Sequence[Row], choice: Choice) -> dict[str, Any]:
    """Compare the chosen plan with the fastest one that fits the same budget, round by round."""
    fitting = [row for row in rows if choice.device_bytes is None or row.device_bytes <= choice.device_bytes]
    if not choice.row:
        return {"budget": choice.budget, "fitting": len(fitting), "auto": "no plan", "met": None}
    chosen = next(row for row in rows if row.name == choice.row)
    best = min(fitting, key=lambda row: row.cpu)
    both = list(zip(chosen.steps, best.steps, strict=True))
    cpu = median_ratio([ours.cpu_seconds / theirs.cpu_seconds for ours, theirs in both])
    wall = statistics.median(ours.wall_seconds / theirs.wall_seconds for ours, theirs in both)
    return {
        "budget": choice.budget, "fitting": len(fitting), "auto": chosen.name, "best": best.name, "cpu": asdict(cpu),
        "text": str(cpu), "wall": wall, "met": cpu.median <= WANTED,
    }  # fmt: skip


def render(rows: Sequence[Row], verdicts: Sequence[dict[str, Any]]) -> str:
    """Return both tables, and the text between them."""
    predicted, measured = [row.predicted.seconds for row in rows], [row.cpu for row in rows]
    places = zip(ranks(predicted), ranks(measured), strict=True)
    base = rows[0]
    lines = []
    for row, (place, true_place) in zip(rows, places, strict=True):
        against = statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in zip(row.steps, base.steps, strict=True))
        times = (f"{1e3 * value:.1f}" for value in (row.predicted.seconds, row.cpu, row.wall))
        ratios = (f"{row.predicted.seconds / base.predicted.seconds:.3f}", f"{against:.3f}")
        share = f"{row.cpu / row.predicted.seconds:.3f}"
        lines.append((row.name, f"{row.device_bytes >> 20}", *times, share, place, true_place, *ratios))
    autos = [
        (
            entry["budget"], entry["fitting"], entry["auto"], entry.get("best", "-"), entry.get("text", "-"),
            f"{entry['wall']:.3f}" if "wall" in entry else "-", {True: "yes", False: "no", None: "-"}[entry["met"]],
        )
        for entry in verdicts
    ]  # fmt: skip
    off = [row.cpu / row.predicted.seconds for row in rows]
    sentence = (
        f"Rank correlation (Spearman) of {len(rows)} plans: {rank_correlation(predicted, measured):.3f}. CPU time over "
        f"prediction: median {statistics.median(off):.3f}, {min(off):.3f} to {max(off):.3f}."
    )
    return f"{table(HEADER, lines)}\n\n{sentence}\n\n{table(AUTO_HEADER, autos)}"


def run(
    subject: Subject, names: Sequence[str] = tuple(GRID), budgets: Sequence[float | None] = BUDGETS
) -> tuple[str, dict[str, Any]]:
    """Return the tables and their rows."""
    torch.set_num_threads(1)
    load = [os.getloadavg()[0]]
    with closing(open_device(torch.device("cpu"), print)) as device:
        hardware = profile_hardware(device, [torch.float32])
    rows, choices = measure(subject, names, budgets, hardware)
    load.append(os.getloadavg()[0])
    verdicts = [judge(rows, choice) for choice in choices]
    note = f"Load of the machine: {load[0]:.1f} before, {load[1]:.1f} after, with {os.cpu_count()} cores."
    result = {"load": load, "hardware": hardware.to_json(), "rows": [asdict(row) for row in rows], "auto": verdicts}
    return f"{render(rows, verdicts)}\n\n{note}", result
