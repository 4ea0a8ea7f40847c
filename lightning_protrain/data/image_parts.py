"""Images of a row and the places they stand at: parts of the content, or `<image>` in its text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lightning_protrain.data.conversations import MalformedRow, Message

PLACEHOLDER = "<image>"
# Placeholders at the edges of a text: the line breaks that separate them from it belong to the convention.
_AT_BEGIN = re.compile(r"(?:<image>\n?)*")
_AT_END = re.compile(r"(?:\n?<image>)*\Z")


def place_images(messages: list[Message], images: Sequence[Any] | None, where: str) -> list[Any]:
    """Makes every image of the row one part `{"type": "image"}` in `messages`, and returns them in order of the parts.

    Parts may carry their image or an index into `images`; those with neither take the images in order. Text with
    `<image>` is divided into parts, in rows with images and not in the assistant's turns, where it is plain text.

    Args:
        messages: Checked messages; changed in place.
        images: The row's column of images; None where the row has no such column and `<image>` is plain text.
        where: Names the row in errors.

    Raises:
        MalformedRow: More images than places or the reverse, or both kinds of places.
    """
    parts = _image_parts(messages)
    spots = 0 if images is None else sum(_text(m).count(PLACEHOLDER) for m in messages if m["role"] != "assistant")
    if parts and spots:
        raise MalformedRow(
            f"{where}: {len(parts)} image parts and {spots} times {PLACEHOLDER} in the text. Use one of the two."
        )
    if spots:
        for message in messages:
            if message["role"] != "assistant":
                _divide(message)
        parts = _image_parts(messages)
    return _assign(parts, images or (), where)


def _image_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [part for content in contents for part in content if part["type"] == "image"]


def _text(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def _divide(message: Message) -> None:
    content = message["content"]
    if not isinstance(content, str) or PLACEHOLDER not in content:
        return
    begin = _AT_BEGIN.match(content)
    assert begin is not None
    rest = content[begin.end() :]
    end = _AT_END.search(rest)
    assert end is not None
    parts = [{"type": "image"}] * begin[0].count(PLACEHOLDER)
    for number, text in enumerate(rest[: end.start()].split(PLACEHOLDER)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    message["content"] = [dict(part) for part in parts + [{"type": "image"}] * end[0].count(PLACEHOLDER)]


def _assign(parts: Sequence[dict[str, Any]], images: Sequence[Any], where: str) -> list[Any]:
    """Takes the references out of the parts and returns what they refer to."""
    waiting = iter(range(len(images)))
    used: set[int] = set()
    placed = []
    for part in parts:
        if "image" in part:
            placed.append(part.pop("image"))
            continue
        index = part.pop("index") if "index" in part else next(waiting, len(images))
        if not 0 <= index < len(images):
            raise MalformedRow(f"{where}: {_count(parts)} but {len(images)} images. Remove parts or add images.")
        used.add(index)
        placed.append(images[index])
    if len(used) < len(images):
        raise MalformedRow(
            f"{where}: {len(images)} images but {_count(parts)}, {len(images) - len(used)} of them without a place. "
            f'Put a part {{"type": "image"}} or {PLACEHOLDER} where each image stands.'
        )
    return placed


def _count(parts: Sequence[Any]) -> str:
    return f"{len(parts)} image part{'' if len(parts) == 1 else 's'} or placeholders"
