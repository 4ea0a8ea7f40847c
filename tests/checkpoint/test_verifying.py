"""Verification names each torn, changed, swapped, missing or additional file; it follows no links and runs no code."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_protrain.checkpoint import verification
from lightning_protrain.checkpoint.manifest import DIGESTS, MANIFEST, Digest, FileEntry, Manifest, _sign
from lightning_protrain.checkpoint.serialize import TENSORS, WEIGHTS
from lightning_protrain.checkpoint.verification import open_regular, read_manifest, verify
from tests.checkpoint.contents import content, flip, load, same, save

FILES = (MANIFEST, "state.pt", TENSORS, WEIGHTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path, 1)
    return tmp_path / "step=1"


@pytest.fixture(params=DIGESTS)
def digested(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """One checkpoint for each algorithm."""
    save(tmp_path, 1, digest=request.param)
    return tmp_path / "step=1"


def _faulty(folder: Path, name: str) -> bool:
    """Return whether this file, and no other one, is found to be wrong."""
    return [fault.file for fault in verify(folder)] == [name]


def test_a_good_one_has_no_faults(digested: Path, request: pytest.FixtureRequest) -> None:
    assert verify(digested) == []
    assert sorted(os.listdir(digested)) == sorted(FILES)
    (algorithm,) = {entry.algorithm for entry in read_manifest(digested).files.values()}
    assert f"[{algorithm}]" in request.node.name


def test_the_default_is_the_fast_one_and_what_was_saved_with_another_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert {entry.algorithm for entry in read_manifest(tmp_path / "step=1").files.values()} == {"xxh3_128"}
    for digest in DIGESTS:
        save(tmp_path, 1, name=digest, digest=digest)
        assert same(load(tmp_path / digest), content(1))


def test_files_of_one_checkpoint_may_have_different_digests(folder: Path) -> None:
    for name, algorithm in zip(sorted(set(FILES) - {MANIFEST}), DIGESTS, strict=True):
        _vouch(folder, name, algorithm)
    assert {entry.algorithm for entry in read_manifest(folder).files.values()} == set(DIGESTS)
    assert verify(folder) == []
    flip(folder / WEIGHTS, 1)
    assert _faulty(folder, WEIGHTS)


@pytest.mark.sample(16)
@pytest.mark.parametrize("algorithm", DIGESTS)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 17, 100])
def test_what_is_read_in_pieces_is_compared_to_the_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, size: int
) -> None:
    monkeypatch.setattr(verification, "PIECE", 8)
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    digest = Digest(algorithm)
    digest.update(data)
    entry = FileEntry(size, str(digest))
    assert verification._compare(tmp_path / "file", entry) is None
    for bit in range(8 * size):
        flip(tmp_path / "file", bit)
        assert "its content was changed" in str(verification._compare(tmp_path / "file", entry))
        flip(tmp_path / "file", bit)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(digested: Path, name: str) -> None:
    folder = digested
    bits = 8 * (folder / name).stat().st_size
    missed = []
    for bit in {0, bits - 1, *random.Random(name).sample(range(bits), 64)}:
        flip(folder / name, bit)
        missed += [] if _faulty(folder, name) else [bit]
        flip(folder / name, bit)
    assert missed == []
    assert verify(folder) == []


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_found(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    sizes = {0, 1, len(data) // 2, len(data) - 1, *random.Random(name).sample(range(len(data)), 64)}
    found = []
    for size in sizes:
        (folder / name).write_bytes(data[:size])
        found.append(_faulty(folder, name))
    assert all(found)
    assert len(found) >= 64


def test_without_verification_the_same_flip_goes_unseen(folder: Path) -> None:
    # The control: these are the libraries' own loaders.
    before = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    flip(folder / WEIGHTS, 8 * (folder / WEIGHTS).stat().st_size - 1)
    after = load_file(folder / WEIGHTS)
    assert any(not torch.equal(before[name], after[name]) for name in before)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), " according to the manifest"),
    "missing": (lambda path: path.unlink(), "it is missing"),
    "a link": (lambda path: (path.rename(path.parent.parent / "x"), path.symlink_to("../x")), "it is a link"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), ""),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file"),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), ""),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FILES)
def test_every_other_change_is_found(folder: Path, name: str, change: str) -> None:
    make, what = CHANGES[change]
    make(folder / name)
    assert _faulty(folder, name)
    assert what in verify(folder)[0].what or name == MANIFEST
    with pytest.raises(ValueError, match=f"is a damaged checkpoint: {name}: "):
        load(folder)


@pytest.mark.parametrize("name", FILES)
def test_the_files_of_another_step_are_found(folder: Path, name: str) -> None:
    save(folder.parent, 2)
    shutil.copy(folder.parent / "step=2" / name, folder / name)
    named = {fault.file for fault in verify(folder)}
    # A manifest of another step fits itself, and none of the files.
    assert named == ({name} if name != MANIFEST else set(FILES) - {MANIFEST})


def test_two_files_that_were_swapped_are_found(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "x")
    (folder / TENSORS).rename(folder / WEIGHTS)
    (folder / "x").rename(folder / TENSORS)
    assert [fault.file for fault in verify(folder)] == [TENSORS, WEIGHTS]


def test_a_surplus_file_is_found(folder: Path) -> None:
    (folder / "rank_00001.pt").write_bytes(b"")
    assert [str(fault) for fault in verify(folder)] == ["rank_00001.pt: the manifest does not list it"]


def test_a_part_is_verified_without_the_rest(folder: Path) -> None:
    (folder / TENSORS).unlink()
    assert verify(folder, only=[WEIGHTS]) == []
    assert [fault.file for fault in verify(folder, only=[TENSORS, "none"])] == [TENSORS, "none"]


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert [fault.file for fault in verify(tmp_path / "none")] == [MANIFEST]


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_the_place_of_a_file_does_not_run(folder: Path, tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    (folder / name).write_bytes(pickle.dumps(_Canary(canary)))
    with pytest.raises(ValueError, match="is a damaged checkpoint"):
        load(folder)
    assert not canary.exists()


@pytest.mark.parametrize(
    "write", [lambda what, path: torch.save(what, path), lambda w, p: p.write_bytes(pickle.dumps(w))]
)
def test_a_pickle_does_not_run_if_the_manifest_vouches_for_it(folder: Path, tmp_path: Path, write: Any) -> None:
    canary = tmp_path / "canary"
    write(_Canary(canary), folder / "state.pt")
    _vouch(folder, "state.pt")
    assert verify(folder) == []
    with pytest.raises(ValueError, match="weights_only"):
        load(folder)
    assert not canary.exists()


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8 + b"{}", (1 << 40).to_bytes(8, "little"), b"\x02" + bytes(7) + b"[]"]
)
def test_no_file_of_tensors_is_refused_if_the_manifest_vouches_for_it(folder: Path, data: bytes) -> None:
    (folder / WEIGHTS).write_bytes(data)
    _vouch(folder, WEIGHTS)
    with pytest.raises(ValueError, match="is not a valid safetensors file"):
        load(folder)


@pytest.mark.parametrize("digest", ["md5:00", "xxh3_64:0000000000000000", "XXH3_128:" + 32 * "0"])
def test_an_algorithm_that_there_is_not_is_named(folder: Path, digest: str) -> None:
    _list(folder, WEIGHTS, digest)
    (fault,) = verify(folder)
    assert fault.file == MANIFEST
    assert f"digest='{digest}' is none of xxh3_128, crc32, sha256" in fault.what


def _vouch(folder: Path, name: str, algorithm: str = "crc32") -> None:
    digest = Digest(algorithm)
    digest.update((folder / name).read_bytes())
    _list(folder, name, str(digest))


def _list(folder: Path, name: str, digest: str) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["digest"]
    manifest["files"][name] = [(folder / name).stat().st_size, digest]
    (folder / MANIFEST).write_text(_sign(manifest))


def test_the_manifest_must_be_small_enough(folder: Path) -> None:
    with (folder / MANIFEST).open("r+b") as file:
        file.truncate(1 << 40)  # It takes no room on the disk.
    with pytest.raises(ValueError, match=r"it has 1024\.00 GiB \(1099511627776 bytes\), but a manifest has at most"):
        read_manifest(folder)


def test_what_was_read_is_what_was_written(folder: Path) -> None:
    assert isinstance(read_manifest(folder), Manifest)
    with open_regular(folder / MANIFEST) as file:
        assert file.read() == (folder / MANIFEST).read_bytes()
    assert same(load(folder), load(folder))
