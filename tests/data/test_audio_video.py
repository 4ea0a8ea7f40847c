"""Audio and video from every kind of source, and malicious files."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.audio_utils import load_audio

from lightning_protrain.data.batches import media_rows as module
from lightning_protrain.data.batches.media_rows import MediaEncoder, media_rows
from lightning_protrain.data.batches.preview import page
from lightning_protrain.data.batches.processor import part_for
from lightning_protrain.data.chat.pipeline import ChatEncoders, ChatSettings
from lightning_protrain.data.conversation import Conversation, MalformedRow, Media, MediaKind, Samples
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.data.sources import audio, video
from lightning_protrain.data.sources.audio import audio_length, open_audio
from lightning_protrain.data.sources.media import check_media, media_source, place_media
from lightning_protrain.data.sources.row_kinds import RowFormat
from lightning_protrain.data.sources.spec import DatasetSpec
from lightning_protrain.data.sources.video import open_frames, video_header
from tests.data import processors
from tests.data.tokenizers import mistral_common
from tests.support.vision_families import VISION_FAMILIES
from tests.support.vision_runs import film, picture, row, sound

A = {"role": "assistant", "content": "So."}
RATE = 16_000


def _parse(row: Any) -> Conversation:
    return RowFormat().parse(row, "row 3", Path("/data"))


# Parts, columns and placeholders


def _wav(seconds: float = 0.5, rate: int = 8000, **options: Any) -> bytes:
    file = io.BytesIO()
    values = np.sin(np.arange(int(seconds * rate)) / 9).astype(np.float32)
    soundfile.write(file, values, rate, **{"format": "WAV", **options})
    return file.getvalue()


WAV = _wav()
CODE = base64.b64encode(WAV).decode()


@pytest.mark.parametrize(
    ("part", "media"),
    [
        ({"type": "audio", "audio": "a.wav"}, Media("audio", "/data/a.wav")),
        ({"type": "audio", "path": "a.wav"}, Media("audio", "/data/a.wav")),
        ({"type": "audio", "url": "file:///b/a.wav"}, Media("audio", "/b/a.wav")),
        ({"type": "audio", "bytes": WAV, "path": "a.wav"}, Media("audio", WAV)),
        ({"type": "audio", "audio": {"bytes": None, "path": "a.wav"}}, Media("audio", "/data/a.wav")),
        ({"type": "audio", "base64": CODE}, Media("audio", WAV)),
        ({"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{CODE}"}}, Media("audio", WAV)),
        ({"type": "audio", "audio_url": "a.wav"}, Media("audio", "/data/a.wav")),
        ({"type": "input_audio", "input_audio": {"data": CODE, "format": "wav"}}, Media("audio", WAV)),
        (
            {"type": "audio", "audio": {"array": [[0.5, 0.0], [0.0, 1.0]], "sampling_rate": 8000, "path": None}},
            Media("audio", Samples(np.array([0.25, 0.5], dtype=np.float32).tobytes(), 8000)),
        ),
        ({"type": "video", "video": "a.mp4"}, Media("video", "/data/a.mp4")),
        ({"type": "video", "path": "a.mp4"}, Media("video", "/data/a.mp4")),
        ({"type": "video_url", "video_url": {"url": "a.mp4"}}, Media("video", "/data/a.mp4")),
        ({"type": "video", "bytes": b"1"}, Media("video", b"1")),
    ],
)
def test_parts_carry_audio_and_videos(part: dict[str, Any], media: Media) -> None:
    parsed = _parse({"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}, A]})
    assert parsed["media"] == [media]
    assert parsed["messages"][0]["content"] == [{"type": media.kind}, {"type": "text", "text": "?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"audio": {"path": "a.wav"}, "video": "v.mp4", "question": "<video>\n<audio>Why?", "answer": "So."},
        {
            "audios": ["a.wav"],
            "videos": ["v.mp4"],
            "messages": [{"role": "user", "content": "<video><audio>\nWhy?"}, A],
        },
        {
            "audios": ["a.wav"],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "video", "video": "v.mp4"},
                        {"type": "audio"},
                        {"type": "text", "text": "Why?"},
                    ],
                },
                A,
            ],
        },
    ],
)
def test_columns_and_placeholders_of_several_kinds(row: Any) -> None:
    parsed = _parse(row)
    assert parsed["media"] == [Media("video", "/data/v.mp4"), Media("audio", "/data/a.wav")]
    kinds = [part["type"] for part in parsed["messages"][0]["content"]]  # type: ignore[index]
    assert kinds == ["video", "audio", "text"]


def test_a_pair_without_places_begins_with_its_media() -> None:
    parsed = _parse({"question": "Why?", "answer": "So.", "audio": "a.wav", "image": "i.png"})
    assert [one.kind for one in parsed["media"]] == ["image", "audio"]


def test_a_placeholder_is_text_where_its_column_is_not() -> None:
    messages: list[Any] = [{"role": "user", "content": "<audio> of <video>"}, A]
    assert place_media(messages, {"image": None, "audio": ["a"], "video": None}, "x") == [("audio", "a")]
    assert messages[0]["content"] == [{"type": "audio"}, {"type": "text", "text": " of <video>"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"audio": "a", "audios": ["b"], "messages": [A]}, "columns `audio` and `audios`"),
        (
            {"audios": ["a"], "messages": [A]},
            "1 audio file but 0 audio parts or placeholders: 1 of the audio files without",
        ),
        (
            {"videos": [], "messages": [{"role": "user", "content": "<video>"}, A]},
            "1 video part or placeholders but 0 videos",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}, A]},
            "1 audio part or placeholders but 0 audio files",
        ),
        ({"video": 7, "question": "?", "answer": "!"}, "video 0 is a int. Give a path or bytes"),
        ({"audio": picture((16, 16)), "question": "?", "answer": "!"}, "audio 0 is a Image. Give a path or bytes"),
        ({"audio": "https://x.org/a.wav", "question": "?", "answer": "!"}, "audio 0 is the address .* Download it"),
        ({"audio": "../a.wav", "question": "?", "answer": "!"}, "audio 0 is '../a.wav', outside of the folder"),
        ({"video": "../a.mp4", "question": "?", "answer": "!"}, "video 0 is '../a.mp4', outside of the folder"),
        ({"audio": {"array": ["x"], "sampling_rate": 1}, "question": "?", "answer": "!"}, "does not hold samples"),
        (
            {"audio": {"array": [0.5]}, "question": "?", "answer": "!"},
            "`sampling_rate` is None. Give samples of one channel",
        ),
        (
            {"audio": {"array": 0.5, "sampling_rate": 8000}, "question": "?", "answer": "!"},
            r"`array` has the shape \(\)",
        ),
    ],
)
def test_what_holds_nothing_is_refused(row: Any, message: str) -> None:
    with pytest.raises(MalformedRow, match=f"row 3.*{message}"):
        _parse(row)


# Decoding


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3", "AIFF"])
@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 44_100])
def test_audio_is_what_transformers_reads(kind: str, rate: int, tmp_path: Path) -> None:
    values = np.random.default_rng(0).uniform(-0.5, 0.5, (rate // 3, 2))
    path = tmp_path / f"a.{kind.lower()}"
    soundfile.write(path, values, rate, format=kind)
    expected = load_audio(str(path), sampling_rate=RATE, backend="soundfile")
    for source in (str(path), path.read_bytes()):
        assert np.array_equal(open_audio(source, RATE, "x"), expected)
        assert audio_length(source, RATE, "x") == len(expected)


def test_decoded_audio_is_resampled() -> None:
    values = np.sin(np.arange(4000) / 9).astype(np.float32)
    source = media_source("audio", {"array": values.tolist(), "sampling_rate": 8000}, Path(), "x")
    file = io.BytesIO()
    soundfile.write(file, values, 8000, format="WAV", subtype="FLOAT")
    assert np.array_equal(open_audio(source, RATE, "x"), open_audio(file.getvalue(), RATE, "x"))  # type: ignore[arg-type]
    assert audio_length(source, RATE, "x") == 8000  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["path", "bytes"])
def test_pictures_of_a_video(where: str, tmp_path: Path) -> None:
    source: Any = film((40, 18), frames=10)
    if where == "path":
        (tmp_path / "a.mp4").write_bytes(source)
        source = str(tmp_path / "a.mp4")
    header = video_header(source, "x")
    assert (header.frames, header.fps, header.width, header.height) == (10, 6, 40, 18)
    with av.open(io.BytesIO(film((40, 18), frames=10))) as container:
        expected = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    for indices in ([0], [0, 3, 3, 9], range(10)):
        assert np.array_equal(open_frames(source, list(indices), "x"), expected[list(indices)])


def test_pictures_are_counted_where_the_header_has_no_number() -> None:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (index, 0, 0)) for index in range(0, 250, 50)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=100)
    assert video_header(file.getvalue(), "x").frames == 5


# Hostile files


def _flac(seconds: float, rate: int) -> bytes:
    return _wav(seconds, rate, format="FLAC")


def _not_finite() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.array([0.1, np.nan, 0.2]), 8000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def _fast_start() -> bytes:
    """A video whose header comes first, so that it opens when its end is missing."""
    path = Path(tempfile.mkdtemp()) / "a.mp4"  # ffmpeg opens it a second time
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("mpeg4", rate=6)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for number in range(12):
            noise = np.random.default_rng(number).integers(0, 256, (24, 32, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        container.mux(stream.encode())
    return path.read_bytes()


def _slow() -> bytes:
    """A video of few pictures that takes more than an hour."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(1, 1000))
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


NOISE = _wav(0.4, 8000, format="FLAC")
HOSTILE: dict[MediaKind, dict[str, tuple[bytes, str]]] = {
    "audio": {
        "cut.wav": (WAV[: len(WAV) // 2], "It is truncated"),
        "cut.flac": (NOISE[: len(NOISE) // 2], "It is truncated"),
        "cut.mp3": (_wav(2, 8000, format="MP3")[:3000], "It is truncated"),
        "empty.wav": (b"", ""),
        "no_samples.wav": (_wav(0), "It has 0 samples"),
        "text.wav": (b"no audio", ""),
        "picture.wav": (film((16, 16)), ""),
        "long.flac": (_flac(3601, 100), "It is longer than 3600 s: 360100 samples, 100 per second"),
    },
    "video": {
        "cut.mp4": (film((20, 24))[:900], ""),
        "cut_behind_header.mp4": (_fast_start()[:-200], "It is truncated|Operation not permitted"),
        "empty.mp4": (b"", ""),
        "text.mp4": (b"no video", ""),
        "sound.mp4": (WAV, ""),
        "long.avi": (_slow(), "It is longer than 3600 s"),
        "list.m3u8": (b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nwhole.mp4\n#EXT-X-ENDLIST\n", ""),
        "list.ffconcat": (b"ffconcat version 1.0\nfile 'whole.mp4'\n", ""),
    },
}
CASES = [(kind, name) for kind, files in HOSTILE.items() for name in files]


def _check(kind: MediaKind, source: Any) -> None:
    check_media({"messages": [], "media": [Media(kind, source)]}, "row 3")


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_hostile_file_is_named_before_training(kind: MediaKind, name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[kind][name]
    (tmp_path / "whole.mp4").write_bytes(film((16, 16)))
    (tmp_path / name).write_bytes(content)
    for source in (str(tmp_path / name), content):
        with pytest.raises(MalformedRow, match=f"row 3, {kind} 0 .* does not open: .*({message})") as refused:
            _check(kind, source)
        assert " at 0x" not in str(refused.value)


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_what_is_no_file_is_named(kind: MediaKind, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("absent", "No such file"), (".", "It is a folder, a pipe"), ("pipe", "It is a folder, a pipe")):
        with pytest.raises(MalformedRow, match=f"row 3, {kind} 0 .* does not open: .*{why}"):
            _check(kind, str(tmp_path / name))


def test_samples_that_are_not_finite_are_refused() -> None:
    with pytest.raises(MalformedRow, match="It has samples that are not finite"):
        open_audio(_not_finite(), RATE, "x")


def test_too_many_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "MAX_SAMPLES", 8000)
    for function in (audio_length, open_audio):
        with pytest.raises(MalformedRow, match="more than 8000 samples: 7717 in each of 2 channels"):
            function(sound(0.35), RATE, "x")


def test_too_many_pixels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "MAX_PIXELS", 1000)
    with pytest.raises(MalformedRow, match=r"3 frames of 20 x 24 pixels are more than 1000 pixels.*processor_kwargs"):
        open_frames(film((20, 24)), [0, 1, 2], "x")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for function in (lambda: video_header(film((20, 24)), "x"), lambda: open_frames(film((20, 24)), [0], "x")):
        with pytest.raises(MalformedRow, match="Its frames have 20 x 24 pixels"):
            function()


_FILES: dict[MediaKind, Sequence[bytes]] = {
    "audio": [_wav(0.2, 8000, format=kind) for kind in ("WAV", "FLAC", "OGG", "MP3")],
    "video": [film((20, 24)), _fast_start()],
}


@pytest.mark.parametrize("kind", ["audio", "video"])
@settings(max_examples=80, deadline=None)
@given(
    index=st.integers(0, 3),
    changes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=8),
    share=st.floats(0.02, 1),
)
def test_a_damaged_file_is_read_or_named_and_nothing_else(
    kind: MediaKind, index: int, changes: list[tuple[int, int]], share: float
) -> None:
    file = _FILES[kind][index % len(_FILES[kind])]
    damaged = bytearray(file)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    source = bytes(damaged[: max(int(share * len(damaged)), 1)])
    with contextlib.suppress(MalformedRow):
        _check(kind, source)
    with contextlib.suppress(MalformedRow):
        if kind == "audio":
            # Resampling from a damaged rate may take long, and is no other case.
            if audio_length(source, RATE, "x") < 1_000_000:
                assert np.isfinite(open_audio(source, RATE, "x")).all()
        else:
            assert open_frames(source, [0, 5], "x").shape[0] == 2


@pytest.mark.parametrize(("package", "extra"), [("soundfile", "audio"), ("av", "vision")])
def test_a_missing_package_is_one_line_that_names_its_extra(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    source: Any = WAV if package == "soundfile" else film((16, 16))
    with pytest.raises(ValueError, match=f"needs {package}, which is not installed") as refused:
        _check("audio" if package == "soundfile" else "video", source)
    assert not isinstance(refused.value, MalformedRow), "such rows cannot be left out"
    assert f'pip install "lightning-protrain[{extra}]"' in str(refused.value)
    assert "\n" not in str(refused.value)


# In batches


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A processor of all kinds, with files of each."""
    folder = tmp_path_factory.mktemp("omni")
    VISION_FAMILIES["Qwen2.5-Omni"].make()[0].save_pretrained(folder)
    (folder / "whole.wav").write_bytes(sound(0.9))
    (folder / "whole.mp4").write_bytes(film((20, 24)))
    picture((20, 24)).save(folder / "whole.png")
    return folder


SUFFIX = {"audio": "wav", "video": "mp4", "image": "png"}


def _line(kind: str, value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"<{kind}>?"}, A], f"{kind}s": [value]}


def _data(folder: Path, rows: Sequence[Any], name: str = "rows", **options: Any) -> ChatDataModule:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = DatasetSpec(str(file), on_malformed=options.pop("on_malformed", "error"))
    return ChatDataModule(spec, tokenizer=str(folder), max_length=1000, batch_size=4, **options)


@pytest.mark.parametrize("policy", ["skip", "error"])
@pytest.mark.parametrize("kind", ["audio", "video"])
def test_hostile_files_are_counted_or_refused_at_set_up(kind: MediaKind, policy: Any, omni: Path) -> None:
    for name, (content, _) in HOSTILE[kind].items():
        (omni / name).write_bytes(content)
    values = [*HOSTILE[kind], "absent", f"../whole.{SUFFIX[kind]}", ".", 7, None, "https://x.org/a", {"path": None}]
    good = [_line(kind, f"whole.{SUFFIX[kind]}") for _ in range(8)]
    bad = [_line(kind, value) for value in values]
    if policy == "error":
        for line in bad:
            with pytest.raises(ValueError, match=f"line 9, {kind} 0"):
                _data(omni, [*good, line], on_malformed="error").setup("fit")
        return
    data = _data(omni, [*good, *bad], on_malformed="skip")
    with pytest.warns(UserWarning, match=f"Left out {len(bad)} of {8 + len(bad)} rows"):
        data.setup("fit")
    assert dict(data.reports[0].dropped) == {"malformed": len(bad)}
    trained = sum(int((batch["labels"] != -100).sum()) for batch in data.train_dataloader())
    assert trained == data.reports[0].num_trained > 0


def _broken(kind: MediaKind) -> bytes:
    """A file whose header and end are whole, and whose contents are not."""
    content = bytearray(_wav(1, 16_000, format="FLAC") if kind == "audio" else film((20, 24), frames=40))
    if kind == "audio":
        content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    else:
        start = content.index(b"mdat") + 400
        content[start : start + 1200] = b"\xff" * 1200
    return bytes(content)


@pytest.mark.parametrize("policy", ["drop", "error"])
def test_broken_contents_behind_a_header_are_found_in_the_batch(policy: Any, omni: Path) -> None:
    (omni / "broken.flac").write_bytes(_broken("audio"))
    data = _data(omni, [_line("audio", "whole.wav")] * 4 + [_line("audio", "broken.flac")] * 4, on_untrainable=policy)
    data.setup("fit")
    assert data.reports[0].num_dropped == 0
    if policy == "error":
        with pytest.raises(ValueError, match=r"line \d, audio 0 .*broken\.flac.*does not open"):
            list(data.train_dataloader())
        return
    with pytest.warns(UserWarning, match=r"audio 0 .*broken\.flac.*does not open.*Nothing of it is trained"):
        batches = list(data.train_dataloader())
    assert 0 < sum(int((batch["labels"] != -100).sum()) for batch in batches) < data.reports[0].num_trained


@pytest.mark.parametrize("policy", ["drop", "error"])
def test_audio_that_the_processor_would_cut_is_counted_or_refused(policy: Any, omni: Path) -> None:
    (omni / "longer.wav").write_bytes(sound(2.5))
    data = _data(omni, [_line("audio", "whole.wav")] * 4 + [_line("audio", "longer.wav")], on_untrainable=policy)
    message = "audio 0 takes 2.5 s, and Qwen2_5OmniProcessor reads only the first 2 s"
    if policy == "error":
        with pytest.raises(ValueError, match=message):
            data.setup("fit")
        return
    with pytest.warns(UserWarning, match=message):
        data.setup("fit")
    assert [dict(report.dropped) for report in data.reports if report.num_dropped] == [{module.PROCESSOR: 1}]


def test_a_report_and_a_page_count_all_kinds(omni: Path) -> None:
    lines = [_line(kind, f"whole.{suffix}") for kind, suffix in SUFFIX.items()] * 4
    data = _data(omni, [*lines, {"messages": [{"role": "user", "content": "?"}, A]}], val_fraction=0.01)
    data.setup("fit")
    report = data.reports[0]
    numbers = (report.num_images, report.num_audio, report.num_videos)
    assert sum(numbers) == sum(len(one.media) for one in data.examples["train"][0])
    assert all(numbers)
    said = f"{numbers[0]} images, {numbers[1]} audio files, {numbers[2]} videos"
    assert f"conversations, {said}, " in report.describe()
    shown = data.show(report.num_kept)
    text = page(shown, data.reports)
    assert said.replace(", ", "<br>") in text
    assert text.count("<img ") == numbers[0] + numbers[2], "images, and the first pictures of videos"
    kinds = {kind for one in data.rows_with_media() for kind in one.media}
    assert kinds == {"image", "audio", "video"}


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_what_the_processor_does_not_read_is_refused_by_name_at_set_up(kind: str, omni: Path, tmp_path: Path) -> None:
    processors.save("llava", tmp_path)
    lines: list[Any] = [{"messages": [{"role": "user", "content": "?"}, A]}] * 8
    data = _data(tmp_path, [*lines, _line(kind, str(omni / f"whole.{SUFFIX[kind]}"))])
    with pytest.raises(ValueError, match=f"The data has {kind}s?, which LlavaProcessor cannot read"):
        data.setup("fit")


def test_media_through_mistral_common_are_refused_by_name() -> None:
    tokenizer = mistral_common()
    processor = hf.PixtralProcessor(hf.PixtralImageProcessor(), tokenizer, patch_size=16)
    with pytest.raises(ValueError, match="has images, which PixtralProcessor cannot read through mistral-common"):
        part_for(processor, "image")


def _encoder(name: str, folder: Path) -> MediaEncoder:
    processor = VISION_FAMILIES[name].make()[0]
    processor.save_pretrained(folder)
    return ChatEncoders(processor.tokenizer, str(folder)).media_encoder(ChatSettings(max_length=1000))


def test_images_and_videos_that_take_each_others_name_are_refused(tmp_path: Path) -> None:
    rows = [row(("image",)), row(("video", "image"))]
    with pytest.warns(UserWarning, match="has an image and a video, of which SmolVLMProcessor keeps one"):
        kept, report = media_rows(rows, _encoder("SmolVLM2", tmp_path), "chats")
    assert (len(kept), report.num_dropped) == (1, 1)


@pytest.mark.parametrize(("name", "step"), [("Qwen2.5-Omni", 640), ("Qwen2-Audio", 160)])
def test_the_processor_hears_each_number_of_tokens_or_frames_once(
    name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = _encoder(name, tmp_path)
    lengths = np.random.default_rng(0).integers(1000, 31_000, 400).tolist()
    rows = [{**row(("audio",)), "media": [Media("audio", Samples(bytes(4 * length), RATE))]} for length in lengths]
    calls: list[int] = []
    process = MediaEncoder.process

    def counted(self: Any, *given: Any) -> Any:
        calls.append(1)
        return process(self, *given)

    monkeypatch.setattr(MediaEncoder, "process", counted)
    kept, _ = media_rows(rows, encoder, "chats")  # type: ignore[arg-type]
    asked = len(calls)
    assert [len(one) for one in kept] == kept.lengths.tolist()
    assert 40 < asked <= 3 + 31_000 // step, "three rows are proven"
