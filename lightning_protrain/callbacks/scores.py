"""What the evaluations of a fit have scored, by the one metric that ranks checkpoints: rank 0's word, told to all."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_protrain.callbacks.exchange import Exchange
from lightning_protrain.checkpoint.ranking import Ranking


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
        self._latest: tuple[int, float | None] | None = None

    def read(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> float | None:
        """The score that `metrics` have; None without a metric that ranks.

        Raises:
            ValueError: The metric does not exist.
        """
        monitor = self.ranking.monitor
        if monitor is None:
            return None
        doing = f"Looking for {monitor!r}"
        with self.exchange.together(doing):
            if monitor not in metrics:
                raise ValueError(
                    f"monitor={monitor!r}: no metric of that name was logged, but {sorted(metrics) or 'none'}. "
                    "Log it in validation_step, or monitor another one."
                )
        score = float(self.exchange.broadcast(metrics[monitor].item(), doing))
        if not self.ranking.record(score):
            rank_zero_warn(f"{monitor} is {score} at step {trainer.global_step}: that is never the best.")
        return score

    def note(self, trainer: Trainer, best: float | None) -> bool:
        """Notes an evaluation that has just ended, and says whether it is better than `best`."""
        score = self.read(trainer, trainer.callback_metrics)
        self._latest = trainer.global_step, score
        return self.exchange.broadcast(self.ranking.is_better(score, best), f"Ranking {self.ranking.monitor!r}")

    def now(self, trainer: Trainer) -> tuple[float | None, bool]:
        """The score of the weights as they are, and whether they have been evaluated."""
        step, score = self._latest or (-1, None)
        return (score, True) if step == trainer.global_step else (None, False)
