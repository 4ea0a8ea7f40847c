"""Schedulers: signals to whole groups of processes, SLURM's own signal, and a job that is queued again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import lightning as L
import psutil
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.preemption import Preemption, SignalShield
from lightning_protrain.checkpoint.discover import find_checkpoints
from tests.support.noisy_runs import Data, Noisy
from tests.support.ranks import BOUND, run_ranks, values
from tests.support.signalled_runs import PREEMPTED, Signals


class Workers(L.LightningDataModule):
    """Two processes make the batches."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.rand(200, 4), batch_size=2, num_workers=2)


class ToTheGroup(Signals):
    """Another process sends the signal to all processes of this group; how many workers live on is written down."""

    def __init__(self, place: str, batch: int, path: Path) -> None:
        super().__init__(place, batch)
        self.path = path

    def send(self, place: str) -> None:
        if (place, self.begun) == (self.place, self.batch):
            subprocess.run(["kill", "-s", str(self.number), "--", f"-{os.getpgrp()}"], check=False)
            try:
                time.sleep(1.0)  # A worker that dies is noticed within it, where PyTorch listens for that.
            finally:
                alive = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
                self.path.write_text(str(len(alive)), encoding="utf-8")


@pytest.mark.parametrize("shielded", [True, False])
def test_a_signal_to_the_whole_group_does_not_take_the_workers_away(
    tmp_path: Path, shielded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shielded:
        monkeypatch.setattr(Preemption, "shield_workers", lambda self, trainer: None)

    def fit(rank: int) -> None:
        os.setpgid(0, 0)
        callbacks = [ToTheGroup("backward", 3, tmp_path / "alive"), ProTrainCheckpoint(tmp_path / "root")]
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        L.Trainer(accelerator="cpu", callbacks=callbacks, **quiet).fit(Noisy(), datamodule=Workers())

    folder = tmp_path / "first"
    folder.mkdir()
    (outcome,) = run_ranks(fit, 1, folder)
    found = [each.manifest.step for each in find_checkpoints(tmp_path / "root").found]
    alive = int((tmp_path / "alive").read_text(encoding="utf-8"))
    if shielded:
        assert (outcome.error, found, alive) == (PREEMPTED, [3], 2)
    else:
        assert alive == 0


def _sleeping() -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    time.sleep(0.2)
    subprocess.run(["kill", str(process.pid)], check=True)
    return process


def test_a_worker_ends_if_its_parent_ends_it() -> None:
    preemption = Preemption()
    preemption._shield = SignalShield({signal.SIGTERM})
    process = _sleeping()
    process.join(0.3)
    assert process.is_alive()
    process.terminate()
    process.join(BOUND)
    assert process.exitcode == 0
    preemption.close()
    process = _sleeping()
    process.join(BOUND)
    assert process.exitcode == -signal.SIGTERM


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of SLURM; what `scontrol` was asked to do is written to the file."""
    asked, program = tmp_path / "asked", tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    for name, value in {"JOB_ID": "77", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return asked


def _slurm_fit(rank: int, root: Path, requeue: bool, number: int) -> None:
    saver = ProTrainCheckpoint(root)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plugins = [SLURMEnvironment(auto_requeue=requeue)]
    callbacks = [Signals("backward", 3, number), saver]
    trainer = L.Trainer(accelerator="cpu", plugins=plugins, callbacks=callbacks, default_root_dir=root, **quiet)
    trainer.fit(Noisy(), datamodule=Data())


@pytest.mark.parametrize("requeue", [True, False])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_job_of_slurm_is_saved_at_the_end_of_the_step_and_queued_again_if_that_is_wished(
    tmp_path: Path, slurm: Path, requeue: bool, number: int
) -> None:
    root, folder = tmp_path / "root", tmp_path / "first"
    folder.mkdir()
    (outcome,) = run_ranks(_slurm_fit, 1, folder, root, requeue, number)
    assert outcome.error == PREEMPTED
    assert [each.manifest.step for each in find_checkpoints(root).found] == [3]
    # Lightning saves within the backward pass, and resumes from that.
    assert not list(root.glob("hpc_ckpt*"))
    asked = requeue and number == signal.SIGUSR1
    assert (slurm.read_text() if slurm.exists() else "") == ("requeue 77\n" if asked else "")


def test_a_queue_that_refuses_is_said(tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    def fit(rank: int) -> str:
        with pytest.warns(UserWarning, match="SLURM did not requeue job 77: .*scontrol"), pytest.raises(SystemExit):
            _slurm_fit(rank, tmp_path / "root", True, signal.SIGUSR1)
        return "said"

    folder = tmp_path / "first"
    folder.mkdir()
    assert values(run_ranks(fit, 1, folder)) == ["said"]
