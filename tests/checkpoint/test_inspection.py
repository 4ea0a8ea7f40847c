"""What there is is said, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_protrain.checkpoint.inspection import inspect
from lightning_protrain.checkpoint.manifest import reserved_name
from lightning_protrain.checkpoint.serialize import WEIGHTS
from tests.checkpoint.contents import flip, save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    first = save(tmp_path, 1, record={"monitor": "loss", "mode": "min", "score": 0.25})
    save(tmp_path, 2, parent=first)
    save(tmp_path, 3, parent=first)
    save(tmp_path, 9, run="other")
    return tmp_path


def test_a_folder_of_checkpoints(root: Path) -> None:
    text, good = inspect(root)
    lines = {line.partition(":")[0]: line for line in text.splitlines()}
    assert good
    assert set(lines) == {"step=1", "step=2", "step=3", "step=9", "To remove what is abandoned or was interrupted"}
    assert lines["step=1"].startswith("step=1: run run, step 1, loss 0.25, 0.000 GB in 3 files")
    assert lines["step=2"].endswith("abandoned: the run was resumed from an earlier checkpoint")
    assert "abandoned" not in lines["step=1"] + lines["step=3"] + lines["step=9"]


def test_a_run_that_began_anew_in_an_old_folder_has_not_gone_back(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 2)
    assert "step=5: run run, step 5, 0.000 GB in 3 files, abandoned: a later run in this folder began anew" in (
        inspect(tmp_path)[0].splitlines()
    )


def test_what_interrupted_removals_have_left_is_listed(root: Path) -> None:
    left = reserved_name("step=0", "run", "removed")
    (root / left).mkdir()
    (root / left / WEIGHTS).write_bytes(bytes(2_000_000))
    lines = inspect(root)[0].splitlines()
    assert f"{left}: being written, or left by an interrupted save or removal, 0.002 GB" in lines
    assert lines[-1].endswith(f"lightning-protrain prune {root}")


def test_one_checkpoint(root: Path) -> None:
    text, good = inspect(root / "step=1", check=True)
    assert good
    assert f"  {WEIGHTS}: " in text
    assert "  score: 0.25" in text
    assert text.endswith("every byte is right")


def test_what_is_wrong_is_found_if_it_is_looked_for(root: Path) -> None:
    flip(root / "step=3" / WEIGHTS, 100)
    assert inspect(root)[1]
    text, good = inspect(root, check=True)
    assert not good
    assert f"step=3: {WEIGHTS}: its content was changed" in text
    assert "step=2: every byte is right" in text
    text, good = inspect(root / "step=3", check=True)
    assert not good
    assert "every byte" not in text


def test_what_has_no_manifest_is_said(root: Path) -> None:
    (root / "step=3" / "manifest.json").unlink()
    text, good = inspect(root)
    assert not good
    assert "step=3: manifest.json: it is missing" in text
    assert inspect(root / "step=3") == (f"{root / 'step=3'}: manifest.json: it is missing", False)


def test_where_there_is_none_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no checkpoint, and holds none"):
        inspect(tmp_path)
