"""Images from every kind of source."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, features

from lightning_protrain.data.conversation import MalformedRow
from lightning_protrain.data.sources.images import check_image, image_size, open_image
from lightning_protrain.data.sources.media import media_source

COLOUR = (200, 100, 50)


def _image(mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Image.Image:
    return Image.new("RGB", size, COLOUR).convert(mode)


def _bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


PNG = _bytes(_image())


def test_a_relative_path_begins_in_the_folder(tmp_path: Path) -> None:
    assert media_source("image", "a/b.png", tmp_path, "x") == str(tmp_path / "a/b.png")
    assert media_source("image", Path("b.png"), tmp_path, "x") == str(tmp_path / "b.png")
    assert media_source("image", "/a/b.png", tmp_path, "x") == "/a/b.png"
    assert media_source("image", "file:///a/b.png", tmp_path, "x") == "/a/b.png"


@pytest.mark.parametrize(
    "value",
    [
        PNG,
        bytearray(PNG),
        memoryview(PNG),
        {"bytes": PNG, "path": None},
        {"bytes": PNG, "path": "elsewhere.png"},
        "data:image/png;base64," + base64.b64encode(PNG).decode(),
        {"url": "data:image/png;base64," + base64.b64encode(PNG).decode()},
    ],
)
def test_bytes_wherever_they_are(value: Any, tmp_path: Path) -> None:
    assert media_source("image", value, tmp_path, "x") == PNG


def test_a_pil_image_stays(tmp_path: Path) -> None:
    image = _image()
    assert media_source("image", image, tmp_path, "x") is image


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "row 3, image 0 is null"),
        ({}, "row 3, image 0 is null"),
        ({"file_name": "a.png"}, "row 3, image 0 is an object with 'file_name'. Give it a `path` or `bytes`"),
        ({"bytes": None, "path": None}, "row 3, image 0 is null"),
        ("", "row 3, image 0 is a str"),
        (7, "row 3, image 0 is a int"),
        ([PNG], "row 3, image 0 is a list"),
        (bytearray(), "row 3, image 0 has 0 bytes"),
        (b"", "row 3, image 0 has 0 bytes"),
        *[(f"{scheme}://x.org/a.png", "is the address .* Download it") for scheme in ("http", "https", "s3", "gs")],
        ("data:image/png,abc", "data URL without base64"),
        ("data:image/png;base64", "data URL without base64"),
        ("data:image/png;base64,@@", "broken base64"),
    ],
)
def test_what_holds_no_image_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedRow, match=message):
        media_source("image", value, tmp_path, "row 3, image 0")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "F", "I", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.new(mode, (6, 4)) if mode in ("LAB", "I;16") else _image(mode)
    opened = open_image(image, "x")
    assert (opened.mode, opened.size) == ("RGB", (6, 4))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "GIF", "JPEG"])
@pytest.mark.parametrize("where", ["path", "bytes"])
def test_every_kind_of_file_opens(kind: str, where: str, tmp_path: Path) -> None:
    source: Any = _bytes(_image(), kind)
    if where == "path":
        (tmp_path / "image").write_bytes(source)
        source = str(tmp_path / "image")
    check_image(source, "x")
    assert np.abs(np.asarray(open_image(source, "x"), dtype=int) - COLOUR).max() < 12


def test_what_is_transparent_is_white() -> None:
    half = Image.new("RGBA", (1, 1), (255, 0, 0, 0))
    assert open_image(half, "x").getpixel((0, 0)) == (255, 255, 255)
    assert open_image(Image.new("RGBA", (1, 1), (255, 0, 0, 255)), "x").getpixel((0, 0)) == (255, 0, 0)
    palette = Image.new("P", (1, 1))
    palette.info["transparency"] = 0
    assert open_image(palette, "x").getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_not_cut() -> None:
    values = np.array([[0, 128 * 256, 255 * 256]], dtype=np.uint16)
    deep = Image.open(io.BytesIO(_bytes(Image.fromarray(values))))
    assert np.asarray(open_image(deep, "x"))[0, :, 0].tolist() == [0, 128, 255]
    assert open_image(Image.new("I", (1, 1), 200), "x").getpixel((0, 0)) == (200, 200, 200)


def test_the_orientation_of_a_camera_is_undone() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert open_image(_bytes(_image(size=(6, 4)), "JPEG", exif=exif), "x").size == (4, 6)


def test_an_animation_gives_its_first_picture() -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    opened = open_image(_bytes(frames[0], "GIF", save_all=True, append_images=frames[1:]), "x")
    assert opened.getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("content", [b"x", b"\x89PNG\r\n\x1a\n", PNG[:20], b"<svg></svg>", b"GIF89a", b"\xff\xd8\xff"])
@pytest.mark.parametrize("function", [check_image, open_image])
def test_what_is_no_image_is_named(content: bytes, function: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(MalformedRow, match=r"row 3, image 1 \('.*a\.png'\) does not open"):
        function(str(path), "row 3, image 1")
    with pytest.raises(MalformedRow, match=rf"row 3, image 1 \({len(content)} bytes?\) does not open"):
        function(content, "row 3, image 1")


@pytest.mark.parametrize("function", [check_image, open_image])
@pytest.mark.parametrize("name", ["absent.png", ".", "a\0b"])
def test_what_is_no_file_is_named(name: str, function: Any, tmp_path: Path) -> None:
    with pytest.raises(MalformedRow, match=r"row 3, image 1 .* does not open"):
        function(str(tmp_path / name), "row 3, image 1")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "BMP"])
def test_an_image_that_ends_early_is_named_at_the_latest_when_it_is_read(kind: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    content = _bytes(noise, kind)
    with pytest.raises(MalformedRow, match=r"x .* does not open"):
        open_image(content[: len(content) // 2], "x")


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_header_tells_the_size_that_the_image_will_have(turn: int, kind: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turn
    content = _bytes(_image(size=(6, 4)), kind, exif=exif)
    assert image_size(content, "x") == open_image(content, "x").size == ((6, 4) if turn < 5 else (4, 6))


def test_a_size_needs_no_pixels(tmp_path: Path) -> None:
    noise = Image.effect_noise((60, 40), 50)
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"):
        content = _bytes(noise.convert("L" if kind == "GIF" else "RGB"), kind)
        # A TIFF may have its header at the end.
        assert image_size(content if kind in ("TIFF", "WEBP") else content[:900], kind) == (60, 40)
    assert image_size(noise, "x") == (60, 40)
    with pytest.raises(MalformedRow, match=r"row 3, image 1 .* does not open"):
        image_size(b"no image", "row 3, image 1")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_file_that_is_cut_off_is_found_before_training(kind: str, share: float, tmp_path: Path) -> None:
    noise = Image.effect_noise((60, 40), 50).convert("L" if kind == "GIF" else "RGB")
    content = _bytes(noise, kind)
    cut = content[: int(share * len(content))].rstrip(b";")
    (tmp_path / "cut").write_bytes(cut)
    for source in (cut, str(tmp_path / "cut")):
        with pytest.raises(MalformedRow, match=r"row 3, image 1 .* does not open: .*\. Correct the path or store"):
            check_image(source, "row 3, image 1")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_what_follows_a_whole_image_does_not_matter(kind: str) -> None:
    content = _bytes(_image(), kind)
    check_image(content, "x")
    check_image(content + bytes(1000), "x")


def test_a_message_names_no_address_in_memory() -> None:
    with pytest.raises(MalformedRow) as refused:
        check_image(b"hallo", "row 3, image 1")
    assert str(refused.value).startswith("row 3, image 1 (5 bytes) does not open: it is not an image that Pillow")


# Hostile images


@pytest.mark.parametrize("path", ["../b.png", "a/../../b.png", "./../b.png", "..", "file://../b.png"])
def test_a_relative_path_that_leaves_the_folder_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedRow, match=r"x is .* outside of the folder .*set `images_dir`"):
        media_source("image", path, tmp_path, "x")
    for within in ("a/../b.png", "..b.png", "a..b/c.png"):
        assert media_source("image", within, tmp_path, "x") == str(tmp_path / within)


def _bomb(side: int) -> bytes:
    """A PNG of a few kilobytes with side x side pixels of one bit."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * ((side // 8 + 1) * side), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [9500, 20_000], ids=["more than Pillow's limit", "more than twice"])
@pytest.mark.parametrize("function", [check_image, image_size, open_image])
def test_a_decompression_bomb_is_refused(function: Any, side: int, tmp_path: Path) -> None:
    bomb = _bomb(side)
    assert len(bomb) < 100_000
    (tmp_path / "bomb.png").write_bytes(bomb)
    for source in (bomb, str(tmp_path / "bomb.png")):
        with pytest.raises(MalformedRow, match=rf"x .* does not open: .*{side**2} pixels.*decompression bomb"):
            function(source, "x")
    assert image_size(_bomb(100), "x") == (100, 100)


@pytest.mark.parametrize("function", [check_image, image_size])
@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
def test_an_image_without_pixels_is_refused(function: Any, size: tuple[int, int]) -> None:
    with pytest.raises(MalformedRow, match=f"x .* does not open: It has {size[0]} x {size[1]} pixels"):
        function(Image.new("RGB", size), "x")


@pytest.mark.parametrize("function", [check_image, image_size, open_image])
def test_a_named_pipe_is_refused_and_not_waited_for(function: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(MalformedRow, match="does not open: It is a folder, a pipe or a device"):
        function(str(tmp_path / "pipe.png"), "x")


_KINDS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "TGA", "ICO", "JPEG2000", "PCX", "SGI", "DDS")
_KINDS += ("AVIF",) if "avif" in features.modules else ()  # since 11.3
_NOISE = Image.effect_noise((32, 24), 50).convert("RGB")
_FILES = {kind: _bytes(_NOISE, kind) for kind in _KINDS}
_CMYK = {kind: _bytes(_NOISE.convert("CMYK"), kind) for kind in ("JPEG", "TIFF")}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning", "ignore::UserWarning")
@settings(max_examples=400)
@given(
    file=st.sampled_from([*_FILES.values(), *_CMYK.values()]),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=8),
    share=st.floats(0.02, 1),
)
def test_a_damaged_file_is_an_image_or_named_and_nothing_else(
    file: bytes, changes: list[tuple[int, int]], share: float
) -> None:
    damaged = bytearray(file)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    source = bytes(damaged[: max(int(share * len(damaged)), 1)])
    for function in (check_image, image_size):
        with contextlib.suppress(MalformedRow):
            function(source, "x")
    with contextlib.suppress(MalformedRow):
        width, height = image_size(source, "x")
        if width * height < 1_000_000:  # more would take long to draw, and is no other case
            assert open_image(source, "x").size == (width, height)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_broken_file_in_cmyk_is_named_at_the_latest_when_it_is_read(kind: str, share: float) -> None:
    assert open_image(_CMYK[kind], "x").mode == "RGB"
    with pytest.raises(MalformedRow, match="does not open"):
        open_image(_CMYK[kind][: int(share * len(_CMYK[kind]))], "x")
