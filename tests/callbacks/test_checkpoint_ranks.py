"""Two ranks save one checkpoint, resume from the same one to the bit, and fail together, with the name of the rank."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_protrain.callbacks.checkpoint import rendezvous
from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint import io
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.verification import verify
from tests.support.counter_runs import LOSSES, Counter
from tests.support.noisy_runs import Data, Noisy
from tests.support.ranks import BOUND, Outcome, kill_this_rank, run_ranks, trainer_on_rank, values


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
    assert [each.manifest.step for each in find_checkpoints(root).found] == [6, 4]
    assert all(verify(each.path) == [] for each in find_checkpoints(root).found)
    assert sorted(os.listdir(root)) == ["epoch=0-step=4.ckpt", "epoch=1-step=6.ckpt"]


def _noisy(rank: int, root: Path, path: Any, every: int) -> list:
    module, seed = Noisy(), rank + (10 if path is None else 1000)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    _fit(rank, root, module, Data(), path, every_n_train_steps=every, save_top_k=-1)
    # The process ends right here: nothing that shares memory may be handed out.
    return [(number, loss) for number, loss in module.losses] + [
        value.flatten().tolist() for value in module.state_dict().values()
    ]


def test_two_ranks_with_random_numbers_of_their_own_resume_to_the_bit(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    whole = values(run_ranks(_noisy, 2, tmp_path / "a", tmp_path / "whole", None, 1))
    assert whole[0][0] != whole[1][0]
    for step in (3, 10, 17):
        folder = tmp_path / f"b{step}"
        folder.mkdir()
        path = next(each.path for each in find_checkpoints(tmp_path / "whole").found if each.manifest.step == step)
        resumed = values(run_ranks(_noisy, 2, folder, folder / "root", path, 20))
        for rank in range(2):
            assert resumed[rank] == whole[rank][step:]


def _assert_both_raise(outcomes: list[Outcome], failing: int, what: str, doing: str) -> None:
    errors = [outcome.error or "" for outcome in outcomes]
    assert what in errors[failing]
    assert f"{doing}" in errors[1 - failing]
    assert f"failed on rank {failing} (" in errors[1 - failing]
    assert what in errors[1 - failing]
    assert max(outcome.seconds for outcome in outcomes) < 2 * BOUND


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
    monkeypatch.setattr(rendezvous, "BOUND", 2.0)

    def fit(rank: int, root: Path) -> None:
        class Dies(Counter):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                if rank == 1 and self.trainer.global_step == 4:
                    kill_this_rank()

        _fit(rank, root, Dies(), every_n_train_steps=2)

    root = tmp_path / "root"
    outcomes = run_ranks(fit, 2, tmp_path, root)
    assert outcomes[1].error == "killed"
    assert "rank 1 has given no sign of life" in (outcomes[0].error or "")
    assert outcomes[0].seconds < 2 * BOUND
    assert [each.manifest.step for each in find_checkpoints(root).found] == [2]


@pytest.mark.filterwarnings("ignore:.* was saved by 1 ranks")
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
    raise ValueError(f"{folder} is not a good checkpoint: weights.safetensors: Input/output error")


@pytest.mark.filterwarnings("ignore:.* was saved by 1 ranks")
def test_ranks_that_have_loaded_different_checkpoints_do_not_train(tmp_path: Path) -> None:
    root = tmp_path / "root"

    def fit(rank: int, path: Path) -> None:
        _fit(rank, root, Counter(), path=path / f"step={rank}")

    for step in (0, 1):
        source = tmp_path / f"first{step}"
        source.mkdir()
        values(run_ranks(_save_at, 2, source, tmp_path / "two", step))
    outcomes = run_ranks(fit, 2, tmp_path, tmp_path / "two")
    for outcome in outcomes:
        assert "Ranks do different things: rank 0 'Loading " in (outcome.error or "")
        assert re.search("step=0', rank 1 'Loading .*step=1'", outcome.error or "")


def _save_at(rank: int, folder: Path, step: int) -> None:
    trainer, _ = _fit(rank, folder / "kept", Counter(), max_steps=step + 1, save_top_k=0)
    trainer.strategy.checkpoint_io = ProTrainCheckpointIO()
    trainer.save_checkpoint(folder / f"step={step}")
