"""`PlanMonitor`: prints the plan before training, logs what it holds on the device, and sums up what it streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console, Group
from rich.table import Table

from lightning_protrain.device import TransferCounters
from lightning_protrain.planner.plan import BlockPolicy, Plan


class Overlapped(Protocol):
    """How a strategy overlaps the host's optimizer steps; `lightning_protrain.overlap.OverlapPlan` is one."""

    @property
    def overlap(self) -> str:
        """`"backward"`, `"forward"` or `"off"`."""

    def describe(self, threads: int | None) -> str:
        """A sentence for the user, if it is not off."""


@runtime_checkable
class Planned(Protocol):
    """What `PlanMonitor` asks of a strategy; `ProTrainStrategy` has it."""

    @property
    def plan(self) -> Plan | None:
        """The plan that is applied, if any."""

    @property
    def counters(self) -> TransferCounters:
        """What was moved until now."""

    @property
    def budget(self) -> int | None:
        """Bytes of the device that the plan may use; None where there is no limit."""

    @property
    def overlap(self) -> Overlapped:
        """How the host's optimizer steps are overlapped."""


@dataclass(frozen=True)
class _Row:
    """What one unit gets; units in a row that get the same become one row of the table."""

    name: str
    policy: BlockPolicy | None
    resident: tuple[int, ...]
    streamed: tuple[int, ...]

    def is_like(self, other: _Row) -> bool:
        return replace(self, name="") == replace(other, name="") and _stem(self.name) == _stem(other.name) is not None


def render_plan(plan: Plan, budget: int | None = None, overlap: Overlapped | None = None) -> Group:
    """The plan as two tables: what every unit gets, and what that takes of the device's memory.

    Args:
        plan: The plan.
        budget: Bytes of the device that the plan may use; None where there is no limit.
        overlap: How the host's optimizer steps are overlapped; None: not said.
    """
    sentences = [_placement(plan)]
    if overlap is not None and any(chunk.trainable and not chunk.resident for chunk in plan.chunks):
        sentences.append(_host_step(overlap))
    return Group(_unit_table(plan), *sentences, "", _memory_table(plan, budget))


def short_bytes(count: int) -> str:
    """Bytes with a unit that leaves few digits: "512 B", "3.0 KiB", "64.0 MiB", "12.3 GiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


class PlanMonitor(Callback):
    """Shows what the strategy "protrain" does; with another strategy it says nothing.

    Before the first step it prints the plan. At the trainer's logging steps it logs three numbers of bytes:
    `device_bytes`, which are the model states on the device at the end of the step (resident and fetched ones),
    `peak_device_bytes`, the most there were until then, and `streamed_bytes`, parameters and gradients moved in both
    directions since the start. Where blocks swap, there are two more: `swapped_out_bytes` and `swapped_in_bytes`, of
    activations since the start. After training it prints the sum.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the plan, on rank zero."""
        strategy = trainer.strategy
        if isinstance(strategy, Planned) and strategy.plan is not None and trainer.is_global_zero:
            Console().print(render_plan(strategy.plan, strategy.budget, strategy.overlap))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the bytes."""
        strategy = trainer.strategy
        if isinstance(strategy, Planned) and strategy.plan is not None:
            pl_module.log_dict(device_bytes(strategy.plan, strategy.counters))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the summary, on rank zero."""
        strategy = trainer.strategy
        if isinstance(strategy, Planned) and strategy.plan is not None and trainer.is_global_zero:
            Console().print(summary(strategy.counters, strategy.budget), highlight=False, soft_wrap=True)


def device_bytes(plan: Plan, counters: TransferCounters) -> dict[str, float]:
    """The bytes that `PlanMonitor` logs, by name."""
    resident = plan.memory.resident_states + plan.memory.module_buffers
    logged = {
        "device_bytes": resident + counters.live_bytes,
        "peak_device_bytes": resident + counters.peak_live_bytes,
        "streamed_bytes": counters.uploaded_bytes + counters.downloaded_bytes,
    }
    if any(block.swap_bytes for block in plan.blocks):
        logged |= {"swapped_out_bytes": counters.swapped_out_bytes, "swapped_in_bytes": counters.swapped_in_bytes}
    return {name: float(nbytes) for name, nbytes in logged.items()}


def summary(counters: TransferCounters, budget: int | None) -> str:
    """What was streamed, through what, and how often it came in time; and what was swapped, if anything."""
    streamed = counters.uploaded_bytes + counters.downloaded_bytes
    swapped = counters.swapped_out_bytes + counters.swapped_in_bytes
    also = f" It swapped {short_bytes(swapped)} of activations." if swapped else ""
    if not streamed:
        return f"ProTrain streamed nothing: all model states stayed on the device.{also}"
    through = "" if budget is None else f" through a budget of {short_bytes(budget)}"
    fetches = counters.prefetch_hits + counters.prefetch_misses
    share = f", {100 * counters.prefetch_hits / fetches:.0f} % of {fetches} fetches were prefetched" if fetches else ""
    return f"ProTrain streamed {short_bytes(streamed)}{through}{share}.{also}"


def _unit_table(plan: Plan) -> Table:
    table = Table(title="Plan", title_justify="left")
    table.add_column("unit")
    for column in ("chunks", "size", "where"):
        table.add_column(column, justify="left" if column == "where" else "right")
    table.add_column("activations")
    for run in _runs(_rows(plan)):
        first = run[0]
        sizes = first.resident + first.streamed
        table.add_row(
            _run_name(run),
            f"{len(run)} x {len(sizes)}" if len(run) > 1 else str(len(sizes)),
            f"{len(run)} x {short_bytes(sum(sizes))}" if len(run) > 1 else short_bytes(sum(sizes)),
            _where(first),
            first.policy.value if first.policy else "",
        )
    return table


def _placement(plan: Plan) -> str:
    resident = sum(chunk.nbytes for chunk in plan.chunks if chunk.resident)
    streamed = sum(chunk.nbytes for chunk in plan.chunks) - resident
    buffers = f" through {plan.num_chunk_buffers} chunk buffers" if streamed else ""
    return f"Parameters: {short_bytes(resident)} on the device, {short_bytes(streamed)} streamed{buffers}."


def _host_step(overlap: Overlapped) -> str:
    if overlap.overlap == "off":
        return "The host steps the optimizer while the device waits."
    return overlap.describe(None)


def _rows(plan: Plan) -> list[_Row]:
    """One row per unit, in the order in which units first appear among the chunks; blocks without chunks come last."""
    policies = {block.name: block.policy for block in plan.blocks}
    names = dict.fromkeys([chunk.unit for chunk in plan.chunks] + list(policies))
    return [
        _Row(
            name=name,
            policy=policies.get(name),
            resident=tuple(chunk.nbytes for chunk in plan.chunks if chunk.unit == name and chunk.resident),
            streamed=tuple(chunk.nbytes for chunk in plan.chunks if chunk.unit == name and not chunk.resident),
        )
        for name in names
    ]


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


def _memory_table(plan: Plan, budget: int | None) -> Table:
    memory = plan.memory
    terms = {
        "resident states": memory.resident_states,
        "chunk buffers": memory.chunk_buffers,
        "gradients in flight": memory.gradients_in_flight,
        "module buffers": memory.module_buffers,
    }
    if memory.swapped_activations:
        terms["swapped activations"] = memory.swapped_activations
    what = "Model states and swapped activations" if memory.swapped_activations else "Model states"
    table = Table(title=f"{what} on the device", title_justify="left", show_footer=True)
    table.add_column("term", footer="total")
    table.add_column("size", footer=short_bytes(memory.total), justify="right")
    table.add_column("of the budget", footer=_share(memory.total, budget), justify="right")
    for term, nbytes in terms.items():
        table.add_row(term, short_bytes(nbytes), _share(nbytes, budget))
    return table


def _share(nbytes: int, budget: int | None) -> str:
    return "no limit" if budget is None else f"{100 * nbytes / budget:.0f} % of {short_bytes(budget)}"
