"""Finds markers in token ids, with array operations only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_protrain.data.chat.markers import Marker

Integers = NDArray[np.int64]
_NONE = -1


@dataclass(frozen=True)
class TokenRows:
    """Concatenated token ids of one or more rows.

    Attributes:
        ids: Token ids, of shape [tokens].
        borders: Position at which each row begins, and the number of tokens, of shape [rows + 1]. No marker crosses a
            border.
    """

    ids: NDArray[Any]
    borders: Integers

    def limits(self, position: Integers) -> Integers:
        """Return the next border after each position; positions must ascend."""
        return np.repeat(self.borders[1:], np.diff(np.searchsorted(position, self.borders)))


@dataclass(frozen=True)
class Matches:
    """Places of the markers of one set, as arrays of shape [matches]; positions ascend strictly.

    Attributes:
        position: Position of the marker's first token.
        stop: One past the position of the marker's last token.
        marker: Index of the marker in the set.
    """

    position: Integers
    stop: Integers
    marker: Integers

    def __getitem__(self, index: slice | NDArray[Any]) -> Matches:
        return Matches(self.position[index], self.stop[index], self.marker[index])


def lay_out(rows: Sequence[ArrayLike]) -> TokenRows:
    """Concatenate the token ids of rows, each of shape [tokens]; at least one row."""
    arrays = [np.asarray(row) for row in rows]
    return TokenRows(np.concatenate(arrays), np.cumsum([0, *map(len, arrays)]))


def without_overlap(position: Integers, stop: Integers) -> slice | Integers:
    """Select disjoint intervals from left to right: drop each interval that begins within the last selected one.

    Args:
        position: Begin of each interval, ascending.
        stop: End of each interval.

    Returns:
        Indices of the selected intervals.
    """
    if not (position[1:] < stop[:-1]).any():
        return slice(None)
    size = position.size
    # `jump` maps each interval to the next one that does not overlap it. Composing `jump` with itself doubles the
    # number of intervals per jump, so the number of rounds is logarithmic.
    jump = np.append(np.searchsorted(position, stop), size)
    selected = np.zeros(size + 1, dtype=bool)
    selected[0] = True
    while True:
        selected[jump[selected]] = True
        if jump[0] == size:
            return np.flatnonzero(selected[:size])
        jump = jump[jump]


class MarkerSearch:
    """Finds the markers of several sets, each of which is matched independently.

    If several markers of a set match at a position, the one with the most ids wins; among those, the one with tails,
    see [Note: Tails] in markers.py, and then the first in the set.

    Args:
        sets: Sets of markers.
    """

    def __init__(self, sets: Sequence[Sequence[Marker]]) -> None:
        # A marker replaces those before it in the search, so the winner is the last one.
        self._ascending = [
            sorted(enumerate(markers), key=lambda entry: (len(entry[1].ids), bool(entry[1].tails), -entry[0]))
            for markers in sets
        ]
        self._firsts = np.array(sorted({marker.ids[0] for markers in sets for marker in markers}), dtype=np.int64)
        self._tails = {marker.tails: np.array(sorted(marker.tails)) for markers in sets for marker in markers}

    def find(self, rows: TokenRows) -> list[Matches]:
        """Return the matches of each set."""
        position = np.flatnonzero(np.isin(rows.ids, self._firsts))
        limit, firsts = rows.limits(position), rows.ids[position]
        matches = []
        for markers in self._ascending:
            stop, index = position.copy(), np.full(position.size, _NONE)
            for number, marker in markers:
                hits = np.flatnonzero(firsts == marker.ids[0])
                hits = hits[position[hits] + len(marker.ids) <= limit[hits]]
                for offset, token in enumerate(marker.ids[1:], start=1):
                    hits = hits[rows.ids[position[hits] + offset] == token]
                end = position[hits] + len(marker.ids)
                if marker.tails:
                    valid = end < limit[hits]
                    valid[valid] = np.isin(rows.ids[end[valid]], self._tails[marker.tails])
                    hits, end = hits[valid], end[valid] + 1
                stop[hits], index[hits] = end, number
            matched = np.flatnonzero(index != _NONE)
            matches.append(Matches(position[matched], stop[matched], index[matched]))
        return matches
