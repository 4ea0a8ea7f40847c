"""Decides when a checkpoint is due: at the ends of steps, and by the scores of evaluations."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.callbacks.checkpoint.frozen import Frozen, FrozenWeights
from lightning_protrain.callbacks.checkpoint.preemption import Preemption
from lightning_protrain.callbacks.checkpoint.rendezvous import Rendezvous, StepFlags
from lightning_protrain.callbacks.checkpoint.setup import copy_of
from lightning_protrain.callbacks.trainer_events import is_fast_dev_run
from lightning_protrain.checkpoint.discover import FoundCheckpoint, Ranking


class EvaluationScores:
    """The score of the latest evaluation and its step.

    Args:
        ranking: Names the metric.

    Attributes:
        exchange: Connection to the other ranks.
    """

    def __init__(self, ranking: Ranking) -> None:
        self.ranking = ranking
        self.exchange = Rendezvous(None)
        self.begin(known=False)

    def begin(self, known: bool) -> None:
        """Forget the evaluations of an earlier fit.

        Args:
            known: True if the resumed run has logged the metric.
        """
        self._known = known
        self._latest: tuple[int, float | None] | None = None
        # The step and value of the last read: Lightning keeps the value if a later evaluation logs none.
        self._read: tuple[int, Tensor] | None = None
        self._warned = False

    def read(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> float | None:
        """Return the score in `metrics`; None if there is no metric, or this evaluation has not logged it.

        Raises:
            ValueError: If the metric was never logged, but others were.
        """
        monitor = self.ranking.monitor
        if monitor is None:
            return None
        doing = f"Looking for {monitor!r}"
        value, step = metrics.get(monitor), trainer.global_step
        if value is not None and self._read is not None and self._read[0] != step and value.is_set_to(self._read[1]):
            value = None
        with self.exchange.together(doing):
            if value is None and not self._known and trainer.is_global_zero and _has_logged(trainer):
                raise ValueError(
                    f"monitor={monitor!r}: no metric of that name was logged, but {sorted(metrics) or 'none'}. "
                    "Log it in validation_step, or monitor another one."
                )
        score: float | None = self.exchange.broadcast(None if value is None else float(value), doing)
        if score is None:
            if not self._warned:
                rank_zero_warn(
                    f"{monitor} was not logged in the evaluation at step {step}, so its checkpoint is never the best. "
                    f"Logged are {sorted(metrics) or 'none'}. This warning is given once."
                )
            self._warned = True
            return None
        self._known = True
        self._read = None if value is None else (step, value)
        if not self.ranking.record(score):
            rank_zero_warn(f"{monitor} is {score} at step {step}: a value that is not finite is never the best.")
        return score

    def note(self, trainer: Trainer, best: float | None) -> bool:
        """Record an evaluation that has just ended, and return True if it is better than `best`."""
        score = self.read(trainer, trainer.callback_metrics)
        self._latest = trainer.global_step, score
        return self.exchange.broadcast(self.ranking.is_better(score, best), f"Ranking {self.ranking.monitor!r}")

    def now(self, trainer: Trainer) -> tuple[float | None, bool]:
        """Return the score of the present weights, and True if a file name may contain their metrics."""
        step, score = self._latest or (-1, None)
        fresh = step == trainer.global_step and (score is not None or self.ranking.monitor is None)
        return (score, True) if fresh else (None, False)


def _has_logged(trainer: Trainer) -> bool:
    """Return True if the loop that has just ended has logged anything; a validation without a trained token has not."""
    results = trainer._results if trainer.validating else None
    return results is None or any(not each.has_reset for each in results.values())


class PendingSave(NamedTuple):
    """A save that is under way; `job` is set only on the writing rank of an asynchronous save."""

    path: str
    step: int
    score: float | None
    job: Future[list[FoundCheckpoint]] | None


class StepEndCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that ends runs and saves at steps on which all ranks agree; subclasses define what is saved.

    Args:
        args, kwargs: As in `ModelCheckpoint`.
        save_on_preemption: True ends the run if any rank gets a signal.
        asynchronous: True writes saves while training continues.
        frozen: Treatment of frozen weights.
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
        self._agreement = StepFlags(self._facts)
        self._frozen = FrozenWeights(frozen)
        self._pending: PendingSave | None = None
        # Save that was under way when the flags were last sent.
        self._asked: PendingSave | None = None

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen for signals: Lightning has just installed its own handlers."""
        self._listen(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Start the exchange of flags beside the step: whether the run ends, and whether a save has ended."""
        self._agreement.ask()

    def copied_bytes(self, trainer: Trainer, optimizers: Collection[Optimizer], state_bytes: float) -> int:
        """Return the host memory for the copy of an asynchronous save on the writing rank, bytes.

        Args:
            trainer: Trainer that is about to fit.
            optimizers: Optimizers of its module.
            state_bytes: As in `copy_of`.
        """
        module = trainer.lightning_module
        if not self.asynchronous or not self._saves(trainer):
            return 0
        kept = () if self.save_weights_only else optimizers
        return copy_of(module, self._frozen.expected(module), kept, state_bytes)

    def _settle(self, trainer: Trainer) -> None:
        """Finish the save that is under way, if there is one; every rank calls it at the same point."""
        raise NotImplementedError

    def _saves(self, trainer: Trainer) -> bool:
        return not is_fast_dev_run(trainer) and (self.save_top_k != 0 or bool(self.save_last))

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
        """Return True if the ranks end the run at this step; also complete a save that all ranks have written.

        Every rank calls it at the end of a step.
        """
        end, requeue, writing = self._agreement.answer()
        self._preemption.agreed = end, bool(requeue)
        if not writing and self._asked is self._pending:
            self._settle(trainer)
        return bool(end)

    def _leave(self, trainer: Trainer) -> None:
        """End the run if all ranks agree, even if the signal came during the save that was just made."""
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
