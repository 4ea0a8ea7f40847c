"""Compares the time and memory of steps with the prediction, for `PlanMonitor`."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_protrain.device.device import StreamDevice
from lightning_protrain.device.recording import Lane, Recording, Span, busy
from lightning_protrain.planner.explain import short_bytes, short_seconds
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.prediction import Prediction
from lightning_protrain.report.timeline import HasDevice

# Number of steps whose median is compared with the prediction, and the relative deviation that is tolerated.
NUM_STEPS, TOLERANCE_OF_STEPS = 20, 0.15
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


class SlowSteps:
    """Compares the steps of a fit with the prediction, on rank 0.

    If the latest steps are slower than predicted, it measures one step, and warns once. If the latest steps are faster,
    and their batches are as large as the batch of the plan, it logs once that a better plan may exist.
    """

    def __init__(self) -> None:
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
        device = strategy.device if isinstance(strategy, HasDevice) else None
        index = trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        begins = index % trainer.accumulate_grad_batches == 0
        if device is not None and device.recording is None and begins:
            self._recording = self._open.enter_context(device.recorded())
            self._said.add(off)

    def end(self, trainer: Trainer, plan: Plan, seconds: float | None, size: tuple[int, int]) -> None:
        """Record the time of a step that has ended, and report a measurement.

        Args:
            trainer: Trainer at the end of a micro-batch that ends a step.
            plan: Plan of the run.
            seconds: Time since the end of the previous step; None for the first step.
            size: Number of samples and of tokens in the micro-batch.
        """
        prediction, strategy = plan.prediction, trainer.strategy
        if prediction is None or not isinstance(strategy, HasDevice) or not trainer.is_global_zero:
            return
        if seconds is not None:
            is_full = all(now >= then for now, then in zip(size, (prediction.samples, prediction.tokens), strict=True))
            self._steps.append((seconds, is_full))
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
        found = self._median()
        if found > prediction.step_seconds:
            advises = plan.does_anything and not is_rehearsed
            warnings.warn(_sentences(found, took, prediction, _REHEARSE if advises else None), stacklevel=2)
        else:
            strategy.session.forget_rehearsal()
            rank_zero_info(_sentences(found, took, prediction, _better(is_rehearsed)))

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

    def _compare_memory(self, strategy: HasDevice, plan: Plan, prediction: Prediction) -> None:
        """Log once if peak memory is below the prediction; `PlanMonitor` warns if it is above."""
        device = strategy.device
        if device is None or "memory" in self._said or not self._could_be_better(plan):
            return
        held = device.allocator_stats().get("reserved_peak_bytes", device.peak_bytes())
        if held is None or held >= (1 - TOLERANCE_OF_STEPS) * prediction.device_bytes:
            return
        self._said.add("memory")
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


def slowest(took: Mapping[str, float], predicted: Mapping[str, float]) -> str:
    """Return the name of the resource whose time exceeds the prediction most; both maps are in seconds."""
    return max(took, key=lambda name: took[name] - predicted.get(name, 0.0))


def fastest(took: Mapping[str, float], predicted: Mapping[str, float]) -> str:
    """Return the name of the resource whose time is farthest below the prediction; both maps are in seconds."""
    return min(took, key=lambda name: took[name] - predicted.get(name, 0.0))


def _better(is_rehearsed: bool) -> str:
    return f"A better plan may exist. {_AGAIN if is_rehearsed else _REHEARSE}"


def _sentences(seconds: float, took: Mapping[str, float], prediction: Prediction, advice: str | None) -> str:
    """Return the message about steps that deviate from the prediction.

    Args:
        seconds: Median time of the latest steps.
        took: Time of each resource in the measured step, seconds.
        prediction: Prediction for a step.
        advice: Last sentence; None means a possible cause.
    """
    off = seconds / prediction.step_seconds - 1
    name = slowest(took, prediction.busy) if off > 0 else fastest(took, prediction.busy)
    resource = "link" if name in ("upload", "download") else name
    told, measured = (short_seconds(each.get(name, 0.0)) for each in (prediction.busy, took))
    which = f"the {name} of the link" if resource == "link" else resource
    return (
        f"A step takes {short_seconds(seconds)}, the median of {NUM_STEPS}; {short_seconds(prediction.step_seconds)} "
        f"were predicted: {abs(off):.0%} {'more' if off > 0 else 'less'}. Most of the difference is {which}: "
        f"{measured} in a measured step, {told} were predicted. {advice or _CAUSES[resource]}"
    )
