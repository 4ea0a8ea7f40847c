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
# Maximum number of pixels in the frames taken from a video; a pixel takes three bytes.
MAX_PIXELS = 2**30
# Formats that contain their frames. Playlists are excluded because they could name other files and URLs.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,asf,ogg,gif,mpegvideo,h264,hevc,apng,dv,nut"
_OPTIONS = {"format_whitelist": _FORMATS, "protocol_whitelist": "file,pipe"}
# Exceptions for unreadable files besides PyAV's FFmpegError; a stream without a decoder has no attribute `width`.
_UNREADABLE = (OSError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)


@dataclass(frozen=True)
class VideoHeader:
    """Number, rate and size of the frames of a video.

    Attributes:
        frames: Number of frames.
        fps: Frames per second.
        width: Width of a frame, pixels.
        height: Height of a frame, pixels.
    """

    frames: int
    fps: float
    width: int
    height: int


def video_header(source: VideoSource, where: str) -> VideoHeader:
    """Read the header of a video; check that its first frame can be decoded and that its end exists.

    Args:
        source: Path of a file, or contents of a file.
        where: Name of the video, for messages.

    Raises:
        MalformedRow: If the video does not exist, cannot be read, has no frames, is truncated, or is longer than
            `MAX_SECONDS`.
        ValueError: If PyAV is not installed.
    """
    with _opened(source, where) as (container, stream):
        width, height = _checked_size(stream)
        frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        fps = float(stream.average_rate or 0)
        if not frames or not fps:
            raise ValueError(f"It has {frames} frames, {fps:g} per second.")
        if frames / fps > MAX_SECONDS:
            raise ValueError(f"It is longer than {MAX_SECONDS} s: {frames} frames, {fps:g} per second.")
        container.seek(0)
        if not any(islice(container.decode(stream), 1)):
            raise ValueError("It has no frames.")
        _check_end(container, stream)
    return VideoHeader(int(frames), fps, width, height)


def open_frames(source: VideoSource, indices: Sequence[int], where: str) -> NDArray[np.uint8]:
    """Return frames of a video in RGB, of shape [frames, height, width, 3].

    Args:
        source: Path of a file, or contents of a file.
        indices: Numbers of the frames, in ascending order, from 0; an index may occur several times.
        where: Name of the video, for messages.

    Raises:
        MalformedRow: If the video does not exist, or cannot be decoded.
        ValueError: If PyAV is not installed.
    """
    wanted = [int(index) for index in indices]
    frames: dict[int, Any] = {}
    with _opened(source, where) as (container, stream):
        width, height = _checked_size(stream)
        if len(wanted) * width * height > MAX_PIXELS:
            raise ValueError(too_many(len(wanted), width, height))
        distinct = set(wanted)
        for number, frame in enumerate(islice(container.decode(stream), wanted[-1] + 1)):
            if number in distinct:
                frames[number] = frame.to_ndarray(format="rgb24", width=width, height=height)
        if len(frames) < len(distinct):
            raise ValueError(f"Frame {wanted[-1]} is missing.")
        return np.stack([frames[index] for index in wanted])


def too_many(frames: int, width: int, height: int) -> str:
    """Return the reason for refusing a number of frames that together exceed `MAX_PIXELS`."""
    return (
        f"{frames} frames of {width} x {height} pixels are more than {MAX_PIXELS} pixels. Let the processor take "
        'fewer with processor_kwargs={"videos_kwargs": {"do_sample_frames": True, "num_frames": 16}}'
    )


@contextmanager
def _opened(source: VideoSource, where: str) -> Iterator[tuple[Any, Any]]:
    """Open a video; raise MalformedRow if that fails, or what this context does with the video."""
    av = optional("av")
    try:
        check_is_file(source)
        # Pass an open file rather than its name: FFmpeg might read a name as a URL.
        with (
            io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file,
            av.open(file, options=_OPTIONS) as container,
        ):
            if not container.streams.video:
                raise ValueError("It has no frames.")
            yield container, container.streams.video[0]
    except (*_UNREADABLE, av.FFmpegError) as error:
        # The full text of a PyAV error begins with an error number and ends with the name of the file object.
        raise not_opened(source, where, str(getattr(error, "strerror", None) or error)) from error


def _checked_size(stream: Any) -> tuple[int, int]:
    width, height = stream.width, stream.height
    if not 0 < width * height <= (Image.MAX_IMAGE_PIXELS or MAX_PIXELS):
        raise ValueError(f"Its frames have {width} x {height} pixels.")
    return width, height


def _check_end(container: Any, stream: Any) -> None:
    """Raise ValueError if the last frames of a file are missing."""
    if stream.duration and stream.frames > 1:
        container.seek((stream.start_time or 0) + stream.duration, stream=stream)
        if not any(packet.size for packet in container.demux(stream)):
            raise ValueError("It is truncated.")
