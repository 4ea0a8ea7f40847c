"""A draft becomes a checkpoint as a whole, or nothing of it is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_protrain.checkpoint import atomic as drafting
from lightning_protrain.checkpoint.atomic import Files, open_draft, refuse_foreign
from lightning_protrain.checkpoint.manifest import DIGESTS, MANIFEST, Digest, FileEntry
from tests.checkpoint.contents import RUN, content, load, same, save
from tests.checkpoint.disks import Journal


@pytest.mark.parametrize("algorithm", DIGESTS)
@pytest.mark.parametrize("sizes", [[], [0], [1], [3, 5], [7, 8, 9], [100], [8, 8], [3, 40, 3]])
def test_what_is_written_in_pieces_is_digested_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, sizes: list[int]
) -> None:
    monkeypatch.setattr(drafting, "PIECE", 8)
    pieces = [os.urandom(size) for size in sizes]
    with open_draft(tmp_path / "x", RUN, Files(), algorithm) as draft:
        with draft.create("file") as file:
            assert [file.write(piece) for piece in pieces] == sizes
        data = b"".join(pieces)
        assert (draft.folder / "file").read_bytes() == data
        digest = Digest(algorithm)
        digest.update(data)
        assert draft.entries == {"file": FileEntry(len(data), str(digest))}


def test_an_algorithm_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="digest='md5': give one of"), open_draft(tmp_path / "x", RUN, Files(), "md5"):
        pass
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_of_a_draft_that_fails(tmp_path: Path) -> None:
    def interrupted() -> None:
        with open_draft(tmp_path / "x", RUN, Files()) as draft, draft.create("a") as file:
            file.write(b"1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_everything_is_staged_in_the_folder_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "there is no such folder"))
    (tmp_path / "root").mkdir()
    journal = Journal(tmp_path)
    save(tmp_path / "root", 1, journal)
    made = [each.path for each in journal.operations if each.kind in ("make_directory", "create")]
    assert all(path.startswith("root/.step=1~") for path in made)
    assert os.listdir(tmp_path) == ["root"]


@pytest.mark.parametrize("name", ["..", ".run.lock", "x" * 300])
def test_a_bad_name_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(ValueError, match="checkpoint"), open_draft(tmp_path / "root" / name, RUN, Files()):
        pass
    assert os.listdir(tmp_path / "root") == []


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step=1").mkdir()
    (tmp_path / "step=1" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is a folder and no checkpoint"):
        save(tmp_path, 1)
    assert os.listdir(tmp_path) == ["step=1"]
    assert os.listdir(tmp_path / "step=1") == ["thesis.tex"]


@pytest.mark.parametrize("kind", ["file", "link", "dangling", "empty", "torn"])
def test_what_may_be_replaced_is(tmp_path: Path, kind: str) -> None:
    target, elsewhere = tmp_path / "step=1", tmp_path / "elsewhere"
    if kind == "file":
        target.write_bytes(b"old")
    elif kind == "link":
        elsewhere.mkdir()
        (elsewhere / "kept").touch()
        target.symlink_to("elsewhere")
    elif kind == "dangling":
        target.symlink_to("nowhere")
    elif kind == "empty":
        target.mkdir()
    else:
        save(tmp_path, 2, name="step=1")
        (target / MANIFEST).unlink()
    refuse_foreign(target)
    save(tmp_path, 1)
    assert same(load(target), content(1))
    assert sorted(os.listdir(tmp_path)) == (["elsewhere", "step=1"] if kind == "link" else ["step=1"])
    assert kind != "link" or os.listdir(elsewhere) == ["kept"]
