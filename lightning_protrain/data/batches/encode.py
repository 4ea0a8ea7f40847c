"""Converts rows into token ids with a loss mask, and truncates long conversations."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from lightning_protrain.config import plural
from lightning_protrain.data.chat.check_turns import (
    MARKERS,
    NO_WORDS,
    NOT_PROVEN,
    UntrainableError,
    WeightsError,
    check_end,
    check_leaks,
    check_trained,
    check_turns,
    is_exact,
    is_thought,
    is_usual,
    num_unwritten,
    turn_weights,
    turns_of_messages,
    unproven_feature,
)
from lightning_protrain.data.chat.marker_search import lay_out
from lightning_protrain.data.chat.markers import Markers
from lightning_protrain.data.chat.mask import (
    LossMask,
    MaskOptions,
    TokenTurns,
    find_turns,
    mask_turns,
    trained_tokens,
    unsplittable_ranges,
)
from lightning_protrain.data.chat.render import Rendered, Renderer
from lightning_protrain.data.chat.turns import scan
from lightning_protrain.data.conversation import Conversation, MediaKind, Message, Preference, text_of, unit_of
from lightning_protrain.data.sources.dataset import DatasetReport, quartet
from lightning_protrain.progress import bar


def _no_borders() -> NDArray[np.int32]:
    return np.empty((0, 2), dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Encoded:
    """Tokens of a conversation or of plain text, and their loss mask.

    Attributes:
        input_ids: Token ids, int32 of shape [tokens].
        trained: True for trained tokens, bool of shape [tokens].
        weights: Weight of each token in the loss, float32 of shape [tokens]; None means equal weights.
        borders: Begin and end of token ranges that truncation must keep whole, such as markers and media tokens, int32
            of shape [ranges, 2].
        extras: Tensors that the processor makes of media, such as `pixel_values`; empty for text.
        media: Kinds of the conversation's media, in order.
        media_stop: One past the last media token; 0 if that is unknown, or there are no media.
        num_unended: Number of trained turns without an end token.
        num_cut: Number of the turns in `num_unended` that were truncated at `max_length`.
        doubt: Reason why the mask may be wrong; empty if there is none.
        num_unwritten: Number of messages whose reasoning the chat template leaves out.
        label: True for an answer that was judged desirable, False for one that was not; None without such a judgement.
    """

    input_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    weights: NDArray[np.float32] | None = None
    borders: NDArray[np.int32] = field(default_factory=_no_borders)
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    media: tuple[MediaKind, ...] = ()
    media_stop: int = 0
    num_unended: int = 0
    num_cut: int = 0
    doubt: str = ""
    num_unwritten: int = 0
    label: bool | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_trained(self) -> int:
        """Number of trained tokens without the first one, which no token predicts."""
        return int(np.count_nonzero(self.trained[1:]))

    def untrained(self) -> Encoded:
        """Return a copy without trained tokens."""
        return replace(self, trained=np.zeros_like(self.trained))


# Names of the tensors in `Encoded.extras` with a value for each token; tokens are their second dimension.
TOKEN_EXTRAS = frozenset({"token_type_ids", "mm_token_type_ids", "cross_attention_mask"})


class Dropped(Enum):
    """A reason why `truncate` drops an example."""

    NOTHING_TRAINED = "no trained token lies within max_length"
    IMAGE_CUT = "an image lies beyond max_length"
    AUDIO_CUT = "audio lies beyond max_length"
    VIDEO_CUT = "a video lies beyond max_length"


_CUT: dict[MediaKind, Dropped] = {
    "image": Dropped.IMAGE_CUT,
    "audio": Dropped.AUDIO_CUT,
    "video": Dropped.VIDEO_CUT,
}


def truncate(encoded: Encoded, max_length: int) -> Encoded | Dropped:
    """Truncate an example to `max_length` tokens, or fewer so that every range in `borders` stays whole.

    Args:
        encoded: Example; it is returned unchanged if it is short enough.
        max_length: Maximum number of tokens, at least 1.

    Returns:
        The first tokens, or the reason for dropping the example: it would lose all trained tokens or a medium. If
        `media_stop` is unknown, truncation is assumed to lose a medium.
    """
    if len(encoded) <= max_length:
        return encoded
    length = cut_before(encoded.borders, max_length)
    if encoded.media and not 0 < encoded.media_stop <= length:
        return _CUT[encoded.media[-1]]
    if length == 0 or (encoded.num_trained and not encoded.trained[1:length].any()):
        return Dropped.NOTHING_TRAINED
    return replace(
        encoded,
        input_ids=encoded.input_ids[:length],
        trained=encoded.trained[:length],
        weights=None if encoded.weights is None else encoded.weights[:length],
        borders=encoded.borders[encoded.borders[:, 1] <= length],
        extras={name: value[:, :length] if name in TOKEN_EXTRAS else value for name, value in encoded.extras.items()},
    )


def cut_before(borders: NDArray[np.int32], length: int) -> int:
    """Return the largest number of tokens, at most `length`, at which truncation keeps every range whole.

    Args:
        borders: Begin and end of ranges, which may overlap, of shape [ranges, 2].
        length: Maximum number of tokens.
    """
    while True:
        cut = borders[(borders[:, 0] < length) & (length < borders[:, 1])]
        if not len(cut):
            return length
        length = int(cut[:, 0].min())


OnUntrainable = Literal["error", "drop", "warn"]
TEMPLATE = "the chat template refuses it"
UNTRAINED = "no token is trained"
REFUSED = "weights of messages cannot be assigned to turns"
EQUAL = "chosen and rejected are equal within max_length"
_ENCODE_AT_ONCE = 512
# Maximum number of tokens if conversations are not cut.
UNCUT = 1 << 30
# Maximum number of dropped rows in a report.
_DROPPED_SHOWN = 20


# What encoding makes of a row: an example, several that belong together, or the reason why there is none.
Result = Encoded | tuple[Encoded, ...] | UntrainableError


class HasMedia(Exception):
    """An error for a conversation with media in a data set that is encoded as text."""


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes the conversations of one data set.

    Attributes:
        renderer: Applies the chat template.
        markers: Markers at which turns begin and end.
        options: Options of the loss mask.
        max_length: Maximum number of tokens of an example.
        on_untrainable: Treatment of a conversation without a trained token, or with a doubtful mask.
        leaking: Roles that the chat format does not distinguish from the assistant, see `leaking_roles`.
        unproven: Reasons by feature that `verify_family` could not verify.
        unwritten: Scaffolds that the template is not known to write, see `unwritten_scaffolds`. They are trained in
            rows where a message begins with one.
        leaves_open: True if the template writes nothing after the last answer, see `leaves_open`.
        end_ids: Control tokens that end what the assistant says, see `end_tokens`.
    """

    renderer: Renderer
    markers: Markers
    options: MaskOptions = field(default_factory=MaskOptions)
    max_length: int = UNCUT
    on_untrainable: OnUntrainable = "drop"
    leaking: frozenset[str] = frozenset()
    unproven: Mapping[str, str] = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()
    leaves_open: bool = False
    end_ids: frozenset[int] = frozenset()

    @property
    def family(self) -> str:
        """Chat format whose markers delimit turns."""
        return self.markers.family

    @property
    def limits(self) -> str:
        """Settings that may leave nothing to train, as text for an error."""
        return f"max_length is {self.max_length}, roles_to_train is {list(self.options.roles)}"

    @property
    def knobs(self) -> str:
        """Settings of the loss mask, as one line of text."""
        variables = self.renderer.variables
        further = f", chat_template_kwargs={variables}" if variables else ""
        length = "none" if self.max_length == UNCUT else self.max_length
        return f"{self.options.describe()}, on_untrainable={self.on_untrainable}, max_length={length}{further}"

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded | UntrainableError]:
        """Encode conversations without media; return an example or an error for each.

        Raises:
            ValueError: If the chat template refuses a conversation, or message weights cannot be assigned to turns.
        """
        rendered = [self.renderer.render(conversation) for conversation in conversations]
        ids = [np.asarray(row, dtype=np.int32) for row in self.renderer.encode(rendered)]
        results = self.mask(conversations, rendered, ids)
        return [result if isinstance(result, UntrainableError) else self.cut(result) for result in results]

    def mask(
        self, conversations: Sequence[Conversation], rendered: Sequence[Rendered], ids: Sequence[NDArray[np.int32]]
    ) -> list[Encoded | UntrainableError]:
        """Compute loss masks; return an untruncated example, or an error if the mask is doubtful, for each row.

        Args:
            conversations: The conversations.
            rendered: Text of each conversation.
            ids: Token ids of each text, of shape [tokens].

        Raises:
            ValueError: If message weights cannot be assigned to turns.
        """
        results: dict[int, Encoded | UntrainableError] = {}
        said = [self._says_scaffold(conversation) for conversation in conversations]
        for value, encoder in ((False, self), (True, self._without_scaffolds)):
            rows = [row for row, says in enumerate(said) if says is value]
            if rows:
                masked = encoder._mask(
                    [conversations[row] for row in rows], [rendered[row] for row in rows], [ids[row] for row in rows]
                )
                results |= zip(rows, masked, strict=True)
        return [results[row] for row in range(len(said))]

    def _says_scaffold(self, conversation: Conversation) -> bool:
        """Return True if a message of a trained role begins with a scaffold in `unwritten`."""
        return bool(self.unwritten) and any(
            text_of(message).lstrip().startswith(self.unwritten) for message in self._messages(conversation)[0]
        )

    @functools.cached_property
    def _without_scaffolds(self) -> ChatEncoder:
        """Encoder that trains the scaffolds in `unwritten`."""
        parts = self.markers.exclusions
        kept = (part for part in parts if part.kind != "scaffold" or part.start[0].text.strip() not in self.unwritten)
        return replace(self, markers=replace(self.markers, exclusions=tuple(kept)))

    def _mask(
        self, conversations: Sequence[Conversation], rendered: Sequence[Rendered], ids: Sequence[NDArray[np.int32]]
    ) -> list[Encoded | UntrainableError]:
        """Compute loss masks like `mask`, and exclude all scaffolds in `markers`."""
        options, quiet = self.options, not self.options.train_thinking
        turns_of_rows = find_turns(ids, self.markers, options)
        num_turns = turns_of_rows.per_row(turns_of_rows.begun)
        usual = np.array(
            [
                not (
                    text.suspicious
                    or (text.sanitized and MARKERS in self.unproven)
                    or "template_kwargs" in conversation
                )
                and is_usual(conversation, turns, options.roles, self.unproven, quiet)
                for conversation, text, turns in zip(conversations, rendered, num_turns.tolist(), strict=True)
            ]
        )
        sizes = {} if usual.all() else self._sizes(conversations, usual, turns_of_rows)
        weights = None if usual.all() else self._weights(conversations, usual, num_turns, sizes)
        if options.train_on == "last_turn":
            turns_of_rows = turns_of_rows.joined(sizes)
        masked = mask_turns(turns_of_rows, self.markers, options, weights)
        if self.leaves_open:
            masked.stopless[turns_of_rows.last_turns()] = False
        sure = usual & (turns_of_rows.per_row(masked.stopless) == 0) if masked.stopless.any() else usual
        any_unended = bool(masked.unended.any())
        ranges = self._ranges(turns_of_rows, ids)
        at = turns_of_rows.rows.borders.tolist()
        results: list[Encoded | UntrainableError] = []
        for row, (tokens, is_sure, first, stop) in enumerate(zip(ids, sure.tolist(), at, at[1:], strict=False)):
            row_weights = None if masked.weights is None else masked.weights[first:stop]
            doubt, num_unwritten = "", 0
            if not is_sure:
                try:
                    num_unwritten = self._check(row, conversations[row], rendered[row], turns_of_rows, masked)
                except UntrainableError as error:
                    if self.on_untrainable != "warn":
                        results.append(error)
                        continue
                    doubt = str(error)
            results.append(
                Encoded(
                    tokens,
                    masked.trained[first:stop],
                    row_weights,
                    ranges[row],
                    num_unended=int(masked.unended[turns_of_rows.of_row(row)].sum()) if any_unended else 0,
                    doubt=doubt,
                    num_unwritten=num_unwritten,
                )
            )
        return results

    def _sizes(
        self, conversations: Sequence[Conversation], usual: NDArray[np.bool_], turns: TokenTurns
    ) -> dict[int, Sequence[int]]:
        """Return the number of turns of each message, for rows with several turns in a message that need it."""
        sizes: dict[int, Sequence[int]] = {}
        for row in np.flatnonzero(~usual).tolist():
            messages, _ = self._messages(conversations[row])
            place = turns.begun_in(row)
            is_weighted = any({"train", "weight"} & message.keys() for message in messages)
            if len(place) > len(messages) and (is_weighted or self.options.train_on == "last_turn"):
                texts = self._read([turns.ids[turns.spans.content[at] : turns.spans.end[at]] for at in place.tolist()])
                messages, _ = self._messages(self.renderer.as_decoded(conversations[row]))
                known = turns_of_messages(messages, texts)
                if known is not None:
                    sizes[row] = known
        return sizes

    def _weights(
        self,
        conversations: Sequence[Conversation],
        usual: NDArray[np.bool_],
        num_turns: NDArray[np.int64],
        sizes: Mapping[int, Sequence[int]],
    ) -> list[list[float] | None] | None:
        """Return the weights of each row's turns, None for a row without weights; None if no row has weights."""
        weights: list[list[float] | None] = [None] * len(conversations)
        for row in np.flatnonzero(~usual).tolist():
            messages, _ = self._messages(conversations[row])
            weights[row] = turn_weights(messages, int(num_turns[row]), sizes.get(row))
        return None if all(row_weights is None for row_weights in weights) else weights

    def _check(
        self, row: int, conversation: Conversation, rendered: Rendered, turns: TokenTurns, masked: LossMask
    ) -> int:
        """Check the mask of a row against its messages, see [Note: Turns and messages] in check_turns.py.

        Returns:
            Number of messages whose reasoning the chat template leaves out.

        Raises:
            UntrainableError: If turns and messages differ, or the conversation has a feature that is not verified.
        """
        options, quiet = self.options, not self.options.train_thinking
        tokens = slice(int(turns.rows.borders[row]), int(turns.rows.borders[row + 1]))
        ids = turns.ids[tokens]
        written, conversation = conversation, self.renderer.as_decoded(conversation)
        messages, _ = self._messages(conversation)
        if not options.train_on_inputs:
            place = turns.begun_in(row)
            # The last token of a start marker may hold the first characters of the content.
            begins = turns.spans.content[place]
            tails = np.array([int(token) not in self.renderer.added_ids for token in turns.ids[begins - 1]], dtype=bool)
            # Tool results may be within a turn of the assistant, but they are not its text.
            every = MaskOptions(roles_to_train=options.roles, train_on_eos="none")
            rows = lay_out([ids])
            spoken = trained_tokens(rows, scan(rows, self.markers), self.markers, every)
            spoken[begins[tails] - 1 - tokens.start] = True
            spans = zip(begins - tails - tokens.start, turns.spans.end[place] - tokens.start, strict=True)
            contents = [ids[a:b][spoken[a:b]] for a, b in spans]
            read = functools.cache(functools.partial(self._read, contents))
            feature = unproven_feature(conversation, self.unproven, rendered.sanitized, quiet)
            if feature is not None and not is_exact(messages, read(), self._ends(turns, place), self._marker_texts):
                raise UntrainableError(f"the chat format failed its check for {feature}", self.unproven[feature])
            check_turns(conversation, options.roles, read, len(contents), rendered.suspicious)
            if options.train_on == "last_turn" and len(np.unique(turns.spans.message[place])) > len(messages):
                raise UntrainableError(NOT_PROVEN, "it is not certain which turns are the last message")
            self._check_words(messages, turns, masked, place)
            whole = options.train_on == "all" and not any(
                "train" in message or "weight" in message for message in conversation["messages"]
            )
            trained_here = masked.trained[tokens].copy()
            trained_here[begins[tails] - 1 - tokens.start] = True
            (trained,) = self._read([ids[trained_here]])
            check_trained(conversation, options.roles, trained, quiet, whole)
            closed = self._check_ends(conversation, turns, masked, place, read)
            check_leaks(conversation, options.roles, trained, self.leaking, closed)
        if rendered.sanitized:
            return num_unwritten(messages, *self._read([ids]))
        return num_unwritten(self._messages(written)[0], rendered.text)

    def _check_words(
        self, messages: Sequence[Message], turns: TokenTurns, masked: LossMask, place: NDArray[np.int64]
    ) -> None:
        """Check that a message without an answer is not trained by its end marker alone.

        The arguments are those of `_check_ends`; `messages` are those of trained roles.

        Raises:
            UntrainableError: If no word of such a message is trained, but its end marker is.
        """
        ends_alone = self.options.train_on_eos == "all" and self.options.train_on == "last_turn"
        if len(messages) != len(place) or ends_alone:
            return
        spans = turns.spans
        for message, at in zip(messages, place.tolist(), strict=True):
            words, end = slice(spans.content[at], spans.end[at]), slice(spans.end[at], spans.stop[at])
            if is_thought(message) and masked.trained[end].any():
                (text,) = self._read([turns.ids[words][masked.trained[words]]])
                if not text.strip():
                    raise UntrainableError(NO_WORDS, f"{text_of(message)[:80]!r} has no answer")

    def _check_ends(
        self,
        conversation: Conversation,
        turns: TokenTurns,
        masked: LossMask,
        place: NDArray[np.int64],
        read: Callable[[], list[str]],
    ) -> bool:
        """Check the trained turns of a row that have no end marker.

        Args:
            conversation: The conversation.
            turns: Turns of all rows.
            masked: Loss mask of all rows; a turn whose end marker shares a token with the content is not `unended`.
            place: Numbers of the row's trained turns.
            read: Returns the text of these turns, without end markers.

        Returns:
            True if each turn has an end marker.

        Raises:
            UntrainableError: If a turn without an end marker contains more than its messages say.
        """
        messages, others = self._messages(conversation)
        closed = True
        for number, at in enumerate(place.tolist()):
            if turns.spans.stop[at] > turns.spans.end[at]:
                continue
            ends = tuple(end.text for end in self.markers.roles[turns.spans.role[at]].ends)
            if ends and read()[number].rstrip().endswith(ends):
                # The turn has its end marker: it shares a token with the content, and is trained as content.
                masked.unended[at] = False
                continue
            closed = False
            if masked.stopless[at]:
                candidates = messages if len(messages) != len(place) else messages[number : number + 1]
                check_end(read()[number], candidates, others)
        return closed

    def _messages(self, conversation: Conversation) -> tuple[list[Message], list[Message]]:
        """Return the messages of trained roles, and those of other roles."""
        parts: tuple[list[Message], list[Message]] = ([], [])
        for message in conversation["messages"]:
            parts[message["role"] not in self.options.roles].append(message)
        return parts

    @functools.cached_property
    def _marker_texts(self) -> frozenset[str]:
        return frozenset(marker.text for role in self.markers.roles for marker in (*role.starts, *role.ends))

    def _ends(self, turns: TokenTurns, place: NDArray[np.int64]) -> list[str]:
        """Return the text of the end markers of turns; empty for a turn without one."""
        spans = turns.spans
        return self._read([turns.ids[spans.end[at] : spans.stop[at]] for at in place.tolist()])

    def _ranges(self, turns: TokenTurns, ids: Sequence[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
        """Return `Encoded.borders` of each row; empty if no row will be truncated."""
        if max(map(len, ids)) <= self.max_length:
            return [_no_borders()] * len(ids)
        whole = unsplittable_ranges(turns, self.markers, self.options)
        parts = np.split(whole, np.searchsorted(whole[:, 0], turns.rows.borders[1:-1]))
        return [(part - begin).astype(np.int32) for part, begin in zip(parts, turns.rows.borders, strict=False)]

    def cut(self, encoded: Encoded) -> Encoded | UntrainableError:
        """Truncate an example to `max_length`; return an error if it loses all trained tokens or a medium."""
        if not encoded.num_trained and self.on_untrainable != "warn":
            return UntrainableError(UNTRAINED)
        cut = truncate(encoded, self.max_length)
        if cut is Dropped.NOTHING_TRAINED and self.on_untrainable == "warn":
            cut = truncate(encoded.untrained(), self.max_length)
        if isinstance(cut, Dropped):
            return UntrainableError(cut.value)
        if len(cut) < len(encoded) and encoded.trained[len(cut)] and cut.trained[-1]:
            # Count the truncated turn, unless the example had an unended turn: only its last turn can be one, and
            # it is either the truncated turn or lies after the cut.
            return replace(cut, num_unended=cut.num_unended + (0 if encoded.num_unended else 1), num_cut=1)
        return cut

    def _read(self, contents: Sequence[NDArray[np.int32]]) -> list[str]:
        return [str(self.renderer.tokenizer.decode(content.tolist())) for content in contents]


class EncodedRows(Sequence[Encoded]):
    """Examples without media, stored in concatenated arrays.

    Args:
        lengths: Number of tokens in each example, int64 of shape [examples].
        ids: Token ids of all examples, int32 of shape [tokens].
        trained: True for trained tokens, bool of shape [tokens].
        weights: Weight of each token in the loss, float32 of shape [tokens]; None means equal weights.
        labels: `Encoded.label` of every second example, bool of shape [examples / 2]; None if they have none.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        ids: NDArray[np.int32],
        trained: NDArray[np.bool_],
        weights: NDArray[np.float32] | None = None,
        labels: NDArray[np.bool_] | None = None,
    ) -> None:
        self.lengths = lengths
        self.labels = labels
        self.is_weighted = weights is not None
        self._offsets = np.concatenate(([0], lengths.cumsum()))
        self._ids, self._trained, self._weights = ids, trained, weights

    @classmethod
    def of(cls, examples: Sequence[Encoded]) -> Self:
        """Concatenate examples; only their tokens, masks and weights are kept."""
        weights = None
        if any(example.weights is not None for example in examples):
            values = [example.trained if example.weights is None else example.weights for example in examples]
            weights = _joined(values, np.float32)
        labels = [example.label for example in examples[::2]]
        return cls(
            np.array([len(example) for example in examples], dtype=np.int64),
            _joined([example.input_ids for example in examples], np.int32),
            _joined([example.trained for example in examples], np.bool_),
            weights,
            None if not labels or labels[0] is None else np.array(labels, dtype=np.bool_),
        )

    def save(self, folder: Path) -> None:
        """Write the arrays to files in `folder`, and wait until the files are on the disk."""
        arrays: dict[str, NDArray[Any] | None] = {"lengths": self.lengths, "ids": self._ids, "trained": self._trained}
        arrays |= {"weights": self._weights, "labels": self.labels}
        for name, array in arrays.items():
            if array is not None:
                with (folder / f"{name}.npy").open("wb") as file:
                    np.save(file, array)
                    file.flush()
                    os.fsync(file.fileno())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Memory-map the arrays that `save` wrote.

        Raises:
            OSError, ValueError: If a file is missing or broken.
        """
        paths = {name: folder / f"{name}.npy" for name in ("lengths", "ids", "trained", "weights", "labels")}
        # `asarray` turns a memmap object into a plain array, whose access is several times as fast.
        arrays = {
            name: np.asarray(np.load(path, mmap_mode="r"))
            for name, path in paths.items()
            if name not in ("weights", "labels") or path.is_file()
        }
        num_tokens = arrays["lengths"].sum()
        if any(len(arrays[name]) != num_tokens for name in arrays.keys() - {"lengths", "labels"}):
            raise ValueError(f"the arrays in {folder} do not fit each other")
        return cls(**arrays)

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
        label = None if self.labels is None else bool(self.labels[index // 2])
        return Encoded(self._ids[part], self._trained[part], weights, label=label)


class RowEncoder(Protocol):
    """Interface of `ChatEncoder` and `TextEncoder`, which encode the rows of one data set."""

    @property
    def family(self) -> str: ...
    @property
    def knobs(self) -> str: ...
    @property
    def limits(self) -> str: ...
    @property
    def on_untrainable(self) -> OnUntrainable: ...
    @property
    def end_ids(self) -> frozenset[int]: ...
    def encode(self, rows: Sequence[Any]) -> Sequence[Result]: ...


def encode_rows(rows: Sequence[Any], encoder: RowEncoder, name: str) -> tuple[EncodedRows, DatasetReport]:
    """Encode all rows of a data set.

    Args:
        rows: Rows of one kind without media.
        encoder: Encoder for this data set.
        name: Name of the data set, for messages.

    Raises:
        ValueError: If a row cannot be trained on and `on_untrainable` is "error", or if none can.
        HasMedia: If a conversation has media.
    """
    examples, report = collect(_encoded(rows, encoder, name), rows, encoder, name)
    return EncodedRows.of(examples), report


def collect(
    results: Iterable[Result], rows: Sequence[Any], encoder: RowEncoder, name: str
) -> tuple[list[Encoded], DatasetReport]:
    """Separate examples from errors; return the examples and a report that counts the errors.

    Args:
        results: Example, examples or error for each row.
        rows: The rows; `rows.where`, if it exists, names a row in messages.
        encoder: Encoder that made the results.
        name: Name of the data set, for messages.

    Raises:
        ValueError: If a row cannot be trained on and `on_untrainable` is "error", or if none can.
    """
    examples: list[Encoded] = []
    num_kept = 0
    dropped: list[str] = []
    shown: list[str] = []
    for number, result in enumerate(results):
        if isinstance(result, UntrainableError):
            if encoder.on_untrainable == "error":
                raise ValueError(
                    f"{row_name(rows, number, name)}: {result}. Correct the row, raise `max_length`, or let "
                    '`on_untrainable` be "drop".'
                ) from result
            dropped.append(result.reason)
            if len(shown) < _DROPPED_SHOWN:
                shown.append(f"{row_name(rows, number, name)}: {result}")
            continue
        num_kept += 1
        examples += result if isinstance(result, tuple) else [result]
    unit = unit_of(rows[0]) if len(rows) else "conversation"
    # The other answer of a labelled row is read for KTO's reference point, and is not trained.
    counted = examples[::2] if unit == "labelled completion" else examples
    media = Counter(kind for example in counted for kind in example.media)
    report = DatasetReport(
        name,
        encoder.family,
        num_kept=num_kept,
        dropped=tuple(Counter(dropped).most_common()),
        num_tokens=sum(map(len, counted)),
        num_trained=sum(example.num_trained for example in counted),
        num_unended=sum(example.num_unended for example in counted),
        num_doubtful=sum(bool(example.doubt) for example in counted),
        lengths=quartet([len(example) for example in counted]),
        num_unwritten=sum(example.num_unwritten > 0 for example in counted),
        num_cut=sum(example.num_cut for example in counted),
        knobs=encoder.knobs,
        dropped_rows=tuple(shown),
        num_images=media["image"],
        num_audio=media["audio"],
        num_videos=media["video"],
        end_ids=tuple(
            index
            for index in sorted(encoder.end_ids)
            if any((example.input_ids[example.trained] == index).any() for example in counted)
        ),
        unit="completion" if unit == "conversation" and not isinstance(encoder, ChatEncoder) else unit,
    )
    if report.num_doubtful:
        first = next(example.doubt for example in counted if example.doubt)
        doubtful = plural(report.num_doubtful, "conversation is", "conversations are")
        rank_zero_warn(f"{name}: {doubtful} kept with a doubtful mask. The first: {first}.")
    if not examples or not report.num_trained:
        _refuse_nothing(report, encoder)
    return examples, report


def _encoded(rows: Sequence[Any], encoder: RowEncoder, name: str) -> Iterator[Result]:
    other: Preference | None = None
    with bar(None, f"Tokenizing {name}", len(rows), "row") as progress:
        for start in range(0, len(rows), _ENCODE_AT_ONCE):
            part = rows[start : start + _ENCODE_AT_ONCE]
            if any("media" in row for row in part):
                raise HasMedia
            if "label" in part[0]:
                results, other = _encode_labelled(part, encoder, other)
                yield from results
            else:
                yield from _encode_pairs(part, encoder) if "sides" in part[0] else encode_part(part, encoder)
            progress.update(len(part))


def encode_part(rows: Sequence[Any], encoder: RowEncoder) -> list[Result]:
    """Encode rows together; if one is refused, encode them one at a time, so that only that row gives an error."""
    try:
        return [*encoder.encode(rows)]
    except ValueError:
        results: list[Result] = []
        for row in rows:
            try:
                results += encoder.encode([row])
            except ValueError as error:
                results.append(UntrainableError(REFUSED if isinstance(error, WeightsError) else TEMPLATE, str(error)))
        return results


def _encode_pairs(rows: Sequence[Preference], encoder: RowEncoder) -> Iterator[Result]:
    """Yield the two sides of each pair, or an error."""
    encoded: Any = encode_part([*chain.from_iterable(row["sides"] for row in rows)], encoder)
    for first, second in zip(encoded[::2], encoded[1::2], strict=True):
        error = next((side for side in (first, second) if isinstance(side, UntrainableError)), None)
        if error is None and np.array_equal(first.input_ids, second.input_ids):
            error = UntrainableError(EQUAL)
        yield error or (replace(first, weights=None), replace(second, weights=None))


def _encode_labelled(
    rows: Sequence[Preference], encoder: RowEncoder, other: Preference | None
) -> tuple[list[Result], Preference | None]:
    """Encode labelled answers; return two examples or an error for each row, and the last row that can be trained.

    The second example has the same prompt with another answer, by which KTO estimates how far the model has moved
    (https://arxiv.org/abs/2402.01306, section 4.1). It is the answer of the row before, among rows that can be trained:
    `other` is the last one before `rows`. If it is None, the first row gets the answer of the last one.
    """
    results: list[Any] = encode_part([row["sides"][0] for row in rows], encoder)
    places = [place for place, result in enumerate(results) if isinstance(result, Encoded)]
    trainable = [rows[place] for place in places]
    if not trainable:
        return results, other
    sides = map(_mismatched, trainable, [other or trainable[-1], *trainable])
    for place, row, second in zip(places, trainable, encode_part([*sides], encoder), strict=True):
        examples: Any = (results[place], second)
        is_refused = isinstance(second, UntrainableError)
        results[place] = (
            second if is_refused else tuple(replace(it, weights=None, label=row["label"]) for it in examples)
        )
    return results, trainable[-1]


def _mismatched(row: Preference, other: Preference) -> Conversation:
    """Return the prompt of a row with the answer of another one."""
    side, answer = row["sides"][0].copy(), other["sides"][0]
    side["messages"] = [*side["messages"][: row["num_prompt"]], *answer["messages"][other["num_prompt"] :]]
    if "plain" in side and "plain" in answer:
        side["plain"] = {**side["plain"], "text": answer["plain"]["text"]}
    return side


def row_name(rows: Sequence[Any], number: int, name: str) -> str:
    """Return the name of a row for messages: that of `rows.where` if it exists, or else data set and row number."""
    where = getattr(rows, "where", None)
    return str(where(number)) if where is not None else f"{name}, row {number}"


def _refuse_nothing(report: DatasetReport, encoder: RowEncoder) -> None:
    if encoder.on_untrainable == "warn":
        return
    why = ", ".join(f"{reason}: {number}" for reason, number in report.dropped)
    reasons = {reason for reason, _ in report.dropped}
    help_ = ""
    if reasons & {UNTRAINED, *(reason.value for reason in Dropped)}:
        help_ = ' Or let `on_untrainable` be "warn" to go on without a loss.'
    elif reasons - {TEMPLATE, REFUSED}:
        help_ = ' Or let `on_untrainable` be "warn" to train on them, with a mask that may be wrong.'
    first = f" The first one: {report.dropped_rows[0]}." if report.dropped_rows else ""
    raise ValueError(
        f"{report.name}: nothing is left to train on ({why or 'no rows'}). {encoder.limits}.{first} Raise "
        f"`max_length`, name a role, or look at the data with `lightning-protrain preview`.{help_}"
    )


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype=dtype)
