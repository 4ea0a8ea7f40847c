"""Rows with images: what is counted without pixels is what batches hold."""

from __future__ import annotations

import base64
import functools
import io
import json
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from transformers import AutoProcessor, LlavaNextImageProcessorPil, LlavaNextProcessor, LlavaProcessor

from lightning_protrain.data.batches import media_rows as module
from lightning_protrain.data.batches.encode import TEMPLATE, Encoded
from lightning_protrain.data.batches.media_rows import MediaEncoder, MediaMeasure, MediaRows, media_rows
from lightning_protrain.data.batches.preview import page
from lightning_protrain.data.batches.tokenizer import unpack_files
from lightning_protrain.data.chat.pipeline import ChatEncoders, ChatSettings
from lightning_protrain.data.conversation import Conversation, Media
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.data.sources import images
from lightning_protrain.data.sources.spec import DatasetSpec
from tests.data import llava
from tests.data.chat_runs import set_today

OPTIONS: dict[str, Any] = {
    "patch_size": 8,
    "vision_feature_select_strategy": "full",
    "num_additional_image_tokens": 0,
    "chat_template": llava.TEMPLATE,
}
SIZES = [(20, 24), (64, 16), (8, 40), (33, 33), (64, 16)]


class Numbered(LlavaProcessor):
    """Writes one more token for every image that came before it."""

    def replace_image_token(self, image_inputs: Any, image_idx: int, **options: Any) -> str:
        return self.image_token * (llava.PATCHES + image_idx)


def _next() -> LlavaNextProcessor:
    """Cuts images into pieces, as many as their shape needs."""
    made = llava.processor()
    square = {"height": 16, "width": 16}
    pieces = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size=square, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32], [16, 48]]
    )
    return LlavaNextProcessor(pieces, made.tokenizer, **OPTIONS)


def _numbered() -> LlavaProcessor:
    made = llava.processor()
    return Numbered(made.image_processor, made.tokenizer, **OPTIONS)


@functools.cache
def _chats(make: Any) -> tuple[Any, ChatEncoders]:
    """A processor and what is proven of its chat format, once."""
    processor = make()
    return processor, ChatEncoders(processor.tokenizer, None)


def _encoder(make: Any, **options: Any) -> MediaEncoder:
    processor, chats = _chats(make)
    return MediaEncoder(chats.encoder(ChatSettings(**{"max_length": 400, **options}), processor), processor)


def _row(sizes: Sequence[tuple[int, int]], answer: str = "Red.", question: str = "?", **more: Any) -> Conversation:
    content = [{"type": "image"} for _ in sizes] + [{"type": "text", "text": question}]
    messages = [{"role": "user", "content": content if sizes else question}]
    messages.append({"role": "assistant", "content": answer, **more})
    row: Any = {"messages": messages}
    return row | {"media": [Media("image", Image.new("RGB", size, "red")) for size in sizes]} if sizes else row


ROWS = [
    *(_row(SIZES[:count], "A." * count) for count in range(5)),
    _row(SIZES[1:2], "It is <image>.", "What does <|im_end|> do?"),
    *(_row([size], "Yes.") for size in SIZES * 2),
]


@pytest.mark.parametrize("make", [llava.processor, _next, _numbered])
def test_tokens_without_pixels_are_those_with_them(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = _encoder(make)
    expected = [encoder.encode(row, "row") for row in ROWS]
    monkeypatch.setattr(images, "open_image", None)
    calls = []
    monkeypatch.setattr(MediaEncoder, "process", _counting(MediaEncoder.process, calls))
    measure = MediaMeasure(encoder)
    for row, whole in zip(ROWS, expected, strict=True):
        found = measure.encode(row, "row")
        assert isinstance(found, Encoded)
        assert isinstance(whole, Encoded)
        assert found.input_ids.tolist() == whole.input_ids.tolist()
        assert found.trained.tolist() == whole.trained.tolist()
        assert (found.media, found.media_stop, found.extras) == (whole.media, whole.media_stop, {})
    assert measure.expands == (make is not _numbered)
    if measure.expands:
        proofs = sum(min(count, 3) for count in (1, 11, 1, 1, 1, 1))
        assert len(calls) == proofs + len(set(SIZES)), "each size is asked once, rows are proven three times"
    else:
        assert len(calls) >= len(ROWS)


def _counting(function: Any, calls: list[Any]) -> Any:
    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        return function(self, *arguments)

    return counted


def test_the_size_of_an_image_decides() -> None:
    encoder = _encoder(_next)
    rows, report = media_rows([_row([size]) for size in SIZES], encoder, "chats, train")
    assert rows.lengths.tolist() == [len(row) for row in rows]
    assert len(set(rows.num_media.tolist())) == 3
    assert report.num_tokens == rows.lengths.sum()
    assert report.num_trained == 5 * (len("Red.") + 1)
    assert report.lengths[3] == rows.lengths.max()


@pytest.mark.parametrize("policy", ["drop", "warn", "error"])
def test_what_cannot_be_trained_on_is_treated_as_the_user_wants(policy: Any) -> None:
    encoder = _encoder(llava.processor, max_length=60, on_untrainable=policy)
    long, cut = _row([], question="Long " * 20), _row(SIZES[:1] * 20)
    rows = [_row(SIZES[:1]), long, _row(SIZES[:2]), cut]
    if policy == "error":
        with pytest.raises(ValueError, match=r"chats, row 1: no trained token lies within max_length.*Correct the row"):
            media_rows(rows, encoder, "chats")
        return
    kept, report = media_rows(rows, encoder, "chats")
    untrained = {"no trained token lies within max_length": 1} if policy == "drop" else {}
    assert dict(report.dropped) == {**untrained, "an image lies beyond max_length": 1}
    assert len(kept) == report.num_kept == 4 - report.num_dropped
    assert [one.num_trained > 0 for one in kept] == ([True, True] if policy == "drop" else [True, False, True])


def test_nothing_to_train_is_refused() -> None:
    encoder = _encoder(llava.processor, max_length=20)
    with pytest.raises(ValueError, match="nothing is left to train on"):
        media_rows([_row(SIZES[:1], question="Long " * 20)], encoder, "chats")


def test_what_the_processor_refuses_is_counted_and_named_once() -> None:
    encoder = _encoder(llava.processor)
    one = _row(SIZES[:1])
    two: Any = {**one, "media": one["media"] * 2}
    with pytest.warns(UserWarning, match=r"row 0.*the processor refuses 2 images") as told:
        rows, report = media_rows([two, one, two], encoder, "chats")
    assert len(rows) == 1
    assert report.dropped == ((module.PROCESSOR, 2),)
    assert len(told) == 1


def _refusing() -> LlavaProcessor:
    processor = llava.processor()
    refusal = "{%- if 'bad' in messages | string %}{{- raise_exception('No bad words.') }}{%- endif %}"
    processor.chat_template = processor.tokenizer.chat_template = refusal + processor.chat_template
    return processor


def test_what_the_template_refuses_is_counted_or_named() -> None:
    given = [_row(SIZES[:1]), _row(SIZES[:1], question="bad")]
    rows, report = media_rows(given, _encoder(_refusing), "chats")
    assert (len(rows), report.dropped) == (1, ((TEMPLATE, 1),))
    with pytest.raises(ValueError, match=r"chats, row 1: .*No bad words"):
        media_rows(given, _encoder(_refusing, on_untrainable="error"), "chats")


@pytest.mark.parametrize("policy", ["drop", "error"])
def test_broken_pixels_behind_a_header_are_found_in_the_batch(
    policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # Each rank decodes the rows of its batches, and tells of them.
    broken = tmp_path / "broken.png"
    Image.effect_noise((20, 24), 50).convert("RGB").save(broken)
    broken.write_bytes(broken.read_bytes()[:200])
    bad: Any = {**_row([(20, 24)]), "media": [Media("image", str(broken))]}
    encoder = _encoder(llava.processor, on_untrainable=policy)
    rows, report = media_rows([_row([(20, 24)]), bad], encoder, "chats")
    assert report.num_kept == 2
    assert rows[0].num_trained == len("Red.") + 1
    if policy == "error":
        with pytest.raises(ValueError, match=r"chats, row 1.*does not open"):
            rows[1]
    else:
        with pytest.warns(UserWarning, match=r"chats, row 1.*does not open.*Nothing of it is trained"):
            assert rows[1].num_trained == 0


def test_rows_without_measures() -> None:
    rows = MediaRows([], _encoder(llava.processor), "chats", [])
    assert (len(rows), len(rows.lengths), rows.is_weighted) == (0, 0, False)


# In the data module


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A processor, and a file of 24 rows with one to three images and texts of many lengths."""
    folder = tmp_path_factory.mktemp("pictures")
    _next().save_pretrained(folder / "model")
    for index, size in enumerate(SIZES):
        Image.new("RGB", size, (50 * index, 0, 0)).save(folder / f"{index}.png")
    rows = []
    for index in range(24):
        count = index % 3 + 1
        row = {"messages": _plain(f"{'<image>' * count}{'What? ' * (index % 7)}", "Yes. " * (index % 5 + 1))}
        rows.append({**row, "images": [f"{(index + number) % len(SIZES)}.png" for number in range(count)]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "model"), str(folder / "rows.jsonl")


def _plain(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _data(pictures: tuple[str, str], **options: Any) -> ChatDataModule:
    model, rows = pictures
    given = {"dataset": rows, "max_length": 400, "batch_size": 4, "val_fraction": 0.1, **options}
    return ChatDataModule(tokenizer=model, **given)


@pytest.fixture(scope="module")
def data(pictures: tuple[str, str]) -> ChatDataModule:
    made = _data(pictures)
    made.setup("fit")
    return made


def test_batches_hold_what_was_counted(data: ChatDataModule) -> None:
    report = data.reports[0]
    batches = list(data.train_dataloader())
    assert report.num_kept == 22
    assert sum(int((batch["labels"] != -100).sum()) for batch in batches) == report.num_trained
    assert sum(int(batch["attention_mask"].sum()) for batch in batches) == report.num_tokens
    largest = data.largest_batch()
    assert largest["input_ids"].shape == (4, max(batch["input_ids"].shape[1] for batch in batches))
    assert largest["pixel_values"].numel() >= max(batch["pixel_values"].numel() for batch in batches)


def test_lengths_group_rows_with_images(data: ChatDataModule, monkeypatch: pytest.MonkeyPatch) -> None:
    padding = []
    for group_by_length in (False, True):
        monkeypatch.setattr(data, "group_by_length", group_by_length)
        batches = data.train_dataloader()
        padding.append(sum(int((batch["attention_mask"] == 0).sum()) for batch in batches))
    assert padding[1] < 0.6 * padding[0]


def test_weights_of_messages_with_images(pictures: tuple[str, str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"messages": _plain("<image>?", "Yes."), "images": [str(Path(pictures[1]).parent / "0.png")]}
    row["messages"][1]["weight"] = 0.25
    rows.write_text((json.dumps(row) + "\n") * 8)
    data = _data((pictures[0], str(rows)))
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert set((batch["loss_weights"][batch["labels"] != -100] / 2**32).tolist()) == {0.25}


def test_images_beside_packed_texts(pictures: tuple[str, str], tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"messages": _plain(f"{i}?", "Yes.")}) + "\n" for i in range(12)))
    data = _data(pictures, dataset=[pictures[1], DatasetSpec(str(texts))], packing=True, max_length=300)
    data.setup("fit")
    trained = sum(int((batch["labels"] != -100).sum()) for batch in data.train_dataloader())
    assert trained == sum(report.num_trained for report in data.reports if report.name.endswith("train"))
    assert len({report.family for report in data.reports}) == 1
    shown = data.show(1)
    assert len(shown) == 2
    assert any(piece.kind == "media" for piece in shown[0].pieces)
    assert np.array_equal(data.examples["train"][0].lengths, [len(one) for one in data.examples["train"][0]])


def test_settings_of_the_processor_are_in_the_checkpoint_and_in_what_is_exported(
    pictures: tuple[str, str], tmp_path: Path
) -> None:
    options = {"do_normalize": False, "size": {"shortest_edge": 24}}
    data = _data(pictures, processor_kwargs=options)
    data.setup("fit")
    state = data.state_dict()
    assert state["processor_kwargs"] == options
    assert "processor_kwargs" not in _data(pictures).state_dict()
    data.processor.save_pretrained(tmp_path / "out")
    saved = AutoProcessor.from_pretrained(tmp_path / "out").image_processor
    assert (saved.do_normalize, dict(saved.size)["shortest_edge"]) == (False, 24)
    again = _data(pictures, processor_kwargs=options)
    again.load_state_dict(state)
    again.setup("fit")
    for one, other in zip(data.train_dataloader(), again.train_dataloader(), strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])


DATED = "{{ '<|im_start|>system\\n' + strftime_now('%d %B') + '<|im_end|>\\n' }}" + llava.TEMPLATE


@pytest.mark.parametrize("given", [None, DATED])
def test_the_chat_format_of_a_checkpoint_is_that_of_the_processor(
    pictures: tuple[str, str], tmp_path: Path, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_today(monkeypatch, "2026-09-30")
    first = _data(pictures, chat_template=given)
    first.setup("fit")
    set_today(monkeypatch, "2026-10-01")
    second = _data(pictures, chat_template=given)
    second.setup("fit")
    second.load_state_dict(first.state_dict())
    texts = [data.tokenizer.decode(data.examples["train"][0][0].input_ids) for data in (first, second)]
    assert texts[0] == texts[1]
    assert ("30 September" in texts[0]) == (given is not None)
    for name, save in (("saved", first.processor.save_pretrained), ("kept", None)):
        save(tmp_path / name) if save else unpack_files(second.state_dict()["chat_format"]["files"], tmp_path / name)
        loaded = AutoProcessor.from_pretrained(tmp_path / name)
        assert loaded.chat_template == loaded.tokenizer.chat_template == (given or llava.TEMPLATE)
    assert first.tokenizer.convert_ids_to_tokens(first.end_ids) == ["<|im_end|>"]
    assert "What?" in first.tokenizer.decode(first.prompt_ids("What?"))


def test_a_setting_that_is_refused_is_refused_before_data_is_read(pictures: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="processor_kwargs needs a processor: give the `tokenizer`"):
        ChatDataModule(str(tmp_path / "missing.jsonl"), processor_kwargs={"do_resize": False})
    with pytest.raises(ValueError, match="names 'padding', which is no setting"):
        _data(pictures, processor_kwargs={"padding": True})
    data = _data(pictures, dataset=str(tmp_path / "missing.jsonl"), processor_kwargs={"do_resise": False})
    with pytest.raises(ValueError, match=r"LlavaNextProcessor does not take\. Did you mean 'do_resize'"):
        data.setup("fit")


def test_a_preview_counts_images_and_shows_them_small(data: ChatDataModule) -> None:
    report = data.reports[0]
    assert report.num_images == sum(len(one.media) for one in data.examples["train"][0]) > report.num_kept
    assert f"{report.num_kept} conversations, {report.num_images} images, " in report.describe()
    shown = data.show(4)
    text = page(shown, data.reports)
    urls = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="image \d+">', text)
    assert [len(one.thumbnails) for one in shown] == [len(one.media) for one in data.examples["train"][0][:4]]
    assert len(urls) == sum(len(one.thumbnails) for one in shown)
    sizes = {Image.open(io.BytesIO(base64.b64decode(url))).size for url in urls}
    assert sizes <= set(SIZES)
    assert not re.search(r"https?://", text)
    assert f"{report.num_images} images" in text


def test_a_thumbnail_is_small_and_a_broken_image_has_none(tmp_path: Path) -> None:
    sources = (Image.new("RGB", (4000, 1000)), str(tmp_path / "absent.png"))
    row: Any = {**_row([]), "media": [Media("image", source) for source in sources]}
    (url,) = MediaRows([row], _encoder(llava.processor), "chats", []).thumbnails(0)
    assert Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size == (160, 40)


# Hostile images, from the file of the rows to the last batch of an epoch


def _hostile(folder: Path) -> dict[str, Any]:
    """An image of each kind that must not reach a batch, by the reason."""
    noise = Image.effect_noise((20, 24), 50).convert("RGB")
    noise.save(folder / "whole.png")
    whole = (folder / "whole.png").read_bytes()
    (folder / "truncated.png").write_bytes(whole[: len(whole) // 2])
    noise.convert("CMYK").save(folder / "cmyk.jpg")
    (folder / "cmyk.jpg").write_bytes((folder / "cmyk.jpg").read_bytes()[:300])
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no image")
    # Sizes in the header: 60,000 x 60,000, and 0 x 24.
    for name, size in (("huge.png", (60_000, 60_000)), ("zero.png", (0, 24))):
        header = b"IHDR" + struct.pack(">II", *size) + whole[24:29]
        (folder / name).write_bytes(whole[:12] + header + struct.pack(">I", zlib.crc32(header)) + whole[33:])
    frames = [Image.new("RGB", (20, 24), color) for color in ("red", "green", "blue")]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:])
    (folder / "animated.gif").write_bytes((folder / "animated.gif").read_bytes()[:60])
    names = ("truncated.png", "cmyk.jpg", "empty.png", "text.png", "huge.png", "zero.png", "animated.gif")
    return {
        **{name: name for name in names},
        "missing": "absent.png",
        "outside": "../whole.png",
        "a folder": ".",
        "a number": 7,
        "null": None,
        "an address": "https://x.org/a.png",
        "broken base64": "data:image/png;base64,@@",
        "no bytes": {"bytes": None, "path": None},
    }


@pytest.mark.parametrize("policy", ["skip", "error"])
def test_hostile_images_are_counted_or_refused_at_set_up(
    policy: Any, pictures: tuple[str, str], tmp_path: Path
) -> None:
    hostile = _hostile(tmp_path)
    good = [{"messages": _plain("<image>?", "Yes."), "images": ["whole.png"]} for _ in range(8)]
    bad = [{**good[0], "images": [image]} for image in hostile.values()]
    file = tmp_path / "rows.jsonl"
    for rows in [[*good, *bad]] if policy == "skip" else [[*good, row] for row in bad]:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = _data(pictures, dataset=DatasetSpec(str(file), on_malformed=policy), on_untrainable="drop")
        if policy == "error":
            with pytest.raises(ValueError, match="line 9, image 0"):
                data.setup("fit")
            continue
        with pytest.warns(UserWarning, match=f"Left out {len(hostile)} of {8 + len(hostile)} rows"):
            data.setup("fit")
        assert dict(data.reports[0].dropped) == {"malformed": len(hostile)}
        trained = sum(int((batch["labels"] != -100).sum()) for batch in data.train_dataloader())
        assert trained == data.reports[0].num_trained > 0


class Fragile(LlavaProcessor):
    """Raises what processors raise for images that they cannot cut or scale."""

    error: type[Exception] = ValueError

    def __call__(self, images: Any = None, **options: Any) -> Any:
        if images is not None and images[0].size == (33, 33):
            raise self.error("this size")
        return super().__call__(images=images, **options)


@pytest.mark.parametrize("error", [ValueError, TypeError, IndexError, KeyError, ZeroDivisionError, RuntimeError])
@pytest.mark.parametrize("policy", ["drop", "error"])
def test_what_a_processor_raises_for_an_image_is_counted_or_refused(
    error: type[Exception], policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fragile, "error", error)
    made = llava.processor()
    chats = _chats(llava.processor)[1]
    processor = Fragile(made.image_processor, made.tokenizer, **OPTIONS)
    encoder = MediaEncoder(chats.encoder(ChatSettings(max_length=400, on_untrainable=policy), processor), processor)
    rows = [_row([(20, 24)]), _row([(33, 33)])]
    if policy == "error":
        with pytest.raises(ValueError, match=r"chats, row 1.*the processor refuses 1 image "):
            media_rows(rows, encoder, "chats")
        return
    with pytest.warns(UserWarning, match="the processor refuses 1 image "):
        kept, report = media_rows(rows, encoder, "chats")
    assert (len(kept), report.dropped) == (1, ((module.PROCESSOR, 1),))
