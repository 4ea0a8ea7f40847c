"""Rows with media, and short runs of the families of `vision_families` on them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig
from transformers.audio_utils import load_audio
from transformers.video_utils import VideoMetadata

from lightning_protrain import CausalLMModule, ChatDataModule
from lightning_protrain.data.batches.encode import Encoded
from lightning_protrain.data.batches.loader import Batch, BatchRow, Collator
from lightning_protrain.data.batches.media_rows import MediaEncoder
from lightning_protrain.data.conversation import Conversation, Media, MediaKind
from lightning_protrain.models.loading import auto_class
from tests.support.ranks import quiet_trainer
from tests.support.vision_families import VISION_FAMILIES

SIZES = ((20, 24), (40, 18), (16, 16))
SECONDS = (0.9, 0.35, 1.6)
SUFFIXES = {"image": "png", "audio": "wav", "video": "mp4"}


@cache
def picture(size: tuple[int, int]) -> Image.Image:
    """Return a picture whose colours differ from pixel to pixel."""
    pixels = torch.randint(256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(size[0]))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


@cache
def sound(seconds: float, rate: int = 22_050) -> bytes:
    """A WAV file of two channels with tones."""
    times = np.arange(int(seconds * rate)) / rate
    channels = [0.5 * np.sin(2 * np.pi * pitch / seconds * times) for pitch in (300, 500)]
    file = io.BytesIO()
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(file, np.stack(channels, 1), rate, format="WAV")
    return file.getvalue()


@cache
def film(size: tuple[int, int], frames: int = 12, fps: int = 6) -> bytes:
    """An MP4 file whose pictures differ."""
    file = io.BytesIO()
    av = pytest.importorskip("av")
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(frames):
            picture = np.full((size[1], size[0], 3), 20 * number, dtype=np.uint8)
            picture[:, :: number % 3 + 2] = 255 - 20 * number
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def medium(kind: MediaKind, number: int) -> Media:
    """One of three media of a kind."""
    number %= 3
    if kind == "image":
        return Media(kind, picture(SIZES[number]))
    return Media(kind, sound(SECONDS[number]) if kind == "audio" else film(SIZES[number], frames=6 + 2 * number))


def processed(encoder: MediaEncoder, row: Conversation) -> Any:
    """Return the processor's output for a row and its decoded media."""
    processor, given = encoder.processor, {}
    if type(processor).__name__ == "VoxtralProcessor":
        return spoken(encoder, row)
    text = encoder.chat.renderer.render(row).text
    for one in row.get("media", ()):
        source: Any = one.source
        if one.kind == "image":
            given.setdefault("images", []).append(source)
        elif one.kind == "audio":
            wav = "data:audio/wav;base64," + base64.b64encode(source).decode()
            given.setdefault("audio", []).append(load_audio(wav, backend="soundfile"))
        else:
            av = pytest.importorskip("av")
            with av.open(io.BytesIO(source)) as container:
                frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            fps = 6
            metadata = VideoMetadata(len(frames), fps, *frames[0].shape[1::-1], len(frames) / fps)
            metadata.frames_indices = list(range(len(frames)))
            given.setdefault("videos", []).append(np.stack(frames))
            given.setdefault("videos_kwargs", {}).setdefault("video_metadata", []).append(metadata)
            if type(processor).__name__ == "SmolVLMProcessor":  # As its chat template does.
                given["videos_kwargs"]["do_sample_frames"] = True
    return processor(text=[text], add_special_tokens=False, return_tensors="pt", **given)


def spoken(encoder: MediaEncoder, row: Conversation) -> Any:
    """Return the output of a processor that takes conversations; audio is decoded and resampled before."""
    parts = []
    for one in row.get("media", ()):
        file = io.BytesIO()
        wav = "data:audio/wav;base64," + base64.b64encode(one.source).decode()  # type: ignore[arg-type]
        soundfile = pytest.importorskip("soundfile")
        soundfile.write(file, load_audio(wav, backend="soundfile"), 16_000, format="WAV", subtype="FLOAT")
        parts.append({"type": "audio", "base64": base64.b64encode(file.getvalue()).decode()})
    first, *rest = row["messages"]
    content = [*parts, *first["content"][len(parts) :]] if parts else first["content"]
    processor = type(encoder.processor)(encoder.processor.feature_extractor, encoder.chat.renderer.tokenizer)
    return processor.apply_chat_template([{"role": "user", "content": content}, *rest])


def row(kinds: Sequence[MediaKind], question: str = "Is it walnut?", answer: str = "maple") -> Conversation:
    """Two questions with their answers; the media come first."""
    parts = [{"type": kind} for kind in kinds]
    first = [*parts, {"type": "text", "text": question}] if parts else question
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And walnut now?"},
        {"role": "assistant", "content": f"still {answer}"},
    ]
    made: Any = {"messages": messages}
    return made | {"media": [medium(kind, number) for number, kind in enumerate(kinds)]} if parts else made


def saved(name: str, folder: Path, weights: bool = False, **sizes: Any) -> str:
    """Writes the processor of a family, rows with its media, and maybe a model.

    Args:
        name: Family.
        folder: Empty.
        weights: True writes a model.
        sizes: Keys of its config that are updated, such as `text_config`.

    Returns:
        The folder, where the rows are in `rows.jsonl`.
    """
    processor, config = VISION_FAMILIES[name].make()
    processor.save_pretrained(folder)
    for number, size in enumerate(SIZES):
        picture(size).save(folder / f"{number}.png")
        (folder / f"{number}.wav").write_bytes(sound(SECONDS[number]))
        (folder / f"{number}.mp4").write_bytes(film(size, frames=6 + 2 * number))
    lines, kinds = [], VISION_FAMILIES[name].rows
    for index in range(3 * len(kinds)):
        made: Any = row(kinds[index % len(kinds)], answer="maple " * (index % 4 + 1))
        columns: dict[str, list[str]] = {}
        for number, kind in enumerate(kinds[index % len(kinds)]):
            columns.setdefault(f"{kind}s", []).append(f"{(index + number) % len(SIZES)}.{SUFFIXES[kind]}")
        lines.append(json.dumps({"messages": made["messages"], **columns}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    if weights:
        config |= {key: {**config[key], **changed} for key, changed in sizes.items()}
        made = AutoConfig.for_model(**config)
        torch.manual_seed(0)
        auto_class(made).from_config(made).save_pretrained(folder)
    return str(folder)


def batch(encoder: MediaEncoder, rows: Sequence[Conversation]) -> Batch:
    """One batch of these rows."""
    encoded = [encoder.encode(row, "row") for row in rows]
    assert all(isinstance(one, Encoded) for one in encoded)
    return Collator(encoder.processor.tokenizer.pad_token_id, 1000)([BatchRow((one,)) for one in encoded])  # type: ignore[arg-type]


def module(**options: Any) -> CausalLMModule:
    """A module with its model; random weights are always the same."""
    made = CausalLMModule(**{"warmup_steps": 0, "learning_rate": 0.01, "loss_chunk_tokens": None, **options})
    torch.manual_seed(0)
    made.configure_model()
    return made


def data(folder: str, **options: Any) -> ChatDataModule:
    """The rows of `saved`, four to a batch."""
    given = {"max_length": 1000, "batch_size": 4, "cache_dir": f"{folder}/cache", **options}
    return ChatDataModule(dataset=f"{folder}/rows.jsonl", tokenizer=folder, **given)


class Losses(L.Callback):
    """Records the losses of a run."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.losses.append(outputs["loss"].clone())


def fit(made: CausalLMModule, rows: ChatDataModule, callbacks: Sequence[L.Callback] = (), **options: Any) -> Any:
    """Trains two steps unless told; returns the losses and the weights."""
    losses = Losses()
    settings = {"max_steps": 2, "devices": 1, "limit_val_batches": 0, "callbacks": [losses, *callbacks]}
    torch.manual_seed(0)
    quiet_trainer(**{**settings, **options}).fit(made, rows)
    return losses.losses, {name: value.clone() for name, value in made.state_dict().items()}


def inputs(batch: Batch) -> Batch:
    """Return the entries of a batch that the model reads."""
    return {name: value for name, value in batch.items() if name not in ("labels", "loss_weights", "trained_tokens")}
