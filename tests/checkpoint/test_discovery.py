"""The newest good checkpoint is found by what it holds, and what is wrong with another is said."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lightning_protrain.checkpoint.atomic import Files, set_aside
from lightning_protrain.checkpoint.discover import find_checkpoints, newest_good, resolve
from lightning_protrain.checkpoint.inspection import inspect
from lightning_protrain.checkpoint.manifest import MANIFEST, Manifest, reserved_name
from lightning_protrain.checkpoint.serialize import TENSORS, WEIGHTS
from lightning_protrain.checkpoint.verification import read_manifest
from tests.checkpoint.contents import RUN, flip, save


def _chain(root: Path, *steps: int, run: str = RUN) -> list[Manifest]:
    return [save(root, step, run=run, name=f"{run}-step={step}") for step in steps]


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
    assert f"(step 2) is the newest undamaged checkpoint of run 'run'. Skipped:\n  run-step=3: {file}" in message


def test_with_none_good_no_run_begins_anew(tmp_path: Path) -> None:
    _chain(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"run-step={step}" / WEIGHTS, 100)
    with pytest.raises(ValueError, match=r"(?s)All checkpoints of run 'run' in .* damaged.*step=2: weights.*step=1: w"):
        newest_good(tmp_path, RUN)


def test_runs_do_not_mix(tmp_path: Path) -> None:
    _chain(tmp_path, 1, 2)
    _chain(tmp_path, 7, run="other")
    assert _chosen(tmp_path, "run")[0] == "run-step=2"
    assert _chosen(tmp_path, "other")[0] == "other-step=7"
    assert newest_good(tmp_path, "third").chosen is None
    with pytest.raises(ValueError, match=r"has checkpoints of the runs other, run\. Name one run"):
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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path, 1, record={"monitor": "loss", "mode": "min", "score": 0.25})
    save(tmp_path, 2)
    save(tmp_path, 3)
    save(tmp_path, 9, run="other")
    return tmp_path


def test_a_folder_of_checkpoints(root: Path) -> None:
    text, good = inspect(root)
    lines = {line.partition(":")[0]: line for line in text.splitlines()}
    assert good
    assert set(lines) == {"step=1", "step=2", "step=3", "step=9"}
    assert lines["step=1"].startswith("step=1: run run, step 1, loss 0.25, 0.000 GB in 3 files")


def test_what_is_set_aside_or_left_by_interrupted_removals_is_listed(root: Path) -> None:
    left = reserved_name("step=0", "run", "removed")
    (root / left).mkdir()
    (root / left / WEIGHTS).write_bytes(bytes(2_000_000))
    set_aside(root, RUN, [read_manifest(root / "step=3").identity], Files())
    lines = inspect(root)[0].splitlines()
    what = "being written, or left by an interrupted save or removal, 0.002 GB; the next save of its run removes it"
    assert f"{left}: {what}" in lines
    assert "step=3.aside: set aside, 0.000 GB; remove it if you do not need it" in lines
    assert not any(line.startswith("step=3:") for line in lines)


def test_one_checkpoint(root: Path) -> None:
    text, good = inspect(root / "step=1", check=True)
    assert good
    assert f"  {WEIGHTS}: " in text
    assert "  score: 0.25" in text
    assert text.endswith("all bytes verified")


def test_what_is_wrong_is_found_if_it_is_looked_for(root: Path) -> None:
    flip(root / "step=3" / WEIGHTS, 100)
    assert inspect(root)[1]
    text, good = inspect(root, check=True)
    assert not good
    assert f"step=3: {WEIGHTS}: its content was changed" in text
    assert "step=2: all bytes verified" in text
    text, good = inspect(root / "step=3", check=True)
    assert not good
    assert "every byte" not in text


def test_what_has_no_manifest_is_said(root: Path) -> None:
    (root / "step=3" / "manifest.json").unlink()
    text, good = inspect(root)
    assert not good
    assert "step=3: manifest.json: it is missing" in text
    assert inspect(root / "step=3") == (f"{root / 'step=3'}: manifest.json: it is missing", False)


def test_a_folder_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a checkpoint, and contains none"):
        inspect(tmp_path)
