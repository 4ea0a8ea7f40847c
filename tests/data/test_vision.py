"""Conversations with images: through the processor of a model, and which of their tokens are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_protrain.config import plural
from lightning_protrain.data.batches.encode import Dropped, Encoded
from lightning_protrain.data.batches.media_rows import MediaEncoder
from lightning_protrain.data.chat.check_turns import UntrainableError
from lightning_protrain.data.chat.pipeline import ChatEncoders, ChatSettings
from lightning_protrain.data.conversation import Conversation, MalformedRow, Media
from tests.data import llava

TEMPLATES = {"strings and lists": llava.TEMPLATE, "lists only": llava.LISTS_ONLY}


@pytest.fixture(scope="module", params=TEMPLATES)
def chats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatEncoders:
    folder = llava.save(tmp_path_factory.mktemp("llava"), TEMPLATES[request.param])
    return ChatEncoders(llava.processor(TEMPLATES[request.param]).tokenizer, folder)


@pytest.fixture(scope="module")
def encoder(chats: ChatEncoders) -> MediaEncoder:
    return chats.media_encoder(ChatSettings(max_length=200))


def _picture(color: str) -> Image.Image:
    return Image.new("RGB", (20, 24), color)


def _row(parts: list[str], answer: str, colors: list[str], **more: Any) -> Conversation:
    content = [{"type": "image"} if part == "<image>" else {"type": "text", "text": part} for part in parts]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "media": [Media("image", _picture(color)) for color in colors], **more}  # type: ignore[typeddict-item]


def _kept(encoder: MediaEncoder, encoded: Encoded) -> str:
    return str(encoder.processor.tokenizer.decode(encoded.input_ids[encoded.trained].tolist()))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_images_are_in_place_and_never_trained(encoder: MediaEncoder, count: int) -> None:
    row = _row(["Look: ", *["<image>", " and "] * count], "Red.", ["red", "green", "blue"][:count])
    encoded = encoder.encode(row, "row")
    assert isinstance(encoded, Encoded)
    image = encoder.processor.tokenizer.convert_tokens_to_ids("<image>")
    places = np.flatnonzero(encoded.input_ids == image)
    assert len(places) == count * llava.PATCHES
    assert not encoded.trained[places].any()
    assert _kept(encoder, encoded) == "Red.<|im_end|>"
    assert encoded.extras["pixel_values"].shape == (count, 3, 16, 16)
    means = encoded.extras["pixel_values"].mean((2, 3))
    assert means.argmax(1).tolist() == list(range(count)), "images come in the order of their places"
    assert (encoded.media, encoded.media_stop) == (("image",) * count, places[-1] + 1)


def test_everything_but_images_is_trained_on_inputs(chats: ChatEncoders) -> None:
    encoder = chats.media_encoder(ChatSettings(max_length=200, train_on_inputs=True))
    encoded = encoder.encode(_row(["<image>", "?"], "Red.", ["red"]), "row")
    assert isinstance(encoded, Encoded)
    image = encoder.processor.tokenizer.convert_tokens_to_ids("<image>")
    assert encoded.trained[1:].tolist() == (encoded.input_ids[1:] != image).tolist()


def test_text_that_looks_like_an_image_is_text(encoder: MediaEncoder) -> None:
    row = _row(["<image>", "Write < image > as "], "It is <image>.", ["red"])
    encoded = encoder.encode(row, "row")
    assert isinstance(encoded, Encoded)
    image = encoder.processor.tokenizer.convert_tokens_to_ids("<image>")
    assert (encoded.input_ids == image).sum() == llava.PATCHES
    assert _kept(encoder, encoded) == "It is <image>.<|im_end|>"


def test_rows_without_images(encoder: MediaEncoder) -> None:
    row: Conversation = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Me."}]}
    encoded = encoder.encode(row, "row")
    assert isinstance(encoded, Encoded)
    assert _kept(encoder, encoded) == "Me.<|im_end|>"
    assert not encoded.extras
    assert encoded.media == ()


@pytest.mark.parametrize(
    ("parts", "colors"), [(["<image>", "?"], []), (["?"], ["red"]), (["<image>", "<image>"], ["red"])]
)
def test_more_places_than_images_are_refused(encoder: MediaEncoder, parts: list[str], colors: list[str]) -> None:
    row = _row(parts, "Red.", colors)
    with pytest.raises(
        MalformedRow,
        match=rf"chats, row 3: the processor refuses {plural(len(colors), 'image') if colors else 'no media'} ",
    ):
        encoder.encode(row, "chats, row 3")


def test_an_image_is_never_cut(chats: ChatEncoders) -> None:
    row = _row(["A longer question. ", "<image>"], "Red.", ["red"])
    whole = chats.media_encoder(ChatSettings(max_length=200)).encode(row, "row")
    assert isinstance(whole, Encoded)
    for max_length in range(1, len(whole) + 1):
        cut = chats.media_encoder(ChatSettings(max_length=max_length)).encode(row, "row")
        if isinstance(cut, UntrainableError):
            assert cut.reason in {reason.value for reason in Dropped}
        else:
            assert len(cut) >= whole.media_stop
            assert torch.equal(cut.extras["pixel_values"], whole.extras["pixel_values"])


def test_a_tokenizer_without_a_processor_is_refused(tmp_path: Path) -> None:
    tokenizer = llava.processor().tokenizer
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"reads text only|has no processor"):
        ChatEncoders(tokenizer, str(tmp_path)).media_encoder(ChatSettings())
    with pytest.raises(ValueError, match="give the `tokenizer` of a model for them and text"):
        ChatEncoders(tokenizer, None).media_encoder(ChatSettings())
