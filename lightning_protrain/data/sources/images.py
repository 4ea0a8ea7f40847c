"""Opens images in RGB, and reads sizes of images from the headers of their files."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from lightning_protrain.data.sources.media_file import check_is_file, not_opened

# For each format: a byte string near the end of every complete file, and how many of the last bytes to search for it.
# Trailing zeros do not count.
_ENDS = {"JPEG": (b"\xff\xd9", 2), "PNG": (b"IEND", 8), "GIF": (b";", 1)}
_TAIL = 64
# Exceptions of Pillow for files that it cannot read; its AVIF and DDS readers raise RuntimeError.
_UNREADABLE = (
    *(OSError, ValueError, SyntaxError, EOFError, RuntimeError, ArithmeticError, MemoryError),
    *(struct.error, zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning),
)


def check_image(source: str | bytes | Image.Image, where: str) -> None:
    """Check that an image can be read: decode its pixels only if the end of the file looks truncated.

    Raises:
        MalformedRow: If the image does not exist, cannot be read, or is truncated.
    """
    if isinstance(source, Image.Image):
        image_size(source, where)
        return
    with _opened(source, where) as image:
        end = _ENDS.get(image.format or "")
    if end is not None and end[0] not in _tail(source)[-end[1] :]:
        open_image(source, where)


def _tail(source: str | bytes) -> bytes:
    if isinstance(source, bytes):
        return source[-_TAIL:].rstrip(b"\x00")
    with open(source, "rb") as file:
        file.seek(max(file.seek(0, io.SEEK_END) - _TAIL, 0))
        return file.read().rstrip(b"\x00")


def image_size(source: str | bytes | Image.Image, where: str) -> tuple[int, int]:
    """Return the width and height of the image that `open_image` will return, from the file's header alone.

    Raises:
        MalformedRow: If the image does not exist, cannot be read, or has no pixels.
    """
    with _opened(source, where) as image:
        size = _turned_size(image)
        if 0 in size:
            raise ValueError(f"It has {size[0]} x {size[1]} pixels.")
    return size


def _turned_size(image: Image.Image) -> tuple[int, int]:
    # `getexif` would decode all pixels of a PNG to look for EXIF data behind them, so such EXIF data is ignored.
    turn = 1 if image.format == "PNG" and "exif" not in image.info else image.getexif().get(ExifTags.Base.Orientation)
    width, height = image.size
    return (height, width) if turn in (5, 6, 7, 8) else (width, height)


def open_image(source: str | bytes | Image.Image, where: str) -> Image.Image:
    """Return the image in RGB, rotated by its EXIF data, on a white background; an animation gives its first frame.

    Args:
        source: Path of a file, contents of a file, or a PIL image.
        where: Name of the image, for messages.

    Raises:
        MalformedRow: If the image does not exist, or cannot be decoded.
    """
    with _opened(source, where) as image:
        return _rgb(image)


@contextmanager
def _opened(source: str | bytes | Image.Image, where: str) -> Iterator[Image.Image]:
    """Open an image; raise MalformedRow if that fails, or what this context does with the image."""
    try:
        if isinstance(source, Image.Image):
            yield source
            return
        check_is_file(source)
        with warnings.catch_warnings():
            # Pillow raises an error only above twice its limit of pixels; between the limit and that, it warns.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        with opened as image:
            yield image
    except _UNREADABLE as error:
        unknown = isinstance(error, UnidentifiedImageError)
        raise not_opened(source, where, "it is not an image that Pillow can read" if unknown else error) from error


def _rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and int(np.asarray(image).max()) > 255):
        # Scale 16-bit pixels: `convert` would clip values above 255 to white.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
