"""Traces of training steps on a GPU: what runs when, and the fraction of transfer time behind computation."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lightning_protrain.device.device import StreamDevice
from lightning_protrain.device.recording import Recording
from lightning_protrain.planner.lanes import LANES, Lane, Work, work_of
from lightning_protrain.report.timeline import as_lanes, predicted_lanes, trace
from lightning_protrain.strategy.protrain import ProTrainStrategy

Interval = tuple[float, float]
UPLOAD, DOWNLOAD = "Memcpy HtoD", "Memcpy DtoH"
CLOSE = 20e-6  # Seconds between two kernels that are drawn as one.
NO_KERNELS = ("Memcpy", "Memset")


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals (begin, end) as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def covered_share(copies: Iterable[Interval], kernels: Iterable[Interval]) -> float | None:
    """Return the fraction of the time of `copies` during which a kernel runs, in [0, 1]; None without copies."""
    copying, running = merge(copies), merge(kernels)
    total = sum(end - begin for begin, end in copying)
    covered, first = 0.0, 0
    for begin, end in copying:
        while first < len(running) and running[first][1] <= begin:
            first += 1
        for start, stop in running[first:]:
            if start >= end:
                break
            covered += min(end, stop) - max(begin, start)
    return covered / total if total else None


class TransferProbe:
    """PyTorch's profiler around the steps between `start` and `stop`, for kernels and copies of a CUDA device.

    Attributes:
        kernels: Intervals in which kernels ran, seconds since the first one; filled by `stop`.
        copies: Intervals of copies, by the name that the profiler gives them.
    """

    def __init__(self) -> None:
        self._profile: profile | None = None
        self.kernels: list[Interval] = []
        self.copies: dict[str, list[Interval]] = {}

    def start(self) -> None:
        """Start tracing a CUDA device."""
        torch.cuda.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def stop(self) -> float | None:
        """Stop tracing; return the fraction of upload time that overlaps with kernels, or None without uploads."""
        assert self._profile is not None
        torch.cuda.synchronize()
        self._profile.stop()
        assert self._profile.profiler is not None
        found = self._profile.profiler.kineto_results
        assert found is not None
        # `profile.events()` makes an object with call stacks of each event, which takes minutes for a large model.
        events = [event for event in found.events() if event.device_type() == DeviceType.CUDA]
        origin = min((event.start_ns() for event in events), default=0)
        for event in events:
            begin = (event.start_ns() - origin) / 1e9
            span = (begin, begin + event.duration_ns() / 1e9)
            if event.name().startswith(NO_KERNELS):
                self.copies.setdefault(event.name(), []).append(span)
            elif not event.is_user_annotation():
                self.kernels.append(span)
        return covered_share(self._copies(UPLOAD), self.kernels)

    def _copies(self, kind: str) -> list[Interval]:
        return [span for name, spans in self.copies.items() if name.startswith(kind) for span in spans]

    def lanes(self) -> list[Work]:
        """Return the traced work by lane; kernels and copies that follow each other closely are one piece of work."""
        kinds: dict[Lane, list[Interval]] = {
            "compute": self.kernels,
            "upload": self._copies(UPLOAD),
            "download": self._copies(DOWNLOAD),
        }
        return [
            Work(lane, begin, end - CLOSE, "traced")
            for lane, spans in kinds.items()
            for begin, end in merge((begin, end + CLOSE) for begin, end in spans)
        ]


class DeviceTrace:
    """A trace of steps: what PyTorch's profiler and the strategy's own recording see, beside what was predicted.

    The profiler sees kernels and copies; the recording sees the host's optimizer steps, and what each copy is for.
    """

    def __init__(self) -> None:
        self._probe, self._open = TransferProbe(), ExitStack()
        self._recording: Recording | None = None

    def start(self, strategy: ProTrainStrategy) -> None:
        """Start tracing, between two steps of a fit."""
        assert strategy.device is not None
        self._probe.start()
        torch.zeros(1, device=strategy.root_device)  # The first kernel: the recording begins right after it.
        self._recording = self._open.enter_context(strategy.device.recorded())

    def stop(self, strategy: ProTrainStrategy, steps: int) -> dict[str, Any]:
        """Stop tracing; return the share of hidden uploads, seconds of work of each lane in a step, and the trace.

        Args:
            strategy: The strategy that trains.
            steps: Number of traced steps.
        """
        assert self._recording is not None
        assert strategy.device is not None
        spans = self._recording.spans()
        self._open.close()
        share = self._probe.stop()
        recorded = as_lanes(spans, isinstance(strategy.device, StreamDevice))
        predicted, traced = predicted_lanes(strategy), self._probe.lanes()
        lanes = {
            lane: {
                "predicted": work_of(predicted, lane),
                "recorded": work_of(recorded, lane) / steps,
                "traced": work_of(traced, lane) / steps,
            }
            for lane in LANES
        }
        return {"hidden_share": share, "lanes": lanes, "trace": trace(predicted, recorded, traced)}
