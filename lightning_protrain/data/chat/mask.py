"""Computes the loss mask of tokenized conversations from their turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.data.chat.marker_search import (
    Integers,
    MarkerSearch,
    Matches,
    TokenRows,
    lay_out,
    without_overlap,
)
from lightning_protrain.data.chat.markers import ExclusionMarkers, Markers
from lightning_protrain.data.chat.turns import Spans, scan, terminators


@dataclass(frozen=True)
class TokenTurns:
    """The turns of several conversations, called rows.

    Attributes:
        rows: Tokens of all rows.
        spans: The turns of all rows.
        first: Index of each row's first turn; the last entry is the number of turns. Of shape [rows + 1].
        trainable: True for turns whose role is trained, of shape [turns].
        begun: True for trainable turns with content, of shape [turns]. A generation prompt is a turn without content.
    """

    rows: TokenRows
    spans: Spans
    first: Integers
    trainable: Bools
    begun: Bools

    @property
    def ids(self) -> NDArray[np.int32]:
        """Token ids of all rows, of shape [tokens]."""
        return self.rows.ids

    def per_row(self, turns: Bools) -> Integers:
        """Return the number of True values of `turns` in each row, of shape [rows]."""
        until = np.concatenate(([0], np.cumsum(turns)))
        return np.asarray(until[self.first[1:]] - until[self.first[:-1]])

    def last_turns(self) -> Integers:
        """Return the numbers of the turns whose content extends to the end of their row."""
        last = (self.first[1:] - 1)[np.diff(self.first) > 0]
        return last[self.spans.end[last] == self.rows.limits(self.spans.start[last])]

    def of_row(self, row: int) -> slice:
        """Return the slice that selects the turns of one row from arrays of shape [turns]."""
        return slice(int(self.first[row]), int(self.first[row + 1]))

    def begun_in(self, row: int) -> Integers:
        """Return the numbers of a row's `begun` turns."""
        part = self.of_row(row)
        return np.flatnonzero(self.begun[part]) + part.start

    def joined(self, sizes: Mapping[int, Sequence[int]]) -> TokenTurns:
        """Return turns of which those of one message share its number in `Spans.message`.

        Args:
            sizes: Number of `begun` turns of each message, for rows with several turns in a message.
        """
        message = self.spans.message.copy()
        for row, numbers in sizes.items():
            place = self.begun_in(row)
            message[place] = np.repeat(place[np.cumsum(numbers) - 1], numbers)
        return replace(self, spans=replace(self.spans, message=message))


def find_turns(rows: Sequence[NDArray[np.int32]], markers: Markers, options: MaskOptions) -> TokenTurns:
    """Find the turns of one or more tokenized conversations."""
    tokens = lay_out(rows)
    spans = scan(tokens, markers)
    trainable = trained_roles(markers, options)[spans.role]
    begun = trainable & ((spans.end > spans.content) | (spans.stop > spans.end))
    turns = TokenTurns(tokens, spans, np.searchsorted(spans.start, tokens.borders), trainable, begun)
    # A last turn whose content is only a scaffold is a generation prompt.
    last = turns.last_turns()
    last = last[begun[last]]
    if last.size and any(part.kind == "scaffold" for part in markers.exclusions):
        trained = trained_tokens(tokens, spans, markers, MaskOptions(roles_to_train=options.roles))
        until = np.concatenate(([0], np.cumsum(trained)))
        begun[last] &= until[spans.stop[last]] > until[spans.content[last]]
    return turns


@dataclass(frozen=True)
class LossMask:
    """The loss mask of several conversations.

    Attributes:
        trained: True for trained tokens, of shape [tokens].
        weights: Weight of each token in the loss, of shape [tokens]; None means equal weights.
        unended: True for turns with trained content but without an end marker, of shape [turns].
        stopless: True for the `unended` turns that should have a trained end marker, of shape [turns].
    """

    trained: Bools
    weights: NDArray[np.float32] | None
    unended: Bools
    stopless: Bools


def mask_turns(
    turns: TokenTurns, markers: Markers, options: MaskOptions, weights: Sequence[list[float] | None] | None
) -> LossMask:
    """Compute the loss mask of several conversations.

    `weights` has, for each row, the weights of its `begun` turns, or None for weights of 1. None means 1 for all turns.
    """
    spans = turns.spans
    every = None if weights is None else _spread(turns, weights)
    trained = trained_tokens(turns.rows, spans, markers, options, every)
    values = None
    if every is not None and not set(every) <= {0.0, 1.0}:
        values = token_weights(trained, spans, markers, options, every)
    unended = turns.trainable & (spans.stop == spans.end)
    stopless = np.zeros_like(unended)
    if unended.any():
        until = np.concatenate(([0], np.cumsum(trained)))
        unended &= until[spans.end] > until[spans.content]
        stopless = unended & _should_end(turns, markers, options)
    return LossMask(trained, values, unended, stopless)


def unsplittable_ranges(turns: TokenTurns, markers: Markers, options: MaskOptions) -> Integers:
    """Return token ranges that truncation must keep whole, of shape [ranges, 2]: markers, and runs of media tokens."""
    spans = turns.spans
    ranges = [np.stack((spans.start, spans.content), 1), np.stack((spans.end, spans.stop), 1)]
    ranges.append(exclusion_borders(turns.rows, markers, options))
    if markers.media:
        media = np.isin(turns.ids, list(markers.media))
        ranges.append(np.flatnonzero(np.diff(media, prepend=False, append=False)).reshape(-1, 2))
    borders = np.concatenate(ranges)
    return borders[np.argsort(borders[:, 0], kind="stable")]


def _spread(turns: TokenTurns, weights: Sequence[list[float] | None]) -> list[float]:
    """Return the weight of each trainable turn of all rows; `weights` is as in `mask_turns`."""
    spread = np.ones(len(turns.begun))
    for row, row_weights in enumerate(weights):
        if row_weights is not None:
            part = turns.of_row(row)
            spread[part][turns.begun[part]] = row_weights
    return spread[turns.trainable].tolist()


def _should_end(turns: TokenTurns, markers: Markers, options: MaskOptions) -> Bools:
    """Return True for turns whose end marker should be trained, if their role always has one."""
    ends = np.array([role.include_end and not role.open_ended for role in markers.roles], dtype=bool)[turns.spans.role]
    if options.train_on_inputs or options.train_on_eos == "none":
        return np.zeros_like(turns.trainable)
    if options.train_on_eos == "last":
        ends &= last_of_row(turns.rows, turns.spans, turns.trainable)
    return ends


Bools = NDArray[np.bool_]
TrainOnEos = Literal["turn", "all", "last", "none"]
TrainOn = Literal["all", "last_turn"]
ASSISTANT = "assistant"


@dataclass(frozen=True)
class MaskOptions:
    """Options of the loss mask.

    Attributes:
        train_on_inputs: True trains everything but media, the first token of each row and turns of weight 0; the other
            options then have no effect.
        roles_to_train: Roles whose turns are trained; None means the assistant. An empty tuple trains nothing.
        train_on_eos: Turns whose end marker is trained: `turn` for trained turns; `all` for other turns, too, unless
            the marker also begins a turn or belongs to a role with `include_end=False`; `last` for the last turn of a
            trained role in each row, unless it was truncated; or `none`.
        train_on: `all` for every turn of a trained role, or `last_turn` for the last one in each row, with further
            turns of the same message.
        train_thinking: True trains reasoning.

    Raises:
        ValueError: If a value is not allowed.
    """

    train_on_inputs: bool = False
    roles_to_train: tuple[str, ...] | None = None
    train_on_eos: TrainOnEos = "turn"
    train_on: TrainOn = "all"
    train_thinking: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (("train_on_eos", TrainOnEos), ("train_on", TrainOn)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise ValueError(f"{name} must be one of {', '.join(get_args(allowed))}, got {value!r}.")
        for name in ("train_on_inputs", "train_thinking"):
            # The string "false" would count as true.
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        roles: Any = self.roles_to_train
        if roles is None:
            return
        # Refuse a string, which is a sequence of strings, too.
        if not isinstance(roles, tuple | list) or not all(isinstance(role, str) for role in roles):
            raise ValueError(f"roles_to_train must be a list of names of roles, got {roles!r}.")
        object.__setattr__(self, "roles_to_train", tuple(roles))

    def describe(self) -> str:
        """Return all options as one line of text."""
        return (
            f"roles_to_train={list(self.roles)}, train_on_inputs={self.train_on_inputs}, "
            f"train_on_eos={self.train_on_eos}, train_on={self.train_on}, train_thinking={self.train_thinking}"
        )

    @property
    def roles(self) -> tuple[str, ...]:
        """Trained roles, which are `roles_to_train` or the assistant."""
        return (ASSISTANT,) if self.roles_to_train is None else self.roles_to_train


def trained_roles(markers: Markers, options: MaskOptions) -> Bools:
    """Return True for trained roles, of the length of `Markers.roles`.

    Raises:
        ValueError: If the chat format has no markers for one of the trained roles.
    """
    names = [role.role for role in markers.roles]
    unknown = sorted(set(options.roles) - set(names))
    if unknown:
        raise ValueError(
            f"roles_to_train names {', '.join(map(repr, unknown))}, for which the chat family {markers.family!r} has "
            f"no boundary. It has: {', '.join(dict.fromkeys(names))}."
        )
    return np.array([name in options.roles for name in names], dtype=bool)


def token_kinds(ids: NDArray[Any], markers: Markers) -> NDArray[np.int8]:
    """Return 0 for each token of text, 1 for a token of a marker, and 2 for media, of shape [tokens]."""
    kinds = np.zeros(len(ids), dtype=np.int8)
    spans = scan(lay_out([ids]), markers)
    for begin, stop in zip((*spans.start, *spans.end), (*spans.content, *spans.stop), strict=True):
        kinds[begin:stop] = 1
    kinds[np.isin(ids, list(markers.media))] = 2
    return kinds


def trained_tokens(
    rows: TokenRows, spans: Spans, markers: Markers, options: MaskOptions, turn_weights: Sequence[float] | None = None
) -> Bools:
    """Return True for trained tokens, of shape [tokens].

    The content of trained turns is trained, without exclusions and media. Markers are trained as `options` and the
    roles say. The first token of each row is never trained.

    Args:
        rows: Token ids.
        spans: Turns that `scan` returned.
        markers: Markers, as passed to `scan`.
        options: Options of the loss mask.
        turn_weights: Weight of each turn of a trained role; None means 1. A turn of weight 0 and its end marker are
            not trained, and it never counts as the last turn.

    Raises:
        ValueError: If the chat format has no markers for a trained role.
    """
    trainable = trained_roles(markers, options)[spans.role]
    dropped = np.zeros(trainable.size, dtype=bool)
    if turn_weights is not None:
        dropped[trainable] = np.asarray(turn_weights) == 0
    if options.train_on_inputs:
        trained = ~_paint(rows.ids.size, spans.content[dropped], spans.stop[dropped])
    else:
        trained = _trained_turns(rows, spans, markers, options, trainable & ~dropped, dropped)
    if markers.media:
        trained &= ~np.isin(rows.ids, list(markers.media))
    trained[rows.borders[rows.borders < rows.ids.size]] = False
    return trained


def token_weights(
    trained: Bools, spans: Spans, markers: Markers, options: MaskOptions, turn_weights: Sequence[float]
) -> NDArray[np.float32]:
    """Return the weight of each token in the loss, of shape [tokens]; untrained tokens have weight 0.

    `trained` is the result of `trained_tokens`, and further arguments are as passed to it. Trained tokens outside of
    trainable turns have weight 1.
    """
    turns = trained_roles(markers, options)[spans.role]
    values = np.asarray(turn_weights, dtype=np.float32)
    begin, stop = _disjoint(spans.start[turns], spans.stop[turns])
    return trained * np.repeat(*_runs(trained.size, begin, stop, values, np.float32(1)))


def _trained_turns(
    rows: TokenRows, spans: Spans, markers: Markers, options: MaskOptions, trainable: Bools, dropped: Bools
) -> Bools:
    """Return True for the tokens of trained turns, of shape [tokens]; the caller excludes media tokens.

    Of the turns of trained roles, `trainable` are those with a weight above 0, and `dropped` those with weight 0.
    """
    if not options.roles:
        return np.zeros(rows.ids.size, dtype=bool)
    turns = trainable
    if options.train_on == "last_turn":
        last = last_of_row(rows, spans, trainable)
        turns = trainable & np.isin(spans.message, spans.message[last])
    with_start = np.array([role.include_start for role in markers.roles], dtype=bool)[spans.role]
    terminated = np.array([role.include_end for role in markers.roles], dtype=bool)[spans.role]
    others = np.zeros_like(turns)
    if options.train_on_eos == "all":
        others = terminated & ~turns & ~dropped & ~_shared_terminators(rows, spans, markers, options)
    elif options.train_on_eos == "last":
        terminated &= last_of_row(rows, spans, trainable) & spans.complete
    elif options.train_on_eos == "none":
        terminated[:] = False
    # Of an untrained turn, at most the end marker is trained.
    begin = np.where(turns, np.where(with_start, spans.start, spans.content), spans.end)
    stop = np.where(terminated, spans.stop, spans.end)
    chosen = turns | others
    trained = _paint(rows.ids.size, begin[chosen], stop[chosen])
    excluded = _excluded(rows, spans, markers, options, turns)
    if excluded[0].size:
        trained &= ~_paint(rows.ids.size, *excluded)
    return trained


def last_of_row(rows: TokenRows, spans: Spans, turns: Bools) -> Bools:
    """Return True for the last turn of each row among the turns that are True in `turns`, of shape [turns]."""
    index = np.flatnonzero(turns)
    piece = np.searchsorted(rows.borders, spans.start[index], side="right")
    last = np.zeros_like(turns)
    last[index[np.append(piece[1:] != piece[:-1], True)[: index.size]]] = True
    return last


def _shared_terminators(rows: TokenRows, spans: Spans, markers: Markers, options: MaskOptions) -> Bools:
    """Return True for turns whose end marker also begins a turn, or ends a role with `include_end=False`."""
    starts = {start.ids for role in markers.roles for start in role.starts}
    trained = {end.ids for role in markers.roles if role.role in options.roles for end in role.ends}
    closing = {end.ids for role in markers.roles if not role.include_end for end in role.ends}

    def shared(ids: tuple[int, ...]) -> bool:
        begins = any(start[: len(ids)] == ids for start in starts)
        return ids in starts or ids in closing or (begins and ids not in trained)

    table = [[shared(end.ids) for end in role.ends] for role in markers.roles]
    if not any(map(any, table)):
        return np.zeros(spans.role.size, dtype=bool)
    by_role = np.zeros((len(table), max(map(len, table)) + 1), dtype=bool)
    for role, values in enumerate(table):
        by_role[role, : len(values)] = values
    return by_role[spans.role, terminators(rows, markers, spans)]


def _excluded(
    rows: TokenRows, spans: Spans, markers: Markers, options: MaskOptions, turns: Bools
) -> tuple[Integers, Integers]:
    """Return the begins and ends of the excluded parts in the turns that are True in `turns`, in ascending order."""
    active = _active(markers, options)
    begins, stops = [], []
    if active and turns.any():
        matches = _exclusion_search(active).find(rows)
        for number, part in enumerate(active):
            start, end = matches[2 * number : 2 * number + 2]
            begin, stop = _regions(start, end if part.end else None, spans, turns, part.kind)
            begins.append(begin)
            stops.append(stop)
    if not begins:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    begin, stop = np.concatenate(begins), np.concatenate(stops)
    order = np.argsort(begin, kind="stable")
    return begin[order], stop[order]


def exclusion_borders(rows: TokenRows, markers: Markers, options: MaskOptions) -> Integers:
    """Return the begin and end of each marker of an exclusion, of shape [ranges, 2]."""
    matches = _exclusion_search(_active(markers, options)).find(rows)
    return np.concatenate([np.empty((0, 2), dtype=np.int64), *(np.stack((m.position, m.stop), 1) for m in matches)])


def _active(markers: Markers, options: MaskOptions) -> tuple[ExclusionMarkers, ...]:
    return tuple(part for part in markers.exclusions if part.kind != "thinking" or not options.train_thinking)


def _regions(start: Matches, end: Matches | None, spans: Spans, turns: Bools, kind: str) -> tuple[Integers, Integers]:
    """Return the begin and end of each part of turns that an exclusion excludes.

    A part extends from its start marker to the next end marker, or to the end of the turn. Its start marker may be
    within the start marker of the turn, for example if the generation prompt begins the reasoning. If reasoning is a
    separate turn, the part includes the end marker of that turn. Without `end`, the start marker is the whole part.
    Only turns that are True in `turns` are searched.
    """
    turn = np.searchsorted(spans.start, start.position, side="right") - 1
    inside = (turn >= 0) & turns[turn] & (start.stop <= spans.end[turn])
    if kind == "scaffold":
        inside &= start.position == spans.content[turn]
    start, turn = start[inside], turn[inside]
    stop = start.stop
    beyond = np.zeros_like(stop)
    if end is not None:
        stop = spans.end[turn]
        at = np.searchsorted(end.position, start.stop)
        has = np.flatnonzero(at < end.position.size)
        closing = end[at[has]]
        ends_it = (closing.position == stop[has]) & (closing.stop <= spans.stop[turn[has]]) & (kind == "thinking")
        beyond[has[ends_it]] = closing.stop[ends_it]
        inside = closing.stop <= stop[has]
        stop[has[inside]] = closing.stop[inside]
    begin = np.maximum(start.position, spans.content[turn])
    disjoint = without_overlap(start.position, stop)
    return begin[disjoint], np.maximum(stop, beyond)[disjoint]


@lru_cache(maxsize=64)
def _exclusion_search(exclusions: tuple[ExclusionMarkers, ...]) -> MarkerSearch:
    return MarkerSearch([markers for part in exclusions for markers in (part.start, part.end)])


def _disjoint(begin: Integers, stop: Integers) -> tuple[Integers, Integers]:
    """Return disjoint intervals that cover the same tokens; an overlap goes to the first interval. `begin` ascends."""
    reached = np.maximum.accumulate(stop) if stop.size else stop
    return np.minimum(np.append(begin[:1], np.maximum(begin[1:], reached[:-1])), reached), reached


def _paint(size: int, begin: Integers, stop: Integers) -> Bools:
    """Return True for positions within an interval, of shape [size]."""
    begin, stop = _disjoint(begin, stop)
    return np.repeat(*_runs(size, begin, stop, np.ones(begin.size, dtype=bool), np.False_))


def _runs(size: int, begin: Integers, stop: Integers, values: NDArray, other: np.generic) -> tuple[NDArray, Integers]:
    """Return the arguments of `np.repeat` for an array with `values` in disjoint intervals and `other` elsewhere."""
    edges = np.empty(2 * begin.size + 2, dtype=np.int64)
    edges[0], edges[-1], edges[1:-1:2], edges[2:-1:2] = 0, size, begin, stop
    runs = np.full(2 * begin.size + 1, other)
    runs[1::2] = values
    return runs, np.diff(edges)
