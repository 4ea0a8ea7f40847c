"""Ends a run with a checkpoint when a signal announces the end of its job; worker processes outlive the signal.

[Note: Workers]
Schedulers send a signal to whole groups of processes, and a worker of a DataLoader that dies takes the run with it in
the middle of a step. So workers block these signals; a thread of theirs hears them, and ends the process if the process
whose worker it is has sent it. What is forked in a fit does so at once. What is spawned inherits the blocked signals
from the thread that starts it, and hears them when it has imported what it needs; so its loader gets a context whose
processes begin like that. Workers of a fork server are left alone: the server itself would have to block the signals,
and would hand that on to all that it forks, whoever has asked for it and means to end it with a signal.

A handler only writes down that a signal has come: what it means is agreed on by all ranks at the end of a step, see
[Note: Facts] in agreement.py.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Any, NoReturn

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader


class SignalShield:
    """While it is there, processes that are forked are as [Note: Workers] says, and so are workers of a fit's loaders.

    Args:
        signals: What they block.
    """

    def __init__(self, signals: Collection[int]) -> None:
        self._signals = frozenset(signals)
        self._covered: list[tuple[DataLoader[Any], Any]] = []
        self._sources: list[tuple[Any, _DataLoaderSource]] = []
        register_after_fork(self, SignalShield._raise)  # It knows this object by a weak reference.

    def cover_fit(self, trainer: Trainer) -> None:
        """Loaders that are asked for in the fit are covered, those for training and those for validation."""
        for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
            self._sources.append((loop, loop._data_source))
            loop._data_source = _CoveredSource(loop._data_source, self)

    def cover(self, loaders: Any) -> None:
        """Workers of these loaders are shielded, if they are spawned.

        Args:
            loaders: As a Trainer takes them.
        """
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
        for loader in combined.flattened:
            if not isinstance(loader, DataLoader) or loader.num_workers < 1:
                continue
            given = loader.multiprocessing_context
            context: Any = multiprocessing.get_context() if given is None else given
            stock = type(context).__module__ == BaseContext.__module__  # Nobody's own.
            if stock and context.get_start_method() == "spawn":
                self._covered.append((loader, given))
                loader.multiprocessing_context = _Spawning(self._signals)

    def close(self) -> None:
        """Loaders have what they had."""
        while self._covered:
            loader, context = self._covered.pop()
            loader.multiprocessing_context = context
        while self._sources:
            loop, source = self._sources.pop()
            loop._data_source = source

    def _raise(self) -> None:
        exit_with_parent(self._signals, os.getppid())


def exit_with_parent(signals: Collection[int], parent: int) -> None:
    """This process blocks signals from here on, and ends if its parent ends it.

    Args:
        signals: Numbers.
        parent: Whose worker it is.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def listen() -> None:
        while True:
            heard = signal.sigwaitinfo(signals)
            if (heard.si_pid, heard.si_signo) == (parent, signal.SIGTERM):
                os._exit(0)  # What a worker does itself.

    threading.Thread(target=listen, name="hears signals", daemon=True).start()


class _CoveredSource(_DataLoaderSource):
    """Where Lightning gets loaders from, which are covered then."""

    def __init__(self, source: _DataLoaderSource, shield: SignalShield) -> None:
        super().__init__(source.instance, source.name)
        self._source, self._shield = source, shield

    def dataloader(self) -> Any:
        loaders = self._source.dataloader()
        self._shield.cover(loaders)
        return loaders


@contextmanager
def _blocked(signals: Collection[int]) -> Iterator[None]:
    resource_tracker.ensure_running()  # Who starts it unblocks SIGTERM.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _SpawnedWorker(SpawnProcess):
    signals: Collection[int] = ()

    def start(self) -> None:
        with _blocked(self.signals):
            super().start()

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.pid is not None
        exit_with_parent(self.signals, parent.pid)
        super().run()


class _Spawning(SpawnContext):
    def __init__(self, signals: Collection[int]) -> None:
        self._signals = signals

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        worker = _SpawnedWorker(*args, **options)
        worker.signals = self._signals
        return worker


# What a shell says of a process that SIGTERM has ended, 128 + 15; schedulers take it for a preemption.
EXIT_CODE = 143
# What a person does at a terminal: Ctrl-C, and closing it. Where a shell or `nohup` has them ignored, they stay so.
_OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
_SAID = b"\nCtrl-C: the run is saved and ends after this step. Press Ctrl-C again to end at once, with nothing saved.\n"


class Preemption:
    """Listens for signals from `listen` to `restore`.

    Attributes:
        received: The signal by which this rank was told to end, 0 before; and whether SLURM sent it to requeue the job.
        agreed: The same of all ranks, as far as they have agreed.
    """

    def __init__(self) -> None:
        self.received = (0, False)
        self.agreed = (0, False)
        self._previous: dict[int, Any] = {}
        self._requeue_signal: int | None = None
        self._requeues = False
        self._shield: SignalShield | None = None
        self._speaks = False
        self._terminals: list[int] = []

    def shield_workers(self, trainer: Trainer) -> None:
        """Workers that are started from here on outlive the signals, see [Note: Workers] in shields.py."""
        self._shield = SignalShield(self._signals(trainer))
        self._shield.cover_fit(trainer)

    def listen(self, trainer: Trainer) -> None:
        """From here on SIGTERM, what SLURM sends in its place, SIGHUP, and a first Ctrl-C, end no process.

        Lightning puts its own handlers in when a fit starts, and those from before back when it ends. Its handlers talk
        to other ranks, or save, in the middle of whatever is being done; they are left out.
        """
        if not self.is_listening:
            self.received, self.agreed = (signal.SIGTERM * trainer.received_sigterm, False), (0, False)
            self._speaks = trainer.is_global_zero
            self._terminals = [number for number in (1, 2) if os.isatty(number)]
            trainer._signal_connector.received_sigterm = False  # It would end the run with nothing saved.
            if threading.current_thread() is threading.main_thread():
                for number in self._signals(trainer):
                    self._previous[number] = signal.signal(number, self._note)

    @property
    def is_listening(self) -> bool:
        """Whether a signal on this rank would be heard."""
        return any(signal.getsignal(number) == self._note for number in self._previous)

    @property
    def is_agreed(self) -> bool:
        """Whether the run ends."""
        return any(self.agreed)

    def leave(self, trainer: Trainer, saved: str) -> NoReturn:
        """End the run, when everything is saved.

        Args:
            trainer: Whose run it is.
            saved: The newest checkpoint.

        Raises:
            SIGTERMException: The run ends, with the exit code that a shell gives the signal: 143 for SIGTERM.
        """
        name = signal.Signals(self.agreed[0]).name
        rank_zero_info(
            f"{name}: the run ends at step {trainer.global_step}, and is saved in {saved}. "
            'Start it again with ckpt_path="last" to go on.'
        )
        if self.agreed[1] and self._requeues and trainer.is_global_zero:
            _requeue()
        raise SIGTERMException(128 + self.agreed[0])

    def close(self) -> None:
        """Workers that are started from here on are as any others."""
        shield, self._shield = self._shield, None
        if shield is not None:
            shield.close()

    def restore(self) -> None:
        """Puts back the handlers that nobody else has put back."""
        for number, handler in self._previous.items():
            mine = (self._note, signal.SIG_DFL) if number == signal.SIGINT else (self._note,)
            if signal.getsignal(number) in mine and handler is not None:
                signal.signal(number, handler)
        self._previous = {}

    def _signals(self, trainer: Trainer) -> set[int]:
        heard: set[int] = {each for each in _OF_TERMINALS if signal.getsignal(each) != signal.SIG_IGN}
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.requeue_signal is not None:
            self._requeue_signal, self._requeues = environment.requeue_signal, environment.auto_requeue
            heard.add(environment.requeue_signal)
        return {signal.SIGTERM, *heard}

    def _note(self, number: int, frame: FrameType | None) -> None:
        requeues = number == self._requeue_signal
        # Of several signals the one that schedulers ask for counts, which has the highest number.
        self.received = (max(self.received[0], signal.SIGTERM if requeues else number), self.received[1] or requeues)
        if number == signal.SIGINT:
            # The system ends the process, whatever it waits for; a notebook's process is left to its user.
            again = self._previous.get(number) if hasattr(sys, "ps1") else signal.SIG_DFL
            signal.signal(number, again)
            if self._speaks:
                os.write(2, _SAID)
        if number == signal.SIGHUP:  # The terminal is gone: what is written to it would raise, and end the run.
            for terminal in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)


def _requeue() -> None:
    job = SLURMEnvironment.job_id()  # Tasks of an array have one each.
    if job is None:
        return
    try:
        subprocess.run(["scontrol", "requeue", str(job)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        rank_zero_warn(f"SLURM did not requeue job {job}: {getattr(error, 'stderr', None) or error}")
    else:
        rank_zero_info(f"SLURM requeues job {job}.")
