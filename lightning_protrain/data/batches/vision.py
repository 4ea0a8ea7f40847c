"""Turns conversations with images into tokens and pixels with the processor of a model, when a batch needs them.

The number of tokens for an image depends only on its size, which is in the header of its file. So lengths are computed
without pixels: for each size, the processor is called once with a blank image, and its tokens are inserted into the
tokens of the text. The first rows of each kind (number of images, control tokens in the text or not) check this against
the processor's output for the whole row with blank images. If a processor behaves otherwise, it is called with blank
images for every row. The counts of the report, the lengths and the dropped rows come from these tokens; batches come
from the real pixels.
"""

from __future__ import annotations

import base64
import contextlib
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from lightning_protrain.config import plural
from lightning_protrain.data.batches.encode import REFUSED, TEMPLATE, ChatEncoder, Encoded, collect
from lightning_protrain.data.chat.check_turns import UntrainableError
from lightning_protrain.data.chat.markers import Markers
from lightning_protrain.data.chat.render import Rendered
from lightning_protrain.data.conversation import Conversation, MalformedRow
from lightning_protrain.data.sources.dataset import DatasetReport, progress_bar
from lightning_protrain.data.sources.images import image_size, open_image, open_images

# Attributes of processors that name media tokens.
_MEDIA_TOKENS = (
    *("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "boa_token", "eoa_token"),
    *("image_break_token", "image_end_token", "fake_image_token", "global_image_tag", "start_image_token"),
    *("end_image_token", "context_image_token", "vision_start_token", "vision_end_token", "image_start_token"),
    *("image_thumbnail_token", "start_of_img_token", "end_of_img_token", "img_patch_token"),
    *("tile_token", "tile_global_token"),
)
# What processors raise for images that they cannot cut or scale.
_REFUSALS = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, MemoryError)
# Tokens before the tiles of an image, such as <row_1_col_2>.
_TILE = re.compile(r"row_\d+_col_\d+")


def with_media(markers: Markers, processor: ProcessorMixin) -> Markers:
    """Return the markers, with the processor's image tokens added to their media.

    Args:
        markers: Markers of the text.
        processor: Processor of the model.
    """
    tokenizer: Any = processor.tokenizer
    names = {str(getattr(processor, name)) for name in _MEDIA_TOKENS if isinstance(getattr(processor, name, None), str)}
    known = tokenizer.get_vocab()
    found = {int(known[name]) for name in names if name in known}
    found |= {int(index) for token, index in tokenizer.get_added_vocab().items() if _TILE.search(token)}
    ids = {getattr(processor, name, None) for name in ("image_token_id", "video_token_id", "audio_token_id")}
    return replace(markers, media=markers.media | found | {int(index) for index in ids if isinstance(index, int)})


@dataclass(frozen=True)
class ImageEncoder:
    """Makes examples of conversations with images.

    Attributes:
        chat: Encoder of the text and its mask; its markers include the media tokens.
        processor: Makes tokens and pixels.
    """

    chat: ChatEncoder
    processor: Any

    def encode(self, conversation: Conversation, where: str) -> Encoded | UntrainableError:
        """Return the example of a conversation, or the reason why there is none.

        Args:
            conversation: Conversation with one image for each image part.
            where: Name of the row, for messages.

        Raises:
            ValueError: If an image does not open, or the template or the processor refuses the conversation.
        """
        rendered = self.chat.renderer.render(conversation)
        images = open_images(conversation, where)
        made = self.process(rendered, images, where)
        ids = made.pop("input_ids")[0].numpy().astype(np.int32)
        made.pop("attention_mask", None)
        extras = {name: _tensor(value) for name, value in made.items()}
        return self.finish(conversation, rendered, ids, extras)

    def process(self, rendered: Rendered, images: Sequence[Image.Image], where: str) -> Any:
        """Return the processor's tensors for a text and its images.

        Raises:
            MalformedRow: If the processor refuses them.
        """
        given: dict[str, Any] = {"add_special_tokens": False}
        if rendered.sanitized:
            given["sanitize_control_tokens"] = True
        try:
            return self.processor(text=[rendered.text], images=list(images) or None, return_tensors="pt", **given)
        except _REFUSALS as error:
            if "char_to_token" in str(error):
                raise MalformedRow(
                    f"{where}: {type(self.processor).__name__} cannot keep control tokens in messages as text beside "
                    "images. Take them out of the messages, or the images out of the row."
                ) from error
            refused = plural(len(images), "image")
            reason = str(error).rstrip(".")
            raise MalformedRow(
                f"{where}: the processor refuses {refused} and this text: {reason}. Give one image for each "
                "image placeholder."
            ) from error

    def finish(
        self, conversation: Conversation, rendered: Rendered, ids: NDArray[np.int32], extras: Mapping[str, Tensor]
    ) -> Encoded | UntrainableError:
        """Return the example with its loss mask, cut to `max_length`.

        Args:
            conversation: The conversation.
            rendered: Its rendered text.
            ids: Its tokens including those of images, [length].
            extras: Further inputs of the model.

        Raises:
            ValueError: If the weights of messages cannot be assigned to turns.
        """
        images = len(conversation.get("images", ()))
        media = np.flatnonzero(np.isin(ids, list(self.chat.markers.media)))
        (masked,) = self.chat.mask([conversation], [rendered], [ids])
        if isinstance(masked, UntrainableError):
            return masked
        return self.chat.cut(replace(masked, extras=extras, images=images, images_stop=_stop(media, images)))


def _tensor(value: Any) -> Tensor:
    """Return a tensor; pixels in float32, which the precision of the run casts: Llama 4's processor gives bfloat16."""
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    return tensor.float() if tensor.is_floating_point() else tensor


def _stop(media: Any, num_images: int) -> int:
    return int(media[-1]) + 1 if num_images and len(media) else 0


PROCESSOR = "an image does not open, or the processor refuses it"
_SHOW_PROGRESS_FROM = 500
# Number of rows of each kind whose tokens are compared with the processor's.
_PROVEN_BY = 3
# Attributes of a processor that may name the token for an image in a template.
_PLACEHOLDERS = ("image_token", "boi_token")
_Size = tuple[int, int]
# Largest width and height of an image in a preview, pixels.
_THUMBNAIL: _Size = (160, 160)


class ImageRows(Sequence[Encoded]):
    """Examples that are made on access, usually in a worker process.

    If an example fails although its image headers were valid, it has no trained token, or raises an error.

    Args:
        rows: Conversations that can be trained on.
        encoder: Makes the examples.
        name: Name of the data set, for messages.
        measured: The examples without pixels, one for each row.

    Attributes:
        lengths: Tokens of each example, int64 of shape [rows].
        num_media: Image tokens of each example, int64 of shape [rows].
        is_weighted: True if any example has weights.
    """

    def __init__(
        self, rows: Sequence[Conversation], encoder: ImageEncoder, name: str, measured: Sequence[Encoded]
    ) -> None:
        self.rows = rows
        self.encoder = encoder
        self.name = name
        media = list(encoder.chat.markers.media)
        self.lengths = np.array([len(one) for one in measured], dtype=np.int64)
        self.num_media = np.array([np.isin(one.input_ids, media).sum() for one in measured], dtype=np.int64)
        self.is_weighted = any(one.weights is not None for one in measured)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        where = _where(self.rows, index, self.name)
        try:
            result = self.encoder.encode(self.rows[index], where)
        except ValueError as error:
            # The header was valid, but the pixels are broken.
            result = UntrainableError(PROCESSOR, str(error))
        if isinstance(result, Encoded):
            return result
        if self.encoder.chat.on_untrainable == "error":
            raise ValueError(
                f"{where}: {result}. Correct the row, raise `max_length`, or let `on_untrainable` be drop."
            )
        rank_zero_warn(f"{where}: {result}. Nothing of it is trained.")
        # One token that is not trained, so that the batch keeps its number of rows.
        return Encoded(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.bool_))

    def thumbnails(self, index: int) -> tuple[str, ...]:
        """Return the images of a row that open, made small, as `data:` URLs."""
        urls = []
        for source in self.rows[index].get("images", ()):
            with contextlib.suppress(MalformedRow):
                image = open_image(source, self.name)
                image.thumbnail(_THUMBNAIL)
                file = io.BytesIO()
                image.save(file, "PNG")
                urls.append("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
        return tuple(urls)


def image_rows(rows: Sequence[Conversation], encoder: ImageEncoder, name: str) -> tuple[ImageRows, DatasetReport]:
    """Count the tokens of all conversations of a data set, and leave out those that cannot be trained on.

    Args:
        rows: Conversations with or without images.
        encoder: Encoder of the data set.
        name: Name of the data set, for messages.

    Raises:
        ValueError: If a conversation cannot be trained on and `on_untrainable` is "error", or if none can.
    """
    measure = ImageMeasure(encoder)
    places: list[int] = []

    def results() -> Iterator[Encoded | UntrainableError]:
        is_told = False
        with progress_bar(len(rows), _SHOW_PROGRESS_FROM) as progress:
            for index in progress.track(range(len(rows)), description="Counting tokens"):
                result = measure.encode(rows[index], _where(rows, index, name))
                if isinstance(result, Encoded):
                    places.append(index)
                elif result.reason == PROCESSOR and not is_told and encoder.chat.on_untrainable != "error":
                    is_told = True
                    rank_zero_warn(f"{result} It is left out, and others like it.")
                yield result

    kept, report = collect(results(), rows, encoder.chat, name)
    selected: Any = rows.select(places) if hasattr(rows, "select") else [rows[index] for index in places]
    return ImageRows(selected, encoder, name, kept), report


class ImageMeasure:
    """Makes examples without pixels; the module docstring explains how.

    Args:
        encoder: Encoder of the conversations with pixels.

    Attributes:
        expands: True as long as images of one size have the same tokens everywhere.
    """

    def __init__(self, encoder: ImageEncoder) -> None:
        self.encoder = encoder
        self.expands = True
        self._proofs: Counter[tuple[int, bool]] = Counter()
        self._expansions: dict[tuple[str, _Size], NDArray[np.int32]] = {}
        names = (getattr(encoder.processor, name, None) for name in _PLACEHOLDERS)
        vocabulary = encoder.processor.tokenizer.get_vocab()
        self._placeholders = {str(name): int(vocabulary[name]) for name in names if name in vocabulary}

    def encode(self, conversation: Conversation, where: str) -> Encoded | UntrainableError:
        """Return the example of a conversation without its image tensors, or the reason why there is none."""
        try:
            rendered = self.encoder.chat.renderer.render(conversation)
        except ValueError as error:
            return UntrainableError(TEMPLATE, str(error))
        images = conversation.get("images", ())
        try:
            sizes = [image_size(image, f"{where}, image {number}") for number, image in enumerate(images)]
            ids = self._ids(rendered, sizes, where)
        except MalformedRow as error:
            return UntrainableError(PROCESSOR, str(error))
        try:
            return self.encoder.finish(conversation, rendered, ids, {})
        except ValueError as error:
            return UntrainableError(REFUSED, str(error))

    def _ids(self, rendered: Rendered, sizes: Sequence[_Size], where: str) -> NDArray[np.int32]:
        kind = (len(sizes), rendered.sanitized)
        ids = self._expanded(rendered, sizes) if self.expands else None
        if ids is not None and self._proofs[kind] >= _PROVEN_BY:
            return ids
        expected = _first(self.encoder.process(rendered, [_blank(size) for size in sizes], where))
        if ids is not None:
            self.expands = np.array_equal(ids, expected)
            self._proofs[kind] += 1
        return expected

    def _expanded(self, rendered: Rendered, sizes: Sequence[_Size]) -> NDArray[np.int32] | None:
        """Return the tokens of the text with those of each image inserted; None if their places are unclear."""
        ids = np.asarray(self.encoder.chat.renderer.encode([rendered])[0], dtype=np.int32)
        for text, token in self._placeholders.items():
            places = np.flatnonzero(ids == token)
            if len(places) == len(sizes):
                # Each piece of text after the first begins with the placeholder.
                before, *after = np.split(ids, places)
                parts = [(self._expansion(text, size), piece[1:]) for size, piece in zip(sizes, after, strict=True)]
                return np.concatenate([before, *chain.from_iterable(parts)])
        return None

    def _expansion(self, text: str, size: _Size) -> NDArray[np.int32]:
        """Return the tokens of an image of this size."""
        if (text, size) not in self._expansions:
            made = self.encoder.process(Rendered(text), [_blank(size)], f"an image of {size[0]} x {size[1]} pixels")
            self._expansions[text, size] = _first(made)
        return self._expansions[text, size]


def _first(made: Any) -> NDArray[np.int32]:
    ids: NDArray[np.int32] = made["input_ids"][0].numpy().astype(np.int32)
    return ids


def _blank(size: _Size) -> Image.Image:
    return Image.new("RGB", size)


def _where(rows: Sequence[Conversation], index: int, name: str) -> str:
    where = getattr(rows, "where", None)
    return str(where(index)) if where is not None else f"{name}, row {index}"
