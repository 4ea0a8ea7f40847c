"""Ends a run with a checkpoint when a signal announces the end of its job; worker processes survive the signal.

Schedulers send a signal to whole groups of processes. A worker of a DataLoader that dies ends the run in the middle of
a step. So forked workers block these signals, and a thread in each worker exits the process only if its parent has sent
the signal. Workers that are spawned or started by a fork server are not shielded.

A signal handler only records the signal. All ranks agree on its meaning at the end of a step, see [Note: Flags] in
callbacks/checkpoint/rendezvous.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Any, NoReturn

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn


class SignalShield:
    """Shields processes that are forked while it exists.

    Args:
        signals: Signals that they block.
    """

    def __init__(self, signals: Collection[int]) -> None:
        self._signals = frozenset(signals)
        register_after_fork(self, SignalShield._raise)  # It keeps only a weak reference to this object.

    def _raise(self) -> None:
        exit_with_parent(self._signals, os.getppid())


def exit_with_parent(signals: Collection[int], parent: int) -> None:
    """Block signals in this process, and exit if its parent sends SIGTERM.

    Args:
        signals: Numbers of the signals.
        parent: Process id of the parent.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def listen() -> None:
        while True:
            heard = signal.sigwaitinfo(signals)
            if (heard.si_pid, heard.si_signo) == (parent, signal.SIGTERM):
                os._exit(0)  # As a worker does by default.

    threading.Thread(target=listen, name="hears signals", daemon=True).start()


# Exit code of a shell for a process ended by SIGTERM, 128 + 15; schedulers treat it as preemption.
EXIT_CODE = 143
# Signals of a terminal: Ctrl-C, and closing it. They stay ignored if a shell or `nohup` ignores them.
_OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
_SAID = b"\nCtrl-C: the run is saved and ends after this step. Press Ctrl-C again to end at once, with nothing saved.\n"


class Preemption:
    """Listens for signals from `listen` to `restore`.

    Attributes:
        received: Signal that told this rank to end, or 0; and True if SLURM sent it to requeue the job.
        agreed: Maximum of `received` over all ranks at the latest step.
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
        """Shield workers that are forked from now on."""
        self._shield = SignalShield(self._signals(trainer))

    def listen(self, trainer: Trainer) -> None:
        """Handle SIGTERM, SLURM's signal, SIGHUP, and a first Ctrl-C without ending the process.

        Lightning installs its own handlers when a fit starts, and restores the former ones when it ends. Its handlers
        talk to other ranks, or save, in the middle of anything; this method replaces them.
        """
        if not self.is_listening:
            self.received, self.agreed = (signal.SIGTERM * trainer.received_sigterm, False), (0, False)
            self._speaks = trainer.is_global_zero
            self._terminals = [number for number in (1, 2) if os.isatty(number)]
            trainer._signal_connector.received_sigterm = False  # Otherwise Lightning ends the run without a save.
            if threading.current_thread() is threading.main_thread():
                for number in self._signals(trainer):
                    self._previous[number] = signal.signal(number, self._note)

    @property
    def is_listening(self) -> bool:
        """True if this rank handles signals."""
        return any(signal.getsignal(number) == self._note for number in self._previous)

    @property
    def is_agreed(self) -> bool:
        """True if all ranks have agreed to end the run."""
        return any(self.agreed)

    def leave(self, trainer: Trainer, saved: str) -> NoReturn:
        """End the run after everything is saved.

        Args:
            trainer: Trainer of the run.
            saved: Path of the newest checkpoint.

        Raises:
            SIGTERMException: Always, with the exit code of a shell for the signal: 143 for SIGTERM.
        """
        name = signal.Signals(self.agreed[0]).name
        rank_zero_info(
            f"{name}: the run ends at step {trainer.global_step}, and is saved in {saved}. "
            'Resume it with ckpt_path="last".'
        )
        if self.agreed[1] and self._requeues and trainer.is_global_zero:
            _requeue()
        raise SIGTERMException(128 + self.agreed[0])

    def close(self) -> None:
        """Stop shielding workers that are forked from now on."""
        self._shield = None

    def restore(self) -> None:
        """Restore the handlers that are still replaced."""
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
        # The scheduler's signal wins over others: SIGTERM has the highest number.
        self.received = (max(self.received[0], signal.SIGTERM if requeues else number), self.received[1] or requeues)
        if number == signal.SIGINT:
            # The next Ctrl-C ends the process whatever it waits for; a notebook keeps its own handler.
            again = self._previous.get(number) if hasattr(sys, "ps1") else signal.SIG_DFL
            signal.signal(number, again)
            if self._speaks:
                os.write(2, _SAID)
        if number == signal.SIGHUP:  # The terminal is gone: writing to it would raise and end the run.
            for terminal in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)


def _requeue() -> None:
    job = SLURMEnvironment.job_id()  # Each task of an array has its own job.
    if job is None:
        return
    try:
        subprocess.run(["scontrol", "requeue", str(job)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        rank_zero_warn(f"SLURM did not requeue job {job}: {getattr(error, 'stderr', None) or error}")
    else:
        rank_zero_info(f"SLURM requeues job {job}.")
