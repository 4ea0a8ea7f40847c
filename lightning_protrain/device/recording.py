"""Records when the streams of a device work: copies, and where computation waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

# "compute": a part of the step as the compute stream sees it. "stall": the compute stream waits for a copy. "host": the
# host steps weights. "network": the compute stream waits for sums over ranks.
Lane = Literal["compute", "stall", "upload", "download", "swap_out", "swap_in", "host", "network"]


class HasClock(Protocol):
    """A device that can tell when a stream has come to a point."""

    def mark(self, lane: Lane) -> Any:
        """Return a point in time of the stream of a lane."""

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks, once the device has passed both."""

    def host_clock(self) -> float:
        """Return the time on the thread that asks, seconds."""

    def synchronize(self) -> None:
        """Block the host until all work that the device has been given has ended."""


@dataclass(frozen=True)
class Span:
    """Work of one stream.

    Attributes:
        lane: Kind of work.
        begin: Seconds from the beginning of the recording.
        end: Seconds from the beginning of the recording.
        what: Kind of work, where the lane has several.
    """

    lane: Lane
    begin: float
    end: float
    what: str = ""


class Recording:
    """The work of the streams of a device while it is recorded.

    Args:
        device: Device that works.
    """

    def __init__(self, device: HasClock) -> None:
        self._device = device
        self._origin = device.mark("compute")
        self._host_origin = device.host_clock()  # The device has just been waited for.
        self._marks: list[tuple[Lane, Any, Any, str]] = []

    @contextmanager
    def span(self, lane: Lane, what: str = "") -> Iterator[None]:
        """Record what the stream of a lane is given in this context."""
        begin = self._mark(lane)
        yield
        self._marks.append((lane, begin, self._mark(lane), what))

    def spans(self) -> list[Span]:
        """Return what has been recorded, after waiting for the device."""
        self._device.synchronize()

        def since(lane: Lane, mark: Any) -> float:
            if lane == "host":
                return float(mark - self._host_origin)
            return self._device.seconds_between(self._origin, mark)

        return [Span(lane, since(lane, begin), since(lane, end), what) for lane, begin, end, what in self._marks]

    def _mark(self, lane: Lane) -> Any:
        return self._device.host_clock() if lane == "host" else self._device.mark(lane)


def busy(spans: Iterable[Span], *lanes: Lane) -> float:
    """Return the seconds in which any of these lanes works."""
    total, until = 0.0, float("-inf")
    for span in sorted((span for span in spans if span.lane in lanes), key=lambda span: span.begin):
        total += max(span.end - max(span.begin, until), 0.0)
        until = max(until, span.end)
    return total
