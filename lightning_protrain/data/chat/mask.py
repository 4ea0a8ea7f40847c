"""Decides which tokens are trained, from the turns that were found in a batch of tokenized conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_protrain.data.chat.marker_trie import Integers, MarkerTrie, Matches, TokenRow, lay_out, without_overlap
from lightning_protrain.data.chat.markers import ExclusionMarkers, Markers
from lightning_protrain.data.chat.turns import Spans, find_spans, terminators


@dataclass(frozen=True)
class TokenTurns:
    """Turns of several rows.

    Attributes:
        row: Tokens of all rows, which no turn crosses.
        borders: Beginnings of the rows, and the end of the last one: [rows + 1].
        spans: The turns.
        first: First turn of each row, and the number of turns: [rows + 1].
        trainable: True for turns whose role is trained.
        begun: True for trainable turns with content: an opened turn for the model to continue does not count.
    """

    row: TokenRow
    borders: Integers
    spans: Spans
    first: Integers
    trainable: Bools
    begun: Bools

    @property
    def ids(self) -> NDArray[np.int32]:
        """Token ids, [tokens]."""
        return self.row.ids

    @property
    def num_begun(self) -> Integers:
        """Number of begun turns in each row."""
        return self.per_row(self.begun)

    def per_row(self, turns: Bools) -> Integers:
        """Return the number of each row's turns that are set in `turns`."""
        until = np.concatenate(([0], np.cumsum(turns)))
        return np.asarray(until[self.first[1:]] - until[self.first[:-1]])

    def last_turns(self) -> Integers:
        """Return the turns that end with their row."""
        last = self.first[1:] - 1
        ends = self.spans.end[last] == self.borders[1:] if len(self.spans.end) else np.zeros(len(last), dtype=bool)
        return last[ends & (last >= self.first[:-1])]

    def of_row(self, row: int) -> slice:
        """Return the slice of a row's turns."""
        return slice(int(self.first[row]), int(self.first[row + 1]))


def find_turns(rows: Sequence[NDArray[np.int32]], markers: Markers, options: MaskOptions) -> TokenTurns:
    """Scan tokenized conversations.

    Args:
        rows: Token ids of the rows, each [length]; at least one row.
        markers: Markers at which turns begin and end.
        options: Options with the trained roles.
    """
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    borders = np.concatenate(([0], np.cumsum(sizes)))
    row = TokenRow(np.concatenate(rows), borders[np.append(True, sizes > 0)], None)
    spans = find_spans(row, markers)
    trainable = trainable_turns(spans, markers, options)
    begun = trainable & ((spans.end > spans.content) | (spans.stop > spans.end))
    found = TokenTurns(row, borders, spans, np.searchsorted(spans.start, borders), trainable, begun)
    # The text of a turn that is opened for the model may be a scaffold.
    last = found.last_turns()
    last = last[begun[last]]
    if last.size and any(part.kind == "scaffold" for part in markers.exclusions):
        said = trained_in(row, spans, markers, MaskOptions(roles_to_train=options.roles))
        until = np.concatenate(([0], np.cumsum(said)))
        begun[last] &= until[spans.stop[last]] > until[spans.content[last]]
    return found


@dataclass(frozen=True)
class LossMask:
    """The loss mask of tokens.

    Attributes:
        trained: True for trained tokens, [tokens].
        weights: Weight of each token, [tokens]; None if all trained tokens weigh the same.
        unended: True for turns with trained content and no terminator.
        stopless: True for `unended` turns whose terminator should be trained, by the options and the format.
    """

    trained: Bools
    weights: NDArray[np.float32] | None
    unended: Bools
    stopless: Bools


def mask_turns(
    found: TokenTurns, markers: Markers, options: MaskOptions, weights: Sequence[list[float] | None] | None
) -> LossMask:
    """Decide which tokens are trained.

    Args:
        found: The turns.
        markers: Markers with which the turns were found.
        options: Options of the mask.
        weights: For each row, one weight for each begun turn, or None for weights of 1; None means 1 for all rows.
    """
    spans = found.spans
    every = None if weights is None else _spread(found, weights)
    trained = trained_in(found.row, spans, markers, options, every)
    values = None
    if every is not None and not set(every) <= {0.0, 1.0}:
        values = token_weights(trained, spans, markers, options, every)
    unended = found.trainable & (spans.stop == spans.end)
    stopless = np.zeros_like(unended)
    if unended.any():
        until = np.concatenate(([0], np.cumsum(trained)))
        unended &= until[spans.end] > until[spans.content]
        stopless = unended & _should_end(found, markers, options)
    return LossMask(trained, values, unended, stopless)


def unsplittable_ranges(found: TokenTurns, markers: Markers, options: MaskOptions) -> Integers:
    """Return the ranges that must not be cut in two, in order: markers and runs of media, [ranges, 2]."""
    spans = found.spans
    ranges = [np.stack((spans.start, spans.content), 1), np.stack((spans.end, spans.stop), 1)]
    ranges.append(exclusion_borders(found.row, markers, options))
    if markers.media:
        media = np.isin(found.ids, list(markers.media))
        ranges.append(np.flatnonzero(np.diff(media, prepend=False, append=False)).reshape(-1, 2))
    borders = np.concatenate(ranges)
    return borders[np.argsort(borders[:, 0], kind="stable")]


def _spread(found: TokenTurns, weights: Sequence[list[float] | None]) -> list[float]:
    """Return the weight of each trainable turn."""
    spread = np.ones(len(found.begun))
    for row, of_row in enumerate(weights):
        if of_row is not None:
            part = found.of_row(row)
            spread[part][found.begun[part]] = of_row
    return spread[found.trainable].tolist()


def _should_end(found: TokenTurns, markers: Markers, options: MaskOptions) -> Bools:
    """Return True for turns whose terminator should be trained and is always written by the format."""
    ends = np.array([role.include_end and not role.open_ended for role in markers.roles], dtype=bool)[found.spans.role]
    if options.train_on_inputs or options.train_on_eos == "none":
        return np.zeros_like(found.trainable)
    if options.train_on_eos == "last":
        ends &= last_of_segment(found.row, found.spans, found.trainable)
    return ends


Bools = NDArray[np.bool_]
TrainOnEos = Literal["turn", "all", "last", "none"]
TrainOn = Literal["all", "last_turn"]
ASSISTANT = "assistant"


@dataclass(frozen=True)
class MaskOptions:
    """Options for the parts of a conversation that are trained.

    Attributes:
        train_on_inputs: True trains everything but padding, media, the first token of every segment and turns of weight
            0; the other options then have no effect.
        roles_to_train: Roles whose turns are trained; None means the assistant; an empty tuple trains nothing.
        train_on_eos: Terminators that are trained. `turn`: those of the trained turns. `all`: those of the other turns
            too, unless the marker also begins a turn or ends a role with `include_end=False`. `last`: only that of the
            last trainable turn of each segment, and none if that turn was cut. `none`: none.
        train_on: All trainable turns, or only the last one of each segment.
        train_thinking: True trains thinking.

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
            # A quoted "false" would be true.
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        roles: Any = self.roles_to_train
        if roles is None:
            return
        # A bare string is a sequence of strings, too.
        if not isinstance(roles, tuple | list) or not all(isinstance(role, str) for role in roles):
            raise ValueError(f"roles_to_train must be a list of names of roles, got {roles!r}.")
        object.__setattr__(self, "roles_to_train", tuple(roles))

    def describe(self) -> str:
        """Return all options as one line."""
        return (
            f"roles_to_train={list(self.roles)}, train_on_inputs={self.train_on_inputs}, "
            f"train_on_eos={self.train_on_eos}, train_on={self.train_on}, train_thinking={self.train_thinking}"
        )

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are trained."""
        return (ASSISTANT,) if self.roles_to_train is None else self.roles_to_train


def trainable_turns(spans: Spans, markers: Markers, options: MaskOptions) -> Bools:
    """Return True for turns whose role is trained: [spans].

    Raises:
        ValueError: If the family has no boundary for one of the roles.
    """
    names = [role.role for role in markers.roles]
    unknown = sorted(set(options.roles) - set(names))
    if unknown:
        raise ValueError(
            f"roles_to_train names {', '.join(map(repr, unknown))}, for which the chat family {markers.family!r} has "
            f"no boundary. It has: {', '.join(dict.fromkeys(names))}."
        )
    return np.array([name in options.roles for name in names], dtype=bool)[spans.role]


def trained_tokens(
    ids: ArrayLike,
    spans: Spans,
    markers: Markers,
    options: MaskOptions,
    attention_mask: ArrayLike | None = None,
    segments: ArrayLike | None = None,
    turn_weights: Sequence[float] | None = None,
) -> Bools:
    """Return True for trained tokens, a bool array of the shape of `ids`.

    The content of the trained turns is trained, without exclusions and media, and with the terminators and start
    markers that the options and the roles name. Padding and the first token of every segment are never trained.

    Args:
        ids: Token ids, as given to `scan`.
        spans: Turns that `scan` found in them.
        markers: Markers that were given to `scan`.
        options: Options of the mask.
        attention_mask: As given to `scan`.
        segments: As given to `scan`.
        turn_weights: One weight for every turn of a trained role, in order. A turn of weight 0 is not trained, nor is
            its terminator, and it does not count as the last trainable turn.

    Raises:
        ValueError: If the family has no boundary for a role.
    """
    row = lay_out(ids, attention_mask, segments)
    return trained_in(row, spans, markers, options, turn_weights).reshape(np.shape(ids))


def trained_in(
    row: TokenRow, spans: Spans, markers: Markers, options: MaskOptions, turn_weights: Sequence[float] | None = None
) -> Bools:
    """Return the trained tokens of ids that are laid out already: [tokens]; see `trained_tokens`."""
    trainable = trainable_turns(spans, markers, options)
    dropped = np.zeros(trainable.size, dtype=bool)
    if turn_weights is not None:
        dropped[trainable] = np.asarray(turn_weights) == 0
    if options.train_on_inputs:
        trained = ~_paint(row.ids.size, spans.content[dropped], spans.stop[dropped])
        if row.attended is not None:
            trained &= row.attended
    else:
        trained = _trained_turns(row, spans, markers, options, trainable & ~dropped, dropped)
    if markers.media:
        trained &= _trainable_ids(markers.media).take(row.ids, mode="clip")
    trained[row.borders[:-1]] = False
    return trained


def token_weights(
    trained: Bools, spans: Spans, markers: Markers, options: MaskOptions, turn_weights: Sequence[float] | None = None
) -> NDArray[np.float32]:
    """Return the weight of every token in the loss, of the shape of `trained`: 0 for tokens that are not trained.

    Args:
        trained: Result of `trained_tokens`.
        spans: Result of `scan`.
        markers: Markers that were given to `scan`.
        options: Options that were given to `trained_tokens`.
        turn_weights: As given to `trained_tokens`; tokens outside these turns have weight 1.
    """
    weights = trained.astype(np.float32).reshape(-1)
    if turn_weights is not None:
        turns = trainable_turns(spans, markers, options)
        values = np.asarray(turn_weights, dtype=np.float32)
        begin, stop = _disjoint(spans.start[turns], spans.stop[turns])
        weights *= np.repeat(*_runs(weights.size, begin, stop, values, np.float32(1)))
    return weights.reshape(trained.shape)


def _trained_turns(
    row: TokenRow, spans: Spans, markers: Markers, options: MaskOptions, trainable: Bools, dropped: Bools
) -> Bools:
    """Return True for the tokens of trained turns, those of media included (the caller removes them)."""
    if not options.roles:
        return np.zeros(row.ids.size, dtype=bool)
    turns = last_of_segment(row, spans, trainable) if options.train_on == "last_turn" else trainable
    with_start = np.array([role.include_start for role in markers.roles], dtype=bool)[spans.role]
    terminated = np.array([role.include_end for role in markers.roles], dtype=bool)[spans.role]
    others = np.zeros_like(turns)
    if options.train_on_eos == "all":
        others = terminated & ~turns & ~dropped & ~_shared_terminators(row, spans, markers, options)
    elif options.train_on_eos == "last":
        terminated &= last_of_segment(row, spans, trainable) & spans.complete
    elif options.train_on_eos == "none":
        terminated[:] = False
    # An untrained turn contributes at most its terminator.
    begin = np.where(turns, np.where(with_start, spans.start, spans.content), spans.end)
    stop = np.where(terminated, spans.stop, spans.end)
    chosen = turns | others
    trained = _paint(row.ids.size, begin[chosen], stop[chosen])
    excluded = _excluded(row, spans, markers, options, turns)
    if excluded[0].size:
        trained &= ~_paint(row.ids.size, *excluded)
    return trained


def last_of_segment(row: TokenRow, spans: Spans, turns: Bools) -> Bools:
    """Return the turns of `turns` that are the last ones of their segment."""
    index = np.flatnonzero(turns)
    piece = np.searchsorted(row.borders, spans.start[index], side="right")
    last = np.zeros_like(turns)
    last[index[np.append(piece[1:] != piece[:-1], True)[: index.size]]] = True
    return last


def _shared_terminators(row: TokenRow, spans: Spans, markers: Markers, options: MaskOptions) -> Bools:
    """Return True for turns whose terminator has another meaning, too."""
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
    return by_role[spans.role, terminators(row, markers, spans)]


def _excluded(
    row: TokenRow, spans: Spans, markers: Markers, options: MaskOptions, turns: Bools
) -> tuple[Integers, Integers]:
    """Return the beginnings and ends of the excluded parts of the turns' content."""
    active = _active(markers, options)
    begins, stops = [], []
    if active and turns.any():
        found = _exclusion_trie(active).find(row)
        for number, part in enumerate(active):
            start, end = found[2 * number : 2 * number + 2]
            begin, stop = _regions(start, end if part.end else None, spans, turns, part.kind)
            begins.append(begin)
            stops.append(stop)
    if not begins:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    begin, stop = np.concatenate(begins), np.concatenate(stops)
    order = np.argsort(begin, kind="stable")
    return begin[order], stop[order]


def exclusion_borders(row: TokenRow, markers: Markers, options: MaskOptions) -> Integers:
    """Return the places of all markers of excluded parts: [ranges, 2]."""
    found = _exclusion_trie(_active(markers, options)).find(row)
    return np.concatenate([np.empty((0, 2), dtype=np.int64), *(np.stack((m.position, m.stop), 1) for m in found)])


def _active(markers: Markers, options: MaskOptions) -> tuple[ExclusionMarkers, ...]:
    return tuple(part for part in markers.exclusions if part.kind != "thinking" or not options.train_thinking)


def _regions(start: Matches, end: Matches | None, spans: Spans, turns: Bools, kind: str) -> tuple[Integers, Integers]:
    """Return the intervals of one exclusion: from each start marker in a turn to the next end marker or turn's end.

    A start marker may be part of the turn's own start marker, for example if the template opens the thinking. A thought
    that is a turn of its own ends with the turn's terminator, which is then a part of it.
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
    kept = without_overlap(start.position, stop)
    return np.maximum(start.position[kept], spans.content[turn[kept]]), np.maximum(stop[kept], beyond[kept])


@lru_cache(maxsize=64)
def _exclusion_trie(exclusions: tuple[ExclusionMarkers, ...]) -> MarkerTrie:
    return MarkerTrie([markers for part in exclusions for markers in (part.start, part.end)])


@lru_cache(maxsize=64)
def _trainable_ids(media: frozenset[int]) -> Bools:
    """Return True for ids that may be trained. Negative ids read entry 0, larger ids the last entry."""
    table = np.ones(max(media) + 2, dtype=bool)
    table[sorted(media)] = False
    return table


def _disjoint(begin: Integers, stop: Integers) -> tuple[Integers, Integers]:
    """Return non-overlapping intervals of the same tokens; overlaps belong to the first interval. Beginnings ascend."""
    reached = np.maximum.accumulate(stop) if stop.size else stop
    return np.minimum(np.append(begin[:1], np.maximum(begin[1:], reached[:-1])), reached), reached


def _paint(size: int, begin: Integers, stop: Integers) -> Bools:
    """Return True for tokens that an interval covers, [size]."""
    begin, stop = _disjoint(begin, stop)
    return np.repeat(*_runs(size, begin, stop, np.ones(begin.size, dtype=bool), np.False_))


def _runs(size: int, begin: Integers, stop: Integers, values: NDArray, other: np.generic) -> tuple[NDArray, Integers]:
    """Return the values of intervals and of the gaps between them, with their lengths, for `np.repeat`."""
    edges = np.empty(2 * begin.size + 2, dtype=np.int64)
    edges[0], edges[-1], edges[1:-1:2], edges[2:-1:2] = 0, size, begin, stop
    runs = np.full(2 * begin.size + 1, other)
    runs[1::2] = values
    return runs, np.diff(edges)
