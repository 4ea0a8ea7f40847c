"""A signal on any rank ends all at the same step with one checkpoint; schedulers send it to groups and queue again."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pty
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import psutil
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.preemption import Preemption, SignalShield
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.verification import verify
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.noisy_runs import BATCHES, Batches, Data, Noisy
from tests.support.ranks import LIMIT, Outcome, run_ranks, trainer_on_rank, values
from tests.support.signalled_runs import EXIT_CODE, PREEMPTED, Both, Signals, Validated
from tests.support.trainers import SILENT


class SignalsInSave(ProTrainCheckpointIO):
    """Sends the signal while a file is being synced."""

    def __init__(self, signals: Signals) -> None:
        super().__init__()
        sync = self.files.sync

        def send(descriptor: int) -> None:
            signals.send("save")
            sync(descriptor)

        self.files.sync = send  # type: ignore[method-assign]


def _fit(
    rank: int,
    world: int,
    root: Path,
    path: Any = None,
    accumulate: int = 1,
    sent: Signals | None = None,
    max_steps: int = -1,
    streams: bool = False,
    **options: Any,
) -> list[Any]:
    module = Validated()
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002
    torch.manual_seed(rank)
    options = {"every_n_train_steps": 4, "monitor": "val_loss", **options}
    saver = ProTrainCheckpoint(root, **options)
    given: dict[str, Any] = {
        "max_epochs": 2,
        "max_steps": max_steps,
        "val_check_interval": 5,
        "accumulate_grad_batches": accumulate,
        "callbacks": [saver] if sent is None else [sent, saver],
        "plugins": [] if sent is None or sent.place != "save" else [SignalsInSave(sent)],
        "enable_checkpointing": True,
        "use_distributed_sampler": False,
    }
    if streams:
        given["kind"] = functools.partial(
            ProTrainStrategy, plan="offload", blocks=[nn.Linear], overlap_optimizer="backward", monitor=False
        )
    trainer = (
        trainer_on_rank(rank, world, **given)
        if world > 1 or streams
        else L.Trainer(accelerator="cpu", **SILENT, **given)
    )
    trainer.fit(module, datamodule=Both(), ckpt_path=path)
    # The process ends right here: nothing that shares memory may be handed out.
    weights = [value.flatten().tolist() for value in module.state_dict().values()]
    return [module.losses, weights, str(saver.best_model_score)]


def _ranks(
    world: int, folder: Path, *args: Any, sent: dict[int, Signals] | None = None, **options: Any
) -> list[Outcome]:
    folder.mkdir()

    def fit(rank: int) -> list[Any]:
        return _fit(rank, world, *args, sent=(sent or {}).get(rank), **options)

    return run_ranks(fit, world, folder)


Whole = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return the results of runs that are not interrupted."""

    @functools.cache
    def run(world: int, accumulate: int = 1, streams: bool = False) -> list[Any]:
        folder = tmp_path_factory.mktemp("whole")
        return values(_ranks(world, folder / "ranks", folder / "root", None, accumulate, streams=streams))

    return run


def _assert_goes_on(
    whole: Whole, world: int, folder: Path, root: Path, step: int, accumulate: int = 1, streams: bool = False
) -> None:
    """The run in `root` was preempted at a step, and ends with the bits of one that was not."""
    found = find_checkpoints(root).found
    assert found[0].manifest.step == step
    assert all(verify(each.path) == [] for each in found)
    assert not [name for name in os.listdir(root) if name.startswith(".")]
    resumed = values(_ranks(world, folder / "resumed", root, "last", accumulate, streams=streams))
    for one, other in zip(whole(world, accumulate, streams), resumed, strict=True):
        done = len(one[0]) - len(other[0])
        assert 0 < done < 2 * BATCHES
        assert other == [one[0][done:], one[1], one[2]]


@pytest.mark.parametrize(
    ("place", "batch", "accumulate", "step"),
    [
        ("start", 3, 1, 3),
        pytest.param("backward", 3, 1, 3, marks=pytest.mark.slow),
        ("step", 10, 1, 10),
        pytest.param("start", 5, 1, 5, marks=pytest.mark.slow),
        ("validation", 5, 1, 5),
        pytest.param("validation", 10, 1, 10, marks=pytest.mark.slow),
        ("save", 4, 1, 4),
        ("end", 2, 4, 1),
        pytest.param("backward", 5, 4, 2, marks=pytest.mark.slow),
        ("validation", 5, 4, 2),
    ],
)
def test_one_rank_is_saved_at_the_next_end_of_a_step(
    tmp_path: Path, whole: Whole, place: str, batch: int, accumulate: int, step: int
) -> None:
    root = tmp_path / "root"
    sent = {0: Signals(place, batch)}
    (outcome,) = _ranks(1, tmp_path / "first", root, None, accumulate, sent=sent)
    assert outcome.error == PREEMPTED
    _assert_goes_on(whole, 1, tmp_path, root, step, accumulate)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("place", ["start", "step"])
def test_a_run_whose_host_steps_behind_backward_is_saved(tmp_path: Path, whole: Whole, world: int, place: str) -> None:
    root = tmp_path / "root"
    outcomes = _ranks(world, tmp_path / "first", root, sent={world - 1: Signals(place, 6)}, streams=True)
    assert [outcome.error for outcome in outcomes] == [PREEMPTED] * world
    _assert_goes_on(whole, world, tmp_path, root, 6, streams=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_a_terminal_sends_saves_the_run_too(
    tmp_path: Path, whole: Whole, number: int, code: int, world: int, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes = _ranks(world, tmp_path / "first", tmp_path / "root", sent={world - 1: Signals("start", 3, number)})
    assert [outcome.error for outcome in outcomes] == [f"SIGTERMException: {code}"] * world
    told = capfd.readouterr().err
    assert ("Press Ctrl-C again to end now" in told) == (number == signal.SIGINT and world == 1)
    _assert_goes_on(whole, world, tmp_path, tmp_path / "root", 3)


def test_the_checkpoint_of_a_run_that_was_ended_is_named(caplog: pytest.LogCaptureFixture) -> None:
    preemption = Preemption()
    preemption.agreed = signal.SIGHUP, False
    with caplog.at_level("INFO"), pytest.raises(SIGTERMException, match="129"):
        preemption.end_run(L.Trainer(accelerator="cpu", logger=False, barebones=True), "runs/step=3.ckpt")
    assert 'SIGHUP: the run ends at step 0, and is saved in runs/step=3.ckpt. Resume it with ckpt_path="last"' in (
        caplog.text
    )


class Twice(Signals):
    """Ctrl-C is pressed again within the step."""

    def send(self, place: str) -> None:
        if (place, self.begun) == (self.place, self.batch):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_interrupt_ends_the_process_at_once(tmp_path: Path) -> None:
    (outcome,) = _ranks(1, tmp_path / "first", tmp_path / "root", sent={0: Twice("start", 5)})
    assert outcome.error == "killed"
    assert [each.manifest.step for each in find_checkpoints(tmp_path / "root").found] == [4]


@pytest.mark.filterwarnings("ignore:monitor=.val_loss. was never logged.* ended before an evaluation")
def test_signals_that_a_shell_has_ignored_stay_ignored(tmp_path: Path) -> None:
    def fit(rank: int) -> list[Any]:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As `nohup` does.
        return _fit(0, 1, tmp_path / "root", max_steps=4, sent=Signals("start", 2, signal.SIGHUP))

    folder = tmp_path / "first"
    folder.mkdir()
    values(run_ranks(fit, 1, folder))
    assert find_checkpoints(tmp_path / "root").found[0].manifest.step == 4


@pytest.mark.parametrize(
    ("who", "place", "batch", "accumulate", "step"),
    [
        ((0,), "start", 3, 1, 3),
        ((1,), "validation", 5, 1, 5),
        ((1,), "end", 2, 4, 1),
        pytest.param((1,), "start", 3, 1, 3, marks=pytest.mark.slow),
        pytest.param((0,), "end", 2, 4, 1, marks=pytest.mark.slow),
        pytest.param((0, 1), "validation", 5, 1, 5, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_are_saved_at_the_same_step_whoever_gets_the_signal(
    tmp_path: Path, whole: Whole, who: tuple[int, ...], place: str, batch: int, accumulate: int, step: int
) -> None:
    root = tmp_path / "root"
    sent = {rank: Signals(place, batch) for rank in who}
    outcomes = _ranks(2, tmp_path / "first", root, None, accumulate, sent=sent)
    assert [outcome.error for outcome in outcomes] == [PREEMPTED] * 2
    assert "hangs" not in [outcome.error for outcome in outcomes]
    _assert_goes_on(whole, 2, tmp_path, root, step, accumulate)


def test_a_signal_in_a_save_of_rank_0_ends_both_without_a_further_step(tmp_path: Path, whole: Whole) -> None:
    outcomes = _ranks(2, tmp_path / "first", tmp_path / "root", sent={0: Signals("save", 4)})
    assert [outcome.error for outcome in outcomes] == [PREEMPTED] * 2
    _assert_goes_on(whole, 2, tmp_path, tmp_path / "root", 4)


@pytest.mark.parametrize("place", ["start", "save"])
def test_further_signals_change_nothing(tmp_path: Path, whole: Whole, place: str) -> None:
    (outcome,) = _ranks(1, tmp_path / "first", tmp_path / "root", sent={0: Signals(place, 4, times=5)})
    assert outcome.error == PREEMPTED
    _assert_goes_on(whole, 1, tmp_path, tmp_path / "root", 4)


def test_a_signal_that_lightning_has_heard_before_training_is_not_lost(tmp_path: Path) -> None:
    class Early(Both):
        def train_dataloader(self) -> Batches:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().train_dataloader()

    def fit(rank: int) -> None:
        saver = ProTrainCheckpoint(tmp_path / "root")
        trainer = L.Trainer(accelerator="cpu", num_sanity_val_steps=0, max_epochs=2, callbacks=[saver], **SILENT)
        trainer.fit(Validated(), datamodule=Early())

    folder = tmp_path / "first"
    folder.mkdir()
    (outcome,) = run_ranks(fit, 1, folder)
    assert outcome.error == PREEMPTED
    assert [each.manifest.step for each in find_checkpoints(tmp_path / "root").found] == [1]


def test_without_it_lightning_ends_the_run_and_nothing_is_saved(tmp_path: Path) -> None:
    # The control: the same signal is sent, and is seen.
    options = {"sent": {0: Signals("start", 3)}, "save_on_preemption": False}
    (outcome,) = _ranks(1, tmp_path / "first", tmp_path / "root", **options)
    assert outcome.error is not None
    assert outcome.error.startswith("SIGTERMException")
    assert [each.manifest.step for each in find_checkpoints(tmp_path / "root").found] == []


@pytest.mark.filterwarnings("ignore:monitor=.val_loss. was never logged.* ended before an evaluation")
def test_the_handlers_of_before_are_put_back(tmp_path: Path) -> None:
    mine = lambda number, frame: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, mine)
    heard = []

    class Looks(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            heard.append(signal.getsignal(signal.SIGTERM))

        def on_train_batch_end(self, *_: Any) -> None:
            heard.append(signal.getsignal(signal.SIGTERM))
            if len(heard) == 4:
                raise RuntimeError("of the user")

    try:
        _fit(0, 1, tmp_path / "a", max_steps=2)
        assert signal.getsignal(signal.SIGTERM) is mine
        saver = ProTrainCheckpoint(tmp_path / "b")
        trainer = L.Trainer(accelerator="cpu", callbacks=[saver, Looks()], **SILENT)
        with pytest.raises(RuntimeError, match="of the user"):
            trainer.fit(Noisy(), datamodule=Data())
        assert signal.getsignal(signal.SIGTERM) is mine
        assert mine not in heard
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_rank_that_is_gone_ends_the_other_one(tmp_path: Path) -> None:
    outcomes = _ranks(2, tmp_path / "first", tmp_path / "root", sent={1: Signals("end", 3, signal.SIGKILL)})
    assert outcomes[1].error == "killed"
    assert outcomes[0].error is not None
    assert outcomes[0].error != PREEMPTED
    assert outcomes[0].error != "hangs"


def _random_place(chance: random.Random, left: int) -> Signals:
    return Signals(chance.choice(["start", "backward", "step", "end"]), chance.randrange(1, max(left // 3, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_ten_preemptions_in_a_row_change_nothing(tmp_path: Path, whole: Whole, world: int) -> None:
    chance = random.Random(world)
    root, path = tmp_path / "root", None
    ended = 0
    for number in range(10):
        done = max((each.manifest.step for each in find_checkpoints(root).found), default=0)
        sent = {chance.randrange(world): _random_place(chance, 2 * BATCHES - done)}
        outcomes = _ranks(world, tmp_path / str(number), root, path, sent=sent)
        path = "last"
        ended += [outcome.error for outcome in outcomes] == [PREEMPTED] * world
    assert ended == 10
    resumed = values(_ranks(world, tmp_path / "resumed", root, "last"))
    for one, other in zip(whole(world), resumed, strict=True):
        assert other == [one[0][len(one[0]) - len(other[0]) :], one[1], one[2]]
    assert not list(root.glob("*.aside"))


SCRIPT = """
import sys
from pathlib import Path
import lightning as L
from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from tests.support.noisy_runs import Data, Noisy

class Slow(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        print("step", trainer.global_step, flush=True)

saver = ProTrainCheckpoint(Path(sys.argv[1]))
L.Trainer(accelerator="cpu", logger=False, max_epochs=-1, callbacks=[Slow(), saver]).fit(Noisy(), datamodule=Data())
"""


@pytest.mark.slow
def test_the_process_says_143(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "root")]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 5"):
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE
    assert find_checkpoints(tmp_path / "root").found[0].manifest.step >= 5


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_is_saved(tmp_path: Path) -> None:
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(Path(__file__).parents[2])
        os.execv(sys.executable, [sys.executable, "-c", SCRIPT, str(tmp_path / "root")])
    told = b""
    while b"step 5" not in told:
        told += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 129
    assert find_checkpoints(tmp_path / "root").found[0].manifest.step >= 5


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
        L.Trainer(accelerator="cpu", callbacks=callbacks, **SILENT).fit(Noisy(), datamodule=Workers())

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
    process.join(LIMIT)
    assert process.exitcode == 0
    preemption.close()
    process = _sleeping()
    process.join(LIMIT)
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
    plugins = [SLURMEnvironment(auto_requeue=requeue)]
    callbacks = [Signals("backward", 3, number), saver]
    trainer = L.Trainer(accelerator="cpu", plugins=plugins, callbacks=callbacks, default_root_dir=root, **SILENT)
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
