"""Finds markers in token ids: all markers of all sets at once, without a Python operation per token or match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_protrain.data.chat.markers import Marker

Integers = NDArray[np.int64]
_DEAD, _ROOT = 0, 1
_NONE = -1
# Number of tokens that are looked up at once, so that the result stays in the cache.
_BLOCK = 1 << 18


@dataclass(frozen=True)
class TokenRow:
    """Concatenated token ids, in pieces that no match may cross.

    Attributes:
        ids: [tokens].
        borders: [pieces + 1], ascending, from 0 to the number of tokens: beginnings of rows and segments, and positions
            at which padding begins or ends.
        attended: True for tokens that are not padding, [tokens]; None if there is no padding.
    """

    ids: NDArray[Any]
    borders: Integers
    attended: NDArray[np.bool_] | None

    def limits(self, position: Integers) -> Integers:
        """Return the border after each of ascending positions."""
        return np.repeat(self.borders[1:], np.diff(np.searchsorted(position, self.borders)))


@dataclass(frozen=True)
class Matches:
    """The matches of one set of markers: arrays of one length, ordered by position, at most one match per position.

    Attributes:
        position: First token of the marker.
        stop: One past its last token.
        marker: Index of the marker in its set.
    """

    position: Integers
    stop: Integers
    marker: Integers

    def __getitem__(self, index: slice | NDArray[Any]) -> Matches:
        return Matches(self.position[index], self.stop[index], self.marker[index])


def lay_out(ids: ArrayLike, attention_mask: ArrayLike | None = None, segments: ArrayLike | None = None) -> TokenRow:
    """Flatten ids and find the borders.

    Args:
        ids: Integers of shape [tokens] or [rows, tokens].
        attention_mask: 0 for padding, of the same shape.
        segments: Changes where another segment begins, of the same shape.

    Raises:
        ValueError: If the ids are not integers, or a shape is wrong.
    """
    array = np.asarray(ids)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise ValueError(f"`ids` must be integers of shape [T] or [B, T], got {array.dtype} of shape {array.shape}.")
    flat = np.ascontiguousarray(array).reshape(-1)
    length = max(array.shape[-1], 1)
    borders = np.arange(0, flat.size + 1, length)
    changes, attended = [], None
    if segments is not None:
        changes.append(_changes(_same_shape("segments", segments, array).reshape(-1)))
    if attention_mask is not None:
        attended = _same_shape("attention_mask", attention_mask, array).reshape(-1) != 0
        changes.append(_changes(attended))
    return TokenRow(flat, np.unique(np.concatenate([borders, *changes])) if changes else borders, attended)


def without_overlap(position: Integers, stop: Integers) -> slice | Integers:
    """Keep intervals from left to right, dropping each one that begins inside the last one kept.

    Args:
        position: Beginnings, ascending.
        stop: Ends, each after its beginning.

    Returns:
        An index into the intervals.
    """
    if not (position[1:] < stop[:-1]).any():
        return slice(None)
    size = position.size
    # Jump from every interval to the next one that may be kept; jumps double, so long chains take few rounds.
    jump = np.append(np.searchsorted(position, stop), size)
    kept = np.zeros(size + 1, dtype=bool)
    kept[0] = True
    while True:
        kept[jump[kept]] = True
        if jump[0] == size:
            return np.flatnonzero(kept[:size])
        jump = jump[jump]


class MarkerTrie:
    """Sets of markers as one trie that is walked from all candidates at the same time.

    A candidate is a position whose id begins some marker; one lookup per token finds all candidates. At each depth of
    the trie, the next ids of all candidates are read at once, and those without a match are dropped. In each set, the
    longest match at a position wins, counting its tail. Of equally long matches, the one with more ids wins, then the
    one with tails, then the one that is named first.

    Args:
        sets: The markers; every set is matched on its own.
    """

    def __init__(self, sets: Sequence[Sequence[Marker]]) -> None:
        self.sets = tuple(tuple(markers) for markers in sets)
        every = [marker for markers in self.sets for marker in markers]
        codes = {token: code for code, token in enumerate(sorted({t for marker in every for t in marker.ids}), 1)}
        self._codes = _table(codes, np.uint16)
        self._first = _table({marker.ids[0]: True for marker in every}, np.bool_)
        # Node 0 means that nothing matches any more.
        children: list[dict[int, int]] = [{}, {}]
        nodes = [[_insert(children, [codes[token] for token in marker.ids]) for marker in set_] for set_ in self.sets]
        self._width = len(codes) + 1
        self._next = np.full(len(children) * self._width, _DEAD, dtype=np.intp)
        for node, edges in enumerate(children):
            for code, child in edges.items():
                self._next[node * self._width + code] = child
        self._grows = np.array([bool(edges) for edges in children])
        deepest = max((len(marker.ids) for marker in every), default=0)
        self._layers = [list(self._layers_of(depth, nodes, len(children))) for depth in range(1, deepest + 1)]
        # Row 0 is for markers without tails: any token may follow.
        tails = list(dict.fromkeys(marker.tails for marker in every if marker.tails))
        self._tail_rows = [np.array([tails.index(m.tails) + 1 if m.tails else 0 for m in set_]) for set_ in self.sets]
        self._tail_width = max((max(tail) for tail in tails), default=0) + 2
        table = np.zeros((len(tails) + 1, self._tail_width), dtype=bool)
        table[0] = True
        for row, tail in enumerate(tails, 1):
            table[row, sorted(tail)] = True
        self._tails = table.reshape(-1)

    def find(self, row: TokenRow) -> list[Matches]:
        """Return the matches of every set. No match crosses a border or covers padding."""
        blocks = range(0, row.ids.size, _BLOCK)
        candidates = [np.flatnonzero(_look_up(self._first, row.ids[at : at + _BLOCK])) + at for at in blocks]
        here = candidates[0] if len(candidates) == 1 else np.concatenate([np.empty(0, dtype=np.int64), *candidates])
        node = np.full(here.size, _ROOT)
        found: list[list[Matches]] = [[] for _ in self.sets]
        for depth, layers in enumerate(self._layers, 1):
            node = self._next.take(node * self._width + _look_up(self._codes, row.ids.take(here, mode="clip")))
            here = here + 1
            for number, table in layers:
                found[number].append(self._hits(row, number, table.take(node), here, depth))
            alive = np.flatnonzero(self._grows.take(node))
            node, here = node[alive], here[alive]
        return [_latest(parts) for parts in found]

    def _hits(self, row: TokenRow, number: int, marker: Integers, here: Integers, depth: int) -> Matches:
        """Return the candidates that are a complete marker within borders and have the required tail."""
        hits = np.flatnonzero(marker >= 0)
        marker, stop = marker[hits], here[hits]
        position = stop - depth
        limit = row.limits(position)
        valid = stop <= limit
        if row.attended is not None:
            valid &= row.attended[position]
        rows = self._tail_rows[number]
        if rows.any():
            rows = rows[marker]
            # The tail of a marker at the very end was cut off.
            inside = stop < limit
            tail = row.ids.take(stop, mode="clip").astype(np.int64)
            tail[(tail < 0) | (tail >= self._tail_width)] = self._tail_width - 1
            valid &= self._tails.take(rows * self._tail_width + tail) | ~inside
            stop = stop + (inside & (rows > 0))
        if valid.all():
            return Matches(position, stop, marker)
        return Matches(position, stop, marker)[np.flatnonzero(valid)]

    def _layers_of(self, depth: int, nodes: list[list[int]], size: int) -> Iterator[tuple[int, Integers]]:
        """Yield, for markers of `depth` ids, their set and the marker of each node. Later ones take precedence."""
        for number, markers in enumerate(self.sets):
            order = sorted(range(len(markers)), key=lambda at: (bool(self.sets[number][at].tails), -at))
            tables: list[Integers] = []
            used: dict[int, int] = {}
            for at in order:
                if len(markers[at].ids) != depth:
                    continue
                node = nodes[number][at]
                layer = used[node] = used.get(node, -1) + 1
                if layer == len(tables):
                    tables.append(np.full(size, _NONE))
                tables[layer][node] = at
            yield from ((number, table) for table in tables)


def _insert(children: list[dict[int, int]], codes: Sequence[int]) -> int:
    """Add a marker to the trie and return its last node."""
    node = _ROOT
    for code in codes:
        if code not in children[node]:
            children[node][code] = len(children)
            children.append({})
        node = children[node][code]
    return node


def _table(values: dict[int, int], dtype: type[np.generic]) -> NDArray[Any]:
    """Return an array with the value of each id; the last entry is for all larger ids."""
    table = np.zeros(max(values, default=0) + 2, dtype=dtype)
    table[list(values)] = list(values.values())
    return table


def _look_up(table: NDArray[Any], ids: NDArray[Any]) -> NDArray[Any]:
    """Return the values of ids, 0 for ids that are not in the table."""
    values: NDArray[Any] = table.take(ids, mode="clip")
    if table[0]:
        values[ids < 0] = 0
    return values


def _latest(parts: Sequence[Matches]) -> Matches:
    """Merge matches in order of position; at each position the match of the last part wins."""
    if len(parts) == 1:
        return parts[0]
    nothing = np.empty(0, dtype=np.int64)
    columns = zip(*[(part.position, part.stop, part.marker) for part in parts], strict=True)
    every = Matches(*map(np.concatenate, columns)) if parts else Matches(nothing, nothing, nothing)
    order = np.argsort(every.position, kind="stable")
    position = every.position[order]
    return every[order[np.append(position[1:] != position[:-1], True)[: order.size]]]


def _changes(values: NDArray[Any]) -> Integers:
    return np.flatnonzero(values[1:] != values[:-1]) + 1


def _same_shape(name: str, values: ArrayLike, ids: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(values)
    if array.shape != ids.shape:
        raise ValueError(f"{name} must have the shape of ids, {ids.shape}, got {array.shape}.")
    return array
