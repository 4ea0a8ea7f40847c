"""Conversations in one form, whatever format they had: types, splitting, fingerprinting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Required, TypedDict

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ROLES = ("system", "developer", "user", "assistant", "tool")


class MalformedRow(ValueError):
    """A row that is no conversation: the message names the row, what is wrong with it and what to do."""


class Message(TypedDict, total=False):
    """One turn.

    Attributes:
        role: One of `ROLES`, or what the `roles` of the data set map to.
        content: Text; where the turn has images, a list of parts: `{"type": "text", "text": ...}`, `{"type": "image"}`.
        reasoning_content: What the assistant thinks before it answers; never empty.
        tool_calls: `{"type": "function", "function": {"name": str, "arguments": dict}}`, maybe an `id`; never empty.
        name: Who speaks, or which tool.
        tool_call_id: The call that a tool answers.
        train: Whether the turn is learnt, where the row says so.
        weight: Factor of the turn's loss, finite and not negative, where the row says so.
    """

    role: Required[str]
    content: Required[str | list[dict[str, Any]]]
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    name: str
    tool_call_id: str
    train: bool
    weight: float


class Conversation(TypedDict, total=False):
    """Turns in order.

    Attributes:
        messages: The turns.
        tools: JSON schemas of the tools that may be called; never empty.
        images: One path, bytes or PIL image for each image part, in order of the parts; never empty.
    """

    messages: Required[list[Message]]
    tools: list[dict[str, Any]]
    images: list[Any]


def text_of(message: Message) -> str:
    """The text of a turn, without its images."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def fingerprint(rows: Iterable[Conversation], **settings: Any) -> str:
    """Hash of the conversations, their order included, and of JSON-able `settings`: 32 hexadecimal digits.

    Images count by their bytes; one that is given as a path counts by the path.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=_image_digest).encode())
        digest.update(b"\n")
    return digest.hexdigest()[:32]


def _image_digest(image: Any) -> str:
    if isinstance(image, Image.Image):
        image = f"{image.mode} {image.size} ".encode() + image.tobytes()
    return hashlib.sha256(image).hexdigest() if isinstance(image, bytes) else str(image)


def split_indices(count: int, val_fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divides `count` rows by chance into training and validation: the sorted indices of each.

    Args:
        count: Number of rows, at least two.
        val_fraction: Share of the validation rows, rounded, at least one row on each side.
        seed: Seed of the choice.

    Raises:
        ValueError: Fewer than two rows.
    """
    if count < 2:
        raise ValueError(
            f"{count} conversation{'' if count == 1 else 's'} cannot be divided into training and validation. Give at "
            'least 2, or a split "validation".'
        )
    size = min(max(round(count * val_fraction), 1), count - 1)
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[size:]), np.sort(order[:size])
