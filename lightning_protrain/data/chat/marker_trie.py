"""Finds markers in token ids, with array operations only."""

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
# Number of tokens that are looked up at once; the intermediate arrays of a block fit the CPU cache.
_BLOCK = 1 << 18


@dataclass(frozen=True)
class TokenRow:
    """Concatenated token ids of one or more rows.

    Attributes:
        ids: Token ids, of shape [tokens].
        borders: Positions that no marker may cross, ascending, of shape [pieces + 1]: 0, the begins of rows and
            segments, the begins and ends of padding, and the number of tokens.
        attended: True for tokens that are not padding, of shape [tokens]; None if there is no padding.
    """

    ids: NDArray[Any]
    borders: Integers
    attended: NDArray[np.bool_] | None

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


def lay_out(ids: ArrayLike, attention_mask: ArrayLike | None = None, segments: ArrayLike | None = None) -> TokenRow:
    """Flatten token ids, and find the borders that no marker may cross.

    Args:
        ids: Token ids of shape [tokens] or [rows, tokens].
        attention_mask: 0 for padding, of the shape of `ids`; None means no padding.
        segments: Number of each token's segment, of the shape of `ids`; None means one segment per row.

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
    kept = np.zeros(size + 1, dtype=bool)
    kept[0] = True
    while True:
        kept[jump[kept]] = True
        if jump[0] == size:
            return np.flatnonzero(kept[:size])
        jump = jump[jump]


class MarkerTrie:
    """A trie of several sets of markers, which is searched for all positions at once.

    A table lookup finds the candidates: positions whose token begins a marker. At each depth of the trie, the next
    tokens of all candidates are compared, and failed candidates are dropped. If several markers of a set match at a
    position, the longest match wins, including its tail, see [Note: Tails] in markers.py. Among equally long matches,
    the order is: more ids, then with tails, then first in the set.

    Args:
        sets: Sets of markers, each of which is matched independently.
    """

    def __init__(self, sets: Sequence[Sequence[Marker]]) -> None:
        self.sets = tuple(tuple(markers) for markers in sets)
        every = [marker for markers in self.sets for marker in markers]
        codes = {token: code for code, token in enumerate(sorted({t for marker in every for t in marker.ids}), 1)}
        self._codes = _table(codes, np.uint16)
        self._first = _table({marker.ids[0]: True for marker in every}, np.bool_)
        # Node 0 is the state without a match.
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
        # Row 0 is for markers without tails, after which any token may follow.
        tails = list(dict.fromkeys(marker.tails for marker in every if marker.tails))
        self._tail_rows = [np.array([tails.index(m.tails) + 1 if m.tails else 0 for m in set_]) for set_ in self.sets]
        self._tail_width = max((max(tail) for tail in tails), default=0) + 2
        table = np.zeros((len(tails) + 1, self._tail_width), dtype=bool)
        table[0] = True
        for row, tail in enumerate(tails, 1):
            table[row, sorted(tail)] = True
        self._tails = table.reshape(-1)

    def find(self, row: TokenRow) -> list[Matches]:
        """Return the matches of each set. Matches do not cross borders, and do not include padding."""
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
        """Return the matches among the candidates that end a marker: within borders, and with the required tail.

        Args:
            row: Token ids.
            number: Number of the set.
            marker: Index of the marker that each candidate has completed; negative if it has completed none.
            here: Position after the tokens of each candidate.
            depth: Number of tokens of each candidate.
        """
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
            # A marker at the end of a piece needs no tail, which may have been truncated.
            inside = stop < limit
            tail = row.ids.take(stop, mode="clip").astype(np.int64)
            tail[(tail < 0) | (tail >= self._tail_width)] = self._tail_width - 1
            valid &= self._tails.take(rows * self._tail_width + tail) | ~inside
            stop = stop + (inside & (rows > 0))
        if valid.all():
            return Matches(position, stop, marker)
        return Matches(position, stop, marker)[np.flatnonzero(valid)]

    def _layers_of(self, depth: int, nodes: list[list[int]], size: int) -> Iterator[tuple[int, Integers]]:
        """Yield the number of a set, and for each node the index of the set's marker of `depth` ids that ends there.

        Several markers of a set may end at a node; then a later array takes precedence over an earlier one.
        """
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
    """Add the tokens of a marker to the trie; return the node at which it ends."""
    node = _ROOT
    for code in codes:
        if code not in children[node]:
            children[node][code] = len(children)
            children.append({})
        node = children[node][code]
    return node


def _table(values: dict[int, int], dtype: type[np.generic]) -> NDArray[Any]:
    """Return a lookup table of values by token id; its last entry, 0, is for all larger ids."""
    table = np.zeros(max(values, default=0) + 2, dtype=dtype)
    table[list(values)] = list(values.values())
    return table


def _look_up(table: NDArray[Any], ids: NDArray[Any]) -> NDArray[Any]:
    """Return the table's value for each id; 0 for ids that are not in the table."""
    values: NDArray[Any] = table.take(ids, mode="clip")
    if table[0]:
        values[ids < 0] = 0
    return values


def _latest(parts: Sequence[Matches]) -> Matches:
    """Merge and sort matches; of several matches at a position, the match of the last part wins."""
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
