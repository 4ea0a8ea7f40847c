"""Finds the images of a row and their places in its text, and opens them as RGB."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from lightning_protrain.config import format_bytes, plural
from lightning_protrain.data.conversation import Conversation, MalformedRow, Message

PLACEHOLDER = "<image>"
# Placeholders at the edges of a text, with the line breaks that conventionally separate them from it.
_AT_BEGIN = re.compile(r"(?:<image>\n?)*")
_AT_END = re.compile(r"(?:\n?<image>)*\Z")


def place_images(messages: list[Message], images: Sequence[Any] | None, where: str) -> list[Any]:
    """Make every image of the row one part `{"type": "image"}` in `messages`, and return the images in that order.

    Parts may carry their image or an index into `images`; other parts take the images in order. In rows with images,
    text with `<image>` is divided into parts, except in the assistant's turns.

    Args:
        messages: Checked messages, changed in place.
        images: Image column of the row; None means that the row has no such column and `<image>` is plain text.
        where: Name of the row, for errors.

    Raises:
        MalformedRow: If the numbers of images and places differ, or both kinds of places are used.
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
    """Remove the references from the parts and return the images that they refer to."""
    waiting = iter(range(len(images)))
    used: set[int] = set()
    placed = []
    for part in parts:
        if "image" in part:
            placed.append(part.pop("image"))
            continue
        index = part.pop("index") if "index" in part else next(waiting, len(images))
        if not 0 <= index < len(images):
            raise MalformedRow(
                f"{where}: {_count(parts)} but {plural(len(images), 'image')}. Remove parts or add images."
            )
        used.add(index)
        placed.append(images[index])
    if len(used) < len(images):
        raise MalformedRow(
            f"{where}: {plural(len(images), 'image')} but {_count(parts)}: "
            f"{len(images) - len(used)} of the images without a place. "
            f'Put a part {{"type": "image"}} or {PLACEHOLDER} where each image stands.'
        )
    return placed


def _count(parts: Sequence[Any]) -> str:
    return f"{plural(len(parts), 'image part')} or placeholders"


# Bytes that a complete file has within its last bytes, ignoring trailing zeros.
_ENDS = {"JPEG": (b"\xff\xd9", 2), "PNG": (b"IEND", 8), "GIF": (b";", 1)}
_TAIL = 64
# Exceptions of Pillow for files that are broken or no images; its readers of AVIF and DDS raise RuntimeError.
_UNREADABLE = (
    *(OSError, ValueError, SyntaxError, EOFError, RuntimeError, ArithmeticError, MemoryError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)


def image_source(value: Any, folder: Path, where: str) -> str | bytes | Image.Image:
    """Return a source from which any process can open an image later.

    Args:
        value: A path, a `data:` URL, bytes, a PIL image, or `{"bytes": ..., "path": ...}` as `datasets` stores images.
        folder: Folder of relative paths.
        where: Name of the image, for messages.

    Raises:
        MalformedRow: If it is none of these, a URL that would have to be downloaded, or a relative path that leaves
            `folder`.
    """
    if isinstance(value, Mapping):
        if value and not value.keys() & {"bytes", "path", "url"}:
            names = ", ".join(map(repr, value))
            raise MalformedRow(f"{where} is an object with {names}. Give it a `path` or `bytes`.")
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        if not len(value):
            raise MalformedRow(f"{where} has 0 bytes. Store the image again.")
        return bytes(value)
    if isinstance(value, str | Path) and str(value):
        text = str(value)
        if text.startswith("data:"):
            return _from_data_url(text, where)
        if text.startswith(("http://", "https://", "ftp://", "s3://", "gs://", "hf://")):
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
    kind = "null" if value is None else f"a {type(value).__name__}"
    raise MalformedRow(f"{where} is {kind}. Give a path, bytes or a PIL image.")


def _from_data_url(text: str, where: str) -> bytes:
    header, comma, payload = text.partition(",")
    if not comma or not header.endswith(";base64"):
        raise MalformedRow(f"{where} is a data URL without base64 data: {text[:40]!r}. Encode it as base64.")
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise MalformedRow(f"{where} is a data URL with broken base64 ({error}). Encode it again.") from error


def check_image(source: str | bytes | Image.Image, where: str) -> None:
    """Read the header of an image and check that its end exists; read its pixels only if the end is missing.

    Raises:
        MalformedRow: If it does not exist, is no image, or is cut off.
    """
    if isinstance(source, Image.Image):
        image_size(source, where)
        return
    try:
        with _opened(source) as image:
            end = _ENDS.get(image.format or "")
    except _UNREADABLE as error:
        raise _no_image(source, where, error) from error
    if end is not None and end[0] not in _tail(source)[-end[1] :]:
        open_image(source, where)


def _tail(source: str | bytes) -> bytes:
    if isinstance(source, bytes):
        return source[-_TAIL:].rstrip(b"\x00")
    with open(source, "rb") as file:
        file.seek(max(file.seek(0, io.SEEK_END) - _TAIL, 0))
        return file.read().rstrip(b"\x00")


def image_size(source: str | bytes | Image.Image, where: str) -> tuple[int, int]:
    """Return the width and height that `open_image` will give, from the header alone.

    Raises:
        MalformedRow: If it does not exist, is no image, or has no pixels.
    """
    try:
        if isinstance(source, Image.Image):
            size = _turned_size(source)
        else:
            with _opened(source) as image:
                size = _turned_size(image)
        if 0 in size:
            raise ValueError(f"It has {size[0]} x {size[1]} pixels.")
    except _UNREADABLE as error:
        raise _no_image(source, where, error) from error
    return size


def _turned_size(image: Image.Image) -> tuple[int, int]:
    # For a PNG without EXIF data at its beginning, Pillow would read all pixels to find them.
    turn = 1 if image.format == "PNG" and "exif" not in image.info else image.getexif().get(ExifTags.Base.Orientation)
    width, height = image.size
    return (height, width) if turn in (5, 6, 7, 8) else (width, height)


def open_image(source: str | bytes | Image.Image, where: str) -> Image.Image:
    """Return the image in RGB, rotated by its EXIF data, on white where transparent; of an animation the first frame.

    Args:
        source: A path, the bytes of an image file, or a PIL image.
        where: Name of the image, for messages.

    Raises:
        MalformedRow: If it does not exist, is no image, or is broken.
    """
    try:
        if isinstance(source, Image.Image):
            return _rgb(source)
        with _opened(source) as image:
            return _rgb(image)
    except _UNREADABLE as error:
        raise _no_image(source, where, error) from error


def open_images(conversation: Conversation, where: str) -> list[Image.Image]:
    """Return the images of a conversation in RGB, in the order of its image parts; see `open_image`."""
    images = conversation.get("images", [])
    return [open_image(image, f"{where}, image {number}") for number, image in enumerate(images)]


def _opened(source: str | bytes) -> Image.Image:
    if isinstance(source, str) and os.path.exists(source) and not os.path.isfile(source):
        raise OSError("It is a folder, a pipe or a device.")  # Opening a named pipe would wait for ever.
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def _no_image(source: str | bytes | Image.Image, where: str, error: BaseException) -> MalformedRow:
    kind = f"{format_bytes(len(source))}" if isinstance(source, bytes) else repr(source)
    why = (
        "it is no image of a kind that Pillow reads"
        if isinstance(error, UnidentifiedImageError)
        else str(error).rstrip(".")
    )
    return MalformedRow(f"{where} ({kind}) does not open: {why}. Correct the path or store the image again.")


def _rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and int(np.asarray(image).max()) > 255):
        # 16 bits per pixel: a plain conversion would clip everything above 255 to white.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
