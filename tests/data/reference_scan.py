"""The scanner's rules token by token."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lightning_protrain.data.chat.markers import Marker, Markers

Turn = namedtuple("Turn", "start content end stop role complete")


def match(markers: Sequence[Marker], ids: Sequence[int], at: int, border: int) -> tuple[int, int] | None:
    """Return the end and the index of the longest marker at this position; None if there is none."""
    found = []
    for index, marker in enumerate(markers):
        stop = at + len(marker.ids)
        if stop > border or tuple(ids[at:stop]) != marker.ids:
            continue
        if marker.tails and stop < border:
            if ids[stop] not in marker.tails:
                continue
            stop += 1
        found.append((stop, len(marker.ids), bool(marker.tails), -index))
    return (max(found)[0], -max(found)[3]) if found else None


def pieces(size: int, attended: Sequence[int] | None, segments: Sequence[int] | None) -> Iterator[tuple[int, int]]:
    """Borders of the segments of one row; padding is in none."""
    key = [(not attended or bool(attended[at]), segments[at] if segments else 0) for at in range(size)]
    first = 0
    for at in range(1, size + 1):
        if at == size or key[at] != key[first]:
            if key[first][0]:
                yield first, at
            first = at


def reference_scan(ids: Sequence[int], markers: Markers, attended=None, segments=None) -> list[Turn]:
    """The turns of one row."""
    starts = [(start, role) for role, entry in enumerate(markers.roles) for start in entry.starts]
    turns = []
    for at, border in pieces(len(ids), attended, segments):
        begins = []
        while at < border:
            found = match([start for start, _ in starts], ids, at, border)
            if found:
                begins.append((at, found[0], starts[found[1]][1]))
            at = found[0] if found else at + 1
        for (start, content, role), behind in pairwise([*begins, None]):
            following, entry = behind[0] if behind else border, markers.roles[role]
            places = range(content, min(following + 1, border))
            ends = [(place, found[0]) for place in places if (found := match(entry.ends, ids, place, border))]
            complete = bool(ends or (entry.open_ended and behind))
            turns.append(Turn(start, content, *(ends[0] if ends else (following, following)), role, complete))
    return turns
