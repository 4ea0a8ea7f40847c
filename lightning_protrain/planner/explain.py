"""Shows a plan in words and tables: placement, memory by phase, and the resource that bounds the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from itertools import takewhile
from typing import Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from lightning_protrain.config import plural
from lightning_protrain.planner.placement import BlockPlan, ChunkPlan, MemoryTerms
from lightning_protrain.planner.plots import UnitRow
from lightning_protrain.planner.prediction import CHECKPOINT_COPY, OTHER_RANKS, Prediction

# Maximum lines and characters a line that `print` shows.
MAX_LINES, WIDTH = 25, 80
# The name of the module that contains all units is shown only up to this many characters.
MAX_PARENT = 16
_UNIT_COLUMNS = ("chunks", "size", "where", "activations")
# Columns of text; the others have numbers.
_TEXTS = ("where", "activations", "of", "term", "mostly")


class Explained(Protocol):
    """The part of a `Plan` that this module reads."""

    @property
    def chunks(self) -> Sequence[ChunkPlan]: ...

    @property
    def blocks(self) -> Sequence[BlockPlan]: ...

    @property
    def num_chunk_buffers(self) -> int: ...

    @property
    def memory(self) -> MemoryTerms: ...

    @property
    def prediction(self) -> Prediction | None: ...

    @property
    def sharding(self) -> str: ...

    @property
    def gradient_buffers(self) -> int: ...

    @property
    def slice_tokens(self) -> int: ...

    @property
    def sliced(self) -> Sequence[str]: ...


class Explanation(Group):
    """A plan in tables and sentences, at most `MAX_LINES` lines of 80 characters, for `print` and for rich."""

    def __str__(self) -> str:
        file = StringIO()
        Console(file=file, width=WIDTH, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def explain(plan: Explained, budget: int | None = None, sentences: Sequence[str] = ()) -> Explanation:
    """Return the plan as text: a table of units, a table of memory by phase, and the expected step.

    Args:
        plan: The plan.
        budget: Bytes of the device that the plan may use; None: the budget in its prediction, if it has one.
        sentences: More sentences on the placement.
    """
    prediction = plan.prediction
    parts: list[RenderableType] = [placement(plan), *_means(plan), *sentences, ""]
    if prediction is None:
        parts.append(memory_table(plan, budget))
    else:
        parts += [phase_table(prediction, budget or prediction.budget), peak_sentence(prediction)]
        parts += [*host_sentences(prediction), time_sentence(prediction), *prediction.advice]
    for max_rows in range(MAX_LINES, 2, -1):
        explanation = Explanation(unit_table(plan, max_rows), *parts)
        if str(explanation).count("\n") < MAX_LINES:
            break
    return explanation


def details(plan: Explained, rates: Mapping[str, float], source: str) -> Group:
    """Return the rest of a plan: each unit, each term of the memory by phase, and the rates of the hardware.

    Args:
        plan: A plan with a prediction.
        rates: Rates of the hardware, per second, by their names.
        source: Address of the data sheet that the rates of the device are from.
    """
    prediction = plan.prediction
    assert prediction is not None
    rows = unit_rows(plan)
    shared = _shared_parent([row.name for row in rows])
    units = _table("unit", *_UNIT_COLUMNS)
    for row in rows:
        units.add_row(*_cells([row], shared))
    terms = _table("phase", "of", "term", "size")
    for phase in prediction.phases:
        for place, taken in (("device", phase.device), ("host", phase.host)):
            for name, nbytes in sorted(taken.items(), key=lambda term: -term[1]):
                if nbytes:
                    terms.add_row(phase.name, place, name.replace("_", " "), short_bytes(nbytes))
    table = _table(f"rate of {prediction.hardware}", "per second")
    for name, rate in rates.items():
        table.add_row(name.replace("_", " "), f"{rate:.3g}")
    basis = f"Rates of the device are parts of those in its data sheet, {source} Rates of the host are estimates."
    return Group("", units, "", terms, "", table, basis)


def short_bytes(count: int) -> str:
    """Format bytes with the unit that leaves few digits: "512 B", "3.0 KiB", "64.0 MiB", "12.3 GiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def short_seconds(seconds: float) -> str:
    """Format seconds with the unit that leaves few digits: "35 us", "2.50 ms", "1.20 s", "210 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def unit_table(plan: Explained, max_rows: int) -> Table:
    """Return a table of a plan's units, the modules that are fetched as a whole: chunks, size, placement and policy.

    Neighbours such as `layers.0` and `layers.1` share a row if their placement and policy are equal. If there are still
    too many rows, neighbours share a row if their placement is equal, and then whatever their placement is. If that
    is not enough, one row counts the units in the middle.

    Args:
        plan: The plan.
        max_rows: Maximum number of rows; at least 3.
    """
    rows = unit_rows(plan)
    keys: tuple[Callable[[UnitRow], object], ...] = (
        lambda row: (row.policy, row.resident, row.streamed),
        lambda row: (row.resident, row.streamed),
        lambda row: None,
    )
    for key in keys:
        runs = _runs(rows, key)
        if len(runs) <= max_rows:
            break
    shared = _shared_parent([row.name for row in rows])
    cells = [_cells(run, shared) for run in runs]
    if len(runs) > max_rows:
        num_hidden = sum(map(len, runs[max_rows - 2 : -1]))
        cells[max_rows - 2 : -1] = [(f"{num_hidden} more units", "", "", "", "")]
    # A long name would wrap the table, such as model.base_model.model.model of a model with adapters.
    table = _table(f"unit of {shared}" if 0 < len(shared) <= MAX_PARENT else "unit", *_UNIT_COLUMNS)
    for row in cells:
        table.add_row(*row)
    return table


def _table(first: str, *others: str) -> Table:
    """Return a table without rows; columns of numbers are right-justified."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first, overflow="fold")  # A long name of a module goes on in the next line.
    for column in others:
        table.add_column(column, justify="left" if column in _TEXTS else "right")
    return table


def placement(plan: Explained) -> str:
    """Return a sentence on the placement of the parameters."""
    resident = sum(chunk.nbytes for chunk in plan.chunks if chunk.resident)
    streamed = sum(chunk.nbytes for chunk in plan.chunks) - resident
    buffers = f" through {plural(plan.num_chunk_buffers, 'chunk buffer')}" if streamed else ""
    return f"Parameters: {short_bytes(resident)} on the device, {short_bytes(streamed)} streamed{buffers}."


def _means(plan: Explained) -> Iterator[str]:
    """Yield a sentence for each means by which a plan saves memory, besides the placement and policies of blocks."""
    if plan.sharding == "shard" and not all(chunk.resident for chunk in plan.chunks):
        yield "Streamed chunks are uploaded whole by each rank, from the one copy of its node."
    if count := plan.gradient_buffers:
        yield f"The host has memory for gradients of {count} chunks; backward waits until earlier ones are stepped."
    moved = [block.swap_bytes for block in plan.blocks if block.policy == "checkpoint" and block.swap_bytes]
    if moved:
        yield f"Inputs of {plural(len(moved), 'checkpointed block')} wait on the host, {short_bytes(sum(moved))}."
    if plan.sliced:
        yield f"Norms, linear layers and MLPs run on at most {plan.slice_tokens:,} tokens at a time."


def memory_table(plan: Explained, budget: int | None) -> Table:
    """Return a table of the terms of the plan's device memory, and of their sum beside the budget."""
    memory = plan.memory
    table = _table("on the device")
    table.show_footer, table.columns[0].footer = True, "total"
    table.add_column("size", footer=short_bytes(memory.total), justify="right")
    if budget is not None:
        table.add_column("of the budget", footer=_share(memory.total, budget), justify="right")
    for name, nbytes in memory.by_name.items():
        if nbytes or not name.endswith("activations"):
            share = [] if budget is None else [_share(nbytes, budget)]
            table.add_row(name.replace("_", " "), short_bytes(nbytes), *share)
    return table


def phase_table(prediction: Prediction, budget: int) -> Table:
    """Return a table of phases: predicted peak on device and host, and the largest term on the device."""
    table = _table(f"on {prediction.hardware}", "device", f"of {short_bytes(budget)}", "host", "mostly")
    for phase in prediction.phases:
        share = f"{100 * phase.device_bytes / budget:.0f} %"
        mostly = max(phase.device, key=lambda name: phase.device[name], default="").replace("_", " ")
        table.add_row(phase.name, short_bytes(phase.device_bytes), share, short_bytes(phase.host_bytes), mostly)
    return table


def peak_sentence(prediction: Prediction) -> str:
    """Return a sentence that lists the predicted terms of device memory at the peak of a run, largest first."""
    phase = max(prediction.phases, key=lambda phase: phase.device_bytes)
    unit = f" in {phase.unit}" if phase.unit else ""
    factor = "" if prediction.alpha is None else f" Fragmentation factor: {prediction.alpha:.2f}."
    return f"At the peak ({phase.name}{unit}) the device holds {', '.join(listed_terms(phase.device))}.{factor}"


def listed_terms(held: Mapping[str, int]) -> list[str]:
    """Return the terms of the device memory, largest first, without terms below one per cent."""
    terms, total = sorted(held.items(), key=lambda term: -term[1]), sum(held.values())
    return [f"{short_bytes(size)} of {name.replace('_', ' ')}" for name, size in terms if 100 * size > total]


def host_sentences(prediction: Prediction) -> list[str]:
    """Return sentences on host memory beyond the states of one rank; empty if there is none."""
    names = {
        CHECKPOINT_COPY: "the copy of the checkpoint, from the first save on",
        OTHER_RANKS: "what the other ranks of the node have of their own: gradients that wait to be added or "
        "averaged, and swapped activations",
    }
    largest = {what: max(phase.host.get(term, 0) for phase in prediction.phases) for term, what in names.items()}
    return [f"Of the host, {short_bytes(nbytes)} are {what}." for what, nbytes in largest.items() if nbytes]


def time_sentence(prediction: Prediction) -> str:
    """Return a sentence with the predicted step time and the resource that bounds it."""
    reasons = {
        "compute": "the device computes all the time",
        "link": "it waits for weights and gradients on their way between host and device",
        "host": "it waits for the optimizer on the host",
        "network": "it waits for what ranks send each other",
        "host memory": "the copies of all GPUs share it",
    }
    rate = prediction.tokens_per_second
    tokens = f", {rate:,.0f} tokens per second" if rate is not None else ""
    batches = f" of {prediction.accumulate} micro-batches" if prediction.accumulate > 1 else ""
    sums = prediction.busy.get("network", 0.0)
    sent = f" Ranks sum gradients for {short_seconds(sums)} of it." if sums > 0 else ""
    alone = prediction.alone_seconds
    sent += f" One rank alone would take {short_seconds(alone)}." if sent and alone is not None else ""
    return (
        f"A step{batches} is expected to take {short_seconds(prediction.step_seconds)}{tokens}; "
        f"what bounds it: {prediction.bound} ({reasons[prediction.bound]}).{sent}"
    )


def unit_rows(plan: Explained) -> list[UnitRow]:
    """Return one row per unit, in the order of their first chunks; blocks without chunks come last."""
    policies = {block.name: str(block.policy) for block in plan.blocks}
    names = dict.fromkeys([chunk.unit for chunk in plan.chunks] + list(policies))
    resident: dict[str, list[int]] = {name: [] for name in names}
    streamed: dict[str, list[int]] = {name: [] for name in names}
    for chunk in plan.chunks:
        (resident if chunk.resident else streamed)[chunk.unit].append(chunk.nbytes)
    return [UnitRow(name, policies.get(name, ""), tuple(resident[name]), tuple(streamed[name])) for name in names]


def _shared_parent(names: Sequence[str]) -> str:
    """Return the name of the innermost module that contains all the named modules."""
    parents = [name.split(".")[:-1] for name in names]
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False)))


def _runs(rows: Sequence[UnitRow], key: Callable[[UnitRow], object]) -> list[list[UnitRow]]:
    """Group consecutive rows that have equal keys and whose names differ only in the last number."""
    runs: list[list[UnitRow]] = []
    for row in rows:
        before = runs[-1][-1] if runs else None
        if before is not None and key(before) == key(row) and _stem(before.name) == _stem(row.name) is not None:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _cells(run: Sequence[UnitRow], shared: str) -> tuple[str, ...]:
    """Return the cells of the table row for a run of units."""
    chunks = [row.resident + row.streamed for row in run]
    resident, streamed = (sum(len(getattr(row, where)) for row in run) for where in ("resident", "streamed"))
    policies = Counter(row.policy for row in run)
    return (
        _run_name(run)[len(shared) :].removeprefix("."),
        _each([len(sizes) for sizes in chunks], str),
        _each([sum(sizes) for sizes in chunks], short_bytes),
        f"{resident} device, {streamed} streamed" if resident and streamed else "streamed" if streamed else "device",
        run[0].policy if len(policies) == 1 else ", ".join(f"{count} {policy}" for policy, count in policies.items()),
    )


def _each(counts: Sequence[int], text: Callable[[int], str]) -> str:
    """Return "3 x 5" if several counts are all 5, else their sum."""
    return f"{len(counts)} x {text(counts[0])}" if len(counts) > 1 == len(set(counts)) else text(sum(counts))


def _stem(name: str) -> str | None:
    """Return the name without its last component if that is a number, as in an `nn.ModuleList`; else None."""
    stem, _, last = name.rpartition(".")
    return stem if last.isdecimal() else None


def _run_name(run: Sequence[UnitRow]) -> str:
    """Return the name of the row: "model.layers.0-5" for several units, "(root)" for the module without a name."""
    name = run[0].name or "(root)"
    return name if len(run) == 1 else f"{name}-{run[-1].name.rpartition('.')[2]}"


def _share(nbytes: int, budget: int) -> str:
    return f"{100 * nbytes / budget:.0f} % of {short_bytes(budget)}"
