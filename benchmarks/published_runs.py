"""Predictions beside training runs that others have measured and published.

    python -m benchmarks.published_runs
    python -m benchmarks.published_runs --systems LLMQ
    python -m benchmarks.published_runs --json after.json
    python -m benchmarks.published_runs publish

`publish` writes the table of docs/published-runs.md from before.json and after.json in the newest folder of results.

Every run has two predictions. The *forecast* is for the run as it was: the same residency of the states, recomputation
and point of the host's optimizer step, and kernels that are fused, see `fused`. It holds the time model against the
measurement. *Here* is the plan that the search finds for the same model, GPU, batch and bytes of optimizer states, with
the kernels that this package runs. It shows what is slower or faster here.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from benchmarks.report import ROOT, commit, quiet, table
from lightning_protrain.models.published import find_config
from lightning_protrain.models.repeated_blocks import Method, Planner, planner_for
from lightning_protrain.planner.memory import memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.packing import pack_chunks, with_residency
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, Plan, Sharding
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.planner.scaling import scale
from lightning_protrain.planner.step_time import step_time
from lightning_protrain.plans import TrainingOptions
from lightning_protrain.profiler.records import ModelProfile, OperationCost
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware

# The forecast is to be within this fraction of the measured rate in half of the runs; a run beyond LIMIT has a reason.
MEDIAN, LIMIT = 0.10, 0.25
# Host of each card, where it is not described; LLMQ's authors report 500 GB on the host of four cards.
CORES, HOST_MEMORY = 16, "500GB"
LLMQ = "https://github.com/IST-DASLab/llmq/blob/b77d969/benchmarks"
SLIDEFORMER = "https://github.com/RegiaYoung/SlideFormer/tree/062322f/bench/DeepSpeed"
TORCHTUNE = "https://github.com/pytorch/torchtune/blob/0031bfa/README.md"
PAGE = ROOT / "docs" / "published-runs.md"
HEADER = (
    "run", "GPU", "model", "tokens x steps", "states; backward repeats", "measured", "before", "forecast", "error",
    "here", "here / measured",
)  # fmt: skip
Recomputed = Literal["nothing", "elementwise", "feed-forward", "blocks"]


@dataclass(frozen=True)
class Run:
    """A published training run.

    Attributes:
        system: What trained.
        gpu: Name in the catalogue.
        model: Name on the Hugging Face Hub.
        measured: Tokens per second of all cards.
        batch: Sequences in a micro-batch.
        accumulate: Micro-batches in a step of one card.
        source: URL.
        resident: True if weights stay on the device; False if they are streamed.
        recomputed: Part of a block's forward that backward repeats.
        serial: True if the host steps after backward, not during it.
        method: Weights that are trained.
        precision: As in the Trainer.
        state_bytes: Bytes of optimizer states for each trained weight.
        length: Tokens of a sequence.
        cards: Number of GPUs.
        reason: Reason for a forecast that is off by more than LIMIT; empty if it is not.
    """

    system: str
    gpu: str
    model: str
    measured: float
    batch: int
    accumulate: int
    source: str
    resident: bool = True
    recomputed: Recomputed = "nothing"
    serial: bool = False
    method: Method = "full"
    precision: str = "bf16-true"
    state_bytes: float = 4.0
    length: int = 1024
    cards: int = 1
    reason: str = ""

    @property
    def name(self) -> str:
        """First word of the system."""
        return self.system.split()[0].rstrip(",")

    @property
    def options(self) -> TrainingOptions:
        """Options of the training to plan."""
        return TrainingOptions(self.method, self.precision, self.batch, self.length)


def _llmq(gpu: str, size: str, measured: float, batch: int, accumulate: int, page: str, **how: Any) -> Run:
    return Run("LLMQ", gpu, f"Qwen/Qwen2.5-{size}", measured, batch, accumulate, f"{LLMQ}/{page}.md", **how)


def _factory(size: str, measured: float, batch: int, accumulate: int, **how: Any) -> Run:
    page = "4090x4" if how.get("cards", 1) > 1 else "4090x1"
    name = "LLaMA-Factory, DeepSpeed" if "serial" in how else "LLaMA-Factory"
    how = {"recomputed": "blocks", **how}
    source = f"{LLMQ}/{page}.md"
    return Run(name, "RTX 4090", f"Qwen/Qwen2.5-{size}", measured, batch, accumulate, source, **how)


_GATHERED = (
    "ZeRO-3 gathers every weight from the other cards in each pass, through the host, because these cards have no "
    "peer-to-peer copies. The forecast streams each card's weights from the host memory that the cards share."
)
_STREAMED: dict[str, Any] = {"resident": False, "recomputed": "blocks"}
_DEEPSPEED: dict[str, Any] = {**_STREAMED, "serial": True, "state_bytes": 8.0}
_4090, _5060, _H100 = "RTX 4090", "RTX 5060 Ti 16GB", "H100 SXM"
_8B = "meta-llama/Llama-3.1-8B"
RUNS: tuple[Run, ...] = (
    _llmq(_4090, "0.5B", 39_860, 16, 32, "4090x1"),
    _llmq(_4090, "1.5B", 14_076, 4, 128, "4090x1"),
    _llmq(_4090, "3B", 7_004, 4, 128, "4090x1", recomputed="elementwise"),
    _llmq(_4090, "7B", 2_779, 16, 32, "4090x1", **_STREAMED),
    _llmq(_4090, "14B", 1_349, 32, 16, "4090x1", **_STREAMED),
    _llmq(_4090, "7B", 10_927, 16, 8, "4090x4", **{**_STREAMED, "recomputed": "feed-forward"}, cards=4),
    _llmq(_4090, "14B", 5_261, 32, 4, "4090x4", **_STREAMED, cards=4),
    _llmq(_4090, "32B", 2_206, 32, 4, "4090x4", **_STREAMED, cards=4),
    _llmq(_5060, "0.5B", 13_011, 10, 51, "5060Ti"),
    _llmq(_5060, "1.5B", 3_899, 8, 64, "5060Ti", recomputed="blocks"),
    _llmq(_5060, "3B", 2_013, 16, 32, "5060Ti", **{**_STREAMED, "recomputed": "feed-forward"}),
    _llmq(_5060, "7B", 889, 32, 16, "5060Ti", **_STREAMED),
    _llmq(_H100, "0.5B", 149_000, 32, 16, "H100x1"),
    _llmq(_H100, "1.5B", 59_254, 32, 16, "H100x1"),
    _llmq(_H100, "3B", 30_916, 16, 32, "H100x1"),
    _llmq(_H100, "7B", 13_818, 4, 128, "H100x1"),
    _llmq(_H100, "14B", 6_315, 8, 64, "H100x1", recomputed="feed-forward"),
    _factory("0.5B", 30_183, 128, 4),
    _factory("1.5B", 9_419, 16, 32),
    _factory("3B", 5_448, 48, 11, **_DEEPSPEED),
    _factory("7B", 2_523, 32, 16, **_DEEPSPEED),
    _factory("14B", 1_135, 20, 26, **_DEEPSPEED),
    _factory("7B", 6_929, 32, 4, **_DEEPSPEED, cards=4, reason=_GATHERED),
    _factory("14B", 2_630, 21, 6, **_DEEPSPEED, cards=4, reason=_GATHERED),
    *(
        Run("DeepSpeed ZeRO-3 offload", _4090, _8B, measured, batch, 1, SLIDEFORMER,
            **{**_DEEPSPEED, "precision": "bf16-mixed"})
        for batch, measured in ((8, 914), (16, 1_373), (32, 1_791))
    ),
    Run("torchtune, compiled", _4090, _8B, 3_083, 2, 1, TORCHTUNE, recomputed="blocks", method="lora", length=2048),
    Run("torchtune, compiled", _4090, _8B, 2_413, 2, 1, TORCHTUNE, recomputed="blocks", method="qlora", length=2048),
    Run("torchtune, compiled", _4090, _8B, 1_650, 2, 1, TORCHTUNE, recomputed="blocks", state_bytes=2.0, length=2048),
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A run with its predictions.

    Attributes:
        run: The run.
        forecast: Predicted tokens per second of the run as it was.
        here: Predicted tokens per second of the plan found for this package; None if none fits.
        bound: Resource that is busy longest in that plan.
        short: What is short if no plan fits.
    """

    run: Run
    forecast: float
    here: float | None
    bound: str = ""
    short: str = ""

    @property
    def error(self) -> float:
        """Forecast over measured, minus one."""
        return self.forecast / self.run.measured - 1


# --- the run as it was ------------------------------------------------------------------------------------------------


def fused(profile: ModelProfile) -> ModelProfile:
    """Return the profile with fused kernels: one pass over memory between two matrix products.

    That pass reads what a product has written and writes what the next one reads. So it moves the bytes that products
    move, and takes the place of all other operations.
    """

    def one(operations: tuple[OperationCost, ...]) -> tuple[OperationCost, ...]:
        products = tuple(cost for cost in operations if cost.flops)
        return products + tuple(replace(cost, flops=0) for cost in products)

    segments = (
        replace(
            it,
            forward=replace(it.forward, operations=one(it.forward.operations)),
            backward=replace(it.backward, operations=one(it.backward.operations)),
        )
        for it in profile.segments
    )
    return replace(profile, segments=tuple(segments))


def plan_of(run: Run, problem: Problem) -> Plan:
    """Return the plan that does what a run did, whether or not its memory suffices here."""
    layout = problem.layout
    chunks = tuple(with_residency(layout, chunk, run.resident) for chunk in pack_chunks(layout))
    repeated = round(share_recomputed(run) * len(layout.blocks))
    rest = BlockPolicy.SELECTIVE if run.recomputed == "elementwise" else BlockPolicy.KEEP
    blocks = tuple(
        BlockPlan(block.name, BlockPolicy.CHECKPOINT if at < repeated else rest)
        for at, block in enumerate(layout.blocks)
    )
    num_buffers = 0 if run.resident else max(minimum_chunk_buffers(layout, chunks), 2)
    memory = memory_terms(layout, chunks, num_buffers, problem.state_bytes, blocks)
    return Plan(chunks, blocks, num_buffers, memory, {info.fqn: info.shape for info in layout.parameters})


def share_recomputed(run: Run) -> float:
    """Return the share of the blocks' matrix products that backward repeats."""
    if run.recomputed != "feed-forward":
        return float(run.recomputed == "blocks")
    config = find_config(run.model).config
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    forward = 3 * config["intermediate_size"]
    attention = 2 * hidden * (1 + config["num_key_value_heads"] / heads)
    return float(forward / (forward + attention))


@cache
def _planner(options: TrainingOptions, model: str, gpu: str, cards: int) -> Planner:
    hardware = DryRunHardware((gpu,), cards, 1, HOST_MEMORY, CORES * cards)
    return planner_for(options.of(find_config(model), gpu), hardware)


def problem_of(run: Run) -> Problem:
    """Return the problem of a run, with fused kernels."""
    planner = _planner(run.options, run.model, run.gpu, run.cards)
    workload = planner.known[run.gpu]
    assert workload.profile is not None
    training = Training("off" if run.serial else "backward", run.accumulate)
    workload = replace(workload, profile=fused(workload.profile), training=training, state_bytes=run.state_bytes)
    targets, cluster = planner.dry_run.targets[run.gpu], planner.dry_run.clusters.get(run.gpu)
    sharding = Sharding.SHARD if run.cards > 1 else next(iter(targets))
    network = cluster.network_under(sharding) if cluster is not None else None
    request = replace(planner.request, workload=workload, profile_on=None, ranks=planner.dry_run.ranks)
    return request.under(sharding, network).here(targets[sharding])


def forecast(run: Run) -> float:
    """Return the predicted tokens per second of a run as it was."""
    problem = problem_of(run)
    seconds = step_time(problem, plan_of(run, problem)).seconds
    return run.batch * run.length * run.accumulate * run.cards / seconds


# --- this package -----------------------------------------------------------------------------------------------------


def plan_here(run: Run) -> Plan | ValueError:
    """Return the plan that the search finds for the same training, or the error that none fits."""
    planner = _planner(run.options, run.model, run.gpu, run.cards)
    workload = planner.known[run.gpu]
    workload = replace(workload, training=Training("backward", run.accumulate), state_bytes=run.state_bytes)
    planner.dry_run.answers.clear()
    planner.dry_run.answer(replace(planner.request, workload=workload, profile_on=None, sliced_on=planner.sliced_on))
    return planner.hardware.answers(planner.dry_run)[run.gpu]


@quiet()
def compare(run: Run) -> Compared:
    """Return a run with its predictions."""
    plan = plan_here(run)
    if isinstance(plan, ValueError):
        return Compared(run, forecast(run), None, short=str(plan).partition(" Most is needed")[0])
    assert plan.prediction is not None
    cluster = _planner(run.options, run.model, run.gpu, run.cards).dry_run.clusters.get(run.gpu)
    rate = plan.prediction.tokens_per_second if cluster is None else scale(plan, cluster).tokens_per_second
    return Compared(run, forecast(run), rate, plan.prediction.bound)


# --- tables -----------------------------------------------------------------------------------------------------------


def facts(compared: Compared) -> dict[str, Any]:
    """Return a comparison as JSON values."""
    return {**asdict(compared), "error": compared.error}


def cells(after: dict[str, Any], before: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a run, from its `facts` after and before the calibration."""
    run = Run(**after["run"])
    cards = f"{run.cards} x " if run.cards > 1 else ""
    states = "resident" if run.resident else "streamed"
    states += ", host steps after backward" if run.serial else ""
    name = run.model.rpartition("/")[2] + ("" if run.method == "full" else f", {run.method}")
    here = after["here"]
    return (
        f"[{run.system}]({run.source})",
        f"{cards}{run.gpu}",
        name,
        f"{run.batch} x {run.length:,} x {run.accumulate}",
        f"{states}; {run.recomputed}",
        f"{run.measured:,.0f}",
        f"{before['error']:+.0%}",
        f"{after['forecast']:,.0f}",
        f"{after['error']:+.0%}",
        "no plan fits" if here is None else f"{here:,.0f}",
        "" if here is None else f"{here / run.measured:.2f}",
    )


def render(after: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> str:
    """Return the table and the figures below it."""
    lines = [table(HEADER, [cells(*both) for both in zip(after, before, strict=True)]), ""]
    for name, found in (("Before", before), ("Forecast", after)):
        errors = sorted(abs(entry["error"]) for entry in found)
        within = sum(error <= LIMIT for error in errors)
        lines.append(
            f"- {name}: median of |error| {statistics.median(errors):.1%}; {within} of {len(errors)} runs within "
            f"{LIMIT:.0%}."
        )
    for reason in dict.fromkeys(entry["run"]["reason"] for entry in after if entry["run"]["reason"]):
        named = [cells(entry, entry) for entry in after if entry["run"]["reason"] == reason]
        runs = " and ".join(f"{entry[2]} on {entry[1]}" for entry in named)
        lines.append(f"- {named[0][0]}, {runs}: {reason}")
    return "\n".join(lines)


def publish(folder: Path) -> None:
    """Write the table of the page from the results in a folder."""
    after, before = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["runs"] for name in ("after", "before")
    )
    text = PAGE.read_text(encoding="utf-8")
    page = re.sub(r"(?<=<!-- table -->\n).*(?=\n<!-- end -->)", lambda _: render(after, before), text, flags=re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")


def newest() -> Path:
    """Return the newest folder of results."""
    return max((ROOT / "benchmarks" / "results").glob("*-published-runs"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare runs and print a table; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_runs")
    parser.add_argument("command", nargs="?", choices=["publish"], help="write the page from the newest results")
    names = sorted({run.name for run in RUNS})
    parser.add_argument("--systems", nargs="+", choices=names, help="only runs of these systems")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(arguments)
    if given.command:
        publish(newest())
        return 0
    found = [facts(compare(run)) for run in RUNS if given.systems is None or run.name in given.systems]
    if given.json:
        document = {"commit": commit(), "runs": found}
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(render(found, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
