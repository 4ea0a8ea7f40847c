"""Reads frames of videos with PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lightning_protrain.data.extras import optional
from lightning_protrain.data.sources.media_file import check_is_file, not_opened

VideoSource = str | bytes
MAX_SECONDS = 3600
# Limit of all pixels that are taken of a video, three bytes each.
MAX_PIXELS = 2**30
# Files that hold their own pictures: playlists name other files, and addresses.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,asf,ogg,gif,mpegvideo,h264,hevc,apng,dv,nut"
_OPTIONS = {"format_whitelist": _FORMATS, "protocol_whitelist": "file,pipe"}
# Exceptions for files that are broken or no videos, beside those of PyAV: a stream without a decoder has no `width`.
_UNREADABLE = (OSError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)


@dataclass(frozen=True)
class VideoHeader:
    """Number, rate and size of the pictures of a video, from its header and its first picture.

    Attributes:
        frames: Number of pictures.
        fps: Pictures per second.
        width: Pixels.
        height: Pixels.
    """

    frames: int
    fps: float
    width: int
    height: int


def video_header(source: VideoSource, where: str) -> VideoHeader:
    """Read the header of a video and its first picture, and check that its end exists.

    Args:
        source: The path or the bytes of a file.
        where: Name of the video, for messages.

    Raises:
        MalformedRow: If it does not exist, is no video, has no pictures, is cut off or longer than `MAX_SECONDS`.
        ValueError: If PyAV is not installed.
    """
    av = optional("av")
    try:
        with _opened(av, source) as (container, stream):
            width, height = _checked_size(stream.width, stream.height)
            frames = stream.frames or _count(container, stream)
            fps = float(stream.average_rate or 0)
            if not frames or not fps:
                raise ValueError(f"It has {frames} pictures, {fps:g} per second.")
            if frames / fps > MAX_SECONDS:
                raise ValueError(f"It is longer than {MAX_SECONDS} s: {frames} pictures, {fps:g} per second.")
            container.seek(0)
            if not any(islice(container.decode(stream), 1)):
                raise ValueError("It has no pictures.")
            _check_end(container, stream)
    except (*_UNREADABLE, av.FFmpegError) as error:
        raise not_opened(source, where, _why(error)) from error
    return VideoHeader(int(frames), fps, width, height)


def open_frames(source: VideoSource, indices: Sequence[int], where: str) -> NDArray[np.uint8]:
    """Return pictures of a video in RGB, [pictures, height, width, 3].

    Args:
        source: The path or the bytes of a file.
        indices: Numbers of the pictures, in ascending order; one that occurs twice is given twice.
        where: Name of the video, for messages.

    Raises:
        MalformedRow: If it does not exist, is no video or is broken.
        ValueError: If PyAV is not installed.
    """
    av = optional("av")
    wanted = [int(index) for index in indices]
    found: dict[int, Any] = {}
    try:
        with _opened(av, source) as (container, stream):
            width, height = _checked_size(stream.width, stream.height)
            if len(wanted) * width * height > MAX_PIXELS:
                raise ValueError(too_many(len(wanted), width, height))
            distinct = set(wanted)
            for number, frame in enumerate(islice(container.decode(stream), wanted[-1] + 1)):
                if number in distinct:
                    found[number] = frame.to_ndarray(format="rgb24", width=width, height=height)
            if len(found) < len(distinct):
                raise ValueError(f"Picture {wanted[-1]} is missing.")
            return np.stack([found[index] for index in wanted])
    except (*_UNREADABLE, av.FFmpegError) as error:
        raise not_opened(source, where, _why(error)) from error


def too_many(frames: int, width: int, height: int) -> str:
    """Return why so many pictures are refused."""
    return (
        f"{frames} pictures of {width} x {height} pixels are more than {MAX_PIXELS} pixels. Let the processor take "
        'fewer with processor_kwargs={"videos_kwargs": {"do_sample_frames": True, "num_frames": 16}}'
    )


@contextmanager
def _opened(av: Any, source: VideoSource) -> Iterator[tuple[Any, Any]]:
    check_is_file(source)
    # From an open file, so that no name is taken for an address.
    with (
        io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file,
        av.open(file, options=_OPTIONS) as container,
    ):
        if not container.streams.video:
            raise ValueError("It has no pictures.")
        yield container, container.streams.video[0]


def _checked_size(width: int, height: int) -> tuple[int, int]:
    if not 0 < width * height <= (Image.MAX_IMAGE_PIXELS or MAX_PIXELS):
        raise ValueError(f"Its pictures have {width} x {height} pixels.")
    return width, height


def _count(container: Any, stream: Any) -> int:
    return sum(packet.size > 0 for packet in container.demux(stream))


def _check_end(container: Any, stream: Any) -> None:
    """Refuse a file whose last pictures are missing."""
    if stream.duration and stream.frames > 1:
        container.seek((stream.start_time or 0) + stream.duration, stream=stream)
        if not any(packet.size for packet in container.demux(stream)):
            raise ValueError("It is cut off.")


def _why(error: BaseException) -> str:
    # Those of PyAV have a number and the name of an open file.
    return str(getattr(error, "strerror", None) or error)
