"""The newest good checkpoint is found by what it holds, wherever it is and whatever it is called."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lightning_protrain.checkpoint.discover import find_checkpoints, newest_good, resolve
from lightning_protrain.checkpoint.manifest import MANIFEST, Manifest, reserved_name
from lightning_protrain.checkpoint.serialize import TENSORS, WEIGHTS
from tests.checkpoint.contents import RUN, flip, save


def _chain(root: Path, *steps: int, run: str = RUN) -> list[Manifest]:
    made: list[Manifest] = []
    for step in steps:
        name = f"{run}-step={step}"
        made.append(save(root, step, run=run, name=name, parent=made[-1] if made else None))
    return made


def _chosen(root: Path, run: str | None = RUN) -> tuple[str, list[str]]:
    newest = newest_good(root, run)
    assert newest.chosen is not None
    return newest.chosen.path.name, [path.name for path, _ in newest.skipped]


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "none").chosen is None
    (tmp_path / "lightning_logs").mkdir()
    (tmp_path / "a.ckpt").touch()
    assert newest_good(tmp_path) == newest_good(tmp_path / "none")


def test_neither_names_nor_times_count(tmp_path: Path) -> None:
    _chain(tmp_path, 3, 10, 20)
    (tmp_path / "run-step=20").rename(tmp_path / "a")
    (tmp_path / "run-step=3").rename(tmp_path / "z")
    for number, name in enumerate(("a", "run-step=10", "z")):
        os.utime(tmp_path / name, (number, number))
    assert _chosen(tmp_path) == ("a", [])


def test_a_tree_that_was_copied_elsewhere_is_as_good(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    _chain(tmp_path / "a", 1, 2)
    (tmp_path / "a" / "last").symlink_to("run-step=2")
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # Links become copies.
    assert len(find_checkpoints(tmp_path / "b").found) == 2
    assert newest_good(tmp_path / "b").chosen is not None


@pytest.mark.parametrize("file", [MANIFEST, "state.pt", TENSORS, WEIGHTS])
@pytest.mark.parametrize("how", ["flip", "missing", "empty"])
def test_one_that_is_not_good_is_skipped_and_named(tmp_path: Path, file: str, how: str) -> None:
    _chain(tmp_path, 1, 2, 3)
    path = tmp_path / "run-step=3" / file
    if how == "flip":
        flip(path, 4 * path.stat().st_size)
    elif how == "missing":
        path.unlink()
    else:
        path.write_bytes(b"")
    assert _chosen(tmp_path) == ("run-step=2", ["run-step=3"])
    message = newest_good(tmp_path, RUN).message()
    assert "run-step=2 (step 2) is the newest good checkpoint of run 'run'. Skipped:\n  run-step=3: " + file in message


def test_with_none_good_no_run_begins_anew(tmp_path: Path) -> None:
    _chain(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"run-step={step}" / WEIGHTS, 100)
    with pytest.raises(ValueError, match=r"(?s)has no good checkpoint of run 'run'.*step=2: weights.*step=1: weights"):
        newest_good(tmp_path, RUN)


def test_runs_do_not_mix(tmp_path: Path) -> None:
    _chain(tmp_path, 1, 2)
    _chain(tmp_path, 7, run="other")
    assert _chosen(tmp_path, "run")[0] == "run-step=2"
    assert _chosen(tmp_path, "other")[0] == "other-step=7"
    assert newest_good(tmp_path, "third").chosen is None
    with pytest.raises(ValueError, match="has checkpoints of the runs other, run: say which one"):
        newest_good(tmp_path)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "evil").mkdir()
    (tmp_path / "root").mkdir()
    _chain(tmp_path / "evil", 9)
    _chain(tmp_path / "root", 1)
    (tmp_path / "root" / "latest").symlink_to(tmp_path / "evil" / "run-step=9")
    assert _chosen(tmp_path / "root")[0] == "run-step=1"


def test_between_its_two_renames_a_save_leaves_the_former_one_to_be_found(tmp_path: Path) -> None:
    made = _chain(tmp_path, 1)
    old, other = reserved_name("run-step=1", RUN, "old"), reserved_name("run-step=1", "other", "old")
    (tmp_path / "run-step=1").rename(tmp_path / old)
    (tmp_path / reserved_name("run-step=1", RUN, "staged")).mkdir()
    assert resolve(tmp_path / "run-step=1") == tmp_path / old
    assert find_checkpoints(tmp_path, RUN).found[0].manifest == made[0]
    (tmp_path / old).rename(tmp_path / other)
    assert find_checkpoints(tmp_path, RUN).found == ()


@pytest.mark.parametrize("state", ["staged", "removed"])
def test_what_was_never_published_or_is_being_removed_is_not_found(tmp_path: Path, state: str) -> None:
    _chain(tmp_path, 1)
    (tmp_path / "run-step=1").rename(tmp_path / reserved_name("run-step=1", RUN, state))  # type: ignore[arg-type]
    assert find_checkpoints(tmp_path).found == ()
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        resolve(tmp_path / "run-step=1")


def test_a_long_list_of_faults_is_cut(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:080}").mkdir()
        (tmp_path / f"{number:080}" / "state.pt").touch()
    with pytest.raises(ValueError) as caught:
        newest_good(tmp_path)
    assert len(str(caught.value)) < 2500
