"""A run that was interrupted after any step, or killed at any moment, ends with the bits of an uninterrupted run."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import random
import signal
import struct
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.resume import ResumedFit
from lightning_protrain.checkpoint import io
from lightning_protrain.checkpoint.discover import find_checkpoints, newest_good
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.verification import verify
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.noisy_runs import BATCHES, EPOCHS, Data, Noisy, _differences, _unexplained
from tests.support.signalled_runs import Both, Validated
from tests.support.trainers import SILENT


def _run(
    folder: Path,
    accumulate: int,
    plan: str | None,
    path: Path | str | None = None,
    every: int = 1,
    saves: dict[str, Any] | None = None,
    overlap: Any = "auto",
    **options: Any,
) -> tuple[Noisy, dict[str, Any]]:
    """Trains to the end, saves every step or every so many; what the end of it is, as Lightning saves it."""
    streamed = partial(ProTrainStrategy, blocks=[nn.Linear], overlap_optimizer=overlap)
    module = Noisy()
    seed = 1 if path is None else 12345
    saver = ProTrainCheckpoint(folder, **(saves or {"every_n_train_steps": every}), save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=accumulate,
        callbacks=[saver],
        strategy="auto" if plan is None else streamed(plan=plan),
        **SILENT,
        **{"max_epochs": EPOCHS, **options},
    )
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    trainer.fit(module, datamodule=Data(), ckpt_path=path)
    last = ProTrainCheckpointIO().load_checkpoint(saver.last_model_path)
    return module, last


@pytest.mark.parametrize(
    ("accumulate", "steps", "plan", "overlap"),
    [
        (1, 20, None, "auto"),
        (4, 6, "offload", "auto"),
        (4, 6, "offload", "backward"),
        pytest.param(1, 20, "offload", "auto", marks=pytest.mark.slow),
        pytest.param(1, 20, "offload", "backward", marks=pytest.mark.slow),
        pytest.param(1, 20, "offload", "forward", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumed_from_every_step_of_two_epochs_ends_with_the_same_bits(
    tmp_path: Path, accumulate: int, steps: int, plan: str | None, overlap: str
) -> None:
    module, expected = _run(tmp_path / "whole", accumulate, plan, overlap=overlap)
    found = find_checkpoints(tmp_path / "whole").found
    assert [each.manifest.step for each in found] == list(range(steps, 0, -1))
    for each in found[1:]:
        step = each.manifest.step
        resumed, last = _run(tmp_path / str(step), accumulate, plan, each.path, every=steps, overlap=overlap)
        assert resumed.losses == module.losses[-len(resumed.losses) :], step
        # Everything that Lightning and we save: weights, moments, schedules, counters, random numbers, position.
        assert _unexplained(last, expected) == [], step


def test_without_random_states_a_resumed_run_ends_with_other_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = _run(tmp_path / "whole", 1, None)
    monkeypatch.setattr(ResumedFit, "restore", lambda self, trainer: None)
    _, last = _run(tmp_path / "resumed", 1, None, find_checkpoints(tmp_path / "whole").found[5].path)
    assert _differences(last["state_dict"], expected["state_dict"])


@pytest.mark.parametrize("saves", [{"every_n_train_steps": 100, "save_last": True}, {"every_n_epochs": 1}], ids=str)
@pytest.mark.parametrize(("stop", "name"), [(3, "epoch=0-step=3.ckpt"), (13, "epoch=1-step=13.ckpt")])
def test_an_epoch_that_max_steps_has_ended_goes_on_in_its_middle(
    tmp_path: Path, saves: dict[str, Any], stop: int, name: str
) -> None:
    module, expected = _run(tmp_path / "whole", 1, None)
    _run(tmp_path / "two", 1, None, saves=saves, max_steps=stop)
    assert find_checkpoints(tmp_path / "two").found[0].path.name == name
    resumed, last = _run(tmp_path / "two", 1, None, "last", saves=saves)
    assert resumed.losses == module.losses[stop:]
    assert last["global_step"] == 20
    assert _differences(last["state_dict"], expected["state_dict"]) == []


def test_a_checkpoint_without_random_numbers_is_said(tmp_path: Path) -> None:
    _, last = _run(tmp_path, 1, None, max_steps=3)
    del last["rank_states"]
    checkpoints = ProTrainCheckpointIO("other")
    checkpoints.save_checkpoint(last, tmp_path / "without")
    with pytest.warns(UserWarning, match="has no random states"):
        _run(tmp_path, 1, None, tmp_path / "without", max_steps=4)
    last["rank_states"] = []
    checkpoints.save_checkpoint(last, tmp_path / "two")
    with pytest.warns(UserWarning, match="has no random states"):
        _run(tmp_path, 1, None, tmp_path / "two", max_steps=4)


KILLED_STEPS, KILLED_EPOCHS = 2400, 240
# Fewer lives are no soak; a run that has not ended after so many is let alone.
FEWEST, MOST = 30, 70
# Seconds: of a life until it is killed, after its first step, and for a few from its very beginning.
LIFE, START = 1.0, 0.4
# Two by their score, the newest, the one resumed from, and one that was to be removed; beside them the lock, and what
# one save has left: staged, or the old one, or one that is being removed.
MOST_KEPT, MOST_LEFT = 5, 3


class Wide(Validated):
    """A module so large that writing its checkpoint takes a while."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.network = nn.Sequential(
            nn.Linear(4, 1500), nn.Dropout(0.5), nn.BatchNorm1d(1500), nn.Linear(1500, 200), nn.Linear(200, 1)
        )


def born() -> Wide:
    """The model as every run begins with it, and with the same random numbers."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    return Wide()


class Life:
    """A training process, and the memory through which it tells its progress; the memory outlives it."""

    def __init__(self, train: Callable[[Life], None]) -> None:
        self._told = mmap.mmap(-1, 16)
        self._process: BaseProcess = multiprocessing.get_context("fork").Process(target=self._live, args=(train,))
        self._process.start()

    def _live(self, train: Callable[[Life], None]) -> None:
        train(self)
        os._exit(0)  # No teardown of what the forked process has inherited.

    def tell(self, stepped: int, saving: bool, durable: int) -> None:
        """Tell the parent process the steps made, whether a save is running, and the last step that is durable."""
        self._told[:] = struct.pack("qii", durable, stepped, saving)

    @property
    def told(self) -> tuple[int, int, bool]:
        """The last step whose save has returned, the steps made, and whether it is in a save."""
        durable, stepped, saving = struct.unpack("qii", self._told[:])
        return durable, stepped, bool(saving)

    def end(self, after: float, from_start: bool) -> bool:
        """Kill the process some seconds after it or its training began; return True if it had ended before."""
        begin: float | None = time.monotonic() if from_start else None
        while self._process.exitcode is None:
            if begin is None and self.told[1]:
                begin = time.monotonic()
            if begin is not None and time.monotonic() - begin > after:
                os.kill(self._process.pid or 0, signal.SIGKILL)
            time.sleep(0.001)
        assert self._process.exitcode in (0, -signal.SIGKILL)
        return self._process.exitcode == 0


class Tells(L.Callback):
    """A callback that tells the parent process how many steps have been made, and whether a save is running."""

    def __init__(self, life: Life) -> None:
        self.life = life

    def on_train_batch_end(self, *_: Any) -> None:
        durable, stepped, saving = self.life.told
        self.life.tell(stepped + 1, saving, durable)

    def watch(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `save` that tells the parent process when the save begins and ends."""

        def watched(*args: Any, **options: Any) -> Any:
            durable, stepped, _ = self.life.told
            self.life.tell(stepped, True, durable)
            saved = save(*args, **options)
            self.life.tell(self.life.told[1], False, getattr(saved, "step", 0))
            return saved

        return watched


def trainer_of(callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", devices=1, max_steps=KILLED_STEPS, max_epochs=KILLED_EPOCHS, val_check_interval=BATCHES // 2,
        callbacks=callbacks, **SILENT, **options,
    )  # fmt: skip


def train(life: Life, root: Path, final: Path, asynchronous: bool, streams: bool) -> None:
    """Train from the last checkpoint, if there is one, and save the final weights and best score to `final`."""
    torch.set_num_threads(1)
    tells = Tells(life)
    io.save_payload = tells.watch(io.save_payload)  # type: ignore[assignment]
    saver = ProTrainCheckpoint(root, monitor="val_loss", save_top_k=2, every_n_train_steps=3, asynchronous=asynchronous)
    strategy: Any = "auto"
    if streams:
        strategy = ProTrainStrategy(plan="offload", overlap_optimizer="backward", monitor=False)
    module = born()
    trainer_of([tells, saver], strategy=strategy).fit(module, datamodule=Both(), ckpt_path="last")
    torch.save({"weights": module.state_dict(), "best": float(saver.best_model_score or 0)}, final)


def entries(root: Path) -> list[str]:
    """Return the names in a folder but links, which lead somewhere at any time."""
    paths = list(root.iterdir()) if root.is_dir() else []
    assert all(path.exists() for path in paths if path.is_symlink())
    return [path.name for path in paths if not path.is_symlink()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [1])
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path: Path, seed: int) -> None:
    chance, root, final = random.Random(seed), tmp_path / "root", tmp_path / "final.pt"
    whole = born()
    best = ModelCheckpoint(tmp_path / "whole", monitor="val_loss", save_top_k=1)
    trainer_of([best]).fit(whole, datamodule=Both())
    kills = within = lives = 0
    ended = False
    while not ended:
        lives += 1
        asynchronous, streams, early = (chance.random() < share for share in (0.5, 0.3, 0.15))
        after = chance.uniform(0, START if early else LIFE) if lives <= MOST else 1e9
        life = Life(lambda life: train(life, root, final, asynchronous, streams))  # noqa: B023
        ended = life.end(after, early)
        durable, _, saving = life.told
        kills, within = kills + (not ended), within + (not ended and saving)
        where = f"seed {seed}, life {lives}, killed after {after:.3f} s"
        listing = find_checkpoints(root)
        assert listing.broken == (), where
        assert [verify(each.path) for each in listing.found] == [[]] * len(listing.found), where
        assert max((each.manifest.step for each in listing.found), default=0) >= durable, where
        assert len(listing.found) <= MOST_KEPT, where
        assert len(entries(root)) <= len(listing.found) + MOST_LEFT, where
    print(f"seed {seed}: {lives} lives, {kills} killed, {within} of them within a save")
    found = torch.load(final, weights_only=True)
    assert all(torch.equal(value, found["weights"][name]) for name, value in whole.state_dict().items())
    assert found["best"] == pytest.approx(float(best.best_model_score or 0), rel=1e-6)
    assert newest_good(root).chosen is not None
    assert len(entries(root)) == len(find_checkpoints(root).found) <= MOST_KEPT
    assert not list(root.glob("*.aside"))
    assert kills >= FEWEST
    assert within > 0


class InPlace(TorchCheckpointIO):
    """Overwrites what is there."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, path)


def train_naively(life: Life, root: Path) -> None:
    torch.set_num_threads(1)
    tells, plugin = Tells(life), InPlace()
    plugin.save_checkpoint = tells.watch(plugin.save_checkpoint)  # type: ignore[method-assign]
    saver = ModelCheckpoint(root, filename="last", every_n_train_steps=3, enable_version_counter=False)
    trainer_of([tells, saver], plugins=[plugin]).fit(Wide(), datamodule=Both())


def is_torn(path: Path) -> bool:
    try:
        torch.load(path, weights_only=False)
    except (RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError):  # By where the file ends.
        return True
    return False


@pytest.mark.parametrize("kept", [0, 1, 0.02, 0.3, 0.5, 0.7, 0.99, 0.999])
def test_a_file_that_ends_early_is_torn(kept: float, tmp_path: Path) -> None:
    torch.save({"weights": torch.arange(2000.0), "steps": list(range(1000))}, tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    assert is_torn(tmp_path / "cut")
    assert not is_torn(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_same_kills_tear_what_is_written_in_place(tmp_path: Path) -> None:
    chance, torn, within = random.Random(1), 0, 0
    for _ in range(30):
        life = Life(lambda life: train_naively(life, tmp_path))
        life.end(chance.uniform(0.05, 0.5), from_start=False)
        within += life.told[2]
        torn += (tmp_path / "last.ckpt").exists() and is_torn(tmp_path / "last.ckpt")
        if torn:
            break
    assert torn
    assert within


def test_a_life_says_what_it_was_doing_when_it_ended() -> None:
    def saves(life: Life) -> None:
        life.tell(3, True, 2)
        time.sleep(60)

    life = Life(saves)
    assert not life.end(0.0, from_start=False)
    assert life.told == (2, 3, True)
    assert Life(lambda life: None).end(60, from_start=True)
