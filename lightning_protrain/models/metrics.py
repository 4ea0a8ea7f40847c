"""Metrics of language models, exact over batches of any size and over any number of ranks.

A metric holds sums: losses in float64, counts in int64, because a float32 counter stops growing at 2**24. Sums are
added over batches and ranks before any division or non-linear function: the exponential of a mean is not the mean of
exponentials. So the value does not depend on how tokens fall into batches, or batches onto ranks.

In `compute`, every rank runs the same collectives, whatever data it has seen. If the metric has a sum for each
position, the first all-reduce finds the largest length. Then one all-reduce adds all counts and one adds all other
sums. A rank without a batch contributes zeros; so does a rank with fewer positions.

A metric without a single token has no value. `compute` then returns None on every rank: Lightning logs nothing, and
neither a checkpoint nor early stopping can take it for the best value.
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

from lightning_protrain.config import plural

NonFinite: TypeAlias = Literal["exclude", "error", "keep"]


class SumMetric(Metric):
    """A metric that holds sums; derived classes compute its value from them in `value`."""

    is_differentiable = False
    full_state_update = False

    def add_sum(self, name: str, dtype: torch.dtype, by_position: bool = False) -> None:
        """Add a sum that starts at zero: a scalar, or a vector that grows with the number of positions."""
        self.add_state(name, torch.zeros((0,) if by_position else (), dtype=dtype), dist_reduce_fx="sum")

    def set_apart(self, kind: str) -> None:
        """Keep `MetricCollection` from merging this metric with one of another kind.

        It merges two metrics if their states have the same names and, after the first batch, the same values. That is
        true of any two metrics if the first batch has no tokens. So a state without content is named after the kind.
        """
        self.add_state(f"_kind_{kind}", torch.zeros(()), dist_reduce_fx=None)

    def value(self) -> Tensor | None:
        """Return the metric over all batches and ranks, or None without data."""
        raise NotImplementedError

    def compute(self) -> Tensor | None:
        """Return the metric over all batches and ranks, or None without data.

        Raises:
            ValueError: On every rank, if a batch was not finite and the policy is `"error"`.
        """
        return self.value()

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        # TorchMetrics caches the value, but treats None as not cached. Reading it again on one rank, as a progress bar
        # does, must not start collectives: so the cache holds () for None.
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
            # A cast moves the sums but keeps their dtype, and so their precision.
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
    """A sum divided by the number of its summands.

    Args:
        nonfinite: Treatment of a batch that is not finite. `"exclude"` leaves the batch out, and `compute` warns.
            `"error"` lets `compute` raise on every rank. `"keep"` makes the value non-finite too.
        weights: True if the counts are float64 weights instead of integers.
        kwargs: Arguments of `torchmetrics.Metric`.

    Attributes:
        total: The sum.
        count: Number, or weight, of the summands.
        num_nonfinite: Number of batches that were not finite.
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
        # Do not branch on the values: they may still be in computation on the device.
        self.total = self.total + torch.where(taken, total.reshape(()), torch.zeros_like(self.total))
        self.count = self.count + torch.where(taken, count.reshape(()), torch.zeros_like(count.reshape(())))
        self.num_nonfinite = self.num_nonfinite + ~finite

    def value(self) -> Tensor | None:
        """Return total over count."""
        self._report()
        return self.total / self.count if self.count else None

    def _report(self) -> None:
        if not self.num_nonfinite or self.nonfinite == "keep":
            return
        batches = plural(int(self.num_nonfinite), "batch", "batches")
        text = f"{type(self).__name__}: NaN or infinite values in {batches}"
        if self.nonfinite == "error":
            raise ValueError(f'{text}. Find the cause, or set nonfinite="exclude" to leave them out.')
        rank_zero_warn(f"{text}, which are left out of the metric.")


class TokenLoss(RatioMetric):
    """Mean loss per token in nats: the sum of the losses over the number of tokens."""

    higher_is_better = False

    def update(self, loss_sum: Tensor | float, num_tokens: Tensor | int) -> None:
        """Add the losses of a batch.

        Args:
            loss_sum: Sum of the losses of its tokens in nats, a scalar.
            num_tokens: Number of tokens.
        """
        self._add(loss_sum, num_tokens)


class Perplexity(TokenLoss):
    """The exponential of the mean loss per token."""

    def value(self) -> Tensor | None:
        """Return the perplexity."""
        loss = super().value()
        return None if loss is None else loss.exp()


class BitsPerByte(RatioMetric):
    """Bits that the model needs per byte of text; unlike the loss per token, comparable between tokenizers."""

    higher_is_better = False

    def update(self, loss_sum: Tensor | float, num_bytes: Tensor | int) -> None:
        """Add a batch.

        Args:
            loss_sum: Sum of the losses of its tokens in nats, a scalar.
            num_bytes: Number of UTF-8 bytes of the text of these tokens.
        """
        self._add(loss_sum, num_bytes)

    def value(self) -> Tensor | None:
        """Return the bits per byte."""
        nats = super().value()
        return None if nats is None else nats / log(2)


class TokenAccuracy(RatioMetric):
    """Fraction of the tokens that the model ranks first."""

    higher_is_better = True

    def update(self, num_correct: Tensor | int, num_tokens: Tensor | int) -> None:
        """Add the number of correct tokens and of all tokens of a batch."""
        self._add(num_correct, num_tokens)


class WeightedAccuracy(RatioMetric):
    """Weighted mean of batch accuracies, each with the weight `accuracy_denom`.

    Args:
        nonfinite: As in `RatioMetric`.
        kwargs: Arguments of `torchmetrics.Metric`.
    """

    higher_is_better = True

    def __init__(self, nonfinite: NonFinite = "exclude", **kwargs: Any) -> None:
        super().__init__(nonfinite, weights=True, **kwargs)

    def update(self, accuracy: Tensor | float, accuracy_denom: Tensor | float) -> None:
        """Add a batch.

        Args:
            accuracy: Accuracy of the batch, a scalar; ignored if the weight is zero.
            accuracy_denom: Number of items that the accuracy is a mean over, e.g. tokens.
        """
        accuracy = torch.as_tensor(accuracy, dtype=torch.float64, device=self.device).detach()
        weight = torch.as_tensor(accuracy_denom, dtype=torch.float64, device=self.device)
        self._add(torch.where(weight == 0, torch.zeros_like(accuracy), accuracy * weight), weight)


class AcceptanceRate(RatioMetric):
    """Fraction of the draft tokens at one position that the target model accepts.

    Args:
        position: Position, counted from 0 for the first draft token.
        kwargs: Arguments of `RatioMetric`.
    """

    higher_is_better = True

    def __init__(self, position: int, **kwargs: Any) -> None:
        if position < 0:
            raise ValueError(f"position={position}: give 0, the first draft token, or more.")
        super().__init__(**kwargs)
        self.position = position
        self.set_apart(f"position_{position}")

    def update(self, accepted: Tensor, total: Tensor) -> None:
        """Add a batch; a batch with fewer positions does not count.

        Args:
            accepted: Number of accepted draft tokens, int [positions].
            total: Number of draft tokens, int [positions].
        """
        accepted, total = _counts(accepted, total, self.device)
        if self.position < total.numel():
            self._add(accepted[self.position], total[self.position])


class AcceptanceLength(SumMetric):
    """Expected number of draft tokens accepted in a row: the sum of the cumulative products of the acceptance rates.

    The rates of the positions are those over all batches and ranks. From the first position without any draft token on,
    the rate is zero.

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
        """Add a batch.

        Args:
            accepted: Number of accepted draft tokens, int [positions]; as many positions as this batch has.
            total: Number of draft tokens, int [positions].
        """
        counts = _counts(accepted, total, self.device)
        self._reduce_states(dict(zip(("accepted", "total"), counts, strict=True)))

    def value(self) -> Tensor | None:
        """Return the length in tokens."""
        if not self.total.numel() or not self.total[0]:
            return None
        rates = torch.where(self.total > 0, self.accepted.double() / self.total.clamp(min=1), 0.0)
        return rates.cumprod(0).sum()


def _counts(accepted: Tensor, total: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    accepted, total = (torch.as_tensor(each, device=device).detach() for each in (accepted, total))
    if accepted.shape != total.shape or accepted.dim() != 1:
        raise ValueError(
            f"`accepted` of shape {tuple(accepted.shape)} and `total` of shape "
            f"{tuple(total.shape)}: give one count for "
            "each position in both, [positions]."
        )
    if accepted.is_floating_point() or total.is_floating_point():
        raise ValueError(f"`accepted` is {accepted.dtype} and `total` is {total.dtype}: give counts, not ratios.")
    return accepted.long(), total.long()


def _padded(each: Tensor, size: int) -> Tensor:
    return F.pad(each, (0, size - each.numel())) if each.dim() else each
