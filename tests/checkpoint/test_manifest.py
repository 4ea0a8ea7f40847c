"""A manifest is read as it was written, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.checkpoint.manifest import FileEntry, Manifest, _sign, is_remains

GOOD = Manifest("run", 7, 3, "0123456789abcdef", {"a.pt": FileEntry(5, "crc32:00000000")}, 2, {"x": 1.5})

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(lambda name: name != "manifest.json")
counts = st.integers(0, (1 << 63) - 1)
entries = st.builds(
    FileEntry, counts, st.from_regex(r"xxh3_128:[0-9a-f]{32}|crc32:[0-9a-f]{8}|sha256:[0-9a-f]{64}", fullmatch=True)
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
manifests = st.builds(
    Manifest,
    names,
    counts,
    counts,
    st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
    st.dictionaries(names, entries, max_size=4),
    st.integers(1, 1000),
    st.dictionaries(st.text(), values, max_size=3),
)


@given(manifests)
def test_the_text_says_it_all(manifest: Manifest) -> None:
    assert Manifest.from_text(manifest.to_text().encode()) == manifest


@given(manifests, st.data())
def test_any_other_byte_makes_it_invalid(manifest: Manifest, data: st.DataObject) -> None:
    text = bytearray(manifest.to_text().encode())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError):
        Manifest.from_text(bytes(text))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(ValueError, match="it is "):
        Manifest.from_text(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"1",
        b"NaN",
        b'"x"',
        b"{}",
        b'{"kind": "other"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 10_000,
        b"\xff\xfe",
        GOOD.to_text().encode() * 2,
        GOOD.to_text().replace('"step": 7', '"step": 8').encode(),
        GOOD.to_text().replace('"step": 7', '"step": 7, "step": 7').encode(),
        GOOD.to_text().encode().strip(),
    ],
    ids=range(16),
)
def test_what_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Manifest.from_text(data)


def _signed(**changes: Any) -> bytes:
    """A text with a digest that fits: what somebody would write who means harm."""
    content = {**json.loads(GOOD.to_text()), **changes}
    del content["digest"]
    return _sign({name: value for name, value in content.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    "name", ["../a", "/etc/passwd", "a/b", "..", ".a", "", "a\0", "a\nb", "manifest.json", "x" * 300, "a\\b"]
)
def test_no_file_can_be_listed_that_is_not_in_the_folder(name: str) -> None:
    with pytest.raises(ValueError, match="its fields are not those of a manifest"):
        Manifest.from_text(_signed(files={name: [1, "crc32:00000000"]}))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": 1.0},
        {"step": True},
        {"step": "1"},
        {"step": 1 << 63},
        {"step": ...},
        {"extra": 1},
        {"sequence": None},
        {"world_size": 0},
        {"run": "../x"},
        {"run": 5},
        {"identity": "x"},
        {"identity": None},
        {"record": []},
        {"files": []},
        {"files": {"a": 5}},
        {"files": {"a": [1 << 70, "crc32:00000000"]}},
        {"files": {"a": [-1, "crc32:00000000"]}},
        {"files": {"a": [1, "md5:00"]}},
        {"files": {"a": [1, None]}},
        {"files": {"a": [1, "crc32:0000000G"]}},
        {"files": {"a": [1, "xxh3_128:" + 31 * "0"]}},
        {"files": {"a": [1, "xxh3_128:" + 31 * "0" + "A"]}},
        {"files": {"a": [1, "xxh3_64:" + 16 * "0"]}},
        {"files": {"a": [1, "sha256:" + 32 * "0"]}},
        {"files": {"a": [1, 32 * "0"]}},
        {"format": 3},
        {"format": ...},
    ],
    ids=str,
)
def test_no_content_but_that_of_a_manifest_is_believed_with_a_digest_that_fits(changes: dict[str, Any]) -> None:
    assert Manifest.from_text(_signed()) == GOOD
    with pytest.raises(ValueError, match=r"its fields are not those|another format"):
        Manifest.from_text(_signed(**changes))


@pytest.mark.parametrize("digest", ["md5:00", "xxh3_64:0000000000000000", "xxh3_128:00"])
def test_a_digest_that_there_is_not_is_named(digest: str) -> None:
    with pytest.raises(ValueError, match=f"digest='{digest}' is none of xxh3_128, crc32, sha256"):
        Manifest.from_text(_signed(files={"a": [1, digest]}))


@pytest.mark.parametrize("record", [{"x": float("nan")}, {"x": {1: 2}}, {"x": (1,)}, {"x": object()}, {"x": {1, 2}}])
def test_a_record_that_json_would_change_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="record"):
        replace(GOOD, record=record)


def test_a_world_of_no_rank_is_refused_by_its_size() -> None:
    with pytest.raises(ValueError, match="world_size is 0, and must be at least 1"):
        replace(GOOD, world_size=0)


def test_the_first_format_is_read_without_its_branches() -> None:
    assert Manifest.from_text(_signed(format=1, branch=1, lineage=[[0, 4]])) == GOOD
    with pytest.raises(ValueError, match="its fields are not those"):
        Manifest.from_text(_signed(branch=1))


def test_the_remains_of_a_checkpoint_are_told_from_other_folders(tmp_path: Path) -> None:
    assert not is_remains(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert not is_remains(tmp_path)
    (tmp_path / "state.pt").symlink_to("nowhere")
    assert is_remains(tmp_path)
