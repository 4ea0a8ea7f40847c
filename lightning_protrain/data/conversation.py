"""The common forms of all rows: conversations, plain text and preferences; and their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Required, TypedDict

from PIL import Image

ROLES = ("system", "developer", "user", "assistant", "tool")
MediaKind = Literal["image", "audio", "video"]


class MalformedRow(ValueError):
    """An error for a row that cannot be read; its message names the row, the fault and the remedy."""


class Message(TypedDict, total=False):
    """A message of a conversation; keys other than `role` and `content` are absent rather than empty.

    Attributes:
        role: One of `ROLES`, or a role that `DatasetSpec.roles` maps to.
        content: Text; or a list of parts if the message has media: `{"type": "text", "text": ...}`,
            `{"type": "image"}`, `{"type": "audio"}`, `{"type": "video"}`.
        reasoning_content: Reasoning of the assistant before its answer.
        tool_calls: Calls `{"type": "function", "function": {"name": str, "arguments": dict}}`, optionally with `id`.
        name: Name of the speaker or the tool.
        tool_call_id: Id of the call that a tool message answers.
        train: False excludes the message from the loss.
        weight: Factor of the message's loss, finite and at least 0.
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
    """Decoded audio with one channel.

    Attributes:
        values: Samples between -1 and 1, as the bytes of little-endian float32 numbers.
        rate: Samples per second.
    """

    values: bytes
    rate: int


@dataclass(frozen=True)
class Media:
    """An image, audio or a video of a conversation; `source` is a path, contents of a file, or decoded data."""

    kind: MediaKind
    source: str | bytes | Image.Image | Samples


_SET = "It is set for training; leave it out."
# Arguments of `apply_chat_template`, which are no variables of a template, and what to do instead of naming them.
NO_VARIABLES = {
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "tokenize", "return_dict"), _SET),
    **dict.fromkeys(("return_tensors", "return_assistant_tokens_mask", "sanitize_control_tokens"), _SET),
    **dict.fromkeys(("tokenizer_kwargs", "add_special_tokens", "padding", "truncation"), _SET),
    **dict.fromkeys(("messages", "conversation", "tools"), "It comes from the rows of the data; leave it out."),
    "chat_template": "Use the option `chat_template`.",
    "max_length": "Use the option `max_length`.",
}


class Conversation(TypedDict, total=False):
    """A conversation; all but `messages` is absent rather than empty.

    Attributes:
        messages: Messages in order.
        tools: JSON schemas of the tools that the assistant may call.
        media: One medium for each image, audio and video part of the messages, in order.
        template_kwargs: Further variables of the template, which take precedence over those of the data set.
        plain: The same row as plain text, for tokenizers without a chat template; absent if it has no such form.
    """

    messages: Required[list[Message]]
    tools: list[dict[str, Any]]
    media: list[Media]
    template_kwargs: dict[str, Any]
    plain: Document


class Document(TypedDict):
    """Plain text, which is written without a chat template.

    Attributes:
        text: Trained text.
        prompt: Untrained text before it; absent for a document that is trained as a whole.
    """

    text: str
    prompt: NotRequired[str]


class Preference(TypedDict):
    """Answers to one prompt that a person or a program has judged.

    Attributes:
        sides: The prompt with each answer: the chosen and the rejected one, or a single one that has a `label`.
        num_prompt: Number of messages in the prompt, which is not trained.
        label: True if the single answer is desirable; absent for a pair.
    """

    sides: list[Conversation]
    num_prompt: int
    label: NotRequired[bool]


Row = Conversation | Document | Preference
# What a row is, in words.
Unit = Literal["conversation", "document", "completion", "pair", "labelled completion"]


def unit_of(row: Any) -> Unit:
    """Return what a row is."""
    if "sides" in row:
        return "labelled completion" if "label" in row else "pair"
    if "text" in row:
        return "completion" if "prompt" in row else "document"
    return "conversation"


def text_of(message: Message) -> str:
    """Return the text of a message without its media."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def fingerprint(rows: Iterable[Any], **settings: Any) -> str:
    """Return a hash of the rows, in order, and of JSON-serializable `settings`: 32 hexadecimal digits.

    The hash covers the bytes of a medium, or only its path if `Media.source` is a path.
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
