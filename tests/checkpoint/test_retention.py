"""The best checkpoint is chosen by finite scores and kept; removed ones are gone, those of other runs stay."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_protrain.checkpoint.atomic import Files, erase, retire, sweep
from lightning_protrain.checkpoint.discover import FoundCheckpoint, Ranking, checkpoint_at
from lightning_protrain.checkpoint.manifest import Manifest, reserved_name
from tests.checkpoint.contents import RUN, flip, load, save
from tests.checkpoint.disks import Journal, Stuck

Mode = Literal["min", "max"]


def _line(*scores: Any, monitor: str = "loss", mode: str = "min") -> list[FoundCheckpoint]:
    """Newest first; the first score is that of the oldest."""
    found = []
    for number, score in enumerate(scores):
        record = {} if score is None else {"monitor": monitor, "mode": mode, "score": score}
        manifest = Manifest("run", number, number, f"{number:016x}", {}, record=record)
        found.append(FoundCheckpoint(Path(str(number)), manifest))
    return found[::-1]


def _names(line: list[FoundCheckpoint]) -> list[int]:
    return sorted(each.manifest.step for each in line)


@pytest.mark.parametrize("score", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_not_finite_is_never_better(score: float | None, mode: Mode) -> None:
    ranking = Ranking("loss", mode)
    assert not ranking.is_better(score, None)
    assert not ranking.is_better(score, 1.0)
    assert ranking.is_better(1e300, None)
    assert ranking.record(score) == {}


@pytest.mark.parametrize(
    ("mode", "min_delta", "score", "best", "better"),
    [
        ("min", 0.0, 1.0, 1.0, False),
        ("min", 0.0, 0.999, 1.0, True),
        ("min", 0.5, 0.5, 1.0, False),
        ("min", 0.5, 0.49, 1.0, True),
        ("max", 0.0, 1.0, 1.0, False),
        ("max", 0.0, 1.001, 1.0, True),
        ("max", 0.5, 1.5, 1.0, False),
        ("max", 0.5, 1.51, 1.0, True),
    ],
)
def test_what_is_better(mode: Mode, min_delta: float, score: float, best: float, better: bool) -> None:
    assert Ranking("loss", mode, min_delta).is_better(score, best) is better


def test_the_best_of_a_line() -> None:
    line = _line(3.0, 1.0, None, 1.0, 2.0)
    best = Ranking("loss").best(line)
    assert best is not None
    assert best.manifest.step == 1  # Of two equal ones the earlier.
    assert Ranking("loss", "max").best(line) is None  # Another mode, another score.
    assert Ranking("accuracy").best(line) is None
    assert Ranking(None).best(line) is None
    assert Ranking("loss").best([]) is None


@pytest.mark.parametrize("score", ["1", True, [], None])
def test_a_score_that_is_no_number_is_none(score: Any) -> None:
    line = _line(5.0, 7.0)
    odd = _line(*[5.0, 7.0, score if score is not None else 0.0])[0]
    if score is None:
        odd = _line(1.0, monitor="other")[0]
    best = Ranking("loss").best([odd, *line])
    assert best is not None
    assert Ranking("loss").score_of(best.manifest) == 5.0


@pytest.mark.parametrize(
    ("scores", "keep", "gone"),
    [
        ((3, 2, 1), 1, [0, 1]),
        ((1, 2, 3), 1, [1]),  # The best and the newest.
        ((1, 2, 3), 2, []),
        ((4, 1, 3, 2, 5), 2, [0, 2]),
        ((1, 1, 1), 1, [1]),
        ((None, None, 1, None), 1, [0, 1]),
        ((1, 2, 3), -1, []),
        ((2, 1, 3), 0, [0]),
        ((), 1, []),
    ],
)
def test_what_may_go(scores: tuple, keep: int, gone: list[int]) -> None:
    assert _names(Ranking("loss").surplus(_line(*scores), keep)) == gone


@pytest.mark.parametrize(
    ("scores", "protected", "gone"),
    [
        ((0, -1, -2), 1, []),  # The last one is better than the first one by more than 1, and not than the second one.
        ((0, -1, -2), 0, [1]),
        ((0, -1, -2), 2, [0, 1]),
        ((0, -1, -2, -2.5, -3.5), 3, [0, 1]),
        ((None, 0, -1, None, -2, 7), 2, [0, 3]),
    ],
)
def test_what_the_best_is_measured_by_stays(scores: tuple, protected: int, gone: list[int]) -> None:
    line = _line(*scores)
    assert _names(Ranking("loss", min_delta=1.0).surplus(line, 0, [f"{protected:016x}"])) == gone


def test_without_a_metric_the_newest_stay() -> None:
    assert _names(Ranking(None).surplus(_line(1, 2, 3), 1)) == [0, 1]
    assert _names(Ranking(None).surplus(_line(1, 2, 3), 1, protected=[f"{1:016x}"])) == [0]


@example([0.0, -1.0, -2.0], 0, "min", 1.0, 1)
@given(
    st.lists(st.none() | st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]) | st.floats(-5, 5), max_size=8),
    st.integers(-1, 4),
    st.sampled_from(["min", "max"]),
    st.floats(0, 2),
    st.integers(0, 7),
)
def test_the_best_the_newest_and_the_protected_never_go(
    scores: list, keep: int, mode: Mode, min_delta: float, protected: int
) -> None:
    ranking, line = Ranking("loss", mode, min_delta), _line(*scores, mode=mode)
    gone = ranking.surplus(line, keep, [f"{protected:016x}"])
    best = ranking.best(line)
    assert best not in gone
    assert not line or line[0] not in gone
    assert protected not in _names(gone)
    # The same best is found among those that are left.
    assert ranking.best([each for each in line if each not in gone]) == best


@pytest.mark.parametrize(
    "options",
    [{"mode": "up"}, {"min_delta": "abc"}, {"min_delta": -1.0}, {"min_delta": math.nan}, {"min_delta": math.inf}],
)
def test_what_there_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give"):
        Ranking("loss", **options)


def _run_of(root: Path, scores: Sequence[float | None]) -> None:
    for step, score in enumerate(scores):
        save(root, step, record=Ranking("loss", "max").record(score))


def test_of_the_folder_of_a_run_the_last_or_the_best_is_taken(tmp_path: Path) -> None:
    _run_of(tmp_path, [1.0, 3.0, 2.0, None])
    assert checkpoint_at(tmp_path, "last") == tmp_path / "step=3"
    assert checkpoint_at(tmp_path, "best") == tmp_path / "step=1"
    assert checkpoint_at(tmp_path / "step=2", "best") == tmp_path / "step=2"
    assert checkpoint_at(tmp_path / "gone.ckpt", "best") == tmp_path / "gone.ckpt"


def test_the_last_is_the_newest_good_one(tmp_path: Path) -> None:
    _run_of(tmp_path, [1.0, 2.0])
    flip(tmp_path / "step=1" / "weights.safetensors", 300)
    with pytest.warns(UserWarning, match=r"step=0 \(step 0\) is the newest undamaged checkpoint"):
        assert checkpoint_at(tmp_path, "last") == tmp_path / "step=0"


@pytest.mark.parametrize(
    ("which", "scores", "message"),
    [("last", [], "contains none"), ("best", [], "contains none"), ("best", [None], "has a score: none was saved")],
)
def test_a_run_without_such_a_checkpoint_is_an_error(
    tmp_path: Path, which: Any, scores: Sequence[float | None], message: str
) -> None:
    _run_of(tmp_path, scores)
    with pytest.raises(ValueError, match=message):
        checkpoint_at(tmp_path, which)


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
    journal = Journal(tmp_path)
    assert sweep(tmp_path, RUN, journal) == [old]
    # What replaced it must be on the disk before it loses its name.
    assert [each.kind for each in journal.operations[:2]] == ["sync_directory", "rename"] or not published
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
    with pytest.warns(UserWarning, match=f"Could not remove .*{stuck}, .*The next save will try again"):
        assert sweep(tmp_path, RUN, Stuck(stuck, error)) == [other]
    assert sweep(tmp_path, RUN, FILES) == [stuck]
