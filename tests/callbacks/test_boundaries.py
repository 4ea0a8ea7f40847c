"""Saves behind the training are those that there would be, and one at a time; errors come at the next step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import nn

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint.atomic import RunLock
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.checkpoint.contents import load, same
from tests.support.counter_runs import LOSSES, Counter, _fit, _steps, _weight
from tests.support.noisy_runs import Data, Noisy
from tests.support.ranks import LIMIT, run_ranks, trainer_on_rank, values
from tests.support.trainers import SILENT


class Held(ProTrainCheckpointIO):
    """A disk that syncs nothing before it is let go, and notes what is done to it."""

    def __init__(self, opened: bool = False, error: OSError | None = None) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.syncs = 0
        self.error = error
        if opened:
            self.gate.set()
        sync = self.files.sync

        def held(descriptor: int) -> None:
            self.syncs += 1
            assert self.gate.wait(LIMIT)
            if self.error is not None:
                raise self.error
            sync(descriptor)

        self.files.sync = held  # type: ignore[method-assign]


class Steps(L.Callback):
    """Calls a function after each step, before the checkpoints do anything."""

    def __init__(self, act: Callable[[L.Trainer, int], None]) -> None:
        self.act = act
        self.last = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != self.last:
            self.last = trainer.global_step
            self.act(trainer, self.last)


def _behind(folder: Path, losses: Sequence[float] = (), **options: Any) -> tuple[L.Trainer, ProTrainCheckpoint]:
    return _fit(folder, losses, asynchronous=True, **options)


@pytest.mark.filterwarnings("ignore:The last step of this run, [0-9]+, is not saved")
@pytest.mark.parametrize(
    "options",
    [
        {"every_n_train_steps": 1, "save_top_k": -1},
        {"losses": LOSSES, "every_n_train_steps": 3},
        {"losses": LOSSES, "every_n_train_steps": 1, "save_top_k": 2, "filename": "{step}-{val_loss:.1f}"},
        {"losses": LOSSES, "mode": "max", "save_last": True},
        {"every_n_train_steps": 100, "save_last": True},
        {"save_top_k": 0},
    ],
    ids=str,
)
def test_the_folder_is_the_same_as_without(tmp_path: Path, options: dict[str, Any]) -> None:
    folders = tmp_path / "one", tmp_path / "other"
    _, one = _fit(folders[0], **options)
    _, other = _behind(folders[1], **options)
    assert _steps(folders[0]) == _steps(folders[1])
    assert sorted(os.listdir(folders[0])) == sorted(os.listdir(folders[1]))
    for here, there in zip(find_checkpoints(folders[0]).found, find_checkpoints(folders[1]).found, strict=True):
        assert (here.path.name, here.manifest.record) == (there.path.name, there.manifest.record)
        assert here.manifest.sequence == there.manifest.sequence
        assert same(load(here.path)["state_dict"], load(there.path)["state_dict"])
        assert same(load(here.path)["loops"], load(there.path)["loops"])
    for name in ("best_model_path", "last_model_path"):
        assert Path(getattr(one, name)).name == Path(getattr(other, name)).name
    assert one.best_model_score == other.best_model_score
    assert {Path(path).name for path in one.best_k_models} == {Path(path).name for path in other.best_k_models}


@pytest.mark.parametrize("overlap", [None, "off", "backward", "forward"])
def test_what_is_written_behind_is_what_there_was_at_the_step(tmp_path: Path, overlap: Any) -> None:
    for asynchronous in (True, False):
        L.seed_everything(1, verbose=False)
        saver = ProTrainCheckpoint(tmp_path / str(asynchronous), every_n_train_steps=3, asynchronous=asynchronous)
        saver.save_top_k = -1
        strategy: Any = "auto"
        if overlap is not None:
            strategy = ProTrainStrategy(plan="offload", blocks=[nn.Linear], overlap_optimizer=overlap)
        trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_epochs=2, callbacks=[saver], **SILENT)
        trainer.fit(Noisy(), datamodule=Data())
    behind, at_once = (find_checkpoints(tmp_path / name).found for name in ("True", "False"))
    assert [each.manifest.step for each in behind] == [20, 18, 15, 12, 9, 6, 3]
    for one, other in zip(behind, at_once, strict=True):
        # Everything: weights, moments, schedules, counters, random numbers, the place in the data.
        assert same(load(one.path), load(other.path))


@pytest.mark.filterwarnings("ignore:The last step of this run, [0-9]+, is not saved")
def test_the_training_goes_on_and_nothing_names_what_is_not_there_yet(tmp_path: Path) -> None:
    held = Held()
    seen: list[tuple[int, list[int], str]] = []

    def look(trainer: L.Trainer, step: int) -> None:
        seen.append((step, [each.manifest.step for each in find_checkpoints(tmp_path).found], saver().last_model_path))
        if step == 5:
            held.gate.set()

    def saver() -> ProTrainCheckpoint:
        return callbacks[1]

    callbacks: list[Any] = [
        Steps(look),
        ProTrainCheckpoint(tmp_path, every_n_train_steps=2, save_last=False, asynchronous=True),
    ]
    trainer = L.Trainer(accelerator="cpu", plugins=[held], max_steps=3, max_epochs=9, callbacks=callbacks, **SILENT)
    threading.Timer(0.5, held.gate.set).start()
    trainer.fit(Counter())
    # The save of step 2 was under way at step 3, and the end of the fit has waited for it.
    assert seen == [(1, [], ""), (2, [], ""), (3, [], "")]
    assert held.syncs > 0
    assert _steps(tmp_path) == [2]
    assert _weight(saver().last_model_path) == 2


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    held, most = Held(), []

    def look(trainer: L.Trainer, step: int) -> None:
        most.append(len([name for name in os.listdir(tmp_path) if name.startswith(".epoch")]))

    threading.Timer(0.5, held.gate.set).start()
    _behind(tmp_path, plugins=[held], callbacks=[Steps(look)], every_n_train_steps=1, save_top_k=-1)
    assert max(most) <= 1
    assert _steps(tmp_path) == list(range(1, 9))


def test_an_error_comes_at_the_next_step_and_leaves_the_former_one(tmp_path: Path) -> None:
    _fit(tmp_path, max_steps=2)
    held, reached = Held(opened=True, error=OSError(28, "No space left on device")), []

    def wait(trainer: L.Trainer, step: int) -> None:
        reached.append(step)
        trainer.strategy.checkpoint_io.writer.join()  # type: ignore[attr-defined]

    options = {"plugins": [held], "callbacks": [Steps(wait)], "every_n_train_steps": 4, "ckpt_path": "last"}
    with pytest.raises(OSError, match="No space left"):
        _behind(tmp_path, **options)
    assert reached == [3, 4, 5]
    assert _steps(tmp_path) == [2]
    with RunLock(tmp_path, "run"):
        pass


def test_an_error_in_the_last_save_ends_the_fit(tmp_path: Path) -> None:
    held = Held(opened=True, error=OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        _behind(tmp_path, plugins=[held], every_n_train_steps=8)
    assert _steps(tmp_path) == []


def test_what_is_under_way_is_ended_when_the_run_fails(tmp_path: Path) -> None:
    held = Held()

    def fail(trainer: L.Trainer, step: int) -> None:
        if step == 3:
            threading.Timer(0.3, held.gate.set).start()
            raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        _behind(tmp_path, plugins=[held], callbacks=[Steps(fail)], every_n_train_steps=2)
    assert _steps(tmp_path) == [2]


def test_an_error_under_way_is_said_when_the_run_fails_for_another_reason(tmp_path: Path) -> None:
    held = Held(error=OSError(5, "Input/output error"))

    def fail(trainer: L.Trainer, step: int) -> None:
        if step == 3:
            held.gate.set()
            raise RuntimeError("of the user")

    with (
        pytest.warns(UserWarning, match="could not be saved: OSError: .*Input/output"),
        pytest.raises(RuntimeError, match="of the user"),
    ):
        _behind(tmp_path, plugins=[held], callbacks=[Steps(fail)], every_n_train_steps=2)
    assert _steps(tmp_path) == []


def test_nothing_is_removed_before_what_replaces_it_is_there(tmp_path: Path) -> None:
    order: list[str] = []
    checkpoints = ProTrainCheckpointIO()
    rename = checkpoints.files.rename

    def note(source: Path, target: Path) -> None:
        rename(source, target)
        if target.name == "last":
            return
        removed = target.name.endswith(".removed")
        order.append(f"{'-' if removed else '+'}{_step(source if removed else target)}")

    checkpoints.files.rename = note  # type: ignore[method-assign]
    _behind(tmp_path, plugins=[checkpoints], every_n_train_steps=2, save_top_k=1)
    assert order == ["+2", "+4", "-2", "+6", "-4", "+8", "-6"]


def _step(path: Path) -> str:
    return path.name.split("step=")[1].split(".")[0]


def test_what_is_loaded_or_saved_by_others_waits(tmp_path: Path) -> None:
    held, loaded = Held(), []

    def use(trainer: L.Trainer, step: int) -> None:
        if step == 3:
            threading.Timer(0.3, held.gate.set).start()
            path = tmp_path / "epoch=0-step=2.ckpt"
            loaded.append(trainer.strategy.checkpoint_io.load_checkpoint(path)["global_step"])
        if step == 5:
            trainer.save_checkpoint(tmp_path / "mine")
            assert (tmp_path / "mine").exists()

    _behind(tmp_path, plugins=[held], callbacks=[Steps(use)], every_n_train_steps=2, save_top_k=-1)
    assert loaded == [2]
    assert _steps(tmp_path) == [2, 4, 5, 6, 8]


def test_a_host_without_room_for_a_copy_saves_at_once(tmp_path: Path) -> None:
    saver = ProTrainCheckpoint(tmp_path, every_n_train_steps=2, asynchronous=True)
    saver._snapshot.free_bytes = lambda: 10
    trainer = L.Trainer(accelerator="cpu", max_steps=2, callbacks=[saver], **SILENT)
    with pytest.warns(UserWarning, match=r"A copy of the checkpoint needs .* of host memory, but .*10 bytes"):
        trainer.fit(Counter())
    assert _steps(tmp_path) == [2]
    assert saver._snapshot.nbytes == 0


def test_the_copy_is_there_once_and_given_back(tmp_path: Path) -> None:
    sizes = []

    def look(trainer: L.Trainer, step: int) -> None:
        sizes.append(trainer.checkpoint_callbacks[0]._snapshot.nbytes)  # type: ignore[attr-defined]

    _, saver = _behind(tmp_path, callbacks=[Steps(look)], every_n_train_steps=1)
    assert sizes[0] == 0
    assert len(set(sizes[1:])) == 1
    assert sizes[1] > 0
    assert saver._snapshot.nbytes == 0


def test_a_best_under_way_is_the_one_to_be_better_than(tmp_path: Path) -> None:
    held = Held()
    threading.Timer(0.5, held.gate.set).start()
    _, saver = _behind(tmp_path, (5.0, 2.0, 3.0, 4.0), plugins=[held], every_n_train_steps=100, save_top_k=-1)
    # 3 is better than 5, which was the best that was on the disk.
    assert _steps(tmp_path) == [2, 4, 8]
    assert float(saver.best_model_score) == 2.0


def test_a_preempted_run_is_on_the_disk_when_it_ends(tmp_path: Path) -> None:
    def fit(rank: int) -> None:
        held = Held()

        def end(trainer: L.Trainer, step: int) -> None:
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Timer(0.3, held.gate.set).start()

        _behind(tmp_path / "root", plugins=[held], callbacks=[Steps(end)], every_n_train_steps=2, save_top_k=-1)

    (tmp_path / "first").mkdir()
    (outcome,) = run_ranks(fit, 1, tmp_path / "first")
    assert outcome.error == "SIGTERMException: 143"
    assert _steps(tmp_path / "root") == [2, 3]


def _two(rank: int, root: Path, error: OSError | None, asynchronous: bool) -> tuple[list[Any], str, str]:
    module, held = Noisy(), Held(opened=True, error=error if rank == 0 else None)
    L.seed_everything(rank, verbose=False)
    saver = ProTrainCheckpoint(root, every_n_train_steps=3, asynchronous=asynchronous)
    slow = Steps(lambda trainer, step: time.sleep(0.02))
    options = {"plugins": [held], "callbacks": [slow, saver], "enable_checkpointing": True, "max_epochs": 2}
    trainer = trainer_on_rank(rank, 2, use_distributed_sampler=False, **options)
    trainer.fit(module, datamodule=Data())
    return module.losses, Path(saver.best_model_path).name, Path(saver.last_model_path).name


def test_two_ranks_train_and_know_the_same(tmp_path: Path) -> None:
    results = []
    for asynchronous in (True, False):
        folder = tmp_path / str(asynchronous)
        folder.mkdir()
        results.append(values(run_ranks(_two, 2, folder, folder / "root", None, asynchronous)))
    assert results[0] == results[1]
    assert results[0][0][1:] == results[0][1][1:]
    assert _steps(tmp_path / "True" / "root") == _steps(tmp_path / "False" / "root")


def test_what_fails_behind_one_rank_fails_on_both(tmp_path: Path) -> None:
    outcomes = run_ranks(_two, 2, tmp_path, tmp_path / "root", OSError(28, "No space left on device"), True)
    assert "No space left on device" in (outcomes[0].error or "")
    assert "failed on rank 0 (OSError" in (outcomes[1].error or "")
    assert "hangs" not in [outcome.error for outcome in outcomes]
    assert _steps(tmp_path / "root") == []
