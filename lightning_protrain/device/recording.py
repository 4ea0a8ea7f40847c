"""Records when the streams of a device work: copies, and where computation waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

# "compute": a part of the step as the compute stream sees it. "stall": the compute stream waits for a copy.
Lane = Literal["compute", "stall", "upload", "download", "swap_out", "swap_in"]


class HasClock(Protocol):
    """A device that can tell when a stream has come to a point."""

    def mark(self, lane: Lane) -> Any:
        """Return a point in time of the stream of a lane."""

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks, once the device has passed both."""

    def synchronize(self) -> None:
        """Block the host until all work that the device has been given has ended."""


@dataclass(frozen=True)
class Span:
    """Work of one stream.

    Attributes:
        lane: Kind of work.
        begin: Seconds from the beginning of the recording.
        end: Seconds from the beginning of the recording.
    """

    lane: Lane
    begin: float
    end: float


class Recording:
    """The work of the streams of a device while it is recorded.

    Args:
        device: Device that works.
    """

    def __init__(self, device: HasClock) -> None:
        self._device = device
        self._origin = device.mark("compute")
        self._marks: list[tuple[Lane, Any, Any]] = []

    @contextmanager
    def span(self, lane: Lane) -> Iterator[None]:
        """Record what the stream of a lane is given in this context."""
        begin = self._device.mark(lane)
        yield
        self._marks.append((lane, begin, self._device.mark(lane)))

    def spans(self) -> list[Span]:
        """Return what has been recorded, after waiting for the device."""
        self._device.synchronize()
        since = self._device.seconds_between
        return [Span(lane, since(self._origin, begin), since(self._origin, end)) for lane, begin, end in self._marks]


def busy(spans: Iterable[Span], *lanes: Lane) -> float:
    """Return the seconds in which any of these lanes works."""
    total, until = 0.0, float("-inf")
    for span in sorted((span for span in spans if span.lane in lanes), key=lambda span: span.begin):
        total += max(span.end - max(span.begin, until), 0.0)
        until = max(until, span.end)
    return total
