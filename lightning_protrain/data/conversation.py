"""Conversations in one common form: types, splitting, fingerprinting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Required, TypedDict

from PIL import Image

ROLES = ("system", "developer", "user", "assistant", "tool")


class MalformedRow(ValueError):
    """A row that is no conversation: the message names the row, what is wrong with it and what to do."""


class Message(TypedDict, total=False):
    """One turn.

    Attributes:
        role: One of `ROLES`, or a role that the `roles` of the data set map to.
        content: Text; if the turn has images, a list of parts: `{"type": "text", "text": ...}`, `{"type": "image"}`.
        reasoning_content: Reasoning of the assistant before its answer; never empty.
        tool_calls: `{"type": "function", "function": {"name": str, "arguments": dict}}`, maybe an `id`; never empty.
        name: Name of the speaker or the tool.
        tool_call_id: Id of the call that a tool answers.
        train: True if the turn is trained; only if the row says so.
        weight: Factor of the turn's loss, finite and not negative; only if the row says so.
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
    """Return the text of a turn without its images."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def fingerprint(rows: Iterable[Conversation], **settings: Any) -> str:
    """Return a hash of the conversations in order, and of JSON-able `settings`: 32 hexadecimal digits.

    Images count by their bytes; an image that is given as a path counts by the path.
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
