"""Conversations become token ids, and every token is trained or not: what the assistant said, and nothing else."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from rich.progress import Progress

from lightning_protrain.data.agreement import UntrainableError, WeightsError, check_turns, turn_weights
from lightning_protrain.data.conversations import Conversation
from lightning_protrain.data.examples import Encoded
from lightning_protrain.data.markers import Markers
from lightning_protrain.data.masking import MaskOptions, token_weights, trainable_turns, trained_tokens
from lightning_protrain.data.rendering import Rendered, Renderer
from lightning_protrain.data.report import DatasetReport, count
from lightning_protrain.data.scanner import Spans, scan
from lightning_protrain.data.truncation import Dropped, truncate

OnUntrainable = Literal["error", "drop", "warn"]
TEMPLATE = "the chat template refuses it"
UNTRAINED = "no token is trained"
REFUSED = "weights of messages cannot be told apart"
_ENCODE_AT_ONCE = 256
# Fewer rows than this take less time than a progress bar takes to be read.
_SHOW_PROGRESS_FROM = 20_000


class HasImages(Exception):
    """A conversation with images, where text was expected."""


@dataclass(frozen=True)
class ChatEncoder:
    """How the conversations of one data set become examples.

    Attributes:
        renderer: Applies the chat template.
        markers: Where turns begin and end.
        options: What is trained.
        max_length: Tokens of an example at most.
        on_untrainable: What happens to a conversation of which nothing is trained, or whose mask is in doubt.
        leaking: Roles that the format does not tell from the assistant, see `proof.leaking_roles`.
    """

    renderer: Renderer
    markers: Markers
    options: MaskOptions = field(default_factory=MaskOptions)
    max_length: int = 1 << 30
    on_untrainable: OnUntrainable = "drop"
    leaking: frozenset[str] = frozenset()

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded | UntrainableError]:
        """Examples of conversations without images, or why there is none.

        Raises:
            ValueError: The chat template refuses a conversation; the weights of messages cannot be told apart.
        """
        rendered = [self.renderer.render(conversation) for conversation in conversations]
        ids = [np.asarray(row, dtype=np.int32) for row in self.renderer.encode(rendered)]
        results = self.mask(conversations, rendered, ids)
        return [one if isinstance(one, UntrainableError) else self.cut(one) for one in results]

    def mask(
        self, conversations: Sequence[Conversation], rendered: Sequence[Rendered], ids: Sequence[NDArray[np.int32]]
    ) -> list[Encoded | UntrainableError]:
        """What of tokenized conversations is trained, before they are cut; or why the mask is in doubt.

        Args:
            conversations: The messages.
            rendered: The texts that were tokenized.
            ids: Their tokens, each [length].

        Raises:
            ValueError: The weights of messages cannot be told apart.
        """
        sizes = [len(row) for row in ids]
        borders = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        flat, segments = np.concatenate(ids), np.repeat(np.arange(len(ids)), sizes)
        spans = scan(flat, self.markers, segments=segments)
        turns = trainable_turns(spans, self.markers, self.options)
        # What a format writes for the model to go on from is no turn yet.
        begun = turns & ((spans.end > spans.content) | (spans.stop > spans.end))
        of_row = np.searchsorted(spans.start, borders)
        said = [[m for m in row["messages"] if m["role"] in self.options.roles] for row in conversations]
        parts = [slice(first, last) for first, last in itertools.pairwise(of_row)]
        weights = [turn_weights(m, int(begun[part].sum())) for m, part in zip(said, parts, strict=True)]
        every = None
        if any(weights_of_row is not None for weights_of_row in weights):
            spread = np.ones(len(turns))
            for part, row_weights in zip(parts, weights, strict=True):
                if row_weights is not None:
                    spread[part][begun[part]] = row_weights
            every = spread[turns].tolist()
        trained = trained_tokens(flat, spans, self.markers, self.options, segments=segments, turn_weights=every)
        values = None
        if every is not None and not set(every) <= {0.0, 1.0}:
            values = token_weights(trained, spans, self.markers, self.options, every)
        whole = self._borders(flat, spans)
        first_border = np.searchsorted(whole[:, 0], borders)
        until = np.concatenate(([0], np.cumsum(trained)))
        unended = turns & ~spans.complete & (until[spans.end] > until[spans.content])
        results: list[Encoded | UntrainableError] = []
        for row, conversation in enumerate(conversations):
            tokens, mine = slice(borders[row], borders[row + 1]), parts[row]
            doubt = ""
            try:
                if not self.options.train_on_inputs:
                    place = np.flatnonzero(begun[mine]) + of_row[row]
                    contents = [flat[spans.content[at] : spans.end[at]] for at in place]
                    read = functools.partial(self._read, contents)
                    suspicious = rendered[row].suspicious
                    check_turns(conversation, self.options.roles, read, len(contents), suspicious, self.leaking)
            except UntrainableError as error:
                doubt = str(error)
                if self.on_untrainable != "warn":
                    results.append(error)
                    continue
            ranges = whole[first_border[row] : first_border[row + 1]] - borders[row]
            own = None if values is None else values[tokens]
            count = int(unended[mine].sum())
            results.append(
                Encoded(ids[row], trained[tokens], own, ranges.astype(np.int32), num_unended=count, doubt=doubt)
            )
        return results

    def cut(self, encoded: Encoded) -> Encoded | UntrainableError:
        """As much of an example as `max_length` allows; or that nothing trained is left, or an image would be lost."""
        if not encoded.num_trained and self.on_untrainable != "warn":
            return UntrainableError(UNTRAINED)
        cut = truncate(encoded, self.max_length)
        if cut is Dropped.NOTHING_TRAINED and self.on_untrainable == "warn":
            cut = truncate(encoded.untrained(), self.max_length)
        if isinstance(cut, Dropped):
            return UntrainableError(cut.value)
        if len(cut) < len(encoded) and encoded.trained[len(cut)] and cut.trained[-1]:
            return replace(cut, num_unended=cut.num_unended + 1)
        return cut

    def _read(self, contents: Sequence[NDArray[np.int32]]) -> list[str]:
        return [str(self.renderer.tokenizer.decode(content.tolist())) for content in contents]

    def _borders(self, ids: NDArray[np.int32], spans: Spans) -> NDArray[np.int64]:
        """What must not be cut in two: markers, and runs of media."""
        ranges = [np.stack((spans.start, spans.content), 1), np.stack((spans.end, spans.stop), 1)]
        if self.markers.media:
            media = np.isin(ids, list(self.markers.media))
            edges = np.flatnonzero(np.diff(media, prepend=False, append=False))
            ranges.append(edges.reshape(-1, 2))
        borders = np.concatenate(ranges)
        return borders[np.argsort(borders[:, 0], kind="stable")]


class EncodedRows(Sequence[Encoded]):
    """Examples of different lengths, stored end to end.

    Args:
        examples: Without images; their borders are not kept.
    """

    def __init__(self, examples: Sequence[Encoded]) -> None:
        self.lengths = np.array([len(example) for example in examples], dtype=np.int64)
        self._offsets = np.concatenate(([0], self.lengths.cumsum()))
        self._ids = _joined([example.input_ids for example in examples], np.int32)
        self._trained = _joined([example.trained for example in examples], np.bool_)
        weighted = any(example.weights is not None for example in examples)
        self._weights = None
        self.is_weighted = weighted
        if weighted:
            values = [example.trained if example.weights is None else example.weights for example in examples]
            self._weights = _joined(values, np.float32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        index %= len(self)
        part = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        weights = None if self._weights is None else self._weights[part]
        return Encoded(self._ids[part], self._trained[part], weights)


def encode_rows(rows: Sequence[Conversation], encoder: ChatEncoder, name: str) -> tuple[EncodedRows, DatasetReport]:
    """Encodes all conversations of a data set.

    Args:
        rows: Without images.
        encoder: How.
        name: Of the data set, for messages.

    Raises:
        ValueError: A conversation cannot be trained on and `on_untrainable` is "error", or none can be.
        HasImages: One has images.
    """
    kept: list[Encoded] = []
    dropped: list[str] = []
    for number, result in enumerate(_encoded(rows, encoder)):
        if isinstance(result, UntrainableError):
            if encoder.on_untrainable == "error":
                raise ValueError(
                    f"{_place(rows, number, name)}: {result}. Correct the row, raise `max_length`, or let "
                    '`on_untrainable` be "drop".'
                ) from result
            dropped.append(result.reason)
            continue
        kept.append(result)
    report = count(
        name,
        encoder.markers.family,
        lengths=[len(one) for one in kept],
        num_trained=sum(one.num_trained for one in kept),
        num_unended=sum(one.num_unended for one in kept),
        dropped=dropped,
        num_doubtful=sum(bool(one.doubt) for one in kept),
    )
    if report.num_doubtful:
        first = next(one.doubt for one in kept if one.doubt)
        rank_zero_warn(f"{name}: {report.num_doubtful} conversations are kept though {first}, and others like it.")
    if not kept or not report.num_trained:
        _refuse_nothing(report, encoder)
    return EncodedRows(kept), report


def _encoded(rows: Sequence[Conversation], encoder: ChatEncoder) -> Iterator[Encoded | UntrainableError]:
    with Progress(transient=True, disable=len(rows) < _SHOW_PROGRESS_FROM) as progress:
        task = progress.add_task("Tokenizing", total=len(rows))
        for start in range(0, len(rows), _ENCODE_AT_ONCE):
            part = rows[start : start + _ENCODE_AT_ONCE]
            if any("images" in row for row in part):
                raise HasImages
            try:
                yield from encoder.encode(part)
            except ValueError:
                yield from _one_by_one(rows, start, len(part), encoder)
            progress.advance(task, len(part))


def _one_by_one(
    rows: Sequence[Conversation], start: int, size: int, encoder: ChatEncoder
) -> Iterator[Encoded | UntrainableError]:
    """The same, where one of them is refused: says which."""
    for number in range(start, start + size):
        try:
            yield from encoder.encode([rows[number]])
        except ValueError as error:
            yield UntrainableError(REFUSED if isinstance(error, WeightsError) else TEMPLATE, str(error))


def _place(rows: Sequence[Conversation], number: int, name: str) -> str:
    where = getattr(rows, "where", None)
    return str(where(number)) if where is not None else f"{name}, row {number}"


def _refuse_nothing(report: DatasetReport, encoder: ChatEncoder) -> None:
    if encoder.on_untrainable == "warn":
        return
    why = ", ".join(f"{number} {reason}" for reason, number in report.dropped)
    raise ValueError(
        f"{report.name}: nothing is left to train on ({why or 'no rows'}). max_length is {encoder.max_length}, "
        f"roles_to_train is {list(encoder.options.roles)}. Raise `max_length`, name a role, look at the data with "
        '`lightning-protrain preview`, or let `on_untrainable` be "warn" to go on without a loss.'
    )


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype=dtype)
