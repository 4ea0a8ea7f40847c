"""The turns that are found in a batch of tokenized conversations, end to end, before they are held against messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.data.markers import Markers
from lightning_protrain.data.masking import (
    Bools,
    MaskOptions,
    exclusion_borders,
    last_of_segment,
    token_weights,
    trainable_turns,
    trained_in,
)
from lightning_protrain.data.matching import Integers, Row
from lightning_protrain.data.scanner import Spans, find_spans


@dataclass(frozen=True)
class FoundTurns:
    """Turns of several rows.

    Attributes:
        row: Tokens of all rows, which no turn crosses.
        borders: Where rows begin, and the end of the last one: [rows + 1].
        spans: The turns.
        first: By row, its first turn, and the number of turns: [rows + 1].
        trainable: By turn, whether its role is trained.
        begun: By turn, whether it is trainable and holds anything: what a format writes for the model to go on from is
            no turn yet.
    """

    row: Row
    borders: Integers
    spans: Spans
    first: Integers
    trainable: Bools
    begun: Bools

    @property
    def ids(self) -> NDArray[np.int32]:
        """The tokens, [tokens]."""
        return self.row.ids

    @property
    def num_begun(self) -> Integers:
        """By row, its begun turns."""
        return self.per_row(self.begun)

    def per_row(self, turns: Bools) -> Integers:
        """By row, how many of its turns are among `turns`."""
        until = np.concatenate(([0], np.cumsum(turns)))
        return np.asarray(until[self.first[1:]] - until[self.first[:-1]])

    def last_turns(self) -> Integers:
        """Return the turns that end with their row."""
        last = self.first[1:] - 1
        ends = self.spans.end[last] == self.borders[1:] if len(self.spans.end) else np.zeros(len(last), dtype=bool)
        return last[ends & (last >= self.first[:-1])]

    def of_row(self, row: int) -> slice:
        """The turns of a row."""
        return slice(int(self.first[row]), int(self.first[row + 1]))


def find_turns(rows: Sequence[NDArray[np.int32]], markers: Markers, options: MaskOptions) -> FoundTurns:
    """Scans tokenized conversations.

    Args:
        rows: Their tokens, each [length]; at least one row.
        markers: Where turns begin and end.
        options: Whose turns are trained.
    """
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    borders = np.concatenate(([0], np.cumsum(sizes)))
    row = Row(np.concatenate(rows), borders[np.append(True, sizes > 0)], None)
    spans = find_spans(row, markers)
    trainable = trainable_turns(spans, markers, options)
    begun = trainable & ((spans.end > spans.content) | (spans.stop > spans.end))
    found = FoundTurns(row, borders, spans, np.searchsorted(spans.start, borders), trainable, begun)
    # What a template writes for the model to go on from may be a scaffold.
    last = found.last_turns()
    last = last[begun[last]]
    if last.size and any(part.kind == "scaffold" for part in markers.exclusions):
        said = trained_in(row, spans, markers, MaskOptions(roles_to_train=options.roles))
        until = np.concatenate(([0], np.cumsum(said)))
        begun[last] &= until[spans.stop[last]] > until[spans.content[last]]
    return found


@dataclass(frozen=True)
class Masked:
    """What is trained of the tokens.

    Attributes:
        trained: By token, [tokens].
        weights: By token, [tokens]; None where all that is trained weighs alike.
        unended: By turn, whether it has trained content and no terminator.
        stopless: Those of `unended` whose terminator should be trained, by the options and by what the format writes.
    """

    trained: Bools
    weights: NDArray[np.float32] | None
    unended: Bools
    stopless: Bools


def mask_turns(
    found: FoundTurns, markers: Markers, options: MaskOptions, weights: Sequence[list[float] | None] | None
) -> Masked:
    """Decides what is trained.

    Args:
        found: The turns.
        markers: The markers that they were found with.
        options: What to train.
        weights: By row, one for each begun turn, or None where these weigh 1; None: all do.
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
    return Masked(trained, values, unended, stopless)


def uncuttable(found: FoundTurns, markers: Markers, options: MaskOptions) -> Integers:
    """What must not be cut in two, in order: markers, excluded parts' markers too, and runs of media: [ranges, 2]."""
    spans = found.spans
    ranges = [np.stack((spans.start, spans.content), 1), np.stack((spans.end, spans.stop), 1)]
    ranges.append(exclusion_borders(found.row, markers, options))
    if markers.media:
        media = np.isin(found.ids, list(markers.media))
        ranges.append(np.flatnonzero(np.diff(media, prepend=False, append=False)).reshape(-1, 2))
    borders = np.concatenate(ranges)
    return borders[np.argsort(borders[:, 0], kind="stable")]


def _spread(found: FoundTurns, weights: Sequence[list[float] | None]) -> list[float]:
    """Weights by trainable turn."""
    spread = np.ones(len(found.begun))
    for row, of_row in enumerate(weights):
        if of_row is not None:
            part = found.of_row(row)
            spread[part][found.begun[part]] = of_row
    return spread[found.trainable].tolist()


def _should_end(found: FoundTurns, markers: Markers, options: MaskOptions) -> Bools:
    """By turn, whether a terminator of it is to be trained and its format always writes one."""
    ends = np.array([role.include_end and not role.open_ended for role in markers.roles], dtype=bool)[found.spans.role]
    if options.train_on_inputs or options.train_on_eos == "none":
        return np.zeros_like(found.trainable)
    if options.train_on_eos == "last":
        ends &= last_of_segment(found.row, found.spans, found.trainable)
    return ends
