"""Images of conversations: from a path, bytes, or what `datasets` stores, to RGB."""

from __future__ import annotations

import base64
import binascii
import io
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from lightning_protrain.data.conversations import Conversation, MalformedRow

# What Pillow raises on files that are broken, or only called images.
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


def image_source(value: Any, folder: Path, where: str) -> str | bytes | Image.Image:
    """What an image can be opened from later, in any process.

    Args:
        value: A path, a `data:` URL, bytes, a PIL image, or `{"bytes": ..., "path": ...}` as `datasets` stores images.
        folder: Where relative paths begin.
        where: Names the image in messages.

    Raises:
        MalformedRow: Nothing of these, or a URL that would have to be downloaded.
    """
    if isinstance(value, Mapping):
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
        return str(path if path.is_absolute() else folder / path)
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
    """Reads the header of an image, not its pixels.

    Raises:
        MalformedRow: It does not exist, or is no image.
    """
    if not isinstance(source, Image.Image):
        try:
            with _opened(source):
                pass
        except _UNREADABLE as error:
            raise _no_image(source, where, error) from error


def open_image(source: str | bytes | Image.Image, where: str) -> Image.Image:
    """The image in RGB, turned as its EXIF data say, what is transparent on white; of an animation the first picture.

    Args:
        source: A path, the bytes of an image file, or a PIL image.
        where: Names the image in messages.

    Raises:
        MalformedRow: It does not exist, is no image, or is broken.
    """
    try:
        if isinstance(source, Image.Image):
            return _rgb(source)
        with _opened(source) as image:
            return _rgb(image)
    except _UNREADABLE as error:
        raise _no_image(source, where, error) from error


def open_images(conversation: Conversation, where: str) -> list[Image.Image]:
    """The images of a conversation in RGB, in the order of its image parts; see `open_image`."""
    images = conversation.get("images", [])
    return [open_image(image, f"{where}, image {number}") for number, image in enumerate(images)]


def _opened(source: str | bytes) -> Image.Image:
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def _no_image(source: str | bytes | Image.Image, where: str, error: BaseException) -> MalformedRow:
    kind = f"{len(source)} bytes" if isinstance(source, bytes) else repr(source)
    return MalformedRow(f"{where} ({kind}) does not open: {error}. Correct the path or store the image again.")


def _rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and int(np.asarray(image).max()) > 255):
        # 16 bits a pixel: a plain conversion would cut everything above 255 to white.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
