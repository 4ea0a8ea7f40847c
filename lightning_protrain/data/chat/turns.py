"""Finds the turns of conversations in token ids, from the markers of their roles.

[Note: Turns by markers] A turn begins with a start marker of its role. It goes to the first of: an end marker of its
role, the next start marker of any role, a border. Borders are the ends of rows and of segments, and padding. What
stands between turns belongs to nobody. An end marker may begin where the next start marker begins: then it is the
terminator of the turn, and the begin of the next one.
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
    """Turns in order: arrays of one length, positions in the flattened ids, see [Note: Turns by markers].

    Attributes:
        start: First token of the start marker.
        content: First token of the content.
        end: One past the content.
        stop: One past the terminator; `end` where there is none. May lie behind the next `start`.
        role: Index into `Markers.roles`.
        complete: Whether an end marker was found, or the role is open-ended and another turn follows in the segment.
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
    """Finds the turns.

    Of start markers the longest at a position wins, and one that begins inside another is none.

    Args:
        ids: Token ids of shape [tokens] or [rows, tokens]; no turn crosses a row.
        markers: The markers as ids.
        attention_mask: 0 where there is padding, the same shape. Padding is known from this alone.
        segments: Another value for every packed conversation, the same shape; no turn crosses a change.

    Raises:
        ValueError: The ids are no integers, or a shape is wrong.
    """
    return find_spans(lay_out(ids, attention_mask, segments), markers)


def find_spans(row: TokenRow, markers: Markers) -> Spans:
    """As `scan`, for ids that are laid out."""
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
    """By turn, the index of its terminator in the `ends` of its role; -1 where there is none."""
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
    """What is worked out once for a set of markers.

    Attributes:
        trie: Set 0 has the starts of all roles, each further one the ends of one or more roles.
        role_of_start: By start marker, its role.
        ends_of_role: By role, the number of its ends: 0 is set 1 of the trie.
        open_ended: By role.
    """

    trie: MarkerTrie
    role_of_start: Integers
    ends_of_role: Integers
    open_ended: NDArray[np.bool_]


@lru_cache(maxsize=64)
def _tables(markers: Markers) -> _Tables:
    roles: Sequence[RoleMarkers] = markers.roles
    # Roles mostly share their ends.
    ends = list(dict.fromkeys(role.ends for role in roles))
    return _Tables(
        trie=MarkerTrie([[start for role in roles for start in role.starts], *ends]),
        role_of_start=np.repeat(np.arange(len(roles)), [len(role.starts) for role in roles]),
        ends_of_role=np.array([ends.index(role.ends) for role in roles], dtype=np.int64),
        open_ended=np.array([role.open_ended for role in roles], dtype=bool),
    )


def _next(matches: Matches, position: Integers) -> tuple[Integers, Integers]:
    """The first match at or behind each position: which positions have one, and the index of it."""
    at = np.searchsorted(matches.position, position)
    found = np.flatnonzero(at < matches.position.size)
    return found, at[found]
