"""Finds the turns of conversations in token ids, from the markers of their roles.

A turn begins with a start marker of its role. It extends to the first of: an end marker of its role, the next start
marker of any role, a border. Borders are the ends of rows and of segments, and padding. Tokens between turns belong to
no turn. An end marker may begin where the next start marker begins: then it is both the terminator of the turn and the
beginning of the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_protrain.data.chat.marker_trie import Integers, MarkerTrie, Matches, TokenRow, lay_out, without_overlap
from lightning_protrain.data.chat.markers import Markers, RoleMarkers


@dataclass(frozen=True)
class Spans:
    """Turns in order: arrays of one length with positions in the flattened ids.

    Attributes:
        start: First token of the start marker.
        content: First token of the content.
        end: One past the content.
        stop: One past the terminator; `end` if there is none. May lie after the next `start`.
        role: Index into `Markers.roles`.
        complete: True if an end marker was found, or the role is open-ended and another turn follows in the segment.
    """

    start: Integers
    content: Integers
    end: Integers
    stop: Integers
    role: Integers
    complete: NDArray[np.bool_]


def scan(
    ids: ArrayLike, markers: Markers, attention_mask: ArrayLike | None = None, segments: ArrayLike | None = None
) -> Spans:
    """Find the turns in token ids.

    The longest start marker at a position wins, and a start marker that begins inside another one does not count.

    Args:
        ids: Token ids of shape [tokens] or [rows, tokens]; no turn crosses a row.
        markers: The markers as ids.
        attention_mask: 0 for padding, of the same shape. None means no padding.
        segments: A different value for every packed conversation, of the same shape; no turn crosses a change.

    Raises:
        ValueError: If the ids are not integers, or a shape is wrong.
    """
    return find_spans(lay_out(ids, attention_mask, segments), markers)


def find_spans(row: TokenRow, markers: Markers) -> Spans:
    """Find the turns in ids that are laid out already; see `scan`."""
    tables = _tables(markers)
    starts, *ends = tables.trie.find(row)
    starts = starts[without_overlap(starts.position, starts.stop)]
    role = tables.role_of_start[starts.marker]
    limit = row.limits(starts.position)
    following = limit.copy()
    np.minimum(starts.position[1:], limit[:-1], out=following[:-1])
    end, stop = following.copy(), following.copy()
    complete = tables.open_ended[role] & (following < limit)
    for number, matches in enumerate(ends):
        mine = np.flatnonzero(tables.ends_of_role[role] == number)
        found, at = _next(matches, starts.stop[mine])
        mine, begin = mine[found], matches.position[at]
        closes = np.flatnonzero((begin <= following[mine]) & (begin < limit[mine]))
        mine, at = mine[closes], at[closes]
        end[mine], stop[mine], complete[mine] = begin[closes], matches.stop[at], True
    return Spans(starts.position, starts.stop, end, stop, role, complete)


def terminators(row: TokenRow, markers: Markers, spans: Spans) -> Integers:
    """Return the index of each turn's terminator in the `ends` of its role, or -1 without one."""
    tables = _tables(markers)
    _, *ends = tables.trie.find(row)
    index = np.full(spans.role.size, -1)
    for number, matches in enumerate(ends):
        mine = np.flatnonzero((tables.ends_of_role[spans.role] == number) & (spans.stop > spans.end))
        _, at = _next(matches, spans.end[mine])
        index[mine] = matches.marker[at]
    return index


@dataclass(frozen=True)
class _Tables:
    """Lookup tables that are computed once for a set of markers.

    Attributes:
        trie: Set 0 has the starts of all roles, each further set the ends of one or more roles.
        role_of_start: Role of each start marker.
        ends_of_role: Number of the set of ends of each role; 0 is set 1 of the trie.
        open_ended: True for open-ended roles.
    """

    trie: MarkerTrie
    role_of_start: Integers
    ends_of_role: Integers
    open_ended: NDArray[np.bool_]


@lru_cache(maxsize=64)
def _tables(markers: Markers) -> _Tables:
    roles: Sequence[RoleMarkers] = markers.roles
    # Most roles share their ends.
    ends = list(dict.fromkeys(role.ends for role in roles))
    return _Tables(
        trie=MarkerTrie([[start for role in roles for start in role.starts], *ends]),
        role_of_start=np.repeat(np.arange(len(roles)), [len(role.starts) for role in roles]),
        ends_of_role=np.array([ends.index(role.ends) for role in roles], dtype=np.int64),
        open_ended=np.array([role.open_ended for role in roles], dtype=bool),
    )


def _next(matches: Matches, position: Integers) -> tuple[Integers, Integers]:
    """Find the first match at or after each position; return the positions that have one, and its index."""
    at = np.searchsorted(matches.position, position)
    found = np.flatnonzero(at < matches.position.size)
    return found, at[found]
