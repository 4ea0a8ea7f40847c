"""Opens media in the form that a processor reads, and knows what of them decides the number of their tokens."""

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

Size = Hashable
# A kind, and a medium in the form that the processor reads.
Opened = tuple[MediaKind, Any]


@dataclass(frozen=True)
class _VideoSize:
    """Header of a video, and numbers of the pictures that are taken, which decide its tokens."""

    header: VideoHeader
    indices: tuple[int, ...]

    @property
    def metadata(self) -> VideoMetadata:
        return VideoMetadata(**_described(self.header), frames_indices=list(self.indices))


@dataclass(frozen=True)
class _Clip:
    """Pictures of a video, uint8 of shape [pictures, height, width, 3], and what was known of it."""

    frames: NDArray[np.uint8]
    metadata: VideoMetadata


@dataclass(frozen=True)
class MediaReader:
    """Opens media for one processor.

    Attributes:
        processor: The processor.
    """

    processor: Any

    def size(self, one: Media, where: str) -> Size:
        """Return what decides the number of tokens of a medium, from its header.

        Args:
            one: The medium.
            where: Its name, for messages.

        Raises:
            MalformedRow: If it does not open, or the processor would cut it.
            ValueError: If the processor reads nothing of its kind.
        """
        part, source = part_for(self.processor, one.kind), one.source
        if one.kind == "image":
            return image_size(source, where)  # type: ignore[arg-type]
        if one.kind == "audio":
            length = audio_length(source, self._rate, where)  # type: ignore[arg-type]
            limit = self._longest(part)
            if limit is not None and length > limit:
                raise MalformedRow(
                    f"{where} takes {length / self._rate:.1f} s, and {type(self.processor).__name__} reads the first "
                    f"{limit / self._rate:.0f} s alone. Divide it, or leave the row out."
                )
            return length
        header = video_header(source, where)  # type: ignore[arg-type]
        indices = self._sampled(part, header, where)
        if len(indices) * header.width * header.height > MAX_PIXELS:
            raise not_opened(source, where, too_many(len(indices), header.width, header.height))
        return _VideoSize(header, indices)

    def open(self, one: Media, where: str) -> Opened:
        """Return a medium in the form that the processor reads.

        Raises:
            MalformedRow: If it does not open, is broken, or the processor would cut it.
            ValueError: If the processor reads nothing of its kind.
        """
        source: Any = one.source
        if one.kind == "image":
            return one.kind, open_image(source, where)
        size: Any = self.size(one, where)
        if one.kind == "audio":
            return one.kind, open_audio(source, self._rate, where)
        return one.kind, _Clip(open_frames(source, size.indices, where), size.metadata)

    def blank(self, kind: MediaKind, size: Any) -> Opened:
        """Return a medium of that size without content."""
        if kind == "image":
            return kind, Image.new("RGB", size)
        if kind == "audio":
            return kind, np.zeros(size, dtype=np.float32)
        shape = (len(size.indices), size.header.height, size.header.width, 3)
        return kind, _Clip(np.zeros(shape, dtype=np.uint8), size.metadata)

    def key(self, kind: MediaKind, size: Any) -> Hashable:
        """Return what sizes with equal tokens share: for audio their number if the processor tells, or frames."""
        if kind != "audio":
            return size
        try:
            counted = self.processor._get_num_multimodal_tokens(audio_lengths=[size])
            return "tokens", int(counted.num_audio_tokens[0])
        except (AttributeError, NotImplementedError, TypeError):
            return "frames", math.ceil(size / getattr(part_for(self.processor, kind), "hop_length", 1))

    def arguments(self, media: Sequence[Opened]) -> dict[str, Any]:
        """Return the arguments of a call of the processor for the media of one text, in their order."""
        images, audio, clips = ([one for other, one in media if other == kind] for kind in ("image", "audio", "video"))
        given: dict[str, Any] = {"images": images or None}
        if audio:
            given |= {"audio": audio, "audio_kwargs": {"sampling_rate": self._rate}}
        if clips:
            # The pictures have been taken: a processor would first need all of them.
            settings = {"video_metadata": [clip.metadata for clip in clips], "do_sample_frames": False}
            given |= {"videos": [clip.frames for clip in clips], "videos_kwargs": settings}
        return given

    def filled(self, conversation: Conversation, media: Sequence[Opened]) -> Conversation:
        """Return a conversation with the samples in its parts, for a processor that takes conversations."""
        parts = iter([self.audio_part(one) for _, one in media])
        messages: Any = [
            {**message, "content": [part if part["type"] == "text" else next(parts) for part in message["content"]]}
            if isinstance(message["content"], list)
            else message
            for message in conversation["messages"]
        ]
        return {**conversation, "messages": messages}

    def audio_part(self, values: NDArray[np.float32]) -> dict[str, Any]:
        """Return audio as a part of a message, with the same bits."""
        file = io.BytesIO()
        optional("soundfile").write(file, values, self._rate, format="WAV", subtype="FLOAT")
        return {"type": "audio", "base64": base64.b64encode(file.getvalue()).decode()}

    @property
    def _rate(self) -> int:
        return int(part_for(self.processor, "audio").sampling_rate)

    def _longest(self, part: Any) -> int | None:
        """Return the number of samples beyond which the processor cuts audio; None if it does not."""
        if not getattr(type(self.processor), "audio_kwargs", {}).get("truncation", True):
            return None
        default = getattr(inspect.signature(part.__call__).parameters.get("max_length"), "default", None)
        limit = getattr(part, "n_samples", default)
        return limit if isinstance(limit, int) else None

    def _sampled(self, part: Any, header: VideoHeader, where: str) -> tuple[int, ...]:
        """Return the numbers of the pictures that the processor would take."""
        settings = {name: getattr(part, name, None) for name in part.valid_kwargs.__annotations__}
        settings |= getattr(type(self.processor), "videos_kwargs", {})
        # With a rate or a number, the chat template of this class samples whatever it is set to.
        asks = type(self.processor).__name__ == "SmolVLMProcessor" and (settings["fps"] or settings["num_frames"])
        if not (settings["do_sample_frames"] or asks):
            return tuple(range(header.frames))
        for name in ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"):
            settings.pop(name, None)
        try:
            taken = part.sample_frames(metadata=VideoMetadata(**_described(header)), **settings)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise MalformedRow(f"{where}: {type(part).__name__} takes no pictures of it: {error}") from error
        return tuple(int(index) for index in taken)


def _described(header: VideoHeader) -> dict[str, Any]:
    return {
        "total_num_frames": header.frames,
        "fps": header.fps,
        "width": header.width,
        "height": header.height,
        "duration": header.frames / header.fps,
    }
