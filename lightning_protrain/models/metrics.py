"""Metrics of language models, exact over batches of any size and over any number of ranks.

[Note: Sums]
A metric here holds sums, those of losses in float64 and those of what is counted in int64: in float32 a counter stands
still at 2**24. Sums are added up over batches and over ranks before anything is divided by another, and before anything
that is not linear: the exponential of a mean is not the mean of exponentials. So the value is the same however tokens
fell into batches, and batches onto ranks.

[Note: One schedule]
In `compute` every rank runs the same collectives, whatever it has seen: the largest length of each sum that has one for
every position, if the metric has such sums, then one sum of all counts and one of all other sums. A rank that has no
batch contributes zeros; one that knows fewer positions too.

[Note: Absent]
A metric without a single token has no value. `compute` then returns None on every rank: Lightning logs nothing, and
neither a checkpoint nor early stopping can take it for a best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from math import log
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.utilities.prints import rank_zero_warn

NonFinite: TypeAlias = Literal["exclude", "error", "keep"]


class SumMetric(Metric):
    """Holds sums, see [Note: Sums] and [Note: One schedule]; derived classes say in `value` what follows from them."""

    is_differentiable = False
    full_state_update = False

    def add_sum(self, name: str, dtype: torch.dtype, by_position: bool = False) -> None:
        """Adds a sum, zero at first: a scalar, or a vector that grows with the positions that are seen."""
        self.add_state(name, torch.zeros((0,) if by_position else (), dtype=dtype), dist_reduce_fx="sum")

    def set_apart(self, kind: str) -> None:
        """Keeps `MetricCollection` from merging this metric with one of another kind.

        It takes two metrics for the same if their states have the same names and, after the first batch, the same
        values: those of any two, if that batch has no tokens. So a state without content is named after the kind.
        """
        self.add_state(f"_kind_{kind}", torch.zeros(()), dist_reduce_fx=None)

    def value(self) -> Tensor | None:
        """The metric over all batches and ranks; None if there is nothing to tell from."""
        raise NotImplementedError

    def compute(self) -> Tensor | None:
        """The metric over all batches and ranks; None if there is nothing to tell from, see [Note: Absent].

        Raises:
            ValueError: A batch was not finite, and the policy is `"error"`; on every rank.
        """
        return self.value()

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        # TorchMetrics keeps a value until there is another, but takes None for one that is not kept. Reading it again
        # on one rank alone, as a progress bar does, must not start collectives: inside, () stands for None.
        @wraps(compute)
        def kept(*args: Any, **kwargs: Any) -> Any:
            value = compute(*args, **kwargs)
            return () if value is None else value

        wrapped = super()._wrap_compute(kept)

        @wraps(compute)
        def computed(*args: Any, **kwargs: Any) -> Any:
            value = wrapped(*args, **kwargs)
            return None if isinstance(value, tuple) else value

        return computed

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            # A cast moves the sums, and leaves them as exact as they are.
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, *args, **kwargs)

    def _sums(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name, reduction in self._reductions.items() if reduction is not None}

    def _reduce_states(self, incoming_state: Mapping[str, Tensor]) -> None:
        self._computed = None
        for name, ours in self._sums().items():
            theirs = incoming_state[name]
            size = max(ours.numel(), theirs.numel())
            setattr(self, name, _padded(ours, size) + _padded(theirs, size))

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        if dist_sync_fn is not gather_all_tensors:
            super()._sync_dist(dist_sync_fn, process_group)
            return
        group = process_group or self.process_group
        sums = self._sums()
        sizes = {name: each.numel() for name, each in sums.items()}
        vectors = [name for name, each in sums.items() if each.dim()]
        if vectors:
            longest = torch.tensor([sizes[name] for name in vectors], device=self.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
            sizes |= dict(zip(vectors, longest.tolist(), strict=True))
        for dtype in dict.fromkeys(each.dtype for each in sums.values()):
            names = [name for name, each in sums.items() if each.dtype == dtype]
            flat = torch.cat([_padded(sums[name], sizes[name]).reshape(-1) for name in names])
            dist.all_reduce(flat, group=group)
            for name, part in zip(names, flat.split([sizes[name] for name in names]), strict=True):
                setattr(self, name, part if sums[name].dim() else part.reshape(()))


class RatioMetric(SumMetric):
    """A sum over the number of what was summed up.

    Args:
        nonfinite: What becomes of a batch that is not finite. `"exclude"`: it is left out with all that it counts, and
            `compute` warns. `"error"`: `compute` raises on every rank. `"keep"`: the value is not finite either.
        weights: Whether the counts are weights, of float64, rather than numbers.
        kwargs: Of `torchmetrics.Metric`.

    Attributes:
        total: The sum.
        count: Of what.
        num_nonfinite: Batches that were not finite.
    """

    total: Tensor
    count: Tensor
    num_nonfinite: Tensor

    def __init__(self, nonfinite: NonFinite = "exclude", weights: bool = False, **kwargs: Any) -> None:
        if nonfinite not in ("exclude", "error", "keep"):
            raise ValueError(f'nonfinite={nonfinite!r}: give "exclude", "error" or "keep".')
        super().__init__(**kwargs)
        self.nonfinite = nonfinite
        self.weights = weights
        self.set_apart(f"{type(self).__name__}_{nonfinite}_{weights}")
        self.add_sum("total", torch.float64)
        self.add_sum("count", torch.float64 if weights else torch.int64)
        self.add_sum("num_nonfinite", torch.int64)

    def _add(self, total: Tensor | float, count: Tensor | float) -> None:
        if torch.as_tensor(count).is_floating_point() and not self.weights:
            raise ValueError(f"{type(self).__name__} counts in integers, and was given {count}: give a whole number.")
        total = torch.as_tensor(total, dtype=self.total.dtype, device=self.device).detach()
        count = torch.as_tensor(count, dtype=self.count.dtype, device=self.device).detach()
        if total.numel() != 1 or count.numel() != 1:
            raise ValueError(
                f"{type(self).__name__} takes sums over a batch, scalars; the shapes are {tuple(total.shape)} and "
                f"{tuple(count.shape)}. Sum them up first."
            )
        finite = total.reshape(()).isfinite()
        taken = finite | (self.nonfinite == "keep")
        # No branch on the values: they may still be under way on the device.
        self.total = self.total + torch.where(taken, total.reshape(()), torch.zeros_like(self.total))
        self.count = self.count + torch.where(taken, count.reshape(()), torch.zeros_like(count.reshape(())))
        self.num_nonfinite = self.num_nonfinite + ~finite

    def value(self) -> Tensor | None:
        """Total over count."""
        self._report()
        return self.total / self.count if self.count else None

    def _report(self) -> None:
        if not self.num_nonfinite or self.nonfinite == "keep":
            return
        text = f"{type(self).__name__}: {int(self.num_nonfinite)} batches are not finite (NaN or infinite)"
        if self.nonfinite == "error":
            raise ValueError(f'{text}. Look into them, or set nonfinite="exclude" to leave them out.')
        rank_zero_warn(f"{text} and left out.")


class TokenLoss(RatioMetric):
    """Mean loss per token in nats: the sum of the losses over the number of tokens."""

    higher_is_better = False

    def update(self, loss_sum: Tensor | float, num_tokens: Tensor | int) -> None:
        """Adds the losses of a batch.

        Args:
            loss_sum: Sum of the losses of its tokens in nats, a scalar.
            num_tokens: How many tokens that is.
        """
        self._add(loss_sum, num_tokens)


class Perplexity(TokenLoss):
    """The exponential of the mean loss per token."""

    def value(self) -> Tensor | None:
        """The perplexity."""
        loss = super().value()
        return None if loss is None else loss.exp()


class BitsPerByte(RatioMetric):
    """Bits that the model takes for a byte of text: comparable between tokenizers, which the loss per token is not."""

    higher_is_better = False

    def update(self, loss_sum: Tensor | float, num_bytes: Tensor | int) -> None:
        """Adds a batch.

        Args:
            loss_sum: Sum of the losses of its tokens in nats, a scalar.
            num_bytes: Bytes, in UTF-8, of the text that these tokens stand for.
        """
        self._add(loss_sum, num_bytes)

    def value(self) -> Tensor | None:
        """Bits per byte."""
        nats = super().value()
        return None if nats is None else nats / log(2)


class TokenAccuracy(RatioMetric):
    """Share of the tokens that the model holds to be the likeliest."""

    higher_is_better = True

    def update(self, num_correct: Tensor | int, num_tokens: Tensor | int) -> None:
        """Adds a batch: how many tokens are right, of how many."""
        self._add(num_correct, num_tokens)


class WeightedAccuracy(RatioMetric):
    """Mean of accuracies of batches, each with the weight `accuracy_denom`.

    Args:
        nonfinite: As in `RatioMetric`.
        kwargs: Of `torchmetrics.Metric`.
    """

    higher_is_better = True

    def __init__(self, nonfinite: NonFinite = "exclude", **kwargs: Any) -> None:
        super().__init__(nonfinite, weights=True, **kwargs)

    def update(self, accuracy: Tensor | float, accuracy_denom: Tensor | float) -> None:
        """Adds a batch.

        Args:
            accuracy: Of the batch, a scalar; of no meaning if it has no weight.
            accuracy_denom: What it is a mean over, e.g. the number of tokens.
        """
        accuracy = torch.as_tensor(accuracy, dtype=torch.float64, device=self.device).detach()
        weight = torch.as_tensor(accuracy_denom, dtype=torch.float64, device=self.device)
        self._add(torch.where(weight == 0, torch.zeros_like(accuracy), accuracy * weight), weight)


class AcceptanceRate(RatioMetric):
    """Share of the draft tokens at one position that the target model accepts.

    Args:
        position: Counted from 0, the first draft token.
        kwargs: Of `RatioMetric`.
    """

    higher_is_better = True

    def __init__(self, position: int, **kwargs: Any) -> None:
        if position < 0:
            raise ValueError(f"position={position}: the first draft token is 0.")
        super().__init__(**kwargs)
        self.position = position
        self.set_apart(f"position_{position}")

    def update(self, accepted: Tensor, total: Tensor) -> None:
        """Adds a batch; one with fewer positions says nothing about this one.

        Args:
            accepted: How many draft tokens were accepted, int [positions].
            total: Of how many, int [positions].
        """
        accepted, total = _counts(accepted, total, self.device)
        if self.position < total.numel():
            self._add(accepted[self.position], total[self.position])


class AcceptanceLength(SumMetric):
    """Draft tokens that would be accepted in a row: the sum of the cumulative products of the rates at all positions.

    Rates are those over all batches and ranks. From the first position that was never counted on, nothing is accepted.

    Attributes:
        accepted: Int64 [positions].
        total: Int64 [positions].
    """

    higher_is_better = True
    accepted: Tensor
    total: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("accepted", torch.int64, by_position=True)
        self.add_sum("total", torch.int64, by_position=True)

    def update(self, accepted: Tensor, total: Tensor) -> None:
        """Adds a batch.

        Args:
            accepted: How many draft tokens were accepted, int [positions]; as many positions as this batch has.
            total: Of how many, int [positions].
        """
        counts = _counts(accepted, total, self.device)
        self._reduce_states(dict(zip(("accepted", "total"), counts, strict=True)))

    def value(self) -> Tensor | None:
        """The length, in tokens."""
        if not self.total.numel() or not self.total[0]:
            return None
        rates = torch.where(self.total > 0, self.accepted.double() / self.total.clamp(min=1), 0.0)
        return rates.cumprod(0).sum()


def _counts(accepted: Tensor, total: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    accepted, total = (torch.as_tensor(each, device=device).detach() for each in (accepted, total))
    if accepted.shape != total.shape or accepted.dim() != 1:
        raise ValueError(
            f"accepted of shape {tuple(accepted.shape)} and total of shape {tuple(total.shape)}: give one count for "
            "each position in both, [positions]."
        )
    if accepted.is_floating_point() or total.is_floating_point():
        raise ValueError(f"accepted is {accepted.dtype} and total is {total.dtype}: give counts, not ratios.")
    return accepted.long(), total.long()


def _padded(each: Tensor, size: int) -> Tensor:
    return F.pad(each, (0, size - each.numel())) if each.dim() else each
