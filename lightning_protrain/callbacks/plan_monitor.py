"""`PlanMonitor`: prints the plan before training, logs memory and traffic, and prints a summary of the streaming."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich import get_console
from rich.console import Group

from lightning_protrain.callbacks.slow_steps import SlowSteps
from lightning_protrain.callbacks.timeline import StepTimeline, log_figures, plan_figures
from lightning_protrain.config import format_bytes
from lightning_protrain.device.device import TransferCounters
from lightning_protrain.planner.advice import few_samples
from lightning_protrain.planner.explain import short_bytes, short_seconds
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.prediction import TOLERANCE, Prediction
from lightning_protrain.profiler.synthetic import size_of

PREFIX = "protrain/"


class HasOverlap(Protocol):
    """The overlap of a strategy's host optimizer steps, such as `lightning_protrain.strategy.overlap.OverlapPlan`."""

    def describe(self, threads: int | None) -> str:
        """Return a sentence for the user."""


class HasPeerAccess(Protocol):
    """The connection between devices, such as `lightning_protrain.device.topology.PeerAccess`."""

    def describe(self) -> str:
        """Return one or two sentences for the user."""


@runtime_checkable
class HasPlan(Protocol):
    """The part of a strategy that `PlanMonitor` reads; `ProTrainStrategy` has it."""

    @property
    def plan(self) -> Plan | None:
        """Plan that is applied; None if there is none."""

    @property
    def counters(self) -> TransferCounters:
        """Counters of all transfers so far."""

    @property
    def measured_peak_bytes(self) -> int | None:
        """Peak of the device's allocated bytes since `setup`; None if the device does not count them."""

    @property
    def allocator_stats(self) -> Mapping[str, int]:
        """Peak of reserved bytes and number of allocation retries, by name; empty if the device does not count them."""

    @property
    def budget(self) -> int | None:
        """Device bytes that the plan may use; None means no limit."""

    @property
    def overlap(self) -> HasOverlap:
        """Overlap of the host's optimizer steps."""

    @property
    def peers(self) -> HasPeerAccess | None:
        """Connection between the devices of a node; None if unknown."""


def render_plan(
    plan: Plan, budget: int | None = None, overlap: HasOverlap | None = None, peers: HasPeerAccess | None = None
) -> Group:
    """Return the plan as two tables: the decisions for every unit, and the device memory that they take.

    Args:
        plan: The plan.
        budget: Device bytes that the plan may use; None means no limit.
        overlap: Overlap of the host's optimizer steps; None leaves it out.
        peers: Connection between the devices of a node; None leaves it out.
    """
    steps = overlap is not None and any(chunk.trainable and not chunk.resident for chunk in plan.chunks)
    said = [overlap.describe(None)] if overlap is not None and steps else []
    return plan.explain(budget, said if peers is None else [*said, peers.describe()])


class PlanMonitor(Callback):
    """Shows the plan of the strategy "protrain", and compares its prediction with the run.

    Before the first step it prints the plan, and after training a summary of the streaming. After the first batch it
    prints advice if weights are streamed for steps of fewer than four samples and the plan has not given that advice.

    Whenever the run itself logs at a step, the monitor logs these figures under `protrain/`:

    - `device_bytes`: model states on the device at the end of the step, resident and fetched.
    - `peak_device_bytes`: maximum of the model states on the device so far.
    - `streamed_bytes`: parameters and gradients moved in both directions so far.
    - `swapped_out_bytes`, `swapped_in_bytes`: activations moved so far, if blocks swap.
    - `waited_seconds`: time that the host has waited for copies so far.
    - `step_seconds`: time from one optimizer step to the next.
    - `predicted_peak_bytes`, `predicted_step_seconds`: prediction of the search for the batch that the plan was made
      with. That is the largest batch if the data know it, so steps may well be faster.
    - `measured_peak_bytes`: peak of allocated bytes on the worst rank, if the device counts them.

    Loggers get these figures directly, as from `LearningRateMonitor`: metrics of the module and other callbacks do not
    change. The progress bar shows the time of the last step and the peak, with the predicted ones in brackets.

    A warning says if the device holds more than 5 % more than predicted, or if the median of 20 steps takes more than
    15 % longer. A message says if either is more than 15 % less, as a better plan may exist then. For the time one step
    is measured, and the text names what is off: computation, the link, the host or the network. With another strategy
    the monitor does nothing.

    Args:
        log: False logs nothing.
        timeline: Whether to measure the third step, and write it beside the predicted one to the trainer's
            `default_root_dir`: `step-timeline.html`, and `step-trace.json` for Perfetto.
    """

    def __init__(self, log: bool = True, timeline: bool = False) -> None:
        self._log = log
        self._wants_timeline = timeline
        self._timeline: StepTimeline | None = None
        self._slow = SlowSteps()
        self._last_step = (0, math.nan)
        self._step_seconds: float | None = None
        self._warned = False
        self._uploaded: int | None = None

    def join(self, trainer: Trainer) -> None:
        """Add this callback to the trainer unless it has a `PlanMonitor` already."""
        if not any(isinstance(one, PlanMonitor) for one in _callbacks(trainer)):
            _callbacks(trainer).append(self)

    def leave(self, trainer: Trainer) -> None:
        """Remove this callback from the trainer."""
        self._stop(trainer)
        if self in _callbacks(trainer):
            _callbacks(trainer).remove(self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the plan on rank 0."""
        self._last_step, self._step_seconds, self._warned = (trainer.global_step, math.nan), None, False
        self._uploaded = None
        self._timeline = StepTimeline() if self._wants_timeline else None
        self._slow = SlowSteps()
        strategy = trainer.strategy
        if isinstance(strategy, HasPlan) and strategy.plan is not None and trainer.is_global_zero:
            # The strategy has said when the host steps, on how many threads, and why this sharding was taken.
            plan = strategy.plan
            if plan.prediction is not None:
                advice = tuple(each for each in plan.prediction.advice if not each.startswith("sharding="))
                plan = replace(plan, prediction=replace(plan.prediction, advice=advice))
            get_console().print(render_plan(plan, strategy.budget, None, strategy.peers))
            if self._log:
                log_figures(trainer.loggers, plan_figures(strategy.plan))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the bytes that evaluations before the first batch have uploaded."""
        if isinstance(trainer.strategy, HasPlan):
            self._uploaded = trainer.strategy.counters.uploaded_bytes
            if trainer.strategy.plan is not None and trainer.strategy.plan.prediction is not None:
                self._show(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to measure a step, if that is asked for, or if steps do not take what was predicted."""
        if self._timeline is not None:
            self._timeline.begin(trainer)
        strategy = trainer.strategy
        if isinstance(strategy, HasPlan) and strategy.plan is not None:
            self._slow.begin(trainer, strategy.plan)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log bytes and seconds; warn once if memory exceeds the prediction or steps are too small."""
        if self._timeline is not None:
            self._timeline.end(trainer)
        strategy = trainer.strategy
        if not isinstance(strategy, HasPlan) or strategy.plan is None:
            return
        if self._uploaded is not None:
            if strategy.counters.uploaded_bytes > self._uploaded:
                self._warn_of_few_samples(strategy.plan, trainer, batch)
            self._uploaded = None
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
        """Print the summary on rank 0, unless a finished run was resumed and no batch was trained."""
        self._stop(trainer)
        strategy, trained = trainer.strategy, self._uploaded is None
        if trained and isinstance(strategy, HasPlan) and strategy.plan is not None and trainer.is_global_zero:
            get_console().print(summary(strategy.counters, strategy.budget), highlight=False, soft_wrap=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop measuring."""
        if self._timeline is not None:
            self._timeline.close()
        self._stop(trainer)

    def _show(self, trainer: Trainer) -> None:
        """Let the progress bar of this fit show more than the trainer's metrics, which are also those of others."""
        bar = trainer.progress_bar_callback
        if bar is None or "get_metrics" in vars(bar):
            return
        own = bar.get_metrics

        def with_plan(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
            return {**own(trainer, pl_module), **self._figures(trainer.strategy)}

        bar.get_metrics = with_plan  # type: ignore[method-assign]

    def _stop(self, trainer: Trainer) -> None:
        """Restore the progress bar, and end a measurement."""
        self._slow.close()
        if trainer.progress_bar_callback is not None:
            vars(trainer.progress_bar_callback).pop("get_metrics", None)

    def _figures(self, strategy: object) -> dict[str, str]:
        """Return what the progress bar shows: measured figures, and the predicted ones in brackets."""
        if not isinstance(strategy, HasPlan) or strategy.plan is None or strategy.plan.prediction is None:
            return {}
        prediction, measured, shown = strategy.plan.prediction, strategy.measured_peak_bytes, dict[str, str]()
        if self._step_seconds is not None:
            shown["step"] = f"{short_seconds(self._step_seconds)} ({short_seconds(prediction.step_seconds)})"
        if measured is not None:
            shown["peak"] = f"{short_bytes(measured)} ({short_bytes(prediction.device_bytes)})"
        return shown

    def _time_step(self, step: int) -> bool:
        """Take the time if a step has ended; return whether one has."""
        before, then = self._last_step
        if step == before:
            return False
        now = time.perf_counter()
        self._step_seconds = None if math.isnan(then) else (now - then) / (step - before)
        self._last_step = (step, now)
        return True

    def _warn_of_few_samples(self, plan: Plan, trainer: Trainer, batch: Any) -> None:
        """Print the advice on few samples, unless the plan has been printed with it."""
        advised = plan.prediction
        if advised is None or not any(few_samples(advised.samples, advised.accumulate)):
            for sentence in few_samples(size_of(batch)[0], trainer.accumulate_grad_batches):
                rank_zero_info(sentence)

    def _compare(self, prediction: Prediction | None, measured: int) -> None:
        if prediction is None or self._warned or measured <= prediction.device_bytes * (1 + TOLERANCE):
            return
        self._warned = True
        warnings.warn(
            f"The device holds {format_bytes(measured)} at its peak, but {format_bytes(prediction.device_bytes)} were "
            f"predicted from the batch of the plan: {measured / prediction.device_bytes - 1:.0%} more. Later batches "
            "may be larger still. Lower device_memory by the difference, limit the batches, or give the data module a "
            "method `largest_batch` to plan with.",
            stacklevel=2,
        )


def _is_written(trainer: Trainer, module: LightningModule) -> bool:
    """Return True if loggers get metrics at this batch; the result is the same on every rank."""
    if module.automatic_optimization and trainer.fit_loop._should_accumulate():
        return False
    steps = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and steps % every == 0


def _run_logs(trainer: Trainer) -> bool:
    """Return True if the module or a callback has logged something for loggers at this step."""
    results = trainer._results
    return results is not None and any(one.meta.logger and one.meta.on_step for _, one in results.valid_items())


def _of_worst_rank(trainer: Trainer, nbytes: int) -> float:
    """Return the maximum over all ranks; every rank calls it."""
    if trainer.world_size == 1:
        return float(nbytes)
    there = torch.tensor(nbytes, dtype=torch.float64, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(there, reduce_op="max"))


def device_bytes(plan: Plan, counters: TransferCounters) -> dict[str, float]:
    """Return the byte figures that `PlanMonitor` logs, by name."""
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
    """Return a sentence on the streamed bytes, the budget, the share of prefetched fetches, and swapped bytes."""
    streamed = counters.uploaded_bytes + counters.downloaded_bytes
    swapped = counters.swapped_out_bytes + counters.swapped_in_bytes
    also = f"\nIt swapped {short_bytes(swapped)} of activations." if swapped else ""
    if not streamed:
        return f"ProTrain streamed nothing: all model states stayed on the device.{also}"
    through = "" if budget is None else f" through {short_bytes(budget)}"
    fetches = counters.prefetch_hits + counters.prefetch_misses
    share = (
        f"; {100 * counters.prefetch_hits / fetches:.0f} % of {fetches:,} fetches were prefetched" if fetches else ""
    )
    return f"ProTrain streamed {short_bytes(streamed)}{through}{share}.{also}"


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
