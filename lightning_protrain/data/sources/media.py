"""Finds the images, audio and videos of a row and their places in its messages, and checks their files."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from PIL import Image

from lightning_protrain.config import plural
from lightning_protrain.data.conversation import MalformedRow, Media, MediaKind, Message, Samples, text_of
from lightning_protrain.data.sources.audio import audio_length, samples
from lightning_protrain.data.sources.images import check_image
from lightning_protrain.data.sources.video import video_header

MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
_PLURALS: dict[MediaKind, str] = {"image": "images", "audio": "audio files", "video": "videos"}
_ADDRESSES = ("http://", "https://", "ftp://", "s3://", "gs://", "hf://")


def count_media(number: int, kind: MediaKind) -> str:
    """Return a number of media as text, such as "2 images"."""
    return plural(number, "audio file" if kind == "audio" else kind)


def place_media(
    messages: list[Message], columns: Mapping[MediaKind, Sequence[Any] | None], where: str
) -> list[tuple[MediaKind, Any]]:
    """Give every medium of a row a content part such as `{"type": "image"}`, and return the media in that order.

    A part may contain its medium, or an index into the column of media. The other parts take the media of the column
    in order. If the row has an images column, each `<image>` in the text becomes a part, except in the assistant's
    turns. `<audio>` and `<video>` work alike.

    Args:
        messages: Parsed messages, changed in place.
        columns: Media in the columns of the row, by kind; None if the row has no column for the kind.
        where: Name of the row, for messages.

    Returns:
        Pairs of a kind and a medium, in the order of the parts.

    Raises:
        MalformedRow: If the numbers of media and places differ, or a row has both parts and placeholders of a kind.
    """
    written = [f"<{kind}>" for kind, column in columns.items() if column is not None]
    others = [message for message in messages if message["role"] != "assistant"]
    for kind in MEDIA_KINDS:
        parts = [part for part in _media_parts(messages) if part["type"] == kind]
        spots = sum(text_of(message).count(f"<{kind}>") for message in others) if f"<{kind}>" in written else 0
        if parts and spots:
            raise MalformedRow(
                f"{where}: {len(parts)} {kind} parts and {spots} times <{kind}> in the text. Use one of the two."
            )
    if written:
        for message in others:
            _divide(message, "|".join(written))
    return _assign(_media_parts(messages), {kind: column or () for kind, column in columns.items()}, where)


def _media_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [part for content in contents for part in content if part["type"] != "text"]


def _divide(message: Message, placeholders: str) -> None:
    """Divide the text of a message at its placeholders; drop the line breaks between placeholders and text."""
    content = message["content"]
    if not isinstance(content, str) or not re.search(placeholders, content):
        return
    begin = re.match(rf"(?:(?:{placeholders})\n?)*", content)
    assert begin is not None
    end = re.search(rf"(?:\n?(?:{placeholders}))*\Z", content[begin.end() :])
    assert end is not None
    text = content[begin.end() : begin.end() + end.start()]
    pieces = [*re.findall(placeholders, begin[0]), *re.split(f"({placeholders})", text)]
    message["content"] = [
        {"type": piece[1:-1]} if re.fullmatch(placeholders, piece) else {"type": "text", "text": piece}
        for piece in [*pieces, *re.findall(placeholders, end[0])]
        if piece
    ]


def _assign(
    parts: Sequence[dict[str, Any]], columns: Mapping[MediaKind, Sequence[Any]], where: str
) -> list[tuple[MediaKind, Any]]:
    """Return the kind and medium of each content part; remove the medium, or its index in the column, from the part."""
    waiting = {kind: iter(range(len(columns[kind]))) for kind in columns}
    used: dict[MediaKind, set[int]] = {kind: set() for kind in columns}
    numbers: Counter[MediaKind] = Counter(part["type"] for part in parts)
    placed: list[tuple[MediaKind, Any]] = []
    for part in parts:
        kind: MediaKind = part["type"]
        column = columns.get(kind, ())
        if kind in part:
            placed.append((kind, part.pop(kind)))
            continue
        index = part.pop("index") if "index" in part else next(waiting.get(kind, iter(())), len(column))
        if not 0 <= index < len(column):
            raise MalformedRow(
                f"{where}: {_count(numbers[kind], kind)} but {count_media(len(column), kind)}. Remove parts or add "
                f"{_PLURALS[kind]}."
            )
        used[kind].add(index)
        placed.append((kind, column[index]))
    for kind, column in columns.items():
        if len(used[kind]) < len(column):
            raise MalformedRow(
                f"{where}: {count_media(len(column), kind)} but {_count(numbers[kind], kind)}: "
                f"{len(column) - len(used[kind])} of the {_PLURALS[kind]} without a place. "
                f'Put a part {{"type": "{kind}"}} or <{kind}> where each of them belongs.'
            )
    return placed


def _count(number: int, kind: MediaKind) -> str:
    return f"{plural(number, f'{kind} part')} or placeholders"


def media_source(kind: MediaKind, value: Any, folder: Path, where: str) -> str | bytes | Image.Image | Samples:
    """Return the source of a medium in a form that worker processes can open.

    Args:
        kind: Kind of the medium.
        value: A path, a `data:` URL, bytes, a PIL image, or a dict of Hugging Face `datasets`:
            `{"bytes": ..., "path": ...}`, or `{"array": ..., "sampling_rate": ...}` for audio.
        folder: Folder to which relative paths refer.
        where: Name of the medium, for messages.

    Raises:
        MalformedRow: If `value` has another form, is the URL of a remote file, or is a relative path that leaves
            `folder`.
    """
    if isinstance(value, Mapping):
        if kind == "audio" and value.get("array") is not None:
            return samples(value["array"], value.get("sampling_rate"), where)
        if value and not value.keys() & {"bytes", "path", "url", "data"}:
            names = ", ".join(map(repr, value))
            raise MalformedRow(f"{where} is an object with {names}. Give it a `path` or `bytes`.")
        if value.get("data"):  # Base64, as in the OpenAI API.
            return _from_data_url(f"data:;base64,{value['data']}", where)
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, Image.Image) and kind == "image":
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        if not len(value):
            raise MalformedRow(f"{where} has 0 bytes. Store it again.")
        return bytes(value)
    if isinstance(value, str | Path) and str(value):
        return _from_text(str(value), folder, where)
    what = "null" if value is None else f"a {type(value).__name__}"
    also = " or a PIL image" if kind == "image" else ""
    raise MalformedRow(f"{where} is {what}. Give a path{',' if also else ' or'} bytes{also}.")


def _from_text(text: str, folder: Path, where: str) -> str | bytes:
    if text.startswith("data:"):
        return _from_data_url(text, where)
    if text.startswith(_ADDRESSES):
        raise MalformedRow(f"{where} is the address {text[:80]!r}. Download it and give the path.")
    path = Path(text.removeprefix("file://")).expanduser()
    if path.is_absolute():
        return str(path)
    if Path(os.path.normpath(path)).parts[:1] == (os.pardir,):
        raise MalformedRow(
            f"{where} is {text[:80]!r}, outside of the folder {str(folder)!r}. Give its absolute path, or set "
            "`images_dir` to a folder that holds it."
        )
    return str(folder / path)


def _from_data_url(text: str, where: str) -> bytes:
    header, comma, payload = text.partition(",")
    if not comma or not header.endswith(";base64"):
        raise MalformedRow(f"{where} is a data URL without base64 data: {text[:40]!r}. Encode it as base64.")
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise MalformedRow(f"{where} is a data URL with broken base64 ({error}). Encode it again.") from error


def named_media(media: Sequence[Media], where: str) -> Iterator[tuple[Media, str]]:
    """Yield each medium of a conversation with its name for messages, such as "data.jsonl, line 3, image 0"."""
    seen: Counter[MediaKind] = Counter()
    for medium in media:
        yield medium, f"{where}, {medium.kind} {seen[medium.kind]}"
        seen[medium.kind] += 1


def check_media(row: Any, where: str) -> None:
    """Check that all media of a row can be read, from the headers and the ends of their files.

    Raises:
        MalformedRow: If a medium does not exist, cannot be read, or is truncated.
        ValueError: If a package for reading audio or videos is not installed.
    """
    for medium, name in named_media(row.get("media", ()), where):
        source: Any = medium.source
        if medium.kind == "image":
            check_image(source, name)
        elif medium.kind == "audio":
            audio_length(source, 1, name)
        else:
            video_header(source, name)
