"""Finds the turns of conversations in token ids by their markers.

A turn begins with a start marker of its role. A turn ends at an end marker of its role, at the next start marker of any
role, or at the end of the row, whichever comes first. Tokens between an end marker and the next start marker belong to
no turn. A marker may be both the end marker of a turn and the start marker of the next turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.data.chat.marker_search import Integers, MarkerSearch, Matches, TokenRows, without_overlap
from lightning_protrain.data.chat.markers import Markers


@dataclass(frozen=True)
class Spans:
    """The turns in ascending order, as arrays of shape [turns]; positions are indices of the flattened ids.

    Attributes:
        start: Position of the start marker's first token.
        content: Position of the content's first token.
        end: One past the position of the content's last token.
        stop: One past the position of the end marker's last token; equal to `end` if there is no end marker.
        role: Index of the role in `Markers.roles`.
        complete: False if the turn was truncated: it has no end marker, and its role requires one or no turn follows.
        message: Number of the turn's message; `scan` gives each turn a number of its own, see `TokenTurns.joined`.
    """

    start: Integers
    content: Integers
    end: Integers
    stop: Integers
    role: Integers
    complete: NDArray[np.bool_]
    message: Integers


def scan(rows: TokenRows, markers: Markers) -> Spans:
    """Find the turns in token ids.

    Of several start markers at a position, the longest wins. A start marker that begins within another is ignored.
    """
    tables = _tables(markers)
    starts, *ends = tables.search.find(rows)
    starts = starts[without_overlap(starts.position, starts.stop)]
    role = tables.role_of_start[starts.marker]
    limit = rows.limits(starts.position)
    following = limit.copy()
    np.minimum(starts.position[1:], limit[:-1], out=following[:-1])
    end, stop = following.copy(), following.copy()
    complete = tables.open_ended[role] & (following < limit)
    for number, matches in enumerate(ends):
        mine = np.flatnonzero(tables.ends_of_role[role] == number)
        has_end, at = _next(matches, starts.stop[mine])
        mine, begin = mine[has_end], matches.position[at]
        closes = np.flatnonzero((begin <= following[mine]) & (begin < limit[mine]))
        mine, at = mine[closes], at[closes]
        end[mine], stop[mine], complete[mine] = begin[closes], matches.stop[at], True
    return Spans(starts.position, starts.stop, end, stop, role, complete, np.arange(role.size))


def terminators(rows: TokenRows, markers: Markers, spans: Spans) -> Integers:
    """Return the index of each turn's end marker in `RoleMarkers.ends`, -1 if there is none, of shape [turns]."""
    tables = _tables(markers)
    _, *ends = tables.search.find(rows)
    index = np.full(spans.role.size, -1)
    for number, matches in enumerate(ends):
        mine = np.flatnonzero((tables.ends_of_role[spans.role] == number) & (spans.stop > spans.end))
        _, at = _next(matches, spans.end[mine])
        index[mine] = matches.marker[at]
    return index


@dataclass(frozen=True)
class _Tables:
    """Lookup tables for the markers of a chat format.

    Attributes:
        search: Search whose set 0 has the start markers of all roles; each further set has the end markers of a role.
        role_of_start: Index of the role of each start marker in set 0.
        ends_of_role: Number of the set with the end markers of each role, minus 1.
        open_ended: `RoleMarkers.open_ended` of each role.
    """

    search: MarkerSearch
    role_of_start: Integers
    ends_of_role: Integers
    open_ended: NDArray[np.bool_]


@lru_cache(maxsize=64)
def _tables(markers: Markers) -> _Tables:
    roles = markers.roles
    # Roles with equal end markers share a set.
    ends = list(dict.fromkeys(role.ends for role in roles))
    return _Tables(
        search=MarkerSearch([[start for role in roles for start in role.starts], *ends]),
        role_of_start=np.repeat(np.arange(len(roles)), [len(role.starts) for role in roles]),
        ends_of_role=np.array([ends.index(role.ends) for role in roles], dtype=np.int64),
        open_ended=np.array([role.open_ended for role in roles], dtype=bool),
    )


def _next(matches: Matches, position: Integers) -> tuple[Integers, Integers]:
    """Find the first match at or after each position.

    Returns:
        Indices of the positions that have such a match, and the index of the match for each of them.
    """
    at = np.searchsorted(matches.position, position)
    matched = np.flatnonzero(at < matches.position.size)
    return matched, at[matched]
