"""Two ranks save one checkpoint.

Each rank reads its part once, and both resume or fail together.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch

from lightning_protrain import rank_store
from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint import io
from lightning_protrain.checkpoint.consolidation import load_folder
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.manifest import MANIFEST, STATE, Manifest
from lightning_protrain.checkpoint.serialize import RANK_STATES, files_for, rank_file
from lightning_protrain.checkpoint.verification import verify
from tests.checkpoint.contents import content, save_content
from tests.support.counter_runs import LOSSES, Counter
from tests.support.ranks import Outcome, kill_this_rank, run_ranks, trainer_on_rank, values
from tests.support.recorded_runs import Recorded, Samples

# Checkpoints of `_save_at` are made by hand.
pytestmark = pytest.mark.filterwarnings("ignore:The last step of this run, [0-9]+, is not saved, because save_top_k=0")


def _fit(rank: int, root: Path, module: Any, data: Any = None, path: Any = None, **options: Any) -> tuple:
    trainer_options = {name: options.pop(name) for name in ("max_steps", "callbacks", "plugins") if name in options}
    saver = ProTrainCheckpoint(root, **options)
    callbacks = [*trainer_options.pop("callbacks", []), saver]
    given = {"max_epochs": 2, "val_check_interval": 2, "use_distributed_sampler": False, **trainer_options}
    trainer = trainer_on_rank(rank, 2, enable_checkpointing=True, callbacks=callbacks, **given)
    trainer.fit(module, datamodule=data, ckpt_path=path)
    return trainer, saver


def _counts(rank: int, root: Path) -> tuple[str, str, float | None]:
    options = {"monitor": "val_loss", "every_n_train_steps": 3}
    _, saver = _fit(rank, root, Counter(LOSSES), **options)
    return saver.best_model_path, saver.last_model_path, float(saver.best_model_score)


def test_both_ranks_know_the_same_best_and_newest(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one, other = values(run_ranks(_counts, 2, tmp_path, root))
    assert one == other
    assert one[0] == str(root / "epoch=0-step=4.ckpt")
    assert [each.manifest.step for each in find_checkpoints(root).found] == [8, 4]
    assert all(verify(each.path) == [] for each in find_checkpoints(root).found)
    assert sorted(os.listdir(root)) == ["best", "epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "last"]


def _assert_both_raise(outcomes: list[Outcome], failing: int, what: str, doing: str) -> None:
    errors = [outcome.error or "" for outcome in outcomes]
    assert what in errors[failing]
    assert f"{doing}" in errors[1 - failing]
    assert f"failed on rank {failing} (" in errors[1 - failing]
    assert what in errors[1 - failing]
    assert "hangs" not in [outcome.error for outcome in outcomes]


def _full(rank: int, root: Path) -> None:
    checkpoints = ProTrainCheckpointIO()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    checkpoints.files.sync = fail  # type: ignore[method-assign]
    _fit(rank, root, Counter(), plugins=[checkpoints])


def test_a_disk_that_is_full_on_one_rank_is_full_on_both(tmp_path: Path) -> None:
    root = tmp_path / "root"
    _assert_both_raise(run_ranks(_full, 2, tmp_path, root), 0, "No space left on device", "Saving ")
    assert os.listdir(root) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_hook_that_raises_on_one_rank_raises_on_both(tmp_path: Path, failing: int) -> None:
    def fit(rank: int, root: Path) -> None:
        class Broken(Counter):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                if rank == failing:
                    raise RuntimeError("of the user")

        _fit(rank, root, Broken())

    root = tmp_path / "root"
    _assert_both_raise(run_ranks(fit, 2, tmp_path, root), failing, "of the user", "Saving ")
    assert os.listdir(root) == []


def _nowhere(rank: int, root: Path) -> None:
    _fit(rank, root, Counter())


def test_a_folder_that_cannot_be_written_to_is_refused_on_both(tmp_path: Path) -> None:
    (tmp_path / "root").touch()
    outcomes = run_ranks(_nowhere, 2, tmp_path, tmp_path / "root")
    _assert_both_raise(outcomes, 0, "Checkpoints cannot be written to", "Preparing ")


def test_a_rank_that_dies_in_a_save_leaves_the_former_one_and_ends_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_store, "BOUND", 2.0)

    def fit(rank: int, root: Path) -> None:
        class Dies(Counter):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                if rank == 1 and self.trainer.global_step == 4:
                    kill_this_rank()

        _fit(rank, root, Dies(), every_n_train_steps=2)

    root = tmp_path / "root"
    outcomes = run_ranks(fit, 2, tmp_path, root)
    assert outcomes[1].error == "killed"
    assert "rank 1 has not responded" in (outcomes[0].error or "")
    assert outcomes[0].error != "hangs"
    assert [each.manifest.step for each in find_checkpoints(root).found] == [2]


@pytest.mark.filterwarnings("ignore:.* was saved with world_size=1")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_file_that_one_rank_cannot_read_is_read_by_none(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"

    def fit(rank: int, path: Path) -> None:
        if rank == failing:
            monkeypatch.setattr(io, "load_folder", _unreadable)  # In this process only.
        _fit(rank, root, Counter(), path=path)

    (tmp_path / "first").mkdir()
    values(run_ranks(_save_at, 2, tmp_path / "first", tmp_path, 1))
    outcomes = run_ranks(fit, 2, tmp_path, tmp_path / "step=1")
    _assert_both_raise(outcomes, failing, "weights.safetensors: Input/output error", "Loading ")


def _unreadable(folder: Path, *args: Any, **options: Any) -> None:
    raise ValueError(f"{folder} is a damaged checkpoint: weights.safetensors: Input/output error")


@pytest.mark.filterwarnings("ignore:.* was saved with world_size=1")
@pytest.mark.parametrize(
    ("paths", "refusal"),
    [
        (
            ("../a/at.ckpt", "at.ckpt"),
            r"do different things: rank 0 'Loading .*a/at.ckpt', rank 1 'Loading .*b/at.ckpt'",
        ),
        # As on nodes whose disks have different checkpoints at one place.
        (("/proc/self/cwd/at.ckpt",) * 2, r"loaded different checkpoints from .*: rank 0: step 1, .*rank 1: step 2, "),
    ],
    ids=["other paths", "other disks"],
)
def test_ranks_that_have_loaded_different_checkpoints_do_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: tuple[str, str], refusal: str
) -> None:
    def save(rank: int) -> None:
        for step, disk in enumerate(("a", "b")):
            _save_at(rank, tmp_path / disk, step)

    def fit(rank: int) -> None:
        monkeypatch.chdir(tmp_path / "ab"[rank])  # In this process only.
        _fit(rank, tmp_path / "root", Counter(), path=paths[rank])

    (tmp_path / "saving").mkdir()
    values(run_ranks(save, 2, tmp_path / "saving"))
    for step, disk in enumerate(("a", "b")):
        (tmp_path / disk / f"step={step}").rename(tmp_path / disk / "at.ckpt")
    for outcome in run_ranks(fit, 2, tmp_path):
        assert re.search(refusal, outcome.error or ""), outcome.error


def _save_at(rank: int, folder: Path, step: int) -> None:
    trainer, _ = _fit(rank, folder / "kept", Counter(), max_steps=step + 1, save_top_k=0)
    trainer.strategy.checkpoint_io = ProTrainCheckpointIO()
    trainer.save_checkpoint(folder / f"step={step}")


# Bytes that only each rank has; all that is read beside checkpoints is less.
OWN, BESIDE = 1_000_000, 64 << 10


class Range(NamedTuple):
    """A range of bytes."""

    least: int
    most: int


def read_so_far() -> int:
    """Bytes that this process has asked the system for; maps do not count."""
    counts = Path("/proc/self/io").read_text(encoding="ascii")
    return int(counts.split("rchar: ")[1].split()[0])


def allowed(folder: Path, manifest: Manifest, rank: int | None) -> Range:
    """Every file of the rank once, by its size in the manifest, and once more what is no tensor."""
    names = files_for(manifest.files.keys(), rank)
    once = sum(manifest.files[name].size for name in names)
    again = sum(entry.size for name, entry in manifest.files.items() if name in names and name.endswith(".pt"))
    return Range(once, once + again + 5 * (folder / MANIFEST).stat().st_size + BESIDE)


def saved(folder: Path, ranks: int) -> Manifest:
    """A checkpoint in which each rank has a million bytes of its own, and all share four."""
    states = [{"random": None, "data": torch.randint(256, (OWN,), dtype=torch.uint8), "others": {}}] * ranks
    large = {"large": torch.randn(OWN)}
    return save_content({**content(1), **large, RANK_STATES: states}, folder, 1)


@pytest.mark.skipif(not Path("/proc/self/io").is_file(), reason="nobody counts what is read")
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_rank_reads_its_part(tmp_path: Path, ranks: int) -> None:
    manifest = saved(tmp_path / "a", ranks)
    for rank in range(ranks):
        before = read_so_far()
        states = load_folder(tmp_path / "a", rank=rank)[RANK_STATES]
        assert [state is not None for state in states] == [each == rank for each in range(ranks)]
        least, most = allowed(tmp_path / "a", manifest, rank)
        assert least <= read_so_far() - before <= most
        shared = sum(entry.size for name, entry in manifest.files.items() if not name.startswith("rank"))
        assert least == shared + manifest.files[rank_file(rank)].size


@pytest.mark.skipif(not Path("/proc/self/io").is_file(), reason="nobody counts what is read")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_reads_all_files_exceeds_the_bound(tmp_path: Path, ranks: int) -> None:
    manifest = saved(tmp_path / "a", ranks)
    before = read_so_far()
    load_folder(tmp_path / "a")
    read = read_so_far() - before
    assert read > allowed(tmp_path / "a", manifest, 0).most
    least, most = allowed(tmp_path / "a", manifest, None)
    assert least <= read <= most


class Large(L.Callback):
    """A callback with a large state that differs between ranks."""

    def state_dict(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        return {"own": torch.randint(256, (OWN,), dtype=torch.uint8, generator=generator)}


class Counts(ProTrainCheckpointIO):
    """Remembers how much was read to load."""

    read = 0

    def load_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        before = read_so_far()
        found = super().load_checkpoint(*args, **options)
        self.read += read_so_far() - before
        return found


def _fit_counting(rank: int, ranks: int, root: Path, steps: int, path: str | None) -> int:
    plugin = Counts()
    saver = ProTrainCheckpoint(root, every_n_train_steps=1, save_top_k=-1)
    options = {"plugins": [plugin], "callbacks": [Large(), saver], "enable_checkpointing": True}
    trainer = trainer_on_rank(rank, ranks, max_steps=steps, **options)
    trainer.fit(Recorded(), torch.utils.data.DataLoader(Samples(48, noisy=False), 2), ckpt_path=path)
    return plugin.read


@pytest.mark.skipif(not Path("/proc/self/io").is_file(), reason="nobody counts what is read")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_in_a_run_each_rank_reads_its_part(tmp_path: Path, ranks: int) -> None:
    root = tmp_path / "root"
    for number, (steps, path) in enumerate(((1, None), (2, "last"))):
        meeting = tmp_path / str(number)
        meeting.mkdir()
        read = values(run_ranks(_fit_counting, ranks, meeting, ranks, root, steps, path))
        if path is None:
            assert read == [0] * ranks
    newest, resumed = find_checkpoints(root).found
    assert newest.manifest.step == 2
    # What rank 0 has is in the files that all share.
    assert all(resumed.manifest.files[rank_file(rank)].size > OWN for rank in range(1, ranks))
    for rank in range(ranks):
        least, most = allowed(resumed.path, resumed.manifest, rank)
        assert least <= read[rank] <= most
    assert STATE in resumed.manifest.files
