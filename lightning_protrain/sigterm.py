"""SIGTERM where several ranks train: it is written down, and what it means is agreed on before the next batch."""

from __future__ import annotations

from types import FrameType

from lightning.pytorch import Trainer


class SigtermNote:
    """What a run's handler of SIGTERM leaves for those that ask.

    Lightning's own handler talks to the other ranks in the middle of whatever is being done, and waits until they
    answer, which they do not; and it ends the rank that has heard the signal after its batch, while others go on.

    Attributes:
        received: Whether this rank has been told to end, since it waits for others.
    """

    def __init__(self) -> None:
        self.received = False
        self._waits = False
        self._trainer: Trainer | None = None

    def listen(self, trainer: Trainer) -> None:
        """Before a run puts in its handlers: this one is among them, in the place of Lightning's."""
        self.received = self._waits = False
        self._trainer = trainer
        trainer._signal_connector._sigterm_notifier_fn = self._note  # type: ignore[method-assign]

    def wait_for_others(self) -> None:
        """From here on this rank ends when all do; before, Lightning ends it."""
        self._waits = True

    def close(self) -> None:
        """After a run: its Trainer is as it was."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)

    def _note(self, signum: int, _: FrameType) -> None:
        assert self._trainer is not None
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not (self.received or self._trainer.received_sigterm):
            launcher.kill(signum)  # Processes that this one has started.
        if self._waits:
            self.received = True
        else:
            self._trainer._signal_connector.received_sigterm = True
