"""Workers that are spawned outlive a signal to the group, and end when their parent says so."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.preemption import Preemption, SignalShield
from lightning_protrain.checkpoint.discover import find_checkpoints
from tests.support.ranks import run_ranks
from tests.support.signalled_runs import PREEMPTED, Signals, Validated
from tests.support.trainers import SILENT

# Seconds for a process that imports all of the package, on a machine that is busy.
STARTS = 60.0


def loader(method: str | None, workers: int = 1, **options: Any) -> DataLoader:
    return DataLoader(torch.rand(24, 4), batch_size=2, num_workers=workers, multiprocessing_context=method, **options)


class Own(SpawnContext):
    """A context that a user has made."""


def test_loaders_are_covered_until_the_fit_ends() -> None:
    shield = SignalShield({signal.SIGTERM})
    spawned, served, forked, alone = loader("spawn"), loader("forkserver"), loader("fork"), loader(None, 0)
    before = [each.multiprocessing_context for each in (spawned, served, forked)]
    shield.cover({"a": [spawned, served], "b": forked, "c": alone, "d": [[1], [2]]})
    assert isinstance(spawned.multiprocessing_context, SpawnContext)
    assert spawned.multiprocessing_context is not before[0]
    assert [each.multiprocessing_context for each in (served, forked)] == before[1:]
    assert alone.multiprocessing_context is None
    shield.cover(spawned)  # Another epoch asks for the same one.
    shield.close()
    assert [each.multiprocessing_context for each in (spawned, served, forked)] == before


def test_a_context_of_the_user_is_left_alone() -> None:
    own = Own()
    given = DataLoader(torch.rand(4), num_workers=1, multiprocessing_context=own)
    shield = SignalShield({signal.SIGTERM})
    shield.cover(given)
    assert given.multiprocessing_context is own


def test_the_default_way_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = loader(None)
    monkeypatch.setattr(multiprocessing, "get_context", lambda: SpawnContext())
    shield = SignalShield({signal.SIGTERM})
    shield.cover(given)
    assert isinstance(given.multiprocessing_context, SpawnContext)
    shield.close()
    assert given.multiprocessing_context is None


def test_a_fit_covers_its_loaders_and_puts_back_where_they_come_from() -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    loops: list[Any] = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop]
    loaders = [loader("spawn"), loader("spawn")]
    sources = [loop._data_source for loop in loops]
    for source, given in zip(sources, loaders, strict=True):
        source.instance = given
    shield = SignalShield({signal.SIGTERM})
    shield.cover_fit(trainer)
    assert [loop._data_source.dataloader() for loop in loops] == loaders
    assert all(type(each.multiprocessing_context).__module__ == SignalShield.__module__ for each in loaders)
    assert all(loop._data_source.is_defined() for loop in loops)
    shield.close()
    assert [loop._data_source for loop in loops] == sources


def _wait(path: Path) -> None:
    begin = time.monotonic()
    while not path.exists():
        assert time.monotonic() - begin < STARTS
        time.sleep(0.05)


def _begin_and_sleep(path: str) -> None:
    Path(path).touch()
    time.sleep(STARTS)


@pytest.mark.slow
@pytest.mark.parametrize("shielded", [True, False])
def test_a_worker_ends_if_its_parent_ends_it_and_for_nobody_else(tmp_path: Path, shielded: bool) -> None:
    given = loader("spawn")
    shield = SignalShield({signal.SIGTERM})
    if shielded:
        shield.cover(given)
    context: Any = given.multiprocessing_context
    process = context.Process(target=_begin_and_sleep, args=(str(tmp_path / "begun"),), daemon=True)
    process.start()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if shielded:  # While it imports.
        subprocess.run(["kill", str(process.pid)], check=True)
    _wait(tmp_path / "begun")
    subprocess.run(["kill", str(process.pid)], check=True)
    process.join(0.5)
    assert process.is_alive() is shielded
    process.terminate()
    process.join(STARTS)
    assert process.exitcode == (0 if shielded else -signal.SIGTERM)


class Workers(L.LightningDataModule):
    """One process makes the batches, another one those of the validation."""

    def train_dataloader(self) -> DataLoader:
        return loader("spawn")

    def val_dataloader(self) -> DataLoader:
        return loader("spawn", persistent_workers=True)


class ToTheGroup(Signals):
    """Another process sends the signal to all processes of this group; the file tells which workers it has ended."""

    def __init__(self, place: str, batch: int, file: Path, patience: float) -> None:
        super().__init__(place, batch)
        self.file, self.patience = file, patience

    def send(self, place: str) -> None:
        if (place, self.begun) == (self.place, self.batch):
            workers = [psutil.Process(each.pid) for each in multiprocessing.active_children()]
            # What PyTorch makes of a worker's end depends on who has set a handler before.
            before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            subprocess.run(["kill", "-s", str(self.number), "--", f"-{os.getpgrp()}"], check=False)
            end = time.monotonic() + self.patience
            while not (ended := [each for each in workers if each.status() == psutil.STATUS_ZOMBIE]):
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
            self.file.write_text(f"{len(ended)} of {len(workers)}")
            signal.signal(signal.SIGCHLD, before)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "batch", "step"), [("backward", 3, 3), ("validation", 12, 12)])
@pytest.mark.parametrize("shielded", [True, False])
def test_a_signal_to_the_whole_group_leaves_workers_alone(
    tmp_path: Path, place: str, batch: int, step: int, shielded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shielded:
        monkeypatch.setattr(Preemption, "shield_workers", lambda self, trainer: None)

    def fit(rank: int) -> None:
        os.setpgid(0, 0)
        sender = ToTheGroup(place, batch, tmp_path / "ended", 1.0 if shielded else STARTS)
        callbacks = [sender, ProTrainCheckpoint(tmp_path / "root")]
        trainer = L.Trainer(accelerator="cpu", max_epochs=2, callbacks=callbacks, num_sanity_val_steps=0, **SILENT)
        trainer.fit(Validated(), datamodule=Workers())

    folder = tmp_path / "first"
    folder.mkdir()
    (outcome,) = run_ranks(fit, 1, folder)
    found = [each.manifest.step for each in find_checkpoints(tmp_path / "root").found]
    ended, workers = map(int, (tmp_path / "ended").read_text().split(" of "))
    assert workers == (2 if place == "validation" else 1)
    if shielded:
        assert (outcome.error, found, ended) == (PREEMPTED, [step], 0)
    else:
        assert ended > 0
