"""The scanner's rules token by token."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import accumulate, pairwise

from lightning_protrain.data.chat.markers import Marker, Markers

Turn = namedtuple("Turn", "start content end stop role complete")


def match(markers: Sequence[Marker], ids: Sequence[int], at: int, border: int) -> tuple[int, int] | None:
    """Return the end and the index of the longest marker at this position; None if there is none."""
    found = []
    for index, marker in enumerate(markers):
        stop = at + len(marker.ids)
        if stop > border or tuple(ids[at:stop]) != marker.ids:
            continue
        if marker.tails:
            if stop == border or ids[stop] not in marker.tails:
                continue
            stop += 1
        found.append((stop, len(marker.ids), bool(marker.tails), -index))
    return (max(found)[0], -max(found)[3]) if found else None


def borders(rows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Begin and end of each row in the concatenated rows."""
    stops = list(accumulate(map(len, rows)))
    return list(zip([0, *stops], stops, strict=False))


def reference_scan(rows: Sequence[Sequence[int]], markers: Markers) -> list[Turn]:
    """The turns of concatenated rows."""
    ids = [token for row in rows for token in row]
    starts = [(start, role) for role, entry in enumerate(markers.roles) for start in entry.starts]
    turns = []
    for at, border in borders(rows):
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
