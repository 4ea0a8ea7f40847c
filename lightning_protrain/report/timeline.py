"""Draws a measured step beside the predicted one, and figures of the plan, for `PlanMonitor`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_protrain.device.device import Device, StreamDevice, TransferCounters
from lightning_protrain.device.recording import Recording, Span
from lightning_protrain.device.topology import PeerAccess
from lightning_protrain.planner.explain import short_seconds
from lightning_protrain.planner.lanes import LANES, Lane, Work, rotated, work_of
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.plots import new_figure, plot_lanes
from lightning_protrain.planner.step_time import lanes
from lightning_protrain.report.svg import document, draw_lanes, table

# Number of the step that is measured, from 0. Step 0 records the order of blocks, and step 1 is the first to prefetch.
STEP = 2
PAGE, TRACE = "step-timeline.html", "step-trace.json"
_LANE_OF: Mapping[str, tuple[Lane, str]] = {
    "compute": ("compute", ""),
    "upload": ("upload", "weights"),
    "swap_in": ("upload", "activations back"),
    "download": ("download", "gradients"),
    "swap_out": ("download", "activations out"),
    "host": ("host", ""),
    "network": ("network", ""),
}
MICROSECOND = 1e-6
# Exceptions of a logger that cannot log an image: its disk or server fails, or a package is missing.
_NO_PICTURE = (OSError, ValueError, TypeError, RuntimeError, ImportError)
# Maximum ratio of the times of two steps that are drawn on one scale.
MOST_APART = 4


@runtime_checkable
class HasPlan(Protocol):
    """The attributes of a strategy that `PlanMonitor` and `StepTimeline` read: those of `ProTrainStrategy`."""

    plan: Plan | None
    budget: int | None
    counters: TransferCounters
    measured_peak_bytes: int | None
    allocator_stats: Mapping[str, int]
    peers: PeerAccess | None
    device: Device | None
    session: Any


class StepTimeline:
    """Measures one step of a fit on rank 0, and writes it to files beside the predicted step."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._open = ExitStack()
        self._recording: Recording | None = None

    def begin(self, trainer: Trainer) -> None:
        """Start to measure if this is step number `STEP`; called before each micro-batch."""
        done = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._first = done if self._first is None else self._first
        if self._recording is not None or done != self._first + STEP or not trainer.is_global_zero:
            return
        strategy = trainer.strategy
        if isinstance(strategy, HasPlan) and strategy.device is not None:
            self._recording = self._open.enter_context(strategy.device.recorded())

    def end(self, trainer: Trainer) -> None:
        """Write the files if the measured step has ended; called after each micro-batch."""
        if self._recording is None or trainer.fit_loop._should_accumulate():
            return
        assert isinstance(trainer.strategy, HasPlan)
        spans, self._recording = self._recording.spans(), None
        self._open.close()
        measured = as_lanes(spans, isinstance(trainer.strategy.device, StreamDevice))
        predicted = predicted_lanes(trainer.strategy)
        folder = Path(trainer.default_root_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / PAGE).write_text(page(predicted, measured), encoding="utf-8")
            (folder / TRACE).write_text(json.dumps(trace(predicted, measured)), encoding="utf-8")
        except OSError as error:
            rank_zero_warn(f"The measured step cannot be written: {error}. Training continues.")
        else:
            rank_zero_info(f"One step was measured: {folder / PAGE} shows it, ui.perfetto.dev opens {folder / TRACE}.")
        log_figures(trainer.loggers, {"measured_step": lambda ax: plot_lanes(measured, _seconds(measured), ax)}, STEP)

    def close(self) -> None:
        """Stop a measurement without writing files."""
        self._recording = None
        self._open.close()


def predicted_lanes(strategy: HasPlan) -> list[Work]:
    """Return the predicted work of a step; empty if no step was profiled."""
    request, plan = strategy.session.request, strategy.plan
    if request is None or plan is None or request.workload.profile is None or request.budget() is None:
        return []
    return lanes(request.here(), plan)


def as_lanes(spans: Sequence[Span], copies_beside: bool) -> list[Work]:
    """Convert recorded spans into work on lanes; stalls are cut out of computation.

    Args:
        spans: Spans that a device has recorded in one step.
        copies_beside: True if copies run in parallel with computation; otherwise copies are stalls.
    """
    works = ("compute", "host") if not copies_beside else tuple(set(_LANE_OF) - {"network"})
    idle = [span for span in spans if span.lane not in works]
    found = []
    for span in spans:
        if span.lane not in _LANE_OF:
            continue
        lane, what = _LANE_OF[span.lane]
        parts = _without(span.begin, span.end, idle) if lane == "compute" else [(span.begin, span.end)]
        found += [Work(lane, begin, end, span.what or what) for begin, end in parts]
    begun = min((work.begin for work in found), default=0.0)
    return _apart(rotated(found, begun, begun))


def _without(begin: float, end: float, holes: Sequence[Span]) -> Iterator[tuple[float, float]]:
    for hole in sorted(holes, key=lambda hole: hole.begin):
        if hole.end > begin and hole.begin < end:
            if hole.begin > begin:
                yield begin, hole.begin
            begin = max(begin, hole.end)
    if end > begin:
        yield begin, end


def _apart(works: Sequence[Work]) -> list[Work]:
    """Remove overlaps within each lane: the time of an overlap counts for the work that begins first."""
    apart: list[Work] = []
    for work in works:
        before = apart[-1] if apart and apart[-1].lane == work.lane else None
        if before is not None and work.begin < before.end:
            work = work._replace(begin=before.end)
        if work.end > work.begin:
            apart.append(work)
    return apart


def page(predicted: Sequence[Work], measured: Sequence[Work]) -> str:
    """Return an HTML page that draws both steps, and compares the seconds of each resource."""
    lengths = [_seconds(works) for works in (predicted, measured) if works] or [0.0]
    together = max(lengths) <= MOST_APART * min(lengths)
    parts = [] if together else ['<p class="quiet">Each step has a scale of its own.</p>']
    for title, works in (("Predicted", predicted), ("Measured", measured)):
        if works:
            duration = f'<p class="quiet">{short_seconds(_seconds(works))}</p>'
            scale = max(lengths) if together else _seconds(works)
            parts.append(f"<h3>{title}</h3>{duration}{draw_lanes(works, scale)}")
    rows = [("a step", *map(short_seconds, (_seconds(predicted), _seconds(measured))))]
    rows += [
        (lane, *(short_seconds(work_of(works, lane)) for works in (predicted, measured)))
        for lane in LANES
        if any(work.lane == lane for work in (*predicted, *measured))
    ]
    parts.append(table(("seconds of work", "predicted", "measured"), rows))
    return document("A step in time", "\n".join(parts))


def trace(predicted: Sequence[Work], measured: Sequence[Work], traced: Sequence[Work] = ()) -> dict[str, Any]:
    """Return steps in Chrome's trace event format: a process for each argument, and a thread for each resource.

    Args:
        predicted: Predicted work of a step.
        measured: Work that the device has recorded.
        traced: Work that a profiler has seen.
    """
    events: list[dict[str, Any]] = []
    processes = (("predicted", predicted), ("measured", measured), ("profiler", traced))
    for process, (name, works) in enumerate(processes, 1):
        if not works:
            continue
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        for thread, lane in enumerate(LANES, 1):
            ids = {"pid": process, "tid": thread}
            events.append({"ph": "M", **ids, "name": "thread_name", "args": {"name": lane}})
            events += [
                {
                    "ph": "X",
                    **ids,
                    "name": work.what,
                    "cat": lane,
                    "ts": work.begin / MICROSECOND,
                    "dur": (work.end - work.begin) / MICROSECOND,
                    "args": {"unit": work.unit} if work.unit else {},
                }
                for work in works
                if work.lane == lane
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _seconds(works: Sequence[Work]) -> float:
    return max((work.end for work in works), default=0.0)


def plan_figures(plan: Plan) -> dict[str, Callable[[Any], object]]:
    """Return functions that draw the figures of a plan on given axes, by name of the figure."""
    figures: dict[str, Callable[[Any], object]] = {"plan": plan.plot}
    if plan.prediction is not None:
        figures["prediction"] = plan.prediction.plot
    return figures


def log_figures(loggers: Sequence[Logger], figures: Mapping[str, Callable[[Any], object]], step: int = 0) -> None:
    """Log figures as images to TensorBoard and W&B, if matplotlib is installed.

    Args:
        loggers: Loggers of the trainer.
        figures: Functions that draw on given axes, by name of the figure.
        step: Number of the step for the loggers.
    """
    loggers = [logger for logger in loggers if isinstance(logger, (TensorBoardLogger, WandbLogger))]
    if not loggers or find_spec("matplotlib") is None:
        return
    try:
        for name, draw in figures.items():
            image = _image(draw)
            for logger in loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_image(f"protrain/{name}", image, step, dataformats="HWC")
                elif isinstance(logger, WandbLogger):
                    logger.log_image(f"protrain/{name}", [image])
    except _NO_PICTURE as error:
        rank_zero_warn(f"Figures of the plan are not logged: {type(error).__name__}: {error}. Training continues.")


def _image(draw: Callable[[Any], object]) -> np.ndarray:
    """Return a figure as RGB pixels, uint8 of shape [height, width, 3]."""
    figure, ax = new_figure((9, 3.6))
    draw(ax)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()
