"""Conversations in one common form: types, splitting, fingerprinting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict

from PIL import Image

ROLES = ("system", "developer", "user", "assistant", "tool")
MediaKind = Literal["image", "audio", "video"]


class MalformedRow(ValueError):
    """A row that is no conversation: the message names the row, what is wrong with it and what to do."""


class Message(TypedDict, total=False):
    """One turn.

    Attributes:
        role: One of `ROLES`, or a role that the `roles` of the data set map to.
        content: Text; if the turn has media, a list of parts: `{"type": "text", "text": ...}`, `{"type": "image"}`,
            `{"type": "audio"}`, `{"type": "video"}`.
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


@dataclass(frozen=True)
class Samples:
    """Decoded audio of one channel.

    Attributes:
        values: Samples between -1 and 1, little-endian float32.
        rate: Samples per second.
    """

    values: bytes
    rate: int


@dataclass(frozen=True)
class Media:
    """An image, audio or a video of a conversation.

    Attributes:
        kind: What it is.
        source: The path of a file, the bytes of one, a PIL image, or decoded audio.
    """

    kind: MediaKind
    source: str | bytes | Image.Image | Samples


class Conversation(TypedDict, total=False):
    """Turns in order.

    Attributes:
        messages: The turns.
        tools: JSON schemas of the tools that may be called; never empty.
        media: One for each part that is no text, in order of the parts; never empty.
    """

    messages: Required[list[Message]]
    tools: list[dict[str, Any]]
    media: list[Media]


def text_of(message: Message) -> str:
    """Return the text of a turn without its media."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def fingerprint(rows: Iterable[Conversation], **settings: Any) -> str:
    """Return a hash of the conversations in order, and of JSON-able `settings`: 32 hexadecimal digits.

    Media count by their bytes; one that is given as a path counts by the path.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=_digest).encode())
        digest.update(b"\n")
    return digest.hexdigest()[:32]


def _digest(value: Any) -> Any:
    if isinstance(value, Media):
        return [value.kind, value.source]
    if isinstance(value, Samples):
        return [value.rate, value.values]
    if isinstance(value, Image.Image):
        value = f"{value.mode} {value.size} ".encode() + value.tobytes()
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)
