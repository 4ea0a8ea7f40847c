"""Decides when a checkpoint is saved: by the scores of evaluations, and by the ends of steps.

[Note: Flags]
In every optimizer step, the ranks take the maximum of a few flags by an all-reduce in a separate gloo group. The
all-reduce starts before the optimizer step and is read after it, so that it overlaps with the step. All ranks get the
same result at the same step. A flag that is set after the all-reduce has started counts at the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.callbacks.checkpoint.frozen import Frozen, FrozenWeights
from lightning_protrain.callbacks.checkpoint.preemption import Preemption
from lightning_protrain.callbacks.checkpoint.setup import copy_of
from lightning_protrain.checkpoint.discover import FoundCheckpoint, Ranking
from lightning_protrain.rank_store import RankStore
from lightning_protrain.trainer_events import CopyableCallback, is_fast_dev_run


class EvaluationScores:
    """Reads the scores of evaluations, and keeps the latest one with its step.

    Args:
        ranking: Ranking with the name of the metric.

    Attributes:
        exchange: Store for exchanges with the other ranks.
    """

    def __init__(self, ranking: Ranking) -> None:
        self.ranking = ranking
        self.exchange = RankStore(None)
        self.begin(known=False)

    def begin(self, known: bool) -> None:
        """Forget the scores of an earlier fit.

        Args:
            known: True if the run to resume has logged the metric.
        """
        self._known = known
        self._latest: tuple[int, float | None] | None = None
        # Step and tensor of the last read. Lightning keeps the tensor if a later evaluation does not log the metric.
        self._read: tuple[int, Tensor] | None = None
        self._warned = False
        # True if the latest evaluation has logged metrics, but none has ever logged this one.
        self._never = False

    def refuse_unknown(self, trainer: Trainer) -> None:
        """Raise ValueError if other metrics were logged, but `monitor` never; call this before training goes on."""
        if self._never:
            raise ValueError(
                f"monitor={self.ranking.monitor!r}: no metric of that name was logged; logged are "
                f"{sorted(trainer.callback_metrics)}. Log it in validation_step, or monitor another one."
            )

    def warn_at_end(self, trainer: Trainer) -> None:
        """Warn if `monitor` was never logged, unless a warning has said so."""
        monitor, logged = self.ranking.monitor, sorted(trainer.callback_metrics)
        if monitor is not None and not self._known and not self._warned:
            advice = (
                f"Logged are {logged}: monitor one of these"
                if logged
                else "The run has ended before an evaluation: lower val_check_interval"
            )
            rank_zero_warn(f"monitor={monitor!r} was never logged, so there is no best checkpoint. {advice}.")

    def read(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> float | None:
        """Return the score in `metrics`; None if `monitor` is None, or this evaluation has not logged the metric."""
        monitor = self.ranking.monitor
        if monitor is None:
            return None
        doing = f"Looking for {monitor!r}"
        value, step = metrics.get(monitor), trainer.global_step
        if value is not None and self._read is not None and self._read[0] != step and value.is_set_to(self._read[1]):
            value = None
        never = value is None and not self._known and _has_logged(trainer)
        score: float | None
        score, self._never = self.exchange.broadcast((None if value is None else float(value), never), doing)
        if score is None:
            if not self._warned and not self._never:
                where = "evaluation at" if trainer.validating else "epoch up to"
                rank_zero_warn(
                    f"{monitor} was not logged in the {where} step {step}, so its checkpoint cannot be the best. "
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
        """Record the score of an evaluation that has just ended; return True if it is better than `best`."""
        score = self.read(trainer, trainer.callback_metrics)
        self._latest = trainer.global_step, score
        return self.exchange.broadcast(self.ranking.is_better(score, best), f"Ranking {self.ranking.monitor!r}")

    def now(self, trainer: Trainer) -> tuple[float | None, bool]:
        """Return the score of the present weights, and True if the latest metrics belong to the present weights."""
        step, score = self._latest or (-1, None)
        fresh = step == trainer.global_step and (score is not None or self.ranking.monitor is None)
        return (score, True) if fresh else (None, False)


def _has_logged(trainer: Trainer) -> bool:
    """Return True if validation has just ended and has logged any metric."""
    results = trainer._results if trainer.validating else None
    return results is not None and any(not result.has_reset for result in results.values())


class StepFlags:
    """Takes the maximum of flags over all ranks, see [Note: Flags].

    Args:
        flags: Function that returns the flags of this rank: numbers from 0 to 255, as many on all ranks.
    """

    def __init__(self, flags: Callable[[], Sequence[int]]) -> None:
        self._flags = flags
        self._store = RankStore(None)
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_group": None, "_pending": None}

    def open(self, store: RankStore) -> None:
        """Create the process group for the flags if there are several ranks; all ranks must call it.

        Args:
            store: Names a rank that is missing.
        """
        self._store = store
        if self._group is None and store.has_others:
            self._group = dist.new_group(backend="gloo")

    def start(self) -> None:
        """Start the all-reduce, unless one has been started; all ranks must call it, and `result` afterwards."""
        if self._group is not None and self._pending is None:
            flags = torch.tensor(self._flags(), dtype=torch.uint8)
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._pending = work, flags

    def result(self) -> list[int]:
        """Return the maximum of each flag over all ranks; start the all-reduce if `start` was not called.

        Raises:
            FailedElsewhere: If another rank has failed or died.
        """
        if self._group is None:
            return list(self._flags())
        self.start()
        assert self._pending is not None
        work, flags = self._pending
        self._store.wait(work, "the end of a step")
        self._pending = None
        return [int(flag) for flag in flags]

    def close(self) -> None:
        """Destroy the process group."""
        group, self._group = self._group, None
        pending, self._pending = self._pending, None
        # During an all-reduce, this would wait for ranks that may have failed.
        if group is not None and pending is None and dist.is_initialized():
            dist.destroy_process_group(group)


class PendingSave(NamedTuple):
    """A save that is not complete; `job` is None unless this rank writes an asynchronous save."""

    path: str
    step: int
    score: float | None
    job: Future[Sequence[FoundCheckpoint]] | None


class StepEndCheckpoint(CopyableCallback, ModelCheckpoint):
    """A `ModelCheckpoint` whose ranks agree at the end of each step to end the run, or that a save is complete.

    Args:
        args, kwargs: As in `ModelCheckpoint`.
        save_on_preemption: As in `ProTrainCheckpoint`.
        asynchronous: As in `ProTrainCheckpoint`.
        frozen: As in `ProTrainCheckpoint`.
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
        self._exchange = RankStore(None)
        self._preemption = Preemption()
        self._agreement = StepFlags(self._flags)
        self._frozen = FrozenWeights(frozen)
        self._pending: PendingSave | None = None
        # Save to which the flags refer that were last sent.
        self._flagged: PendingSave | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pending": None, "_flagged": None}  # It does not write a save under way.

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers, because Lightning has just installed its own."""
        self._listen(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Start to exchange flags in parallel with the step: to end the run, and whether a save is complete."""
        self._agreement.start()

    def copied_bytes(self, trainer: Trainer, optimizers: Collection[Optimizer], state_bytes: float) -> int:
        """Return the host memory that the writing rank needs for the copy of an asynchronous save, bytes.

        Args:
            trainer: Trainer before the fit.
            optimizers: Optimizers of the module.
            state_bytes: As in `copy_of`.
        """
        module = trainer.lightning_module
        if not self.asynchronous or not self._saves(trainer):
            return 0
        saved = () if self.save_weights_only else optimizers
        return copy_of(module, self._frozen.expected(module), saved, state_bytes)

    def _settle(self, trainer: Trainer) -> None:
        """Wait for the pending save, if there is one; all ranks must call it at the same point."""
        raise NotImplementedError

    def _saves(self, trainer: Trainer) -> bool:
        return not is_fast_dev_run(trainer) and (self.save_top_k != 0 or bool(self.save_last))

    def _listen(self, trainer: Trainer) -> None:
        if self._saves(trainer) and (self.save_on_preemption or self.asynchronous):
            self._agreement.open(self._exchange)
            if self.save_on_preemption:
                self._preemption.listen(trainer)

    def _flags(self) -> tuple[int, ...]:
        self._flagged = self._pending
        job = None if self._pending is None else self._pending.job
        return (*self._preemption.received, job is not None and not job.done())

    def _agree(self, trainer: Trainer) -> bool:
        """Return True if the ranks end the run at this step; also complete a save that has been written.

        All ranks must call it at the end of a step.
        """
        end, requeue, writing = self._agreement.result()
        self._preemption.agreed = end, bool(requeue)
        if not writing and self._flagged is self._pending:
            self._settle(trainer)
        return bool(end)

    def _leave(self, trainer: Trainer) -> None:
        """End the run if the ranks have agreed, or agree now because a signal came during the latest save."""
        if self._preemption.is_agreed or self._agree(trainer):
            self._settle(trainer)
            self._preemption.end_run(trainer, self.last_model_path)

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
