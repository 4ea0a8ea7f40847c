"""Losses on preferences: DPO, IPO, ORPO, SimPO and KTO, from log-probabilities of completions.

Names, defaults and formulas are those of TRL (https://huggingface.co/docs/trl). Every loss is a mean over pairs (KTO:
over examples), so that it does not depend on how pairs are divided into batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_protrain.models.metrics import NonFinite, RatioMetric

LossName: TypeAlias = Literal["dpo", "ipo", "orpo", "simpo", "kto"]
# Losses that read an argument; the others would ignore it.
_READERS = {
    "label_smoothing": ("dpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


@dataclass(frozen=True)
class PairScores:
    """Scores of n pairs, float32 of shape [n].

    Attributes:
        losses: Loss of each pair.
        chosen_rewards: Reward of each chosen completion, without gradients.
        rejected_rewards: Reward of each rejected completion, without gradients.
        chosen_logps: Log-probability of each chosen completion in nats, without gradients; for ORPO and SimPO the mean
            over its tokens.
        rejected_logps: Log-probability of each rejected completion.
    """

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    chosen_logps: Tensor
    rejected_logps: Tensor


@dataclass(frozen=True)
class Objective:
    """A preference loss with its settings, as in `PreferenceModule`.

    Raises:
        ValueError: If the loss is unknown, or a setting that it does not read differs from its default.
    """

    loss: LossName = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.loss not in get_args(LossName):
            raise ValueError(f"loss is {self.loss!r}. Give {', '.join(get_args(LossName))}.")
        for field in fields(self):
            readers = _READERS.get(field.name, get_args(LossName))
            if self.loss not in readers and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name} is {getattr(self, field.name)!r}, but loss={self.loss!r} does not read it: only "
                    f"{' and '.join(readers)} {'does' if len(readers) == 1 else 'do'}. Leave it out."
                )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Objective:
        """Return the objective of hyperparameters, which may have further entries."""
        return cls(**{field.name: settings[field.name] for field in fields(cls)})

    @property
    def has_reference(self) -> bool:
        """True if the loss compares log-probabilities with those of a reference model."""
        return self.loss in ("dpo", "ipo", "kto")

    @property
    def has_pairs(self) -> bool:
        """True if rows are pairs of a chosen and a rejected completion, False if each is desirable or not."""
        return self.loss != "kto"

    def of_pairs(self, logps: Tensor, num_tokens: Tensor, reference: Tensor | None, nll: Tensor | None) -> PairScores:
        """Return losses, rewards and log-probabilities of pairs.

        Args:
            logps: Summed log-probabilities of completions, float32 [2n]: chosen and rejected in turns.
            num_tokens: Number of tokens of each completion, int64 [2n].
            reference: Summed log-probabilities under the reference model, [2n]; None if the loss has no reference.
            nll: Mean negative log-likelihood of the tokens of prompt and chosen completion, [n]; only ORPO reads it.
        """
        means = logps / num_tokens.clamp(min=1)
        chosen_logps, rejected_logps = _halves(logps if reference is not None else means)
        ratios = means if reference is None else logps - reference
        chosen, rejected = _halves(ratios)
        margins = chosen - rejected
        if self.loss == "dpo":  # https://arxiv.org/abs/2305.18290, equation 7; smoothed: ericmitchell.ai/cdpo.pdf
            losses = self._smoothed(self.beta * margins)
        elif self.loss == "ipo":  # https://arxiv.org/abs/2310.12036, equation 17, of means over tokens as in TRL
            chosen_mean, rejected_mean = _halves(ratios / num_tokens.clamp(min=1))
            losses = (chosen_mean - rejected_mean - 1 / (2 * self.beta)) ** 2
        elif self.loss == "simpo":  # https://arxiv.org/abs/2405.14734, equation 6
            losses = self._smoothed(self.beta * margins - self.simpo_gamma)
        else:  # https://arxiv.org/abs/2403.07691, equations 6 and 7
            assert nll is not None
            # TRL takes the mean over the chosen tokens of a batch, which would depend on the batch; the paper takes
            # that of a sequence.
            log_odds = margins - (_log1mexp(chosen) - _log1mexp(rejected))
            losses = nll - self.beta * F.logsigmoid(log_odds)
        rewards = _halves(self.beta * ratios.detach())
        return PairScores(losses, *rewards, chosen_logps.detach(), rejected_logps.detach())

    def of_examples(self, ratios: Tensor, kl: Tensor, desirable: Tensor) -> Tensor:
        """Return the KTO losses of examples, [n]; https://arxiv.org/abs/2402.01306, equations 7 and 8.

        Args:
            ratios: Log-probabilities of the completions, minus those under the reference model, [n].
            kl: Mean of such differences over mismatched completions, a scalar; negative values count as 0.
            desirable: True for desirable completions, bool [n].
        """
        signs = torch.where(desirable, 1.0, -1.0).to(ratios.dtype)
        weights = torch.where(desirable, self.desirable_weight, self.undesirable_weight).to(ratios.dtype)
        return weights * (1 - torch.sigmoid(self.beta * signs * (ratios - kl.clamp(min=0))))

    def _smoothed(self, logits: Tensor) -> Tensor:
        smoothing = self.label_smoothing
        return -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[0::2], rows[1::2]


def _log1mexp(logps: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, accurate at both ends; 0 counts as the largest number below it.

    An answer that is learnt perfectly has the log-probability 0, where the gradient is infinite.
    """
    logps = logps.clamp(max=-torch.finfo(logps.dtype).eps)
    is_near = logps > -math.log(2)
    near = torch.log(-torch.expm1(torch.where(is_near, logps, -1.0)))
    return torch.where(is_near, near, torch.log1p(-torch.exp(torch.where(is_near, -1.0, logps))))


class RowMean(RatioMetric):
    """Mean of a value over rows."""

    def update(self, total: Tensor, count: Tensor) -> None:
        """Add a batch: the sum of the value over its rows, and their number."""
        self._add(total, count)


class KTOLoss(RatioMetric):
    """Mean KTO loss, with a KL term over all rows, so that neither batches nor ranks change it.

    Args:
        objective: The loss.
        nonfinite: As in `RatioMetric`, for a row instead of a batch.
        kwargs: Arguments of `torchmetrics.Metric`.

    Attributes:
        ratios: Differences of log-probabilities by number of the example, float64 [examples].
        mismatched: Such differences of mismatched completions, float64 [examples].
        desirable: 1 for desirable examples, int64 [examples].
        known: 1 for examples with values, int64 [examples].
    """

    higher_is_better = False
    ratios: Tensor
    mismatched: Tensor
    desirable: Tensor
    known: Tensor

    def __init__(self, objective: Objective, nonfinite: NonFinite = "exclude", **kwargs: Any) -> None:
        super().__init__(nonfinite, **kwargs)
        self.objective = objective
        for name in ("ratios", "mismatched"):
            self.add_sum(name, torch.float64, by_position=True)
        for name in ("desirable", "known"):
            self.add_sum(name, torch.int64, by_position=True)

    def update(self, pair_ids: Tensor, ratios: Tensor, mismatched: Tensor, desirable: Tensor) -> None:
        """Add examples: their numbers, int64, and values as in the attributes, all of shape [n]."""
        finite = (ratios + mismatched).isfinite()
        taken = finite | (self.nonfinite == "keep")
        self.num_nonfinite = self.num_nonfinite + ~finite.all()
        numbers = pair_ids[taken]
        size = int(numbers.max()) + 1 if numbers.numel() else 0
        values = (ratios.double(), mismatched.double(), desirable.long(), torch.ones_like(pair_ids))
        added = {
            name: value.new_zeros(size).index_copy(0, numbers, value[taken])
            for name, value in zip(("ratios", "mismatched", "desirable", "known"), values, strict=True)
        }
        none = {name: torch.zeros_like(getattr(self, name)) for name in ("total", "count", "num_nonfinite")}
        self._reduce_states({**none, **added})

    def value(self) -> Tensor | None:
        """Return the mean loss over all examples."""
        self._report()
        known = self.known > 0
        if not known.any():
            return None
        times = self.known[known]  # An example may be in two loaders.
        kl = (self.mismatched[known] / times).mean()
        losses = self.objective.of_examples(self.ratios[known] / times, kl, self.desirable[known] > 0)
        return losses.mean()
