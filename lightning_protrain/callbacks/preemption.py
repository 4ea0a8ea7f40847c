"""A signal that announces the end of a job becomes an end of the run, with a checkpoint.

A handler only writes down that a signal has come: what it means is agreed on by all ranks at the end of a step, see
[Note: Facts] in agreement.py.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from types import FrameType
from typing import Any, NoReturn

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_protrain.callbacks.shields import Shield

# What a shell says of a process that SIGTERM has ended, 128 + 15; schedulers take it for a preemption.
EXIT_CODE = 143


class Preemption:
    """Listens for signals from `listen` to `restore`.

    Attributes:
        received: Whether this rank was told to end, and whether it was told so by the signal of SLURM.
        agreed: The same of all ranks, as far as they have agreed.
    """

    def __init__(self) -> None:
        self.received = (False, False)
        self.agreed = (False, False)
        self._previous: dict[int, Any] = {}
        self._requeue_signal: int | None = None
        self._requeues = False
        self._shield: Shield | None = None

    def shield_workers(self, trainer: Trainer) -> None:
        """Workers that are started from here on outlive the signals, see [Note: Workers] in shields.py."""
        self._shield = Shield(self._signals(trainer))
        self._shield.cover_fit(trainer)

    def listen(self, trainer: Trainer) -> None:
        """From here on SIGTERM, and what SLURM sends in its place, end no process.

        Lightning puts its own handlers in when a fit starts, and those from before back when it ends. Its handlers talk
        to other ranks, or save, in the middle of whatever is being done; they are left out.
        """
        if not self.is_listening:
            self.received, self.agreed = (trainer.received_sigterm, False), (False, False)
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

    def leave(self, trainer: Trainer) -> NoReturn:
        """Ends the run, when everything is saved.

        Raises:
            SIGTERMException: It ends, with exit code 143.
        """
        rank_zero_info(f"A signal asks for the end of the run: it ends at step {trainer.global_step}, and is saved.")
        if self.agreed[1] and self._requeues and trainer.is_global_zero:
            _requeue()
        raise SIGTERMException(EXIT_CODE)

    def close(self) -> None:
        """Workers that are started from here on are as any others."""
        shield, self._shield = self._shield, None
        if shield is not None:
            shield.close()

    def restore(self) -> None:
        """Puts back the handlers that nobody else has put back."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._note and handler is not None:
                signal.signal(number, handler)
        self._previous = {}

    def _signals(self, trainer: Trainer) -> set[int]:
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.requeue_signal is not None:
            self._requeue_signal, self._requeues = environment.requeue_signal, environment.auto_requeue
            return {signal.SIGTERM, environment.requeue_signal}
        return {signal.SIGTERM}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = (True, self.received[1] or number == self._requeue_signal)


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
