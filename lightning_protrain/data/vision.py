"""Conversations with images: the processor of a model makes tokens and pixels of them, when they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from transformers import ProcessorMixin

from lightning_protrain.data.agreement import UntrainableError
from lightning_protrain.data.conversations import Conversation, MalformedRow
from lightning_protrain.data.encoding import ChatEncoder
from lightning_protrain.data.examples import Encoded
from lightning_protrain.data.images import open_images
from lightning_protrain.data.markers import Markers

# What a processor calls the tokens that stand for media.
_MEDIA_TOKENS = (
    *("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "boa_token", "eoa_token"),
    *("image_break_token", "image_end_token", "fake_image_token", "global_image_tag", "start_image_token"),
    *("end_image_token", "context_image_token", "vision_start_token", "vision_end_token"),
)
MANAGED_KEYS = ("revision", "trust_remote_code")


def with_media(markers: Markers, processor: ProcessorMixin) -> Markers:
    """The markers, and as media whatever the processor puts in place of images.

    Args:
        markers: Those of the text.
        processor: Of the model.
    """
    tokenizer: Any = processor.tokenizer
    names = {str(getattr(processor, name)) for name in _MEDIA_TOKENS if isinstance(getattr(processor, name, None), str)}
    known = tokenizer.get_vocab()
    found = {int(known[name]) for name in names if name in known}
    ids = {getattr(processor, name, None) for name in ("image_token_id", "video_token_id", "audio_token_id")}
    return replace(markers, media=markers.media | found | {int(index) for index in ids if isinstance(index, int)})


def usable_keys(processor_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are passed on; those of `MANAGED_KEYS` are left out with a warning."""
    managed = [key for key in MANAGED_KEYS if key in processor_kwargs]
    if managed:
        rank_zero_warn(
            f"processor_kwargs: {', '.join(managed)} cannot be set here and is left out: processor and model are of "
            "one folder. Give a folder with the revision that you want."
        )
    return {key: value for key, value in processor_kwargs.items() if key not in managed}


@dataclass(frozen=True)
class ImageEncoder:
    """How conversations with images become examples.

    Attributes:
        chat: The text and its mask; its markers know the media tokens.
        processor: Makes tokens and pixels.
        options: Passed to the processor.
    """

    chat: ChatEncoder
    processor: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, conversation: Conversation, where: str) -> Encoded | UntrainableError:
        """The example of a conversation, or why there is none.

        Args:
            conversation: With as many images as parts that stand for them.
            where: Names it in messages.

        Raises:
            ValueError: An image that does not open; template or processor refuse it.
        """
        rendered = self.chat.renderer.render(conversation)
        images = open_images(conversation, where)
        given: dict[str, Any] = {"add_special_tokens": False, **self.options}
        if rendered.sanitized:
            given["sanitize_control_tokens"] = True
        try:
            made = self.processor(
                text=[rendered.text], images=[images] if images else None, return_tensors="pt", **given
            )
        except (ValueError, IndexError, TypeError) as error:
            raise MalformedRow(
                f"{where}: the processor refuses {len(images)} images and this text: {error}. Give one image for each "
                "place of one."
            ) from error
        ids = made.pop("input_ids")[0].numpy().astype(np.int32)
        made.pop("attention_mask", None)
        extras = {name: _tensor(value) for name, value in made.items()}
        media = np.flatnonzero(np.isin(ids, list(self.chat.markers.media)))
        (masked,) = self.chat.mask([conversation], [rendered], [ids])
        if isinstance(masked, UntrainableError):
            return masked
        return self.chat.cut(replace(masked, extras=extras, images=len(images), images_stop=_stop(media, len(images))))


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _stop(media: Any, num_images: int) -> int:
    return int(media[-1]) + 1 if num_images and len(media) else 0


class ImageRows(Sequence[Encoded]):
    """Examples that are made when they are asked for, by whoever asks: a worker process, mostly.

    A conversation that cannot be trained on is an example without a trained token, or an error.

    Args:
        rows: Conversations.
        encoder: Makes the examples.
        name: Of the data set, for messages.
    """

    def __init__(self, rows: Sequence[Conversation], encoder: ImageEncoder, name: str) -> None:
        self.rows = rows
        self.encoder = encoder
        self.name = name

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        where = self._where(index)
        try:
            result = self.encoder.encode(self.rows[index], where)
        except ValueError as error:
            # Broken pixels behind a header that was right, or what template or processor refuse.
            result = UntrainableError(str(error))
        if isinstance(result, Encoded):
            return result
        if self.encoder.chat.on_untrainable == "error":
            raise ValueError(
                f"{where}: {result}. Correct the row, raise `max_length`, or let `on_untrainable` be drop."
            )
        rank_zero_warn(f"{where}: {result}. Nothing of it is trained.")
        # A token that nothing is learnt from, so that the batch keeps its rows.
        return Encoded(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.bool_))

    def _where(self, index: int) -> str:
        where = getattr(self.rows, "where", None)
        return str(where(index)) if where is not None else f"{self.name}, row {index}"
