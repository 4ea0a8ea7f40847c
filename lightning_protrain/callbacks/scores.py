"""What the evaluations of a fit have scored, by the one metric that ranks checkpoints: rank 0's word, told to all."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_protrain.callbacks.exchange import Exchange
from lightning_protrain.checkpoint.discover import Ranking


class Scores:
    """The score of the latest evaluation, and of which step it is.

    Args:
        ranking: Names the metric.

    Attributes:
        exchange: With the other ranks.
    """

    def __init__(self, ranking: Ranking) -> None:
        self.ranking = ranking
        self.exchange = Exchange(None)
        self.begin(known=False)

    def begin(self, known: bool) -> None:
        """Forget the evaluations of an earlier fit.

        Args:
            known: Whether the run that is resumed has logged the metric.
        """
        self._known = known
        self._latest: tuple[int, float | None] | None = None
        # The value that was read last, and at which step: Lightning keeps it where a later evaluation logs none.
        self._read: tuple[int, Tensor] | None = None
        self._warned = False

    def read(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> float | None:
        """Return the score in `metrics`; None without a metric that ranks, or where this evaluation has not logged it.

        Raises:
            ValueError: The metric was never logged, and others were.
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
                    f"{monitor} was not logged in the evaluation at step {step}, which so is no better than others. "
                    f"Logged are {sorted(metrics) or 'none'}. This is said once."
                )
            self._warned = True
            return None
        self._known = True
        self._read = None if value is None else (step, value)
        if not self.ranking.record(score):
            rank_zero_warn(f"{monitor} is {score} at step {step}: that is never the best.")
        return score

    def note(self, trainer: Trainer, best: float | None) -> bool:
        """Note an evaluation that has just ended, and return whether it is better than `best`."""
        score = self.read(trainer, trainer.callback_metrics)
        self._latest = trainer.global_step, score
        return self.exchange.broadcast(self.ranking.is_better(score, best), f"Ranking {self.ranking.monitor!r}")

    def now(self, trainer: Trainer) -> tuple[float | None, bool]:
        """Return the score of the weights as they are, and whether metrics of them may be in a name."""
        step, score = self._latest or (-1, None)
        fresh = step == trainer.global_step and (score is not None or self.ranking.monitor is None)
        return (score, True) if fresh else (None, False)


def _has_logged(trainer: Trainer) -> bool:
    """Return whether what has just ended has logged anything; a validation without a trained token has not."""
    results = trainer._results if trainer.validating else None
    return results is None or any(not each.has_reset for each in results.values())
