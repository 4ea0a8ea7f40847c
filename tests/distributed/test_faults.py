"""A rank that fails, dies or is told to end: all leave soon and before the same batch; rank and step are named."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_protrain import ProTrainStrategy
from lightning_protrain.distributed import rank_sync
from lightning_protrain.distributed.rank_sync import SigtermNote, SigtermWatch
from lightning_protrain.fsdp2.strategy import ProTrainFSDP2Strategy
from lightning_protrain.rank_store import FailedElsewhere
from tests.support.faulty_ranks import AT_END, GONE, ONGOING, TOKENS, UNEVEN, Faulty
from tests.support.rank_models import Module, strategy_of
from tests.support.ranks import kill_this_rank, run_ranks, trainer_on_rank, values
from tests.support.terminated_ranks import PLACES, Told
from tests.support.trainers import QUIET


def _train(rank: int, placement: str, fault: str, epochs: int) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Faulty(rank, fault)
    trainer = trainer_on_rank(
        rank, 2, kind=lambda **process: strategy_of(placement, module, **process), max_epochs=epochs
    )
    trainer.fit(module)
    return trainer.global_step


# By fault: epochs, and what is found in the error of either rank.
FAULTS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "raise": (
        1,
        ("Training at step 3 ends on rank 0: rank 1 failed (training at step 3) with ValueError: boom",),
        ("ValueError: boom",),
    ),
    "raise after backward": (
        1,
        ("Training at step ", " ends on rank 0: rank 1 failed (training at step 2) with ValueError: boom"),
        ("ValueError: boom",),
    ),
    "kill": (1, ("Training at step 3 ends on rank 0", GONE), ("killed",)),
    "kill after backward": (1, ("Training at step ", GONE), ("killed",)),
    "skip": (1, ("rank 1 failed (training at step 3) with RuntimeError: Skipping",), ("RuntimeError: Skipping",)),
    "uneven": (1, (UNEVEN,), (UNEVEN,)),
    "stream longer": (1, (AT_END, ONGOING), (AT_END, ONGOING)),
    "stream shorter": (2, ("diverged", "rank 1: the end of epoch 0"), ("rank 0: batch 5 of epoch 0",)),
}
# What is the same code under every placement need not be seen under each of them every time.
QUICK = {"raise", "raise after backward", "kill"}
CASES = [
    pytest.param(placement, fault, marks=() if placement == "shard" or fault in QUICK else (pytest.mark.slow,))
    for placement in ("shard", "replicate", "resident")
    for fault in FAULTS
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("placement", "fault"), CASES)
def test_all_ranks_leave_and_name_who_is_missing(placement: str, fault: str, tmp_path: Path) -> None:
    epochs, *expected = FAULTS[fault]
    outcomes = run_ranks(_train, 2, tmp_path, placement, fault, epochs)
    for outcome, texts in zip(outcomes, expected, strict=True):
        assert outcome.error != "hangs", outcomes
        for text in texts:
            assert text in str(outcome.error), outcomes


SETTINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sharding: rank 0 has 'shard', rank 1 has 'replicate'", {"sharding": "replicate"}, {}),
    ("reduce_dtype: rank 0 has None, rank 1 has 'bfloat16'", {"reduce_dtype": "bfloat16"}, {}),
    ("adapter_grad_sync: rank 0 has 'auto', rank 1 has 'flat'", {"adapter_grad_sync": "flat"}, {}),
    ("static_graph: rank 0 has False, rank 1 has True", {"static_graph": True}, {}),
    ("ddp_comm_hook: rank 0 has none, rank 1 has one", {"ddp_comm_hook": print}, {}),
    ("gradient_clip_val: rank 0 has None, rank 1 has 0.1", {}, {"gradient_clip_val": 0.1}),
    ("accumulate_grad_batches: rank 0 has 1, rank 1 has 3", {}, {"accumulate_grad_batches": 3}),
]


def _set_up(rank: int) -> list[str]:
    torch.set_num_threads(1)
    said = []
    for _, ours, options in SETTINGS:
        torch.manual_seed(0)
        module = Module("full")
        given = {"sharding": "shard", "plan": "offload", "monitor": False, **(ours if rank else {})}
        trainer = trainer_on_rank(
            rank,
            2,
            kind=lambda given=given, **process: ProTrainStrategy(**given, **process),
            max_steps=1,
            **(options if rank else {}),
        )
        with pytest.raises(ValueError, match="The ranks have different") as raised:
            trainer.fit(module)
        said.append(str(raised.value))
    return said


def test_ranks_with_different_settings_are_refused(tmp_path: Path) -> None:
    for said in values(run_ranks(_set_up, 2, tmp_path)):
        for message, (setting, *_) in zip(said, SETTINGS, strict=True):
            assert f"The ranks have different values of {setting}." in message


class Talkative(Faulty):
    """Ranks gather by themselves what they have measured: at the end of a validation, and of an epoch."""

    def __init__(self, rank: int, fault: str, validates: bool) -> None:
        super().__init__(rank, fault)
        self.validates = validates
        self.mean = MeanMetric()

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(TOKENS[: 4 if self.validates else 0]), batch_size=2)

    def validation_step(self, batch: list[Tensor]) -> None:
        if self.fault == "kill in validation" and self.rank == 1:
            kill_this_rank()
        self.mean.update(Module.training_step(self, batch))
        self.log("mean", self.mean)

    def on_train_epoch_end(self) -> None:
        self.all_gather(torch.ones(1))


def _train_talkative(rank: int, fault: str, validates: bool) -> list[str]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Talkative(rank, fault, validates)
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0}
    trainer = trainer_on_rank(rank, 2, kind=lambda **process: strategy_of("shard", module, **process), **options)
    try:
        trainer.fit(module)
    except RuntimeError as error:
        return [str(error), *getattr(error, "__notes__", [])]
    return []


@pytest.mark.parametrize(("fault", "longer"), [("stream longer", 1), ("stream shorter", 0)])
@pytest.mark.parametrize("validates", [True, False])
def test_ranks_that_gather_behind_their_last_batch_come_apart(
    fault: str, longer: int, validates: bool, tmp_path: Path
) -> None:
    place = "validation after batch 5 of epoch 0" if validates else "the end of epoch 0"
    for outcome in run_ranks(_train_talkative, 2, tmp_path, fault, validates):
        assert outcome.error != "hangs"
        assert f"rank {longer}: batch 5 of epoch 0" in outcome.value[0]
        assert f"rank {1 - longer}: {place}" in outcome.value[0]


def test_a_rank_missing_in_a_collective_of_user_code_is_noted(tmp_path: Path) -> None:
    first, second = run_ranks(_train_talkative, 2, tmp_path, "kill in validation", True)
    assert first.error != "hangs"
    assert second.error == "killed"
    assert first.value[1].startswith(f"Training at step 4 ends on rank 0: {GONE}"), first


SAID = FailedElsewhere("Training at step 3 ends on rank 0: rank 1 is gone")
KINDS = pytest.mark.parametrize("kind", [ProTrainStrategy, ProTrainFSDP2Strategy])


def strategy_of_two(kind: type[ProTrainStrategy], notes: list[str]) -> ProTrainStrategy:
    """Return a strategy that has met another rank, which is gone now; `notes` receives its notes for other ranks."""
    strategy = kind()
    store = SimpleNamespace(doing="Training at step 3", sign_off=notes.append, explain=lambda: SAID)
    strategy._sync.mesh = SimpleNamespace(store=store)  # type: ignore[assignment]
    return strategy


@KINDS
@pytest.mark.parametrize(
    ("error", "is_of_collective"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (RuntimeError("Timed out waiting 10000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_errors_of_collectives_are_explained(kind: type[ProTrainStrategy], error: Any, is_of_collective: bool) -> None:
    strategy = strategy_of_two(kind, [])
    assert strategy._sync.explain(error) is (SAID if is_of_collective else error)
    with pytest.raises((RuntimeError, ValueError)) as raised, strategy._sync.explaining():
        raise error
    assert (raised.value, raised.value.__cause__) == ((SAID, error) if is_of_collective else (error, None))
    strategy._sync.mesh = None
    assert strategy._sync.explain(error) is error
    with pytest.raises((RuntimeError, ValueError)) as raised, strategy._sync.explaining():
        raise error
    assert raised.value is error


@KINDS
def test_errors_are_explained_once(kind: type[ProTrainStrategy]) -> None:
    strategy = strategy_of_two(kind, [])
    first = FailedElsewhere(
        "Training at step 3 ends on rank 0: rank 1 failed with RuntimeError: Connection closed by peer"
    )
    with pytest.raises(RuntimeError) as raised, strategy._sync.explaining():
        raise first
    assert raised.value is first


@KINDS
def test_a_rank_that_fails_says_where(kind: type[ProTrainStrategy]) -> None:
    notes: list[str] = []
    strategy = strategy_of_two(kind, notes)
    strategy.on_exception(KeyError("x"))
    assert notes == ["failed (training at step 3) with KeyError: 'x'"]
    for error, explained in (
        (RuntimeError("Connection closed by peer"), [str(SAID)]),
        (FailedElsewhere("Training at step 3 ends on rank 0: Connection closed by peer"), []),
        (RuntimeError("shapes"), []),
    ):
        strategy.on_exception(error)
        assert getattr(error, "__notes__", []) == explained


@KINDS
def test_one_rank_meets_nobody(kind: type[ProTrainStrategy]) -> None:
    strategy = kind()
    assert strategy._sync.mesh is None
    assert strategy.broadcast("x") == "x"
    assert strategy._sync.meet("anywhere", flag=True)
    assert not strategy._sync.meet("anywhere")
    strategy.barrier()
    strategy.on_exception(KeyError("x"))


def _train_told(rank: int, placement: str, who: tuple[int, ...], place: str) -> Any:
    """Return the number of trained batches, the exception that ended the run, and whether the old handler is back."""
    torch.set_num_threads(1)
    before = signal.getsignal(signal.SIGTERM)
    module = Told(rank in who, place)
    options = {"limit_train_batches": 6, "limit_val_batches": 2, "val_check_interval": 3, "max_epochs": 2}
    trainer = trainer_on_rank(rank, 2, kind=lambda **process: strategy_of(placement, module, **process), **options)
    try:
        trainer.fit(module)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the test wants to see it)
        end = type(error).__name__
    else:
        end = "none"
    return end, module.num_batches, signal.getsignal(signal.SIGTERM) == before, dist.get_rank()


@pytest.mark.sample(5)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)], ids=str)
def test_all_ranks_end_before_the_same_batch(who: tuple[int, ...], place: str, tmp_path: Path) -> None:
    outcomes = run_ranks(_train_told, 2, tmp_path, "shard", who, place)
    batches = {"validation": 3, "last batch": 6}.get(place, 5)
    assert [outcome.value for outcome in outcomes] == [("SIGTERMException", batches, True, rank) for rank in range(2)]
    assert "hangs" not in [outcome.error for outcome in outcomes]


@pytest.mark.parametrize("agrees", [False, True])
def test_a_signal_is_written_down_for_whoever_looks_for_it(agrees: bool) -> None:
    """Before ranks meet, Lightning ends the rank by itself; from then on, only the rank's note records the signal."""
    trainer = L.Trainer(accelerator="cpu", **QUIET)
    note = SigtermNote()
    note.listen(trainer)
    if agrees:
        note.wait_for_others()
    connector = trainer._signal_connector
    connector.register_signal_handlers()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (trainer.received_sigterm, note.received) == (not agrees, agrees)
    finally:
        connector.teardown()
    note.close()
    assert "_sigterm_notifier_fn" not in vars(connector)
    note.listen(trainer)
    assert not note.received
    note.close()


class Different(Module):
    """A module that rank 0 uses whole and rank 1 in part: rank 0 waits for gradients that rank 1 never sends."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__("full")
        self.rank, self.folder = rank, folder

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return super().training_step(batch) if self.rank == 0 else self.model.embedding(batch[0]).mean()

    def on_before_backward(self, loss: Tensor) -> None:
        (self.folder / f"rank {self.rank} is there").touch()


def _wait_for_nobody(rank: int, folder: Path) -> None:
    """Train `Different`, and send SIGTERM to this process once both ranks have begun the backward."""
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"stderr {rank}", os.O_CREAT | os.O_WRONLY), 2)
    SigtermWatch.patience = 0.5
    module = Different(rank, folder)
    trainer = trainer_on_rank(rank, 2, kind=lambda **process: strategy_of("resident", module, **process))

    def send() -> None:
        while len([*folder.glob("rank * is there")]) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    trainer.fit(module)


@pytest.mark.slow
def test_a_rank_that_a_collective_blocks_ends_upon_sigterm(tmp_path: Path) -> None:
    blocked, other = run_ranks(_wait_for_nobody, 2, tmp_path, tmp_path)
    assert (blocked.error, blocked.code) == ("killed", 143)
    told = (tmp_path / "stderr 0").read_text()
    assert "SIGTERM: rank 0 ends and saves nothing, because a collective or another native call has blocked it" in told
    assert "loss.backward" in told or "run_backward" in told
    assert "rank 0 is gone without a word" in str(other.error)


class Counted(threading.Event):
    """An event that counts how often a wait for it has begun."""

    num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        return super().wait(timeout)


def _wait_in(rank: int, module: str, native: bool) -> Any:
    """Return whether the handler of SIGURG was restored after a wait in a module, which ends if SIGTERM is survived."""
    note, lock, libc = SigtermNote(), threading.Lock(), ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)  # Zeros: unlocked.
    note._watch._answered = answered = Counted()
    note._watch.patience = 0.1 if native else 60.0
    note.listen(L.Trainer(accelerator="cpu", **QUIET))
    signal.signal(signal.SIGTERM, lambda *_: None)
    release = partial(libc.pthread_mutex_unlock, mutex) if native else lock.release

    def end() -> None:
        while answered.num_waits < 3 if module == "lightning_protrain.checkpoint.disk" else not answered.is_set():
            time.sleep(0.01)
        release()

    if not native:  # As if the first signal came right before the wait.
        kill, lost = signal.pthread_kill, iter([True])
        signal.pthread_kill = lambda *to: None if next(lost, False) else kill(*to)
    # Any signal ends a sleep, but no lock.
    acquire = partial(libc.pthread_mutex_lock, mutex) if native else lock.acquire
    acquire()
    threading.Thread(target=end, daemon=True).start()
    os.kill(os.getpid(), signal.SIGTERM)
    exec("acquire()", {"__name__": module, "acquire": acquire})
    note.close()
    return signal.getsignal(signal.SIGURG) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("module", "native", "survives"),
    [
        pytest.param("user", True, False, id="a native call"),
        pytest.param("user", False, True, id="a wait in Python"),
        pytest.param("lightning_protrain.checkpoint.disk", True, True, id="a file is written"),
    ],
)
def test_sigterm_ends_whoever_waits_in_native_code(module: str, native: bool, survives: bool, tmp_path: Path) -> None:
    (outcome,) = run_ranks(_wait_in, 1, tmp_path, module, native)
    assert (outcome.value, outcome.code) == ((True, 0) if survives else (None, 143)), outcome


def test_another_watch_of_signals_is_left_alone() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.setblocking(False)
        assert signal.set_wakeup_fd(theirs.fileno()) == -1
        try:
            watch = SigtermWatch()
            watch.begin(0)
            assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL
            watch.close()
        finally:
            assert signal.set_wakeup_fd(-1) == theirs.fileno()


def test_a_rank_in_a_slow_batch_is_blocked_only_later(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = SigtermWatch()
    for now in (5.0, 7.0, 20.0, 21.0):
        monkeypatch.setattr(rank_sync.time, "monotonic", lambda now=now: now)
        watch.note_batch()
    assert watch._longest_batch == 13.0
