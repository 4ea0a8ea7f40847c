"""Conversations with images: the processor of a model makes tokens and pixels of them, when they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from lightning_protrain.data.agreement import UntrainableError
from lightning_protrain.data.conversations import Conversation, MalformedRow
from lightning_protrain.data.encoding import ChatEncoder
from lightning_protrain.data.examples import Encoded
from lightning_protrain.data.images import open_images
from lightning_protrain.data.markers import Markers
from lightning_protrain.data.rendering import Rendered

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
        made = self.process(rendered, images, where)
        ids = made.pop("input_ids")[0].numpy().astype(np.int32)
        made.pop("attention_mask", None)
        extras = {name: _tensor(value) for name, value in made.items()}
        return self.finish(conversation, rendered, ids, extras)

    def process(self, rendered: Rendered, images: Sequence[Image.Image], where: str) -> Any:
        """What the processor makes of a text and its images, as tensors.

        Raises:
            MalformedRow: It refuses them.
        """
        given: dict[str, Any] = {"add_special_tokens": False, **self.options}
        if rendered.sanitized:
            given["sanitize_control_tokens"] = True
        try:
            return self.processor(text=[rendered.text], images=list(images) or None, return_tensors="pt", **given)
        except (ValueError, IndexError, TypeError) as error:
            raise MalformedRow(
                f"{where}: the processor refuses {len(images)} images and this text: {error}. Give one image for each "
                "place of one."
            ) from error

    def finish(
        self, conversation: Conversation, rendered: Rendered, ids: NDArray[np.int32], extras: Mapping[str, Tensor]
    ) -> Encoded | UntrainableError:
        """What of tokens is trained, and as much of it as `max_length` allows.

        Args:
            conversation: Whose they are.
            rendered: The text that they come from.
            ids: Tokens, those of images among them, [length].
            extras: What goes with them to the model.

        Raises:
            ValueError: The weights of messages cannot be told apart.
        """
        images = len(conversation.get("images", ()))
        media = np.flatnonzero(np.isin(ids, list(self.chat.markers.media)))
        (masked,) = self.chat.mask([conversation], [rendered], [ids])
        if isinstance(masked, UntrainableError):
            return masked
        return self.chat.cut(replace(masked, extras=extras, images=images, images_stop=_stop(media, images)))


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _stop(media: Any, num_images: int) -> int:
    return int(media[-1]) + 1 if num_images and len(media) else 0
