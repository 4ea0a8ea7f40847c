"""Only what a callback has saved itself and nobody wants is removed; names are free ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_protrain.callbacks.checkpoint.resume import ACCUMULATING, free_path, prune, usable
from lightning_protrain.checkpoint.discover import Ranking, find_checkpoints
from tests.checkpoint.contents import flip, save


def _chain(root: Path, scores: list[float]) -> None:
    ranking, parent = Ranking("loss", "min", 0.0), None
    for step, score in enumerate(scores):
        parent = save(root, step, parent=parent, record={"callback": "me", **ranking.record(score)})


@pytest.mark.parametrize(
    ("top", "protected", "left"),
    [(1, [], [3, 1]), (2, [], [3, 2, 1]), (-1, [], [3, 2, 1, 0]), (1, [0], [3, 1, 0])],
)
def test_the_best_the_newest_and_the_protected_stay(
    tmp_path: Path, top: int, protected: list[int], left: list[int]
) -> None:
    _chain(tmp_path, [4.0, 1.0, 2.0, 3.0])
    save(tmp_path, 9, run="other")
    found = {each.manifest.step: each for each in find_checkpoints(tmp_path, "run").found}
    removed: list[Path] = []
    names = [found[step].manifest.identity for step in protected]
    kept = prune(tmp_path, found[3].manifest, "me", Ranking("loss", "min", 0.0), top, names, removed.append)
    assert [each.manifest.step for each in kept] == left
    assert sorted(removed) == sorted(found[step].path for step in {0, 1, 2, 3} - set(left))


def test_what_cannot_be_removed_warns_stays_in_the_line_and_is_tried_again(tmp_path: Path) -> None:
    _chain(tmp_path, [1.0, 2.0, 3.0, 4.0])
    head, tried = find_checkpoints(tmp_path, "run").found[0].manifest, []

    def refuse(path: Path) -> None:
        tried.append(path.name)
        raise PermissionError(f"no {path.name}")

    for _ in range(2):
        with pytest.warns(UserWarning, match="step=1 could not be removed: no step=1"):
            kept = prune(tmp_path, head, "me", Ranking("loss", "min", 0.0), 1, [], refuse)
        assert [each.manifest.step for each in kept] == [3, 2, 1, 0]
    assert tried == ["step=2", "step=1"] * 2


def test_what_another_callback_has_saved_stays(tmp_path: Path) -> None:
    _chain(tmp_path, [1.0, 2.0, 3.0, 4.0])
    head = find_checkpoints(tmp_path, "run").found[0].manifest
    removed: list[Path] = []
    kept = prune(tmp_path, head, "you", Ranking("loss", "min", 0.0), 1, [], removed.append)
    assert (len(kept), removed) == (4, [])


def test_a_name_that_is_taken_gets_a_version(tmp_path: Path) -> None:
    path = tmp_path / "step=1.5.ckpt"
    assert free_path(path, "-", 1) == path
    path.touch()
    assert free_path(path, "-", 1).name == "step=1.5-v1.ckpt"
    (tmp_path / "step=1.5-v1.ckpt").symlink_to("nowhere")
    assert free_path(path, "-", 1).name == "step=1.5-v2.ckpt"


def test_what_is_torn_or_between_two_steps_is_not_gone_on_from(tmp_path: Path) -> None:
    save(tmp_path, 1, record={ACCUMULATING: True})
    save(tmp_path, 2)
    two, one = find_checkpoints(tmp_path, "run").found
    assert "between two steps" in str(usable(one)[0])
    assert usable(two) == []
    flip(two.path / "weights.safetensors", 900)
    assert "weights.safetensors" in str(usable(two)[0])
