"""A plan in words and tables: what lives where, what it takes, what bounds the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

from rich.console import Group, RenderableType
from rich.table import Table

from lightning_protrain.planner.prediction import CHECKPOINT_COPY, OTHER_RANKS, Prediction

# Characters: a terminal is 80 wide, and a longer name of the module around them would hide the names of the units.
MAX_SHARED_NAME = 12


class _Chunk(Protocol):
    """What is read of a `ChunkPlan`."""

    @property
    def unit(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def resident(self) -> bool: ...


class _Block(Protocol):
    """What is read of a `BlockPlan`."""

    @property
    def name(self) -> str: ...

    @property
    def policy(self) -> str: ...


class _Memory(Protocol):
    """What is read of `MemoryTerms`."""

    @property
    def resident_states(self) -> int: ...

    @property
    def chunk_buffers(self) -> int: ...

    @property
    def gradients_in_flight(self) -> int: ...

    @property
    def module_buffers(self) -> int: ...

    @property
    def swapped_activations(self) -> int: ...

    @property
    def activations(self) -> int: ...

    @property
    def gathers_for_others(self) -> int: ...

    @property
    def total(self) -> int: ...


class Explained(Protocol):
    """What is read of a `Plan`."""

    @property
    def chunks(self) -> Sequence[_Chunk]: ...

    @property
    def blocks(self) -> Sequence[_Block]: ...

    @property
    def num_chunk_buffers(self) -> int: ...

    @property
    def memory(self) -> _Memory: ...

    @property
    def prediction(self) -> Prediction | None: ...

    @property
    def sharding(self) -> str: ...

    @property
    def gathered_by(self) -> int: ...


@dataclass(frozen=True)
class _Row:
    """What one unit gets; units in a row that get the same become one row of the table."""

    name: str
    policy: str
    resident: tuple[int, ...]
    streamed: tuple[int, ...]

    def is_like(self, other: _Row) -> bool:
        return replace(self, name="") == replace(other, name="") and _stem(self.name) == _stem(other.name) is not None


def explain(plan: Explained, budget: int | None = None, sentences: Sequence[str] = ()) -> Group:
    """The plan as tables: what every unit gets, what that takes of the memory, and what it is expected to give.

    Args:
        plan: The plan.
        budget: Bytes of the device that the plan may use; None: what it was predicted for, if it was.
        sentences: More to say about what lives where.
    """
    if budget is None and plan.prediction is not None:
        budget = plan.prediction.budget
    said = [placement(plan), *sharing_sentences(plan), *sentences]
    parts: list[RenderableType] = [unit_table(plan), *said, "", memory_table(plan, budget)]
    if plan.prediction is not None:
        parts += ["", phase_table(plan.prediction), *host_sentences(plan.prediction), time_sentence(plan.prediction)]
        parts += plan.prediction.advice
    return Group(*parts)


def short_bytes(count: int) -> str:
    """Bytes with a unit that leaves few digits: "512 B", "3.0 KiB", "64.0 MiB", "12.3 GiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def short_seconds(seconds: float) -> str:
    """Seconds with a unit that leaves few digits: "35 us", "2.50 ms", "1.20 s", "210 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def unit_table(plan: Explained) -> Table:
    """What every unit gets; equal neighbours are one row."""
    rows = _rows(plan)
    shared = _shared_parent([row.name for row in rows])
    table = Table(title="Plan", title_justify="left")
    table.add_column(f"unit of {shared}" if shared else "unit")
    for column in ("chunks", "size", "where"):
        table.add_column(column, justify="left" if column == "where" else "right")
    table.add_column("activations")
    for run in _runs(rows):
        first = run[0]
        sizes = first.resident + first.streamed
        table.add_row(
            _run_name(run)[len(shared) :].removeprefix("."),
            f"{len(run)} x {len(sizes)}" if len(run) > 1 else str(len(sizes)),
            f"{len(run)} x {short_bytes(sum(sizes))}" if len(run) > 1 else short_bytes(sum(sizes)),
            _where(first),
            first.policy,
        )
    return table


def placement(plan: Explained) -> str:
    """One sentence on where the parameters are."""
    resident = sum(chunk.nbytes for chunk in plan.chunks if chunk.resident)
    streamed = sum(chunk.nbytes for chunk in plan.chunks) - resident
    count = plan.num_chunk_buffers
    buffers = f" through {count} chunk {'buffer' if count == 1 else 'buffers'}" if streamed else ""
    return f"Parameters: {short_bytes(resident)} on the device, {short_bytes(streamed)} streamed{buffers}."


def sharing_sentences(plan: Explained) -> list[str]:
    """How chunks come to several ranks that share one copy of them, if they do."""
    if plan.sharding != "shard" or all(chunk.resident for chunk in plan.chunks):
        return []
    if plan.gathered_by == 1:
        return ["Streamed chunks are uploaded whole by each rank, from the one copy of its machine."]
    return [f"Streamed chunks come in parts, gathered between the {plan.gathered_by} ranks of a machine."]


def memory_table(plan: Explained, budget: int | None) -> Table:
    """What the plan puts on the device, beside what it may."""
    memory = plan.memory
    terms = {
        "resident states": memory.resident_states,
        "chunk buffers": memory.chunk_buffers,
        "gradients in flight": memory.gradients_in_flight,
        "module buffers": memory.module_buffers,
    }
    also = {"swapped activations": memory.swapped_activations, "activations": memory.activations}
    also["gathers for other ranks"] = memory.gathers_for_others
    terms |= {term: nbytes for term, nbytes in also.items() if nbytes}
    what = "Model states" + (" and activations" if memory.activations else "")
    if memory.swapped_activations and not memory.activations:
        what = "Model states and swapped activations"
    table = Table(title=f"{what} on the device", title_justify="left", show_footer=True)
    table.add_column("term", footer="total")
    table.add_column("size", footer=short_bytes(memory.total), justify="right")
    table.add_column("of the budget", footer=_share(memory.total, budget), justify="right")
    for term, nbytes in terms.items():
        table.add_row(term, short_bytes(nbytes), _share(nbytes, budget))
    return table


def phase_table(prediction: Prediction) -> Table:
    """What each phase is expected to need at its peak, and what takes most of it."""
    table = Table(title=f"Expected on {prediction.hardware}", title_justify="left")
    table.add_column("phase")
    table.add_column("device", justify="right")
    table.add_column("host", justify="right")
    table.add_column("mostly")
    for phase in prediction.phases:
        largest = max(phase.device.items(), key=lambda term: term[1], default=("", 0))
        mostly = f"{largest[0].replace('_', ' ')}, {short_bytes(largest[1])}" if largest[1] else ""
        where = f" (in {phase.unit})" if phase.unit and mostly else ""
        table.add_row(phase.name, short_bytes(phase.device_bytes), short_bytes(phase.host_bytes), mostly + where)
    return table


def host_sentences(prediction: Prediction) -> list[str]:
    """What the host keeps beside the states of one rank, if anything."""
    kept = {
        CHECKPOINT_COPY: "the copy of the checkpoint, from the first save on",
        OTHER_RANKS: "what the other ranks of the machine have of their own: gradients that wait to be added or "
        "averaged, and swapped activations",
    }
    found = {what: max(phase.host.get(term, 0) for phase in prediction.phases) for term, what in kept.items()}
    return [f"Of the host, {short_bytes(nbytes)} are {what}." for what, nbytes in found.items() if nbytes]


def time_sentence(prediction: Prediction) -> str:
    """How long a step is expected to take, and what it waits for."""
    reasons = {
        "compute": "the device computes all the time",
        "link": "it waits for weights and gradients on their way between host and device",
        "host": "it waits for the optimizer on the host",
        "network": "it waits for what ranks send each other",
    }
    rate = prediction.tokens_per_second
    tokens = f", {rate:,.0f} tokens per second" if rate is not None else ""
    batches = f" of {prediction.accumulate} micro-batches" if prediction.accumulate > 1 else ""
    sums = prediction.busy.get("network", 0.0)
    sent = f" Ranks sum gradients for {short_seconds(sums)} of it." if sums > 0 else ""
    weights = prediction.busy.get("exchange", 0.0)
    sent += f" Machines send each other new weights for {short_seconds(weights)}." if weights > 0 else ""
    alone = prediction.alone_seconds
    sent += f" One rank alone would take {short_seconds(alone)}." if sent and alone is not None else ""
    return (
        f"A step{batches} is expected to take {short_seconds(prediction.step_seconds)}{tokens}; "
        f"what bounds it: {prediction.bound} ({reasons[prediction.bound]}).{sent}"
    )


def _rows(plan: Explained) -> list[_Row]:
    """One row per unit, in the order in which units first appear among the chunks; blocks without chunks come last."""
    policies = {block.name: str(block.policy) for block in plan.blocks}
    names = dict.fromkeys([chunk.unit for chunk in plan.chunks] + list(policies))
    resident: dict[str, list[int]] = {name: [] for name in names}
    streamed: dict[str, list[int]] = {name: [] for name in names}
    for chunk in plan.chunks:
        (resident if chunk.resident else streamed)[chunk.unit].append(chunk.nbytes)
    return [_Row(name, policies.get(name, ""), tuple(resident[name]), tuple(streamed[name])) for name in names]


def _shared_parent(names: Sequence[str]) -> str:
    """The module that all of them are in, if its name is long enough to push what tells them apart out of the table."""
    parents = [name.split(".")[:-1] for name in names]
    shared = ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False)))
    return shared if len(shared) > MAX_SHARED_NAME else ""


def _runs(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Consecutive rows that differ in nothing but the number in their names."""
    runs: list[list[_Row]] = []
    for row in rows:
        if runs and row.is_like(runs[-1][-1]):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _stem(name: str) -> str | None:
    """The name without its last component where that is a number, as in the children of an `nn.ModuleList`."""
    stem, _, last = name.rpartition(".")
    return stem if last.isdecimal() else None


def _run_name(run: Sequence[_Row]) -> str:
    """The name of the row: "model.layers.0-5" for several, "(root)" for the module without a name."""
    name = run[0].name or "(root)"
    return name if len(run) == 1 else f"{name}-{run[-1].name.rpartition('.')[2]}"


def _where(row: _Row) -> str:
    if row.resident and row.streamed:
        return f"{len(row.resident)} on the device, {len(row.streamed)} streamed"
    return "streamed" if row.streamed else "device"


def _share(nbytes: int, budget: int | None) -> str:
    return "no limit" if budget is None else f"{100 * nbytes / budget:.0f} % of {short_bytes(budget)}"
