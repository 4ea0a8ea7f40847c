"""What is removed is gone, what another run has is not, and what an interrupted save has left is put right."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from lightning_protrain.checkpoint.atomic import Files, RunLock, erase, prune, retire, sweep
from lightning_protrain.checkpoint.manifest import reserved_name
from tests.checkpoint.contents import RUN, load, save
from tests.checkpoint.disks import Journal, Stuck

FILES = Files()


def test_a_checkpoint_loses_its_name_then_its_manifest_then_the_rest(tmp_path: Path) -> None:
    save(tmp_path, 1)
    journal = Journal(tmp_path)
    retire(tmp_path / "step=1", RUN, journal)
    kinds = [(each.kind, each.path.rpartition("/")[2]) for each in journal.operations]
    assert [kind for kind, _ in kinds[:2]] == ["rename", "sync_directory"]
    assert kinds[2] == ("remove", "manifest.json")
    assert kinds[3][0] == "sync_directory"
    assert os.listdir(tmp_path) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    save(tmp_path, 1)
    (tmp_path / "step=1" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "step=1" / "folder").mkdir()
    (tmp_path / "step=1" / "folder" / "file").symlink_to(tmp_path / "kept" / "file")
    (tmp_path / "link").symlink_to("kept")
    erase(tmp_path / "link", FILES)
    erase(tmp_path / "step=1", FILES)
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(tmp_path / "kept") == ["file"]


@pytest.mark.parametrize("published", [True, False])
def test_a_save_that_was_interrupted_between_its_renames_is_put_right(tmp_path: Path, published: bool) -> None:
    save(tmp_path, 1, name="last")
    old = reserved_name("last", RUN, "old")
    (tmp_path / "last").rename(tmp_path / old)
    if published:
        save(tmp_path, 2, name="last")
    assert sweep(tmp_path, RUN, FILES) == [old]
    assert os.listdir(tmp_path) == ["last"]
    assert load(tmp_path / "last")["global_step"] == 1 + published
    assert sweep(tmp_path, RUN, FILES) == []


def test_debris_of_this_run_goes_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    mine = [reserved_name("a", RUN, "staged"), reserved_name("b", RUN, "removed")]
    others = [reserved_name("a", "other", "staged"), "step=1", "notes", ".hidden", ".x~12.staged"]
    for name in {*mine, *others} - {"step=1"}:
        shutil.copytree(tmp_path / "step=1", tmp_path / name, dirs_exist_ok=True)
    (tmp_path / reserved_name("c", RUN, "staged")).write_bytes(b"half a file")
    assert len(sweep(tmp_path, RUN, FILES)) == 3
    assert sorted(os.listdir(tmp_path)) == sorted(others)


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EACCES, errno.EIO])
def test_debris_that_cannot_be_removed_warns_and_is_tried_again(tmp_path: Path, error: int) -> None:
    stuck, other = reserved_name("a", RUN, "removed"), reserved_name("b", RUN, "staged")
    for name in (stuck, other):
        (tmp_path / name).touch()
    with pytest.warns(UserWarning, match=f"{stuck} could not be removed: .*The next save tries again"):
        assert sweep(tmp_path, RUN, Stuck(stuck, error)) == [other]
    assert sweep(tmp_path, RUN, FILES) == [stuck]


def _abandoned(root: Path) -> str:
    """A run that went back from step 2 to step 1, and debris, whose name is returned."""
    first = save(root, 1)
    save(root, 2, parent=first)
    save(root, 3, parent=first)
    save(root, 9, run="other")
    left = reserved_name("step=0", RUN, "removed")
    shutil.copytree(root / "step=1", root / left)
    return left


def test_what_no_run_continues_from_is_pruned_with_debris(tmp_path: Path) -> None:
    left = _abandoned(tmp_path)
    everything = set(os.listdir(tmp_path))
    lines, good = prune(tmp_path, FILES, dry_run=True)
    assert good
    assert [line.partition(":")[0] for line in lines] == ["step=2", left]
    assert set(os.listdir(tmp_path)) == everything
    assert [line.replace("would be", "").split() for line in lines] == [
        line.split() for line in prune(tmp_path, FILES)[0]
    ]
    assert set(os.listdir(tmp_path)) == {"step=1", "step=3", "step=9"}
    assert prune(tmp_path, FILES) == ([], True)


def test_what_cannot_be_pruned_is_named(tmp_path: Path) -> None:
    left = _abandoned(tmp_path)
    lines, good = prune(tmp_path, Stuck("step=2"))
    assert not good
    assert lines[0].startswith("step=2: could not be removed: [Errno 16]")
    assert not (tmp_path / left).exists()


def test_a_run_that_is_being_written_is_not_pruned(tmp_path: Path) -> None:
    _abandoned(tmp_path)
    with RunLock(tmp_path, RUN, FILES), pytest.raises(ValueError, match="is being written by process"):
        prune(tmp_path, FILES)
    assert (tmp_path / "step=2").exists()


def test_where_nothing_is_saved_nothing_is_pruned(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint of ProTrainCheckpoint"):
        prune(tmp_path, FILES)
