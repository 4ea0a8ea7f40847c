"""Reads audio with soundfile and resamples it with soxr; the result is bitwise that of transformers' `load_audio`."""

from __future__ import annotations

import io
import math
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.data.conversation import MalformedRow, Samples
from lightning_protrain.data.extras import optional
from lightning_protrain.data.sources.media_file import check_is_file, not_opened

AudioSource = str | bytes | Samples
# The limit protects memory: a compressed file of a few kilobytes may decode to gigabytes.
MAX_SECONDS = 3600
# Maximum number of samples in all channels together; a sample takes four bytes.
MAX_SAMPLES = 2**29
# A streaming writer puts one of these sizes into the header of a WAV file, because it does not know the length.
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)
# Exceptions that soundfile raises; its own exception classes derive from RuntimeError.
_UNREADABLE = (OSError, ValueError, TypeError, RuntimeError, MemoryError)


def audio_length(source: AudioSource, rate: int, where: str) -> int:
    """Return the number of samples that `open_audio` will return, from the file's header alone.

    Args:
        source: Path of a file, contents of a file, or decoded audio.
        rate: Samples per second after resampling.
        where: Name of the audio, for messages.

    Raises:
        MalformedRow: If the audio does not exist, cannot be read, is truncated, is empty, or is longer than
            `MAX_SECONDS`.
        ValueError: If soundfile is not installed.
    """
    sound = None if isinstance(source, Samples) else optional("soundfile")
    try:
        if isinstance(source, Samples):
            frames, own_rate = len(source.values) // 4, source.rate
        else:
            with _opened(sound, source) as file:
                frames, own_rate = file.frames, file.samplerate
                _check_end(source, file)
                _check_length(frames, own_rate, file.channels)
        _check_length(frames, own_rate)
    except _UNREADABLE as error:
        raise not_opened(_named(source), where, getattr(error, "error_string", error)) from error
    return math.ceil(frames * rate / own_rate)


def open_audio(source: AudioSource, rate: int, where: str) -> NDArray[np.float32]:
    """Return the mean of all channels, resampled, of shape [samples]; the arguments are those of `audio_length`.

    Raises:
        MalformedRow: If the audio does not exist, cannot be decoded, or has samples that are not finite.
        ValueError: If soundfile or soxr is not installed.
    """
    sound = None if isinstance(source, Samples) else optional("soundfile")
    resample = optional("soxr").resample
    try:
        if isinstance(source, Samples):
            values, own_rate = np.frombuffer(source.values, dtype=np.float32), source.rate
        else:
            with _opened(sound, source) as file:
                _check_length(file.frames, file.samplerate, file.channels)
                channels, own_rate, frames = file.read(dtype="float32", always_2d=True).T, file.samplerate, file.frames
            values = channels.mean(axis=0) if len(channels) > 1 else channels[0]
            if len(values) < frames:
                raise ValueError(f"It ends after {len(values)} of {frames} samples.")
        if not np.isfinite(values).all():
            raise ValueError("It has samples that are not finite.")
        if own_rate != rate:
            length = math.ceil(len(values) * rate / own_rate)
            values = resample(values, own_rate, rate, quality="soxr_hq")
            values = np.pad(values, (0, max(0, length - len(values))))[:length]
    except _UNREADABLE as error:
        raise not_opened(_named(source), where, getattr(error, "error_string", error)) from error
    return np.ascontiguousarray(values, dtype=np.float32)


def samples(array: Any, rate: Any, where: str) -> Samples:
    """Convert decoded audio of Hugging Face `datasets` into the mean of its channels.

    Args:
        array: Samples, of shape [samples] or [channels, samples].
        rate: Samples per second.
        where: Name of the audio, for messages.

    Raises:
        MalformedRow: If `array` is not an array of numbers of such a shape, or `rate` is not a positive number.
    """
    try:
        values = np.asarray(array, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise MalformedRow(f"{where}: `array` does not hold samples ({error}). Give numbers.") from error
    if values.ndim not in (1, 2) or isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
        raise MalformedRow(
            f"{where}: `array` has the shape {values.shape} and `sampling_rate` is {rate!r}. Give samples of one "
            "channel, and a positive number of them per second."
        )
    return Samples((values.mean(axis=0) if values.ndim == 2 else values).astype("<f4").tobytes(), int(rate))


def _opened(sound: Any, source: str | bytes) -> Any:
    check_is_file(source)
    if isinstance(source, str):
        with open(source, "rb"):  # An error of `open` names the cause; an error of soundfile does not.
            pass
    return sound.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source)


def _check_end(source: str | bytes, file: Any) -> None:
    """Raise ValueError if a file is shorter than its header says."""
    if isinstance(source, bytes):
        head, size = source[:8], len(source)
    else:
        with open(source, "rb") as plain:
            head, size = plain.read(8), os.path.getsize(source)
    riff_size = int.from_bytes(head[4:], "little")
    is_short = head[:4] == b"RIFF" and riff_size not in _UNKNOWN_SIZES and riff_size + 8 > size
    if not is_short and 0 < file.frames <= MAX_SECONDS * file.samplerate:
        try:
            file.seek(file.frames - 1)
            is_short = len(file.read(1)) < 1
        except RuntimeError:
            is_short = True
    if is_short:
        raise ValueError("It is truncated.")


def _check_length(frames: int, rate: int, channels: int = 1) -> None:
    if not frames:
        raise ValueError("It has 0 samples.")
    if frames * channels > MAX_SAMPLES:
        raise ValueError(f"It has more than {MAX_SAMPLES} samples: {frames} in each of {channels} channels.")
    if rate <= 0 or frames > MAX_SECONDS * rate:
        raise ValueError(f"It is longer than {MAX_SECONDS} s: {frames} samples, {rate} per second.")


def _named(source: AudioSource) -> Any:
    return source.values if isinstance(source, Samples) else source
