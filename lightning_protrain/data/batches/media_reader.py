"""Opens media for a processor, and reads from their headers the sizes that determine their number of tokens."""

from __future__ import annotations

import base64
import inspect
import io
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers.video_utils import VideoMetadata

from lightning_protrain.data.batches.processor import part_for
from lightning_protrain.data.conversation import Conversation, MalformedRow, Media, MediaKind
from lightning_protrain.data.extras import optional
from lightning_protrain.data.sources.audio import audio_length, open_audio
from lightning_protrain.data.sources.images import image_size, open_image
from lightning_protrain.data.sources.media_file import not_opened
from lightning_protrain.data.sources.video import MAX_PIXELS, VideoHeader, open_frames, too_many, video_header

# Properties of a medium that determine its number of tokens, such as width and height.
Size = Hashable
# Kind of a medium, and the medium as the processor reads it.
Opened = tuple[MediaKind, Any]


@dataclass(frozen=True)
class _VideoSize:
    """Header of a video, and indices of the frames that the processor samples."""

    header: VideoHeader
    indices: tuple[int, ...]

    @property
    def metadata(self) -> VideoMetadata:
        return _metadata(self.header, frames_indices=list(self.indices))


@dataclass(frozen=True)
class _Clip:
    """Sampled frames of a video, uint8 of shape [frames, height, width, 3], and metadata of the video."""

    frames: NDArray[np.uint8]
    metadata: VideoMetadata


@dataclass(frozen=True)
class MediaReader:
    """Opens media for one processor."""

    processor: Any

    def size(self, medium: Media, where: str) -> Size:
        """Return the size of a medium, from its header.

        Args:
            medium: The medium.
            where: Name of the medium, for messages.

        Raises:
            MalformedRow: If the medium cannot be opened, or is longer than the processor reads.
            ValueError: If the processor cannot read media of this kind.
        """
        part, source = part_for(self.processor, medium.kind), medium.source
        if medium.kind == "image":
            return image_size(source, where)  # type: ignore[arg-type]
        if medium.kind == "audio":
            length = audio_length(source, self._rate, where)  # type: ignore[arg-type]
            limit = self._longest(part)
            if limit is not None and length > limit:
                raise MalformedRow(
                    f"{where} takes {length / self._rate:.1f} s, and {type(self.processor).__name__} reads only the "
                    f"first {limit / self._rate:.0f} s. Divide it, or leave the row out."
                )
            return length
        header = video_header(source, where)  # type: ignore[arg-type]
        indices = self._sampled(part, header, where)
        if len(indices) * header.width * header.height > MAX_PIXELS:
            raise not_opened(source, where, too_many(len(indices), header.width, header.height))
        return _VideoSize(header, indices)

    def open(self, medium: Media, where: str) -> Opened:
        """Return a medium as the processor reads it.

        Raises:
            MalformedRow: If the medium cannot be decoded, or is longer than the processor reads.
            ValueError: If the processor cannot read media of this kind.
        """
        source: Any = medium.source
        if medium.kind == "image":
            return medium.kind, open_image(source, where)
        size: Any = self.size(medium, where)
        if medium.kind == "audio":
            return medium.kind, open_audio(source, self._rate, where)
        return medium.kind, _Clip(open_frames(source, size.indices, where), size.metadata)

    def blank(self, kind: MediaKind, size: Any) -> Opened:
        """Return a blank medium of the given size: black pixels, or silence."""
        if kind == "image":
            return kind, Image.new("RGB", size)
        if kind == "audio":
            return kind, np.zeros(size, dtype=np.float32)
        shape = (len(size.indices), size.header.height, size.header.width, 3)
        return kind, _Clip(np.zeros(shape, dtype=np.uint8), size.metadata)

    def key(self, kind: MediaKind, size: Any) -> Hashable:
        """Return a key that is equal only for sizes with equal tokens.

        For audio, the key is the number of tokens or, if the processor cannot compute it, of feature frames.
        """
        if kind != "audio":
            return size
        try:
            counted = self.processor._get_num_multimodal_tokens(audio_lengths=[size])
            return "tokens", int(counted.num_audio_tokens[0])
        except (AttributeError, NotImplementedError, TypeError):
            return "frames", math.ceil(size / getattr(part_for(self.processor, kind), "hop_length", 1))

    def arguments(self, media: Sequence[Opened]) -> dict[str, Any]:
        """Return the keyword arguments that pass the media of one text to the processor."""
        images, audio, clips = (
            [medium for other, medium in media if other == kind] for kind in ("image", "audio", "video")
        )
        arguments: dict[str, Any] = {"images": images or None}
        if audio:
            arguments |= {"audio": audio, "audio_kwargs": {"sampling_rate": self._rate}}
        if clips:
            # The frames are sampled already: to sample them itself, a processor would need all frames decoded.
            settings = {"video_metadata": [clip.metadata for clip in clips], "do_sample_frames": False}
            arguments |= {"videos": [clip.frames for clip in clips], "videos_kwargs": settings}
        return arguments

    def filled(self, conversation: Conversation, media: Sequence[Opened]) -> Conversation:
        """Put the opened audio into the parts of a conversation, for a processor that reads conversations."""
        parts = iter([self.audio_part(audio) for _, audio in media])
        messages: Any = [
            {**message, "content": [part if part["type"] == "text" else next(parts) for part in message["content"]]}
            if isinstance(message["content"], list)
            else message
            for message in conversation["messages"]
        ]
        return {**conversation, "messages": messages}

    def audio_part(self, values: NDArray[np.float32]) -> dict[str, Any]:
        """Return a content part with the audio as a lossless base64-encoded WAV file."""
        file = io.BytesIO()
        optional("soundfile").write(file, values, self._rate, format="WAV", subtype="FLOAT")
        return {"type": "audio", "base64": base64.b64encode(file.getvalue()).decode()}

    @property
    def _rate(self) -> int:
        return int(part_for(self.processor, "audio").sampling_rate)

    def _longest(self, part: Any) -> int | None:
        """Return the number of samples at which the processor truncates audio; None if it does not truncate."""
        if not getattr(type(self.processor), "audio_kwargs", {}).get("truncation", True):
            return None
        default = getattr(inspect.signature(part.__call__).parameters.get("max_length"), "default", None)
        limit = getattr(part, "n_samples", default)
        return limit if isinstance(limit, int) else None

    def _sampled(self, part: Any, header: VideoHeader, where: str) -> tuple[int, ...]:
        """Return the indices of the frames that the processor would sample."""
        settings = {name: getattr(part, name, None) for name in part.valid_kwargs.__annotations__}
        settings |= getattr(type(self.processor), "videos_kwargs", {})
        # SmolVLM also samples with `do_sample_frames=False`, if `fps` or `num_frames` is set.
        always = type(self.processor).__name__ == "SmolVLMProcessor" and (settings["fps"] or settings["num_frames"])
        if not (settings["do_sample_frames"] or always):
            return tuple(range(header.frames))
        for name in ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"):
            settings.pop(name, None)
        try:
            sampled = part.sample_frames(metadata=_metadata(header), **settings)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise MalformedRow(f"{where}: {type(part).__name__} cannot sample frames of it: {error}") from error
        return tuple(int(index) for index in sampled)


def _metadata(header: VideoHeader, **sampled: Any) -> VideoMetadata:
    size = {"width": header.width, "height": header.height}
    return VideoMetadata(header.frames, header.fps, **size, duration=header.frames / header.fps, **sampled)
