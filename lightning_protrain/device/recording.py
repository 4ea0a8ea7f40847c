"""Recording of the work of a device's streams: when they compute, copy and wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

# Kind of work. "compute": work on the compute stream. "stall": the compute stream waits for a copy. "host": the host
# steps the optimizer. "network": the compute stream waits for an all-reduce. The others are copies.
Lane = Literal["compute", "stall", "upload", "download", "swap_out", "swap_in", "host", "network"]


@dataclass(frozen=True)
class Span:
    """An interval in which a stream works.

    Attributes:
        lane: Kind of work.
        begin: Seconds since the start of the recording.
        end: Seconds since the start of the recording.
        what: Details on the kind of work; may be empty.
    """

    lane: Lane
    begin: float
    end: float
    what: str = ""


class Recording:
    """A recording of the work of the streams of a `Device`, from its construction on."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._origin = device.mark("compute")
        self._host_origin = device.host_clock()  # The same moment as `_origin`: the caller has synchronized the device.
        self._marks: list[tuple[Lane, Any, Any, str]] = []

    @contextmanager
    def span(self, lane: Lane, what: str = "") -> Iterator[None]:
        """Record the work that is queued on the stream of a lane within this context."""
        begin = self._mark(lane)
        yield
        self._marks.append((lane, begin, self._mark(lane), what))

    def spans(self) -> list[Span]:
        """Wait for the device and return the recorded intervals."""
        self._device.synchronize()

        def since(lane: Lane, mark: Any) -> float:
            if lane == "host":
                return float(mark - self._host_origin)
            return self._device.seconds_between(self._origin, mark)

        return [Span(lane, since(lane, begin), since(lane, end), what) for lane, begin, end, what in self._marks]

    def _mark(self, lane: Lane) -> Any:
        return self._device.host_clock() if lane == "host" else self._device.mark(lane)


def busy(spans: Iterable[Span], *lanes: Lane) -> float:
    """Return the total time in which at least one of these lanes works, seconds."""
    total, until = 0.0, float("-inf")
    for span in sorted((span for span in spans if span.lane in lanes), key=lambda span: span.begin):
        total += max(span.end - max(span.begin, until), 0.0)
        until = max(until, span.end)
    return total
