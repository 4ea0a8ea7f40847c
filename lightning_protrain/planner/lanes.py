"""Spans of time in which the resources of a machine work in one step: predicted by the time model, or measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

# Resources that work beside each other; the network is that between ranks.
Lane = Literal["compute", "upload", "download", "host", "network"]
LANES: tuple[Lane, ...] = get_args(Lane)


class Work(NamedTuple):
    """Work of one resource.

    Attributes:
        lane: The resource.
        begin: Seconds from the beginning of the step.
        end: Seconds from the beginning of the step.
        what: Kind of work, such as "backward".
        unit: Unit of the model that the work is for; empty where it is for none.
        position: Index of the segment of the profile that the work is for; -1: for none.
    """

    lane: Lane
    begin: float
    end: float
    what: str
    unit: str = ""
    position: int = -1


class WorkLog:
    """A list of spans that the time model adds to.

    Args:
        units: Unit at each position of a step.

    Attributes:
        spans: The spans so far.
        origin: Seconds that are added to all times.
    """

    def __init__(self, units: Sequence[str]) -> None:
        self.spans: list[Work] = []
        self.origin = 0.0
        self._units = units

    def add(self, lane: Lane, begin: float, end: float, what: str, position: int = -1) -> None:
        """Add the work for a position; -1: for no particular one. Nothing is added where it takes no time."""
        if end > begin:
            unit = "" if position < 0 else self._units[position]
            self.spans.append(Work(lane, self.origin + begin, self.origin + end, what, unit, position))


def rotated(spans: Iterable[Work], begin: float, seconds: float) -> list[Work]:
    """Return the spans of a repeating step as they are seen from another beginning.

    Args:
        spans: Spans of a step that begins at 0.
        begin: Time at which the step is to begin, seconds. A span that goes on then is divided.
        seconds: Duration of the step.
    """
    found = []
    for span in spans:
        for low, high, shift in ((0.0, begin, seconds - begin), (begin, float("inf"), -begin)):
            first, last = max(span.begin, low), min(span.end, high)
            if last > first:
                found.append(span._replace(begin=first + shift, end=last + shift))
    return sorted(found, key=lambda span: (LANES.index(span.lane), span.begin))


def work_of(spans: Iterable[Work], lane: Lane) -> float:
    """Return the seconds in which a resource works."""
    return sum(span.end - span.begin for span in spans if span.lane == lane)
