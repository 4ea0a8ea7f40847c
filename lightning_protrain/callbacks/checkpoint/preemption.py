"""Saves and ends a run when a signal announces the end of its job.

A signal handler only records the signal. At the end of a step, the ranks agree to end the run, see [Note: Flags] in
callbacks/checkpoint/saving_points.py.

A scheduler may send the signal to all processes of a job. If a DataLoader worker died of it, the run would end within a
step. So forked workers block these signals, and a thread in each worker exits the process only if its parent sent
SIGTERM. Workers that are spawned or started by a fork server are not protected.
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
    """Blocks signals in processes that are forked while this object exists.

    Args:
        signals: Numbers of the signals.
    """

    def __init__(self, signals: Collection[int]) -> None:
        self._signals = frozenset(signals)
        register_after_fork(self, SignalShield._raise)  # keeps only a weak reference to this object

    def _raise(self) -> None:
        """Block the signals in this process, but exit if its parent sends SIGTERM."""
        signals, parent = self._signals, os.getppid()
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)

        def listen() -> None:
            while True:
                received = signal.sigwaitinfo(signals)
                if (received.si_pid, received.si_signo) == (parent, signal.SIGTERM):
                    os._exit(0)

        threading.Thread(target=listen, name="signal listener", daemon=True).start()


# Signals of a terminal: Ctrl-C, and closing the terminal. A signal that the process already ignores, as under `nohup`,
# stays ignored.
_OF_TERMINALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name))
_ON_CTRL_C = b"\nCtrl-C: the run is saved and ends after this step. Press Ctrl-C again to end now without saving.\n"


class Preemption:
    """Handles signals between calls of `listen` and `restore`.

    Attributes:
        received: Number of the signal that this rank received, or 0; and True if it is SLURM's signal to requeue.
        agreed: Maximum of `received` over all ranks at the end of the latest step.
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

    def __reduce__(self) -> tuple[Any, ...]:
        return Preemption, ()  # A copy handles no signals.

    def shield_workers(self, trainer: Trainer) -> None:
        """Block the signals in workers that are forked from now on."""
        self._shield = SignalShield(self._signals(trainer))

    def listen(self, trainer: Trainer) -> None:
        """Install handlers for SIGTERM, SLURM's signal, SIGHUP and Ctrl-C that only record the signal.

        The handlers replace Lightning's, which would save or communicate at any point of a step. Lightning restores
        the user's handlers when the fit ends.
        """
        if not self.is_listening:
            self.received, self.agreed = (signal.SIGTERM * trainer.received_sigterm, False), (0, False)
            self._speaks = trainer.is_global_zero
            self._terminals = [number for number in (1, 2) if os.isatty(number)]
            trainer._signal_connector.received_sigterm = False  # otherwise Lightning ends the run without saving
            if threading.current_thread() is threading.main_thread():
                for number in self._signals(trainer):
                    self._previous[number] = signal.signal(number, self._note)

    @property
    def is_listening(self) -> bool:
        """True if the handlers of this object are installed."""
        return any(signal.getsignal(number) == self._note for number in self._previous)

    @property
    def is_agreed(self) -> bool:
        """True if all ranks have agreed to end the run."""
        return any(self.agreed)

    def end_run(self, trainer: Trainer, saved: str) -> NoReturn:
        """End the run, after the checkpoint is saved.

        Args:
            trainer: Trainer of the run.
            saved: Path of the newest checkpoint.

        Raises:
            SIGTERMException: Always; its exit code is 128 plus the number of the signal.
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
        """Stop blocking the signals in workers that are forked from now on."""
        self._shield = None

    def restore(self) -> None:
        """Restore the previous handlers of signals that are still handled by this object."""
        for number, handler in self._previous.items():
            mine = (self._note, signal.SIG_DFL) if number == signal.SIGINT else (self._note,)
            if signal.getsignal(number) in mine and handler is not None:
                signal.signal(number, handler)
        self._previous = {}

    def _signals(self, trainer: Trainer) -> set[int]:
        handled: set[int] = {number for number in _OF_TERMINALS if signal.getsignal(number) != signal.SIG_IGN}
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.requeue_signal is not None:
            self._requeue_signal, self._requeues = environment.requeue_signal, environment.auto_requeue
            handled.add(environment.requeue_signal)
        return {signal.SIGTERM, *handled}

    def _note(self, number: int, frame: FrameType | None) -> None:
        requeues = number == self._requeue_signal
        # The scheduler's signal takes precedence: SIGTERM has the highest number of these signals.
        self.received = (max(self.received[0], signal.SIGTERM if requeues else number), self.received[1] or requeues)
        if number == signal.SIGINT:
            # The next Ctrl-C ends the process at once. An interactive session, such as a notebook, gets its own handler
            # back.
            again = self._previous.get(number) if hasattr(sys, "ps1") else signal.SIG_DFL
            signal.signal(number, again)
            if self._speaks:
                os.write(2, _ON_CTRL_C)
        if number == getattr(signal, "SIGHUP", None):  # The terminal is closed, so writing to it would raise an error.
            for terminal in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)


def _requeue() -> None:
    job = SLURMEnvironment.job_id()  # each task of a job array has an id of its own
    if job is None:
        return
    try:
        subprocess.run(["scontrol", "requeue", str(job)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        rank_zero_warn(f"SLURM did not requeue job {job}: {getattr(error, 'stderr', None) or error}")
    else:
        rank_zero_info(f"SLURM requeues job {job}.")
