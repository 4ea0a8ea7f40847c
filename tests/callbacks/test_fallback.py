"""The newest checkpoint that every rank can read; whole runs are in test_checkpoint_world.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_protrain.callbacks.checkpoint import resume
from lightning_protrain.callbacks.checkpoint.rendezvous import Rendezvous
from lightning_protrain.callbacks.checkpoint.resume import ACCUMULATING, newest_listed, newest_of_all
from lightning_protrain.checkpoint.atomic import Files
from lightning_protrain.checkpoint.manifest import MANIFEST
from lightning_protrain.checkpoint.save import save_folder
from lightning_protrain.checkpoint.serialize import RANK_STATES, WEIGHTS
from lightning_protrain.checkpoint.verification import Fault
from tests.checkpoint.contents import content, flip
from tests.support.ranks import run_ranks, values


def _save(root: Path, *steps: int, **record: Any) -> None:
    root.mkdir(exist_ok=True)
    parent = None
    for step in steps:
        saved = {**content(step), RANK_STATES: [{"random": rank} for rank in range(2)]}
        parent = save_folder(saved, root / f"step={step}", "run", step, Files(), parent, record=record)


def _chosen(rank: int, root: Path) -> tuple[str | None, list[str]]:
    exchange = Rendezvous.open("x")
    newest = newest_of_all(exchange, rank, root, "run")
    exchange.close()
    return newest.chosen and newest.chosen.path.name, [f"{path.name} {what}" for path, what in newest.skipped]


def test_it_is_the_newest_where_all_is_good(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1, 2, 3)
    assert values(run_ranks(_chosen, 2, tmp_path, tmp_path / "a")) == [("step=3", [])] * 2
    assert newest_listed(tmp_path / "a", "run") == tmp_path / "a" / "step=3"


@pytest.mark.parametrize(("file", "rank"), [(WEIGHTS, 0), ("rank00000.pt", 0), ("rank00001.pt", 1), (MANIFEST, None)])
def test_what_one_rank_finds_wrong_is_skipped_by_all(tmp_path: Path, file: str, rank: int | None) -> None:
    _save(tmp_path / "a", 1, 2, 3)
    flip(tmp_path / "a" / "step=3" / file, 200)
    for name, skipped in values(run_ranks(_chosen, 2, tmp_path, tmp_path / "a")):
        assert name == "step=2"
        assert len(skipped) == 1
        assert file in skipped[0]
        assert rank is None or f"(on rank {rank})" in skipped[0]


def test_what_only_one_rank_cannot_read_is_skipped_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "a", 1, 2)
    verify_rank = resume.verify_rank

    def act(rank: int) -> Any:
        def fails(folder: Path, number: int) -> list[Fault]:
            bad = rank == 1 and folder.name == "step=2"
            return [Fault(WEIGHTS, "Input/output error")] if bad else verify_rank(folder, number)

        monkeypatch.setattr(resume, "verify_rank", fails)
        return _chosen(rank, tmp_path / "a")

    expected = ("step=1", [f"step=2 {WEIGHTS}: Input/output error (on rank 1)"])
    assert values(run_ranks(act, 2, tmp_path)) == [expected] * 2


def test_with_none_good_all_ranks_are_told(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    flip(tmp_path / "a" / "step=1" / "rank00001.pt", 20)
    zero, one = run_ranks(_chosen, 2, tmp_path, tmp_path / "a")
    assert "has no good checkpoint of run 'run'" in (zero.error or "")
    assert "failed on rank 0 (ValueError: " in (one.error or "")
    assert "has no good checkpoint of run 'run'" in (one.error or "")


def test_one_between_two_steps_is_not_gone_on_from(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    _save(tmp_path / "b", 2, **{ACCUMULATING: True})
    (tmp_path / "b" / "step=2").rename(tmp_path / "a" / "step=2")
    assert newest_listed(tmp_path / "b", "run") is None
    assert newest_listed(tmp_path / "nothing", "run") is None


def test_a_broken_manifest_is_listed_so_that_it_is_told(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    flip(tmp_path / "a" / "step=1" / MANIFEST, 20)
    assert newest_listed(tmp_path / "a", "run") == tmp_path / "a" / "step=1"
