"""`PlanMonitor`: prints the plan, logs memory and transfers, and compares prediction and run."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich import get_console

from lightning_protrain.config import format_bytes
from lightning_protrain.device.device import StreamDevice, TransferCounters
from lightning_protrain.device.recording import Lane, Recording, Span, busy
from lightning_protrain.distributed.evaluation import patch
from lightning_protrain.planner.explain import short_bytes, short_seconds
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.prediction import TOLERANCE, Prediction
from lightning_protrain.profiler.synthetic import size_of
from lightning_protrain.report.timeline import HasPlan, StepTimeline, log_figures, plan_figures
from lightning_protrain.trainer_events import CopyableCallback

PREFIX = "protrain/"
# Number of steps whose median is compared with the prediction, and the relative deviation that is tolerated.
NUM_STEPS, TOLERANCE_OF_STEPS = 20, 0.15
# Bytes that nobody is warned of: PyTorch's allocator rounds each tensor up to 512 bytes, which a plan does not count.
NEGLIGIBLE = 2**20
# Predictions below this number of seconds are not compared: Python takes most of such a step, and is not predicted.
LEAST_SECONDS = 0.02
# Name that a strategy gives to the recorded span of the optimizer step.
OPTIMIZER_STEP = "optimizer step"
_COPIES: tuple[Lane, ...] = ("upload", "swap_in", "download", "swap_out")
# Possible causes if a resource is slower than in the rehearsal.
_CAUSES = {
    "compute": "Other processes may use the device, or it runs at a lower clock.",
    "link": "Other devices or processes may use the link, or host memory is not page-locked.",
    "host": "Other processes may use the cores or the memory of the host.",
    "network": "Other ranks may be slower, or others use the network.",
}
_REHEARSE = 'No rehearsal was made: plan="auto" with rehearse=True plans with measured times.'
_AGAIN = "The next run will rehearse again."


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
        self._steps = StepComparison()
        # Restores the progress bar.
        self._patches = ExitStack()
        self._trained = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy measures no step.
        return {**super().__getstate__(), "_timeline": None, "_steps": StepComparison(), "_patches": ExitStack()}

    def join(self, trainer: Trainer) -> None:
        """Add this callback to the trainer, unless the trainer has a `PlanMonitor` already."""
        if not any(isinstance(callback, PlanMonitor) for callback in _callbacks(trainer)):
            _callbacks(trainer).append(self)

    def detach(self, trainer: Trainer) -> None:
        """Remove this callback from the trainer."""
        self._stop()
        if self in _callbacks(trainer):
            _callbacks(trainer).remove(self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the plan on rank 0."""
        self._trained = False
        self._timeline = StepTimeline() if self._wants_timeline else None
        self._steps = StepComparison(trainer.global_step)
        strategy = trainer.strategy
        if isinstance(strategy, HasPlan) and strategy.plan is not None and trainer.is_global_zero:
            # The strategy's log already has the overlap, the number of threads, the reason for the sharding and FSDP2.
            plan = strategy.plan
            if plan.prediction is not None:
                advice = tuple(it for it in plan.prediction.advice if not it.startswith(("sharding=", "strategy=")))
                plan = replace(plan, prediction=replace(plan.prediction, advice=advice))
            peers = [] if strategy.peers is None else [strategy.peers.describe()]
            get_console().print(plan.explain(strategy.budget, peers))
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
            self._steps.begin(trainer, strategy.plan)

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
        has_stepped = self._steps.time_step(trainer.global_step)
        prediction, measured = strategy.plan.prediction, strategy.measured_peak_bytes
        if self._log and trainer.loggers and _is_written(trainer, pl_module):
            logged = device_bytes(strategy.plan, strategy.counters)
            logged["waited_seconds"] = strategy.counters.waited_seconds
            logged |= {name: float(value) for name, value in strategy.allocator_stats.items()}
            if self._steps.seconds is not None:
                logged["step_seconds"] = self._steps.seconds
            if prediction is not None:
                logged["predicted_peak_bytes"] = float(prediction.device_bytes)
                logged["predicted_step_seconds"] = prediction.step_seconds
            if measured is not None:
                logged["measured_peak_bytes"] = _of_worst_rank(trainer, measured)
            if _run_logs(trainer):
                step = trainer.fit_loop.epoch_loop._batches_that_stepped
                for logger in trainer.loggers:
                    logger.log_metrics({f"{PREFIX}{name}": value for name, value in logged.items()}, step=step)
        if measured is not None and prediction is not None:
            self._steps.warn_of_memory(prediction, measured)
        if has_stepped:
            self._steps.end(trainer, strategy.plan, size_of(batch))

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
        get_metrics = bar.get_metrics

        def with_plan(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
            return {**get_metrics(trainer, pl_module), **self._figures(trainer.strategy)}

        self._patches.callback(patch(bar, "get_metrics", with_plan))

    def _stop(self) -> None:
        """Restore the progress bar, and stop the measurement of a step."""
        self._steps.close()
        self._patches.close()

    def _figures(self, strategy: object) -> dict[str, str]:
        """Return texts for the progress bar: measured figures, with predictions in brackets."""
        if not isinstance(strategy, HasPlan) or strategy.plan is None or strategy.plan.prediction is None:
            return {}
        prediction, measured, shown = strategy.plan.prediction, strategy.measured_peak_bytes, dict[str, str]()
        if (seconds := self._steps.seconds) is not None:
            shown["step"] = f"{short_seconds(seconds)} (predicted: {short_seconds(prediction.step_seconds)})"
        if measured is not None:
            shown["peak"] = f"{short_bytes(measured)} (predicted: {short_bytes(prediction.device_bytes)})"
        return shown


class StepComparison:
    """Compares time and memory of the steps of a fit with the prediction, and says each deviation once.

    If the latest steps are slower than predicted, it measures one step on rank 0, and warns. If the latest steps are
    faster, and their batches are as large as the batch of the plan, it logs that a better plan may exist.

    Args:
        step: Number of steps before the fit.

    Attributes:
        seconds: Time of the last step; None after the first one.
    """

    def __init__(self, step: int = 0) -> None:
        self.seconds: float | None = None
        self._last_step = (step, math.nan)
        self._said: set[str] = set()
        # For each of the latest steps: its time in seconds, and True if its batch was as large as that of the plan.
        self._steps: deque[tuple[float, bool]] = deque(maxlen=NUM_STEPS)
        self._open = ExitStack()
        self._recording: Recording | None = None

    def begin(self, trainer: Trainer, plan: Plan) -> None:
        """Start to measure a step if the latest steps deviate from the prediction; called before each micro-batch."""
        off = self._off(plan)
        if not off or off in self._said or self._recording is not None or not trainer.is_global_zero:
            return
        strategy = trainer.strategy
        device = strategy.device if isinstance(strategy, HasPlan) else None
        index = trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        begins = index % trainer.accumulate_grad_batches == 0
        if device is not None and device.recording is None and begins:
            self._recording = self._open.enter_context(device.recorded())
            self._said.add(off)

    def time_step(self, step: int) -> bool:
        """Return True if an optimizer step has ended; store its time.

        Args:
            step: Number of steps that have ended.
        """
        last, then = self._last_step
        if step == last:
            return False
        now = time.perf_counter()
        self.seconds = None if math.isnan(then) else (now - then) / (step - last)
        self._last_step = (step, now)
        return True

    def warn_of_memory(self, prediction: Prediction, measured: int) -> None:
        """Warn if the peak memory `measured`, in bytes, exceeds the prediction."""
        if "more memory" in self._said or measured <= prediction.device_bytes * (1 + TOLERANCE) + NEGLIGIBLE:
            return
        self._said.add("more memory")
        warnings.warn(
            f"The device holds {format_bytes(measured)} at its peak, but {format_bytes(prediction.device_bytes)} were "
            f"predicted from the batch of the plan: {measured / prediction.device_bytes - 1:.0%} more. Later batches "
            "may be larger. Lower device_memory by the difference, limit the size of batches, or give the data module "
            "a method `largest_batch`.",
            stacklevel=2,
        )

    def end(self, trainer: Trainer, plan: Plan, size: tuple[int, int]) -> None:
        """Compare a step that has ended, and report a measurement.

        Args:
            trainer: Trainer at the end of a micro-batch that ends a step.
            plan: Plan of the run.
            size: Number of samples and of tokens in the micro-batch.
        """
        prediction, strategy = plan.prediction, trainer.strategy
        if prediction is None or not isinstance(strategy, HasPlan) or not trainer.is_global_zero:
            return
        if self.seconds is not None:
            is_full = all(now >= then for now, then in zip(size, (prediction.samples, prediction.tokens), strict=True))
            self._steps.append((self.seconds, is_full))
        request = strategy.session.request
        is_rehearsed = request is not None and request.node.is_rehearsed
        if not is_rehearsed:  # Another rehearsal would measure the same memory.
            self._compare_memory(strategy, plan, prediction)
        if self._recording is None:
            return
        spans = self._recording.spans()
        self.close()
        on_host = prediction.busy.get("host", 0.0) > 0
        took = busy_seconds(spans, isinstance(strategy.device, StreamDevice), on_host)
        seconds = self._median()
        if seconds > prediction.step_seconds:
            advises = plan.does_anything and not is_rehearsed
            warnings.warn(_sentences(seconds, took, prediction, _REHEARSE if advises else None), stacklevel=2)
        else:
            strategy.session.forget_rehearsal()
            rank_zero_info(_sentences(seconds, took, prediction, _better(is_rehearsed)))

    def close(self) -> None:
        """Stop a measurement without a report."""
        self._recording = None
        self._open.close()

    def _median(self) -> float:
        return median(seconds for seconds, _ in self._steps)

    def _off(self, plan: Plan) -> str:
        """Return "slower" or "faster" if the latest steps deviate from the prediction, or an empty string."""
        predicted = plan.prediction.step_seconds if plan.prediction is not None else 0.0
        if len(self._steps) < NUM_STEPS or predicted < LEAST_SECONDS:
            return ""
        off = self._median() / predicted - 1
        if off > TOLERANCE_OF_STEPS:
            return "slower"
        return "faster" if off < -TOLERANCE_OF_STEPS and self._could_be_better(plan) else ""

    def _could_be_better(self, plan: Plan) -> bool:
        """Return True if another plan may be faster when time or memory is below the prediction."""
        return plan.does_anything and len(self._steps) == NUM_STEPS and all(is_full for _, is_full in self._steps)

    def _compare_memory(self, strategy: HasPlan, plan: Plan, prediction: Prediction) -> None:
        """Log once if peak memory is below the prediction."""
        device = strategy.device
        if device is None or "less memory" in self._said or not self._could_be_better(plan):
            return
        held = device.allocator_stats().get("reserved_peak_bytes", device.peak_bytes())
        if held is None or held >= (1 - TOLERANCE_OF_STEPS) * prediction.device_bytes:
            return
        self._said.add("less memory")
        rank_zero_info(
            f"The device holds {short_bytes(held)} at its peak; {short_bytes(prediction.device_bytes)} were predicted: "
            f"{1 - held / prediction.device_bytes:.0%} less. {_better(is_rehearsed=False)}"
        )


def busy_seconds(spans: Sequence[Span], copies_beside: bool, on_host: bool) -> dict[str, float]:
    """Return the time for which each resource works in a step, seconds, by its name in `Prediction.busy`.

    Args:
        spans: Spans that a device has recorded in one step.
        copies_beside: True if copies run in parallel with computation.
        on_host: True if the host steps weights; then the time of the optimizer step counts as the host's.
    """
    idle: tuple[Lane, ...] = ("stall", "network") if copies_beside else ("stall", "network", *_COPIES)
    if on_host:
        spans = [replace(span, lane="host") if span.what == OPTIMIZER_STEP else span for span in spans]
    return {
        "compute": busy(spans, "compute", *idle) - busy(spans, *idle),
        "upload": busy(spans, "upload", "swap_in"),
        "download": busy(spans, "download", "swap_out"),
        "host": busy(spans, "host"),
        "network": busy(spans, "network"),
    }


def _better(is_rehearsed: bool) -> str:
    return f"A better plan may exist. {_AGAIN if is_rehearsed else _REHEARSE}"


def _sentences(seconds: float, took: Mapping[str, float], prediction: Prediction, advice: str | None) -> str:
    """Return the message about steps that deviate from the prediction, with `advice` or a possible cause at its end."""
    off = seconds / prediction.step_seconds - 1
    more = {name: took[name] - prediction.busy.get(name, 0.0) for name in took}
    name = (max if off > 0 else min)(more, key=more.__getitem__)
    resource = "link" if name in ("upload", "download") else name
    told, measured = (short_seconds(seconds.get(name, 0.0)) for seconds in (prediction.busy, took))
    which = f"the {name} of the link" if resource == "link" else resource
    return (
        f"A step takes {short_seconds(seconds)}, the median of {NUM_STEPS}; {short_seconds(prediction.step_seconds)} "
        f"were predicted: {abs(off):.0%} {'more' if off > 0 else 'less'}. Most of the difference is {which}: "
        f"{measured} in a measured step, {told} were predicted. {advice or _CAUSES[resource]}"
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
    return any(result.meta.logger and result.meta.on_step for _, result in results.valid_items())


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
