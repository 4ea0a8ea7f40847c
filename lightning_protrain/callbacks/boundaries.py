"""What happens to checkpoints at the ends of steps, on all ranks together: a run ends, a save behind it has ended."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer

from lightning_protrain.callbacks.agreement import Agreement
from lightning_protrain.callbacks.copies import copy_of
from lightning_protrain.callbacks.frozen import Frozen, FrozenWeights
from lightning_protrain.callbacks.occasions import tries_only
from lightning_protrain.callbacks.preemption import Preemption
from lightning_protrain.checkpoint.discover import Found


class Pending(NamedTuple):
    """A save that is under way; `job` is on the rank that writes, and only if it is written behind the training."""

    path: str
    step: int
    score: float | None
    job: Future[list[Found]] | None


class BoundaryCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that ends runs and saves where all ranks agree to; what it saves, and how, others say.

    Args:
        args, kwargs: As in `ModelCheckpoint`.
        save_on_preemption: Whether a signal on any rank ends the run.
        asynchronous: Whether saves are written behind the training.
        frozen: What is saved of frozen weights.
    """

    def __init__(
        self,
        *args: Any,
        save_on_preemption: bool = True,
        asynchronous: bool = False,
        frozen: Frozen = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.save_on_preemption = save_on_preemption
        self.asynchronous = asynchronous
        self._preemption = Preemption()
        self._agreement = Agreement(self._facts)
        self._frozen = FrozenWeights(frozen)
        self._pending: Pending | None = None
        # What was under way when the question was asked that is answered next.
        self._asked: Pending | None = None

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listens for signals: Lightning has just put its own handlers in."""
        self._listen(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Asks beside the step whether it is the last one, and whether a save has ended."""
        self._agreement.ask()

    def copied_bytes(self, trainer: Trainer, optimizers: Collection[Optimizer], state_bytes: float) -> int:
        """Host memory for the copy from which a save is written behind the training, on the rank that writes.

        Args:
            trainer: About to fit.
            optimizers: Of its module.
            state_bytes: As in `copy_of`.
        """
        module = trainer.lightning_module
        if not self.asynchronous or not self._saves(trainer):
            return 0
        kept = () if self.save_weights_only else optimizers
        return copy_of(module, self._frozen.expected(module), kept, state_bytes)

    def _settle(self, trainer: Trainer) -> None:
        """Ends the save that is under way, if there is one: every rank calls it at the same point."""
        raise NotImplementedError

    def _saves(self, trainer: Trainer) -> bool:
        return not tries_only(trainer) and (self.save_top_k != 0 or bool(self.save_last))

    def _listen(self, trainer: Trainer) -> None:
        if self._saves(trainer) and (self.save_on_preemption or self.asynchronous):
            self._agreement.open()
            if self.save_on_preemption:
                self._preemption.listen(trainer)

    def _facts(self) -> tuple[int, ...]:
        self._asked = self._pending
        job = None if self._pending is None else self._pending.job
        return (*self._preemption.received, job is not None and not job.done())

    def _agree(self, trainer: Trainer) -> bool:
        """Whether the run ends here; settles a save that has ended. Every rank calls it at the end of a step."""
        end, requeue, writing = self._agreement.answer()
        self._preemption.agreed = end, bool(requeue)
        if not writing and self._asked is self._pending:
            self._settle(trainer)
        return bool(end)

    def _leave(self, trainer: Trainer) -> None:
        """Ends the run if that is agreed, also if it was asked for in the save that has just been made."""
        if self._preemption.is_agreed or self._agree(trainer):
            self._settle(trainer)
            self._preemption.leave(trainer, self.last_model_path)

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        return self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0

    def _time_is_up(self, trainer: Trainer) -> bool:
        if self._train_time_interval is None:
            return False
        now, before = time.monotonic(), self._last_time_checked
        up = before is not None and now - before >= self._train_time_interval.total_seconds()
        if trainer.strategy.broadcast(up):
            self._last_time_checked = now
            return True
        return False
