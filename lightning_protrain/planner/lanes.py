"""Spans of time in which the resources of a machine work in one step: predicted by the time model, or measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

# Resources that work at the same time; the network is the one between ranks.
Lane = Literal["compute", "upload", "download", "host", "network"]
LANES: tuple[Lane, ...] = get_args(Lane)


class Work(NamedTuple):
    """Work of one resource.

    Attributes:
        lane: The resource.
        begin: Seconds from the beginning of the step.
        end: Seconds from the beginning of the step.
        what: Kind of work, such as "backward".
        unit: Unit of the model that the work is for; empty if it is for no single unit.
        position: Index of the profile's segment that the work is for; -1: no segment.
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
        origin: Seconds to add to all times.
    """

    def __init__(self, units: Sequence[str]) -> None:
        self.spans: list[Work] = []
        self.origin = 0.0
        self._units = units

    def add(self, lane: Lane, begin: float, end: float, what: str, position: int = -1) -> None:
        """Add a span of work; do nothing if it takes no time.

        Args:
            lane: The resource.
            begin: Seconds from `origin`.
            end: Seconds from `origin`.
            what: Kind of work.
            position: Index of the profile's segment that the work is for; -1: no segment.
        """
        if end > begin:
            unit = "" if position < 0 else self._units[position]
            self.spans.append(Work(lane, self.origin + begin, self.origin + end, what, unit, position))


def rotated(spans: Iterable[Work], begin: float, seconds: float) -> list[Work]:
    """Return the spans of a repeating step, with another time as its beginning.

    Args:
        spans: Spans of a step that begins at 0.
        begin: New beginning of the step, seconds; a span that is under way then is divided in two.
        seconds: Duration of the step.
    """
    shifted = []
    for span in spans:
        for low, high, shift in ((0.0, begin, seconds - begin), (begin, float("inf"), -begin)):
            first, last = max(span.begin, low), min(span.end, high)
            if last > first:
                shifted.append(span._replace(begin=first + shift, end=last + shift))
    return sorted(shifted, key=lambda span: (LANES.index(span.lane), span.begin))


def work_of(spans: Iterable[Work], lane: Lane) -> float:
    """Return the seconds in which a resource works."""
    return sum(span.end - span.begin for span in spans if span.lane == lane)
