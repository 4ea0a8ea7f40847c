"""Fraction of transfer time that overlaps with computation, from a trace of CUDA activities."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
UPLOAD = "Memcpy HtoD"
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
    """A trace of the steps between `start` and `stop`."""

    def __init__(self) -> None:
        self._profile: profile | None = None

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
        copies, kernels = [], []
        for event in self._profile.events() or ():
            if event.device_type != DeviceType.CUDA or event.is_user_annotation:
                continue
            span = (event.time_range.start, event.time_range.end)
            if event.name.startswith(UPLOAD):
                copies.append(span)
            elif not event.name.startswith(NO_KERNELS):
                kernels.append(span)
        return covered_share(copies, kernels)
