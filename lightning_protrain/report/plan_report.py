"""Prints plans and writes them to files: one plan, a table of plans, and the memory under FSDP2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_protrain.config import plural
from lightning_protrain.planner.explain import short_bytes, short_seconds
from lightning_protrain.planner.fsdp_memory import FSDPMemory
from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.planner.prediction import Prediction
from lightning_protrain.planner.scaling import Cluster, Scaled, scale

# A plan for each hardware name, or the error that says why no plan fits; `""` is this node.
Answers = Mapping[str, Plan | ValueError]
HERE = "this machine"


@rank_zero_only
def say_basis(text: str) -> None:
    """Print the batch and the host that plans are for."""
    Console().print(text, highlight=False, markup=False)


@rank_zero_only
def report_fsdp(answers: Mapping[str, FSDPMemory | ValueError], path: str | None = None) -> None:
    """Print the memory of each rank under FSDP2, and write it to a JSON file.

    Args:
        answers: Memory under FSDP2 for each GPU name, or the error that says why the model does not fit.
        path: JSON file to write; None: no file.
    """
    console = Console()
    table = _table("FSDP2: the most that each takes")
    for column in ("hardware", "mesh", "device", "host of a node", "blocks recomputed", "fits"):
        table.add_column(column, justify="left" if column == "hardware" else "right", no_wrap=True)
    for name, answer in answers.items():
        if isinstance(answer, ValueError):
            table.add_row(name or HERE, *[""] * 4, "no")
            continue
        copies, shards = answer.to_dict()["mesh"]
        blocks = f"{len(answer.checkpointed)} of {answer.num_blocks}"
        device, host = short_bytes(answer.device_bytes), short_bytes(answer.node_host_bytes)
        table.add_row(name or HERE, f"{copies} x {shards}", device, host, blocks, "yes")
    console.print(table)
    for name, answer in answers.items():
        text = str(answer) if isinstance(answer, ValueError) else answer.describe()
        console.print(f"{name or HERE}: {text}", highlight=False)
        if len(answers) == 1 and not isinstance(answer, ValueError):
            console.print(_fsdp_phases(answer))
    _write(path, {name: None if isinstance(it, ValueError) else it.to_dict() for name, it in answers.items()})


def _fsdp_phases(memory: FSDPMemory) -> Table:
    table = _table("Each rank, by phase")
    for column in ("phase", "device", "host", "of the device"):
        table.add_column(column, justify="right" if column in ("device", "host") else "left")
    for phase in memory.phases:
        terms = sorted(((nbytes, term) for term, nbytes in phase.device.items() if nbytes), reverse=True)
        largest = ", ".join(f"{term} {short_bytes(nbytes)}" for nbytes, term in terms[:3])
        table.add_row(phase.name, short_bytes(phase.device_bytes), short_bytes(phase.host_bytes), largest)
    return table


@rank_zero_only
def report(answers: Answers, path: str | None = None, clusters: Mapping[str, Cluster] | None = None) -> None:
    """Print plans, and write them to a JSON file.

    Args:
        answers: Plan for each hardware name, or the error that says why no plan fits.
        path: JSON file to write; None: no file.
        clusters: Cluster for each hardware name; None: the plans are for single GPUs.
    """
    console = Console()
    plans = {name: answer for name, answer in answers.items() if isinstance(answer, Plan)}
    if len(answers) == 1:
        for plan in plans.values():
            console.print(plan.explain())
    else:
        console.print(comparison(answers))
        for name, answer in answers.items():
            text = str(answer) if isinstance(answer, ValueError) else _policies(answer)
            console.print(f"{name}: {text}", highlight=False)
    if clusters and plans:
        console.print(scaling({name: (plan.sharding, scale(plan, clusters[name])) for name, plan in plans.items()}))
    write_plans(answers, path)


def make_parent(path: str | None) -> None:
    """Make the folder of a file that a command will write; None: there is no file."""
    if path is not None:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)


@rank_zero_only
def write_plans(answers: Answers, path: str | None) -> None:
    """Write plans to a JSON file, null where no plan fits.

    Args:
        answers: Plan for each name, or the error.
        path: JSON file to write; None: no file.
    """
    if path is not None:
        _write(path, {name: json.loads(it.to_json()) if isinstance(it, Plan) else None for name, it in answers.items()})


def _write(path: str | None, content: Mapping[str, object]) -> None:
    """Write a value for each hardware name to a JSON file; None: write no file."""
    if path is not None:
        named = {name or HERE: value for name, value in content.items()}
        Path(path).write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")


def comparison(
    answers: Answers, label: str = "hardware", title: str = "Plans", longest: Sequence[int] | None = None
) -> Table:
    """Return a table with a row for each plan; it fits 80 columns with the longest GPU name of the data sheets.

    Args:
        answers: Plan for each name, or the error that says why no plan fits.
        label: Heading of the column of names.
        title: Title of the table.
        longest: Tokens of the longest text that fits, for each answer; None: without that column.
    """
    table = _table(title)
    last = () if longest is None else ("longest",)
    for column in (label, "resident", "device", "host", "step", "tokens/s", "bound", *last):
        left, fixed = column in (label, "bound"), column != label or label == "hardware"
        table.add_column(column, justify="left" if left else "right", no_wrap=fixed, overflow="fold")
    for index, (name, answer) in enumerate(answers.items()):
        if isinstance(answer, ValueError):
            table.add_row(name, "no plan")
            continue
        prediction = answer.prediction
        row = [name, _resident(answer)]
        if prediction is not None:
            row += [*figures(prediction), prediction.bound]
            row += [] if longest is None else [f"{longest[index]:,}"]
        table.add_row(*row)
    return table


def figures(prediction: Prediction) -> list[str]:
    """Return the cells of a plan in a table: memory of device and host, time of a step, tokens per second."""
    rate = prediction.tokens_per_second
    return [
        short_bytes(prediction.device_bytes),
        short_bytes(prediction.host_bytes),
        short_seconds(prediction.step_seconds),
        "" if rate is None else f"{rate:,.0f}",
    ]


def scaling(scaled: Mapping[str, tuple[str, Scaled]]) -> Table:
    """Return a table with a row for each cluster: sharding, host memory of a node, times and throughput."""
    table = _table("On all GPUs (estimate)")
    for column in ("hardware", "GPUs", "host", "sums", "step", "tokens/s", "efficiency"):
        table.add_column(column, justify="left" if column == "hardware" else "right", no_wrap=column != "GPUs")
    for name, (way, step) in scaled.items():
        table.add_row(
            name,
            f"{step.cluster.num_nodes} x {step.cluster.gpus_per_node}, {way}",
            short_bytes(step.node_bytes),
            short_seconds(step.sent_seconds),
            short_seconds(step.step_seconds),
            "" if step.tokens_per_second is None else f"{step.tokens_per_second:,.0f}",
            f"{100 * step.efficiency:.0f} %",
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _resident(plan: Plan) -> str:
    total = sum(chunk.nbytes for chunk in plan.chunks)
    resident = sum(chunk.nbytes for chunk in plan.chunks if chunk.resident)
    return f"{100 * resident / max(total, 1):.0f} %"


def _policies(plan: Plan) -> str:
    """Return the number of blocks with each policy, and the warnings of a plan."""
    counts = {policy: sum(block.policy is policy for block in plan.blocks) for policy in BlockPolicy}
    named = ", ".join(f"{count} {policy}" for policy, count in counts.items() if count)
    advice = plan.prediction.advice if plan.prediction is not None else ()
    warnings = [sentence for sentence in advice if sentence.startswith("Warning")]
    return ". ".join([f"activations of {plural(len(plan.blocks), 'block')}: {named}", *warnings])
