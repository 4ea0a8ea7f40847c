"""Benchmarks of the planner: predictions and measurements.

    python -m benchmarks.planner memory
    python -m benchmarks.planner memory --rows llama/offload/fp32 --results planner-memory
    python -m benchmarks.planner search --results planner-search
    python -m benchmarks.planner profile --results planner-profile
    python -m benchmarks.planner order --results planner-order
    python -m benchmarks.planner link --results planner-link

`memory`: for each row (a model, a plan and a precision), this process profiles the model without weights and predicts
the peak of device memory. Then another process trains on the CPU and counts logical bytes in the second step, when
optimizer states exist. The other commands are in their own files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks import planner_link, planner_order, planner_profile, planner_search, subjects
from benchmarks.logical import PeakOfStep
from benchmarks.models import Subject
from benchmarks.report import ROOT, quiet, table, write_result
from lightning_protrain.planner.memory import memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.packing import pack_chunks, with_residency
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, Plan
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout, ModelProfile, castable
from lightning_protrain.profiler.row_wise import Slices
from lightning_protrain.runtime.slices import run_in_slices
from lightning_protrain.strategy.protrain import ProTrainStrategy

HEADER = ("model", "plan", "precision", "predicted", "measured", "measured / predicted", "phase", "unit", "met")
WANTED = (0.95, 1.0)
ADAMW_STATE_BYTES = 8.0
KEEP, SELECTIVE, CHECKPOINT, SWAP = BlockPolicy
CPU = HardwareProfile(
    "CPU", *(1.0,) * 4, flops={"float32": 1.0}, memory=1.0, device_step=1.0, host_step=1.0, host_memory=1.0,
    device_bytes=1, host_bytes=1, asynchronous=False,
)  # fmt: skip
# Plans by name: functions that return whether chunk i of n is resident, and the policy of block i.
PLANS: dict[str, tuple[Callable[[int, int], bool], Callable[[int], BlockPolicy]]] = {
    "resident": (lambda index, count: True, lambda index: KEEP),
    "offload": (lambda index, count: False, lambda index: CHECKPOINT),
    "keep": (lambda index, count: False, lambda index: KEEP),
    "swap": (lambda index, count: False, lambda index: (SWAP, CHECKPOINT, SWAP, KEEP)[index % 4]),
    "swap-all": (lambda index, count: False, lambda index: SWAP),
    "half": (lambda index, count: index < count // 2, lambda index: (KEEP, CHECKPOINT)[index % 2]),
    "selective": (lambda index, count: False, lambda index: SELECTIVE),
    "selective-mixed": (
        lambda index, count: index < count // 2,
        lambda index: (SWAP, SELECTIVE, CHECKPOINT, SELECTIVE)[index % 4],
    ),
    "resident-checkpoint": (lambda index, count: True, lambda index: CHECKPOINT),
    "sliced": (lambda index, count: False, lambda index: CHECKPOINT),
    "sliced-swap": (lambda index, count: False, lambda index: SWAP),
    "sliced-mixed": (lambda index, count: False, lambda index: (SWAP, CHECKPOINT, SWAP, KEEP)[index % 4]),
    "sliced-kept": (lambda index, count: index < count // 2, lambda index: KEEP),
}
# Tokens of a slice, in plans that are called sliced.
SLICE_TOKENS = 8
ROWS = (
    "gpt2/resident/fp32",
    "gpt2/offload/fp32",
    "gpt2/swap/bf16",
    "gpt2/selective/fp32",
    "llama/keep/fp32",
    "llama/swap/fp32",
    "llama/offload/bf16",
    "llama/selective/fp32",
    "llama/selective/bf16",
    "llama/selective-mixed/bf16",
    "llama/resident-checkpoint/bf16",
    "llama/sliced/fp32",
    "llama/sliced/bf16",
    "llama/sliced-kept/fp32",
    "qwen3/half/bf16",
    "qwen3/swap-all/fp32",
    "gemma2/keep/bf16",
    "gemma2/offload/fp32",
    "gemma2/selective/bf16",
    "t5/resident/fp32",
    "t5/offload/bf16",
    "t5/swap/fp32",
    "t5/selective/fp32",
    "bert/half/fp32",
    "bert/offload/bf16",
    "mixtral/offload/fp32",
    "mixtral/resident/bf16",
    "mixtral/selective/bf16",
    "lora/resident/bf16",
    "lora/offload/fp32",
    "lora/keep/bf16",
    "lora/selective/bf16",
    "lora/sliced/fp32",
    "lora/sliced-swap/fp32",
    "lora/sliced-mixed/fp32",
    "lora/sliced/bf16",
    "llava/offload/fp32",
    "llava/swap/bf16",
    "llava/half/fp32",
    "llava/selective-mixed/fp32",
)


@dataclass(frozen=True)
class Prediction:
    """The prediction of a row.

    Attributes:
        row: `model/plan/precision`.
        plan: The plan as JSON.
        peak: Peak of device memory, bytes.
        phase: Phase of the peak.
        unit: Unit of the peak.
        terms: Terms that the peak is the sum of.
    """

    row: str
    plan: str
    peak: int
    phase: str
    unit: str
    terms: dict[str, int]


def predict(row: str) -> Prediction:
    """Predict the peak of a row."""
    model, plan_name, precision = row.split("/")
    module = Subject(model)
    slices = Slices(run_in_slices, 99, SLICE_TOKENS) if plan_name.startswith("sliced") else None
    layout, profile = profile_of(module, precision, slices)
    plan = plan_of(layout, profile, plan_name)
    timeline = memory_timeline(Problem(profile, layout, CPU, Training(), ADAMW_STATE_BYTES, None, None), plan)
    phase = max(map(timeline.phase, ("forward", "backward", "step")), key=lambda phase: phase.total)
    return Prediction(row, plan.to_json(), phase.total, phase.name, phase.unit, dict(phase.device))


def profile_of(module: Subject, precision: str, slices: Slices | None = None) -> tuple[ModelLayout, ModelProfile]:
    """Return the layout and the profile of a model in a precision."""
    layout = describe_model(module)
    low = precision == "bf16"
    # Like Lightning's precision plugin.
    context = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False) if low else nullcontext
    profile = profile_model(module, layout, partial(module.training_step, module.batch, 0), context, slices=slices)
    return layout.streaming(castable(profile, "bfloat16"), "bfloat16") if low else layout, profile


def plan_of(layout: ModelLayout, profile: ModelProfile, name: str) -> Plan:
    """Return one of `PLANS`, with two chunk buffers or the minimum number."""
    resident, policy = PLANS[name]
    packed = pack_chunks(layout)
    chunks = tuple(with_residency(layout, chunk, resident(at, len(packed))) for at, chunk in enumerate(packed))
    streamed = frozenset(fqn for chunk in chunks if chunk.streamed_dtype for fqn in chunk.parameters)
    saved = profile.swap_bytes(streamed)
    blocks = [
        BlockPlan(block.name, policy(at), saved[block.name] if policy(at) is SWAP else 0)
        for at, block in enumerate(layout.blocks)
    ]
    streams = any(not chunk.resident for chunk in chunks)
    num_buffers = max(minimum_chunk_buffers(layout, chunks), 2) if streams else 0
    memory = memory_terms(layout, chunks, num_buffers, ADAMW_STATE_BYTES, blocks)
    shapes = {info.fqn: info.shape for info in layout.parameters}
    plan = Plan(chunks, tuple(blocks), num_buffers, memory, shapes)
    return replace(plan, slice_tokens=profile.slice_tokens, sliced=profile.sliced)


def measure(prediction: Prediction) -> int:
    """Train a row for two steps, and return the peak of logical bytes in the second one."""
    model, _, precision = prediction.row.split("/")
    counted = PeakOfStep()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        strategy=ProTrainStrategy(plan=Plan.from_json(prediction.plan)),
        callbacks=[counted],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Subject(model))
    return counted.peak


def compare(rows: Sequence[str]) -> list[dict[str, Any]]:
    """Predict in this process, and measure in another one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictions.json"
        predictions = [predict(row) for row in rows]
        path.write_text(json.dumps([asdict(entry) for entry in predictions]), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.planner", "measure", str(path)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    peaks = json.loads(done.stdout.splitlines()[-1])
    return [
        {**asdict(entry), "plan": "", "measured": peak, "ratio": peak / entry.peak}
        for entry, peak in zip(predictions, peaks, strict=True)
    ]


def render(results: Sequence[dict[str, Any]]) -> str:
    """Return the table."""
    lines = []
    for entry in results:
        met = "yes" if WANTED[0] <= entry["ratio"] <= WANTED[1] else "no"
        sizes = (f"{entry['peak']:,}", f"{entry['measured']:,}", f"{entry['ratio']:.4f}")
        lines.append((*entry["row"].split("/"), *sizes, entry["phase"], entry["unit"], met))
    return table(HEADER, lines)


@quiet()
def main(arguments: Sequence[str]) -> None:
    """Run one of the sub-commands."""
    options = _parser().parse_args(arguments)
    if options.command == "measure":
        entries = json.loads(options.predictions.read_text(encoding="utf-8"))
        print(json.dumps([measure(Prediction(**entry)) for entry in entries]))
        return
    if options.command == "memory":
        results = compare(options.rows)
        text, result = render(results), {"rows": results}
    elif options.command == "search":
        text, result = planner_search.run(options.models, options.tried, options.sequence)
    elif options.command == "profile":
        text, result = planner_profile.run(options.models)
    elif options.command == "link":
        rows = planner_link.run()
        text, result = planner_link.render(rows), {"rows": [asdict(row) for row in rows]}
    else:
        given = {"num_params": int(options.params), "batch": options.batch, "sequence": options.sequence}
        subject = subjects.Subject("", None, steps=options.steps, **given)
        text, result = planner_order.run(subject, options.plans, options.budgets)
    print(text)
    if options.results:
        write_result(options.results, "benchmarks.planner", arguments, result, text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compares the planner's predictions with measurements.")
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="used by `memory` in another process")
    measuring.add_argument("predictions", type=Path)
    memory = commands.add_parser("memory", help="predicted and measured peaks")
    memory.add_argument("--rows", nargs="+", default=ROWS, help="model/plan/precision")
    searching = commands.add_parser("search", help="time of the search")
    searching.add_argument("--models", nargs="*", default=list(planner_search.MODELS), choices=planner_search.MODELS)
    searching.add_argument("--tried", nargs="*", default=list(planner_search.TRIED), choices=planner_search.TRIED)
    searching.add_argument("--sequence", type=int, default=planner_search.SEQUENCE)
    profiling = commands.add_parser("profile", help="time and memory of profiling")
    profiling.add_argument("--models", nargs="*", default=planner_profile.MODELS, choices=planner_profile.SIZES)
    order = commands.add_parser("order", help="predicted and measured steps")
    order.add_argument("--plans", nargs="+", default=list(planner_order.GRID), choices=planner_order.GRID)
    order.add_argument(
        "--budgets",
        nargs="*",
        type=float,
        default=planner_order.BUDGETS,
        help="budgets, as fractions of the first plan's memory",
    )
    order.add_argument("--params", type=float, default=20e6, help="parameters of the Llama")
    order.add_argument("--batch", type=int, default=4)
    order.add_argument("--sequence", type=int, default=128)
    order.add_argument(
        "--steps", type=int, default=22, help=f"steps of each plan; the first {planner_order.WARM_UP} are warm-up"
    )
    link = commands.add_parser("link", help="plans on links that are slower than expected")
    for command in (memory, searching, profiling, order, link):
        command.add_argument("--results", help="name of the folder in benchmarks/results")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
