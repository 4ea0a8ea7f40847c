"""Watches for `PlanMonitor` whether steps are slower than predicted, and names the resource that is."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from lightning.pytorch import Trainer

from lightning_protrain.callbacks.timeline import HasDevice
from lightning_protrain.device.device import StreamDevice
from lightning_protrain.device.recording import Lane, Recording, Span, busy
from lightning_protrain.planner.explain import short_seconds
from lightning_protrain.planner.prediction import Prediction

# Steps whose median is compared, and the part by which it may be longer than predicted.
NUM_STEPS, TOLERANCE_OF_TIME = 20, 0.15
# A step that is predicted to be shorter is mostly Python, which is not predicted.
LEAST_SECONDS = 0.02
# What a strategy calls the span of the optimizer's step.
OPTIMIZER_STEP = "optimizer step"
_COPIES: tuple[Lane, ...] = ("upload", "swap_in", "download", "swap_out")
# What may be wrong with each resource.
_CAUSES = {
    "compute": "Other processes may use the device, or it runs at a lower clock",
    "link": "Other devices or processes may use the link, or host memory is not page-locked",
    "host": "Other processes may use the cores or the memory of the host",
    "network": "Other ranks may be slower, or others use the network",
}


class SlowSteps:
    """Compares steps of a fit with the prediction on rank 0; if they are too slow, measures one and warns once.

    Attributes:
        has_warned: Whether the warning has been given.
    """

    def __init__(self) -> None:
        self.has_warned = False
        self._seconds: deque[float] = deque(maxlen=NUM_STEPS)
        self._open = ExitStack()
        self._recording: Recording | None = None

    def begin(self, trainer: Trainer, prediction: Prediction | None) -> None:
        """Begin to measure a step if the latest ones were too slow; called before each micro-batch."""
        if prediction is None or self.has_warned or self._recording is not None or not trainer.is_global_zero:
            return
        if not self._are_slow(prediction):
            return
        strategy = trainer.strategy
        device = strategy.device if isinstance(strategy, HasDevice) else None
        index = trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        begins = index % trainer.accumulate_grad_batches == 0
        if device is not None and device.recording is None and begins:
            self._recording = self._open.enter_context(device.recorded())

    def end(self, trainer: Trainer, prediction: Prediction | None, seconds: float | None) -> None:
        """Take the time of a step that has ended; warn if it was measured.

        Args:
            trainer: Trainer at the end of a micro-batch that ends a step.
            prediction: Prediction of the plan.
            seconds: Time since the step before; None: there was none.
        """
        if seconds is not None:
            self._seconds.append(seconds)
        if self._recording is None or prediction is None:
            return
        spans = self._recording.spans()
        self.close()
        assert isinstance(trainer.strategy, HasDevice)
        on_host = prediction.busy.get("host", 0.0) > 0
        took = busy_seconds(spans, isinstance(trainer.strategy.device, StreamDevice), on_host)
        self.has_warned = True
        warnings.warn(_slower(median(self._seconds), took, prediction), stacklevel=2)

    def close(self) -> None:
        """End a measurement that an error or the end of the run has cut off."""
        self._recording = None
        self._open.close()

    def _are_slow(self, prediction: Prediction) -> bool:
        predicted = prediction.step_seconds
        if len(self._seconds) < NUM_STEPS or predicted < LEAST_SECONDS:
            return False
        return median(self._seconds) > (1 + TOLERANCE_OF_TIME) * predicted


def busy_seconds(spans: Sequence[Span], copies_beside: bool, on_host: bool) -> dict[str, float]:
    """Return the seconds in which each resource works, by its name in `Prediction.busy`.

    Args:
        spans: What a device has recorded of one step.
        copies_beside: True if copies run beside computation; else it stands still meanwhile.
        on_host: True if the host steps weights: then the device does next to nothing in the optimizer's step.
    """
    stands: tuple[Lane, ...] = ("stall", "network") if copies_beside else ("stall", "network", *_COPIES)
    if on_host:
        spans = [replace(span, lane="host") if span.what == OPTIMIZER_STEP else span for span in spans]
    return {
        "compute": busy(spans, "compute", *stands) - busy(spans, *stands),
        "upload": busy(spans, "upload", "swap_in"),
        "download": busy(spans, "download", "swap_out"),
        "host": busy(spans, "host"),
        "network": busy(spans, "network"),
    }


def slowest(took: Mapping[str, float], predicted: Mapping[str, float]) -> str:
    """Return the resource that takes most longer than predicted, by its name in both maps."""
    return max(took, key=lambda name: took[name] - predicted.get(name, 0.0))


def _slower(seconds: float, took: Mapping[str, float], prediction: Prediction) -> str:
    name = slowest(took, prediction.busy)
    resource = "link" if name in ("upload", "download") else name
    told, measured = (short_seconds(each.get(name, 0.0)) for each in (prediction.busy, took))
    which = f"the {name} of the link" if resource == "link" else resource
    return (
        f"A step takes {short_seconds(seconds)}, the median of {NUM_STEPS}; {short_seconds(prediction.step_seconds)} "
        f"were predicted: {seconds / prediction.step_seconds - 1:.0%} more. Most of it is {which}: {measured} in a "
        f"measured step, {told} were predicted. {_CAUSES[resource]}. rehearse=True plans with what is measured."
    )
