"""Encodes one row of a real format, and returns its trained tokens as text."""

from __future__ import annotations

from typing import Any

from lightning_protrain.data.batches.encode import ChatEncoder, Encoded
from lightning_protrain.data.chat.pipeline import ChatSettings
from lightning_protrain.data.conversation import Conversation


def settings_of(**knobs: Any) -> ChatSettings:
    """Return settings with a `max_length` that cuts no row."""
    return ChatSettings(**{"max_length": 10_000, **knobs})


def one(encoder: ChatEncoder, row: Conversation) -> Encoded:
    """The row, which must be trainable."""
    (encoded,) = encoder.encode([row])
    assert isinstance(encoded, Encoded), encoded
    return encoded


def kept(encoder: ChatEncoder, encoded: Encoded) -> str:
    """The text of its trained tokens."""
    return str(encoder.renderer.tokenizer.decode(encoded.input_ids[encoded.trained].tolist()))
