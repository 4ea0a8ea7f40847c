"""Converts conversations with media into tokens and tensors, by the model's processor, when a batch needs them.

The number of tokens of a medium usually depends only on its size, which is in the header of its file. So the tokens of
a data set are counted without decoding media. For each size, the processor is called once with a blank medium, and the
resulting tokens are inserted into the tokens of the text. The first rows of each kind compare the result with the
processor's tokens for the whole row with blank media. If tokens differ, the processor is called for every row, with
blank media. Report, lengths and dropped rows come from these counts; batches come from the real media.
"""

from __future__ import annotations

import base64
import contextlib
import io
import re
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin, __version__, processing_utils

from lightning_protrain.data.batches.encode import REFUSED, TEMPLATE, ChatEncoder, Encoded, collect, row_name
from lightning_protrain.data.batches.media_reader import MediaReader, Opened, Size
from lightning_protrain.data.batches.processor import takes_conversations
from lightning_protrain.data.chat.check_turns import UntrainableError
from lightning_protrain.data.chat.markers import Markers
from lightning_protrain.data.chat.render import Rendered
from lightning_protrain.data.conversation import Conversation, MalformedRow, MediaKind
from lightning_protrain.data.sources.dataset import DatasetReport
from lightning_protrain.data.sources.images import open_image
from lightning_protrain.data.sources.media import count_media, named_media
from lightning_protrain.data.sources.video import open_frames
from lightning_protrain.progress import bar

# Attributes of processors whose values are media tokens.
_MEDIA_TOKENS = (
    *("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "boa_token", "eoa_token"),
    *("image_break_token", "image_end_token", "fake_image_token", "global_image_tag", "start_image_token"),
    *("end_image_token", "context_image_token", "vision_start_token", "vision_end_token", "image_start_token"),
    *("image_thumbnail_token", "start_of_img_token", "end_of_img_token", "img_patch_token"),
    *("tile_token", "tile_global_token", "audio_bos_token", "audio_eos_token", "vision_bos_token", "vision_eos_token"),
)
# Exceptions that processors raise for media that they cannot process.
_REFUSALS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)
# Processors that return images and frames of videos under one key, so that one of the two is lost.
_ONE_OF_TWO = ("SmolVLMProcessor",)
# Matches the token that precedes a tile of an image, such as <row_1_col_2>.
_TILE = re.compile(r"row_\d+_col_\d+")


def with_media(markers: Markers, processor: ProcessorMixin) -> Markers:
    """Return markers with the media tokens of the model's processor in `media`."""
    tokenizer: Any = processor.tokenizer
    names = {str(getattr(processor, name)) for name in _MEDIA_TOKENS if isinstance(getattr(processor, name, None), str)}
    known = tokenizer.get_vocab()
    media = {int(known[name]) for name in names if name in known}
    ids = {getattr(processor, name, None) for name in ("image_token_id", "video_token_id", "audio_token_id")}
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        media |= {int(index) for token, index in tokenizer.get_added_vocab().items() if _TILE.search(token)}
    elif takes_conversations(processor):
        special = tokenizer.tokenizer.instruct_tokenizer.audio_encoder.special_ids
        ids |= {special.audio, special.begin_audio}
    return replace(markers, media=markers.media | media | {int(index) for index in ids if isinstance(index, int)})


@dataclass(frozen=True)
class MediaEncoder:
    """Encodes conversations with media.

    Attributes:
        chat: Encoder that renders the text and makes the loss mask; its markers include the media tokens.
        processor: The model's processor.
    """

    chat: ChatEncoder
    processor: Any

    @property
    def reader(self) -> MediaReader:
        """Reader that opens media for the processor."""
        return MediaReader(self.processor)

    def encode(self, conversation: Conversation, where: str) -> Encoded | UntrainableError:
        """Encode a conversation; return the example, or an error if it cannot be trained on.

        Args:
            conversation: Conversation with or without media.
            where: Name of the row, for messages.

        Raises:
            ValueError: If a medium cannot be opened, or the template or the processor refuses the conversation.
        """
        media = [self.reader.open(medium, name) for medium, name in named_media(conversation.get("media", ()), where)]
        rendered = self.render(conversation, media)
        made = self.process(rendered, media, where)
        ids = made.pop("input_ids")[0].numpy().astype(np.int32)
        made.pop("attention_mask", None)
        extras = {name: _tensor(value) for name, value in made.items()}
        return self.finish(conversation, rendered, ids, extras)

    def render(self, conversation: Conversation, media: Sequence[Opened]) -> Rendered:
        """Return the text of a conversation, or its tokens if the processor reads whole conversations.

        Raises:
            ValueError: If the chat template refuses the conversation.
        """
        if media and takes_conversations(self.processor):
            conversation = self.reader.filled(conversation, media)
        return self.chat.renderer.render(conversation)

    def process(self, rendered: Rendered, media: Sequence[Opened], where: str) -> Any:
        """Return the processor's tensors for a text and its media.

        Raises:
            MalformedRow: If the processor refuses the text or the media.
        """
        kind = type(self.processor).__name__
        if kind in _ONE_OF_TWO and {"image", "video"} <= {medium_kind for medium_kind, _ in media}:
            raise MalformedRow(f"{where} has an image and a video, of which {kind} keeps one. Divide the row.")
        if rendered.ids is not None:
            made = {"input_ids": torch.tensor([rendered.ids])}
            if media:
                turn = {"role": "user", "content": [self.reader.audio_part(audio) for _, audio in media]}
                made["input_features"] = self.processor.apply_chat_template([turn])["input_features"]
            return made
        arguments = self.reader.arguments(media) | {"add_special_tokens": False}
        if rendered.sanitized:
            if not hasattr(processing_utils, "_UNMARKED"):  # It came with the version that tells marked tokens apart.
                raise MalformedRow(
                    f"{where}: transformers {__version__} cannot keep control tokens in messages as text beside media. "
                    'Run `pip install -U "transformers>=5.23"`, or take them out of the messages.'
                )
            arguments["sanitize_control_tokens"] = True
        try:
            return self.processor(text=[rendered.text], return_tensors="pt", **arguments)
        except _REFUSALS as error:
            if "char_to_token" in str(error):
                raise MalformedRow(
                    f"{where}: {kind} cannot keep control tokens in messages as text beside "
                    "images. Take them out of the messages, or the images out of the row."
                ) from error
            reason = str(error).rstrip(".")
            counts = Counter(medium_kind for medium_kind, _ in media)
            counted = ", ".join(count_media(number, medium_kind) for medium_kind, number in counts.items())
            raise MalformedRow(
                f"{where}: the processor refuses {counted or 'no media'} and this text: {reason}. Give one medium for "
                "each placeholder."
            ) from error

    def finish(
        self, conversation: Conversation, rendered: Rendered, ids: NDArray[np.int32], extras: Mapping[str, Tensor]
    ) -> Encoded | UntrainableError:
        """Make the loss mask, and return the example, truncated to `max_length`.

        Args:
            conversation: The conversation.
            rendered: Text of the conversation.
            ids: Token ids, including media tokens, of shape [tokens].
            extras: Further inputs of the model.

        Raises:
            ValueError: If message weights cannot be assigned to turns.
        """
        kinds = tuple(medium.kind for medium in conversation.get("media", ()))
        places = np.flatnonzero(np.isin(ids, list(self.chat.markers.media)))
        (masked,) = self.chat.mask([conversation], [rendered], [ids])
        if isinstance(masked, UntrainableError):
            return masked
        stop = int(places[-1]) + 1 if kinds and len(places) else 0
        return self.chat.cut(replace(masked, extras=extras, media=kinds, media_stop=stop))


def _tensor(value: Any) -> Tensor:
    """Convert a processor's output into a tensor, floating-point numbers into float32: Llama 4 gives bfloat16."""
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    return tensor.float() if tensor.is_floating_point() else tensor


PROCESSOR = "a medium cannot be opened, or the processor refuses it"
# Number of rows of each kind for which inserted tokens are compared with the processor's.
_PROVEN_BY = 3
# Attributes of a processor whose value may be the placeholder of a medium in a rendered text.
_PLACEHOLDERS: dict[MediaKind, tuple[str, ...]] = {
    "image": ("image_token", "boi_token"),
    "audio": ("audio_token", "boa_token"),
    "video": ("video_token",),
}
# Maximum width and height of a thumbnail, pixels.
_THUMBNAIL = (160, 160)


class MediaRows(Sequence[Encoded]):
    """Examples with media, which are encoded on access, usually in a worker process.

    A row whose media turn out to be broken becomes an example without trained tokens, or raises ValueError if
    `on_untrainable` is "error".

    Args:
        rows: Conversations that can be trained on.
        encoder: Encoder for these rows.
        name: Name of the data set, for messages.
        measured: Example of each row, encoded with blank media.

    Attributes:
        lengths: Number of tokens in each example, int64 of shape [rows].
        num_media: Number of media tokens in each example, int64 of shape [rows].
        kinds: Map from each kind of media to the first row that has it.
        is_weighted: True if any example has weights.
    """

    def __init__(
        self, rows: Sequence[Conversation], encoder: MediaEncoder, name: str, measured: Sequence[Encoded]
    ) -> None:
        self.rows = rows
        self.encoder = encoder
        self.name = name
        media = list(encoder.chat.markers.media)
        self.lengths = np.array([len(example) for example in measured], dtype=np.int64)
        self.num_media = np.array([np.isin(example.input_ids, media).sum() for example in measured], dtype=np.int64)
        self.is_weighted = any(example.weights is not None for example in measured)
        self.kinds = {kind: row for row in reversed(range(len(measured))) for kind in measured[row].media}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        where = row_name(self.rows, index, self.name)
        try:
            result = self.encoder.encode(self.rows[index], where)
        except ValueError as error:
            # The header was valid, but the medium is broken.
            result = UntrainableError(PROCESSOR, str(error))
        if isinstance(result, Encoded):
            return result
        if self.encoder.chat.on_untrainable == "error":
            raise ValueError(
                f"{where}: {result}. Correct the row, raise `max_length`, or let `on_untrainable` be drop."
            )
        # Another rank does not decode this row.
        warnings.warn(f"{where}: {result}. Nothing of it is trained.", stacklevel=2)
        # Return one untrained token, so that the batch keeps its number of rows.
        return Encoded(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.bool_))

    def thumbnails(self, index: int) -> tuple[str, ...]:
        """Return small versions of a row's images and first video frames as `data:` URLs; skip unreadable files."""
        urls = []
        for medium in self.rows[index].get("media", ()):
            with contextlib.suppress(MalformedRow):
                source: Any = medium.source
                if medium.kind == "audio":
                    continue
                if medium.kind == "image":
                    image = open_image(source, self.name)
                else:
                    image = Image.fromarray(open_frames(source, [0], self.name)[0])
                image.thumbnail(_THUMBNAIL)
                file = io.BytesIO()
                image.save(file, "PNG")
                urls.append("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
        return tuple(urls)


def media_rows(rows: Sequence[Conversation], encoder: MediaEncoder, name: str) -> tuple[MediaRows, DatasetReport]:
    """Count the tokens of all conversations of a data set, and leave out conversations that cannot be trained on.

    Args:
        rows: Conversations with or without media.
        encoder: Encoder for this data set.
        name: Name of the data set, for messages.

    Raises:
        ValueError: If a conversation cannot be trained on and `on_untrainable` is "error", or if none can.
    """
    measure = MediaMeasure(encoder)
    places: list[int] = []

    def results() -> Iterator[Encoded | UntrainableError]:
        warned = False
        for index in bar(range(len(rows)), f"Counting tokens of {name}", unit="row"):
            result = measure.encode(rows[index], row_name(rows, index, name))
            if isinstance(result, Encoded):
                places.append(index)
            elif result.reason == PROCESSOR and not warned and encoder.chat.on_untrainable != "error":
                warned = True
                rank_zero_warn(f"{result} It is left out, and others like it.")
            yield result

    examples, report = collect(results(), rows, encoder.chat, name)
    selected: Any = rows.select(places) if hasattr(rows, "select") else [rows[index] for index in places]
    return MediaRows(selected, encoder, name, examples), report


class MediaMeasure:
    """Encodes conversations with blank media, to count tokens; the module docstring explains how.

    Args:
        encoder: Encoder for the real media.

    Attributes:
        expands: True until inserted tokens differ from the processor's tokens for a whole row.
    """

    def __init__(self, encoder: MediaEncoder) -> None:
        self.encoder = encoder
        self.expands = True
        self._proofs: Counter[tuple[tuple[MediaKind, ...], bool]] = Counter()
        self._expansions: dict[tuple[str, Hashable], NDArray[np.int32]] = {}
        vocabulary = encoder.processor.tokenizer.get_vocab()
        self._placeholders = {
            kind: {
                str(token): int(vocabulary[token])
                for name in names
                if (token := getattr(encoder.processor, name, None)) in vocabulary
            }
            for kind, names in _PLACEHOLDERS.items()
        }

    def encode(self, conversation: Conversation, where: str) -> Encoded | UntrainableError:
        """Encode a conversation without tensors; return the example, or an error if it cannot be trained on.

        Raises:
            ValueError: If the processor cannot read media of a kind that the conversation has.
        """
        media = named_media(conversation.get("media", ()), where)
        try:
            sizes = [(medium.kind, self.encoder.reader.size(medium, name)) for medium, name in media]
        except MalformedRow as error:
            return UntrainableError(PROCESSOR, str(error))
        whole = takes_conversations(self.encoder.processor)
        try:
            blank = [self.encoder.reader.blank(kind, size) for kind, size in sizes] if whole else []
            rendered = self.encoder.render(conversation, blank)
        except ValueError as error:
            return UntrainableError(TEMPLATE, str(error))
        try:
            ids = self._ids(rendered, sizes, where)
        except MalformedRow as error:
            return UntrainableError(PROCESSOR, str(error))
        try:
            return self.encoder.finish(conversation, rendered, ids, {})
        except ValueError as error:
            return UntrainableError(REFUSED, str(error))

    def _ids(self, rendered: Rendered, sizes: Sequence[tuple[MediaKind, Size]], where: str) -> NDArray[np.int32]:
        if rendered.ids is not None:
            return np.asarray(rendered.ids, dtype=np.int32)
        proof = (tuple(kind for kind, _ in sizes), rendered.sanitized)
        ids = self._expanded(rendered, sizes) if self.expands else None
        if ids is not None and self._proofs[proof] >= _PROVEN_BY:
            return ids
        blank = [self.encoder.reader.blank(kind, size) for kind, size in sizes]
        expected = _first(self.encoder.process(rendered, blank, where))
        if ids is not None:
            self.expands = np.array_equal(ids, expected)
            self._proofs[proof] += 1
        return expected

    def _expanded(self, rendered: Rendered, sizes: Sequence[tuple[MediaKind, Size]]) -> NDArray[np.int32] | None:
        """Return the tokens of a text with inserted media tokens; None if placeholders and media do not match."""
        ids = np.asarray(self.encoder.chat.renderer.encode([rendered])[0], dtype=np.int32)
        inserted: dict[int, NDArray[np.int32]] = {}
        for kind in {kind for kind, _ in sizes}:
            sizes_of_kind = [size for other, size in sizes if other == kind]
            for text, token in self._placeholders[kind].items():
                places = np.flatnonzero(ids == token)
                if len(places) == len(sizes_of_kind):
                    expansions = [self._expansion(kind, text, size) for size in sizes_of_kind]
                    inserted |= zip(places.tolist(), expansions, strict=True)
                    break
            else:
                return None
        # Each piece but the first begins with a placeholder, which the media tokens replace.
        places = np.array(sorted(inserted), dtype=np.int64)
        head, *after = np.split(ids, places)
        return np.concatenate(
            [head, *chain.from_iterable((inserted[p], piece[1:]) for p, piece in zip(places, after, strict=True))]
        )

    def _expansion(self, kind: MediaKind, text: str, size: Any) -> NDArray[np.int32]:
        """Return the tokens that replace the placeholder of a medium of the given size."""
        key = (text, self.encoder.reader.key(kind, size))
        if key not in self._expansions:
            made = self.encoder.process(Rendered(text), [self.encoder.reader.blank(kind, size)], f"{kind} of {size}")
            self._expansions[key] = _first(made)
        return self._expansions[key]


def _first(made: Any) -> NDArray[np.int32]:
    return made["input_ids"][0].numpy().astype(np.int32)
