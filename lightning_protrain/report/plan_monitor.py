"""`PlanMonitor`: prints the plan, logs memory and transfers, and compares prediction and run."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich import get_console
from rich.console import Group

from lightning_protrain.config import format_bytes
from lightning_protrain.device.device import TransferCounters
from lightning_protrain.distributed.evaluation import patch
from lightning_protrain.planner.explain import short_bytes, short_seconds
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.prediction import TOLERANCE, Prediction
from lightning_protrain.profiler.synthetic import size_of
from lightning_protrain.report.slow_steps import SlowSteps
from lightning_protrain.report.timeline import StepTimeline, log_figures, plan_figures
from lightning_protrain.trainer_events import CopyableCallback

PREFIX = "protrain/"


class HasOverlap(Protocol):
    """The interface of `lightning_protrain.strategy.overlap.OverlapPlan`."""

    def describe(self, threads: int | None) -> str:
        """Return a sentence that says when the host steps the optimizer."""


class HasPeerAccess(Protocol):
    """The interface of `lightning_protrain.device.topology.PeerAccess`."""

    def describe(self) -> str:
        """Return sentences that describe the connection between the devices of a node."""


@runtime_checkable
class HasPlan(Protocol):
    """The properties of a strategy that `PlanMonitor` reads, such as `ProTrainStrategy`."""

    @property
    def plan(self) -> Plan | None:
        """Plan of the strategy; None if there is none."""

    @property
    def counters(self) -> TransferCounters:
        """Counters of transfers between host and device."""

    @property
    def measured_peak_bytes(self) -> int | None:
        """Peak of allocated device memory since `setup`, bytes; None if the device does not measure it."""

    @property
    def allocator_stats(self) -> Mapping[str, int]:
        """Peak of reserved bytes and number of allocation retries, by name; empty if there are no such counters."""

    @property
    def budget(self) -> int | None:
        """Limit of the plan's device memory, bytes; None means no limit."""

    @property
    def overlap(self) -> HasOverlap:
        """Time at which the host steps the optimizer."""

    @property
    def peers(self) -> HasPeerAccess | None:
        """Connection between the devices of a node; None if it is unknown."""


def render_plan(
    plan: Plan, budget: int | None = None, overlap: HasOverlap | None = None, peers: HasPeerAccess | None = None
) -> Group:
    """Return tables of the plan for a terminal: the decisions for each unit, and the device memory.

    Args:
        plan: The plan.
        budget: Limit of the plan's device memory, bytes; None means no limit.
        overlap: Time at which the host steps the optimizer; None omits it.
        peers: Connection between the devices of a node; None omits it.
    """
    steps = overlap is not None and any(chunk.trainable and not chunk.resident for chunk in plan.chunks)
    sentences = [overlap.describe(None)] if overlap is not None and steps else []
    return plan.explain(budget, sentences if peers is None else [*sentences, peers.describe()])


class PlanMonitor(CopyableCallback):
    """Shows the plan of the strategy "protrain", and compares its prediction with the run.

    The monitor prints the plan before the first step, and a summary of transfers after training. With another strategy
    it does nothing.

    If the run logs at a step, the monitor logs these metrics with the prefix `protrain/`:

    - `device_bytes`: size of the model states on the device at the end of the step.
    - `peak_device_bytes`: maximum of `device_bytes` during the run so far.
    - `streamed_bytes`: size of all copies of parameters and gradients so far, in both directions.
    - `swapped_out_bytes`, `swapped_in_bytes`: size of all copies of activations so far, if blocks swap.
    - `waited_seconds`: time for which the host has waited for copies so far.
    - `step_seconds`: time from one optimizer step to the next.
    - `predicted_peak_bytes`, `predicted_step_seconds`: prediction for the batch that the plan was made with, which is
      the largest one if the data module has `largest_batch`.
    - `measured_peak_bytes`: maximum over ranks of the peak of allocated bytes, if the device measures it.

    The metrics go to the loggers only, so `trainer.callback_metrics` does not change. The progress bar shows the time
    of the last step and the peak memory, with predictions in brackets.

    The monitor warns if peak memory exceeds its prediction by more than 5 %, or the median time of 20 steps exceeds its
    prediction by more than 15 %. If memory or time is more than 15 % below its prediction, the monitor logs that a
    better plan may exist. If the time deviates, the monitor measures one step, and names the resource that differs
    most.

    Args:
        log: False logs nothing.
        timeline: True measures the third step, and writes it beside the predicted step into `default_root_dir` of the
            trainer: `step-timeline.html`, and `step-trace.json` for Perfetto.
    """

    def __init__(self, log: bool = True, timeline: bool = False) -> None:
        self._log = log
        self._wants_timeline = timeline
        self._timeline: StepTimeline | None = None
        self._slow = SlowSteps()
        # Restores the progress bar.
        self._patches = ExitStack()
        self._last_step = (0, math.nan)
        self._step_seconds: float | None = None
        self._warned = False
        self._trained = False

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_timeline": None,
            "_slow": SlowSteps(),
            "_patches": ExitStack(),
        }  # A copy measures no step.

    def join(self, trainer: Trainer) -> None:
        """Add this callback to the trainer, unless the trainer has a `PlanMonitor` already."""
        if not any(isinstance(one, PlanMonitor) for one in _callbacks(trainer)):
            _callbacks(trainer).append(self)

    def detach(self, trainer: Trainer) -> None:
        """Remove this callback from the trainer."""
        self._stop()
        if self in _callbacks(trainer):
            _callbacks(trainer).remove(self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the plan on rank 0."""
        self._last_step, self._step_seconds, self._warned = (trainer.global_step, math.nan), None, False
        self._trained = False
        self._timeline = StepTimeline() if self._wants_timeline else None
        self._slow = SlowSteps()
        strategy = trainer.strategy
        if isinstance(strategy, HasPlan) and strategy.plan is not None and trainer.is_global_zero:
            # The strategy's log already has the overlap, the number of threads, the reason for the sharding and FSDP2.
            plan = strategy.plan
            if plan.prediction is not None:
                advice = tuple(
                    each for each in plan.prediction.advice if not each.startswith(("sharding=", "strategy="))
                )
                plan = replace(plan, prediction=replace(plan.prediction, advice=advice))
            get_console().print(render_plan(plan, strategy.budget, None, strategy.peers))
            if self._log:
                log_figures(trainer.loggers, plan_figures(strategy.plan))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Extend the progress bar."""
        plan = trainer.strategy.plan if isinstance(trainer.strategy, HasPlan) else None
        if plan is not None and plan.prediction is not None:
            self._show(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start to measure a step if `timeline` requires it, or if recent steps deviate from the prediction."""
        if self._timeline is not None:
            self._timeline.begin(trainer)
        strategy = trainer.strategy
        if isinstance(strategy, HasPlan) and strategy.plan is not None:
            self._slow.begin(trainer, strategy.plan)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log metrics; warn once if memory exceeds the prediction."""
        if self._timeline is not None:
            self._timeline.end(trainer)
        strategy = trainer.strategy
        if not isinstance(strategy, HasPlan) or strategy.plan is None:
            return
        self._trained = True
        has_stepped = self._time_step(trainer.global_step)
        prediction, measured = strategy.plan.prediction, strategy.measured_peak_bytes
        if self._log and trainer.loggers and _is_written(trainer, pl_module):
            logged = device_bytes(strategy.plan, strategy.counters)
            logged["waited_seconds"] = strategy.counters.waited_seconds
            logged |= {name: float(value) for name, value in strategy.allocator_stats.items()}
            if self._step_seconds is not None:
                logged["step_seconds"] = self._step_seconds
            if prediction is not None:
                logged["predicted_peak_bytes"] = float(prediction.device_bytes)
                logged["predicted_step_seconds"] = prediction.step_seconds
            if measured is not None:
                logged["measured_peak_bytes"] = _of_worst_rank(trainer, measured)
            if _run_logs(trainer):
                step = trainer.fit_loop.epoch_loop._batches_that_stepped
                for logger in trainer.loggers:
                    logger.log_metrics({f"{PREFIX}{name}": value for name, value in logged.items()}, step=step)
        if measured is not None:
            self._compare(prediction, measured)
        if has_stepped:
            self._slow.end(trainer, strategy.plan, self._step_seconds, size_of(batch))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary on rank 0, if a batch was trained."""
        self._stop()
        strategy = trainer.strategy
        if self._trained and isinstance(strategy, HasPlan) and strategy.plan is not None and trainer.is_global_zero:
            get_console().print(summary(strategy.counters, strategy.budget), highlight=False, soft_wrap=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop the measurement of a step, and restore the progress bar."""
        if self._timeline is not None:
            self._timeline.close()
        self._stop()

    def _show(self, trainer: Trainer) -> None:
        """Add measured and predicted figures to the progress bar, but not to the trainer's metrics."""
        bar = trainer.progress_bar_callback
        if bar is None:
            return
        own = bar.get_metrics

        def with_plan(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
            return {**own(trainer, pl_module), **self._figures(trainer.strategy)}

        self._patches.callback(patch(bar, "get_metrics", with_plan))

    def _stop(self) -> None:
        """Restore the progress bar, and stop the measurement of a step."""
        self._slow.close()
        self._patches.close()

    def _figures(self, strategy: object) -> dict[str, str]:
        """Return texts for the progress bar: measured figures, with predictions in brackets."""
        if not isinstance(strategy, HasPlan) or strategy.plan is None or strategy.plan.prediction is None:
            return {}
        prediction, measured, shown = strategy.plan.prediction, strategy.measured_peak_bytes, dict[str, str]()
        if self._step_seconds is not None:
            shown["step"] = f"{short_seconds(self._step_seconds)} (predicted: {short_seconds(prediction.step_seconds)})"
        if measured is not None:
            shown["peak"] = f"{short_bytes(measured)} (predicted: {short_bytes(prediction.device_bytes)})"
        return shown

    def _time_step(self, step: int) -> bool:
        """Return True if an optimizer step has ended; store its time."""
        before, then = self._last_step
        if step == before:
            return False
        now = time.perf_counter()
        self._step_seconds = None if math.isnan(then) else (now - then) / (step - before)
        self._last_step = (step, now)
        return True

    def _compare(self, prediction: Prediction | None, measured: int) -> None:
        if prediction is None or self._warned or measured <= prediction.device_bytes * (1 + TOLERANCE):
            return
        self._warned = True
        warnings.warn(
            f"The device holds {format_bytes(measured)} at its peak, but {format_bytes(prediction.device_bytes)} were "
            f"predicted from the batch of the plan: {measured / prediction.device_bytes - 1:.0%} more. Later batches "
            "may be larger. Lower device_memory by the difference, limit the size of batches, or give the data module "
            "a method `largest_batch`.",
            stacklevel=2,
        )


def _is_written(trainer: Trainer, module: LightningModule) -> bool:
    """Return True if loggers get metrics at this batch; the result is equal on all ranks."""
    if module.automatic_optimization and trainer.fit_loop._should_accumulate():
        return False
    steps = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and steps % every == 0


def _run_logs(trainer: Trainer) -> bool:
    """Return True if the module or a callback has logged a metric at this step."""
    results = trainer.fit_loop.epoch_loop._results
    return any(one.meta.logger and one.meta.on_step for _, one in results.valid_items())


def _of_worst_rank(trainer: Trainer, nbytes: int) -> float:
    """Return the maximum over all ranks; all ranks must call it."""
    if trainer.world_size == 1:
        return float(nbytes)
    there = torch.tensor(nbytes, dtype=torch.float64, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(there, reduce_op="max"))


def device_bytes(plan: Plan, counters: TransferCounters) -> dict[str, float]:
    """Return the metrics in bytes that `PlanMonitor` logs, by name."""
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
    """Return a summary of streamed bytes, budget, share of prefetched chunks, and swapped bytes.

    Args:
        counters: Counters of transfers between host and device.
        budget: Limit of the plan's device memory, bytes; None means no limit.
    """
    streamed = counters.uploaded_bytes + counters.downloaded_bytes
    swapped = counters.swapped_out_bytes + counters.swapped_in_bytes
    also = f"\nIt swapped {short_bytes(swapped)} of activations." if swapped else ""
    if not streamed:
        return f"ProTrain streamed nothing: all model states stayed on the device.{also}"
    through = "" if budget is None else f" through {short_bytes(budget)}"
    fetches = counters.prefetch_hits + counters.prefetch_misses
    share = f"; {100 * counters.prefetch_hits / fetches:.0f} % of {fetches:,} fetches prefetched" if fetches else ""
    return f"ProTrain streamed {short_bytes(streamed)}{through}{share}.{also}"


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
