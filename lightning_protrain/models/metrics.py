"""Metrics of language models that are exact over batches of any size and any number of ranks.

A metric keeps sums, in float64 and int64 because a float32 counter stops growing at 2**24. Sums are added over batches
and ranks before any division or exponential. So the value does not depend on how tokens are divided into batches and
ranks.

In `compute`, every rank runs the same collectives, even if it has no data. If the metric has a vector of sums by
position, the first all-reduce finds its largest length. Then one all-reduce adds all counts and one adds all other
sums.

`compute` returns None on every rank if no rank has a token. Lightning then logs nothing, so that neither a checkpoint
nor early stopping sees a value.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from math import log
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.utilities.prints import rank_zero_warn

from lightning_protrain.config import check_kinds, plural

NonFinite: TypeAlias = Literal["exclude", "error", "keep"]


class SumMetric(Metric):
    """Base class of metrics that keep sums; subclasses compute the metric from the sums in `value`."""

    is_differentiable = False
    full_state_update = False

    def add_sum(self, name: str, dtype: torch.dtype, by_position: bool = False) -> None:
        """Register a sum that starts at zero: a scalar, or a vector if `by_position`, whose length grows."""
        self.add_state(name, torch.zeros((0,) if by_position else (), dtype=dtype), dist_reduce_fx="sum")

    def set_apart(self, kind: str) -> None:
        """Keep `MetricCollection` from merging this metric with one of another kind.

        `MetricCollection` merges metrics whose states have equal names and, after the first batch, equal values. That
        would merge any two metrics if the first batch has no tokens, so this adds an unused state named after the kind.
        """
        self.add_state(f"_kind_{kind}", torch.zeros(()), dist_reduce_fx=None)

    def value(self) -> Any:
        """Return the metric over all batches and ranks, or None without data."""
        raise NotImplementedError

    def compute(self) -> Any:
        """Return the metric over all batches and ranks, or None without data.

        Raises:
            ValueError: On every rank, if a batch was not finite and `nonfinite="error"`.
        """
        return self.value()

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        # TorchMetrics caches the value, but recomputes None. A second read on one rank, such as by a progress bar, must
        # not start collectives. So () is cached in place of None.
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
            # Keep the dtype of the sums if the module is cast.
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
        sizes = {name: value.numel() for name, value in sums.items()}
        vectors = [name for name, value in sums.items() if value.dim()]
        if vectors:
            longest = torch.tensor([sizes[name] for name in vectors], device=self.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
            sizes |= dict(zip(vectors, longest.tolist(), strict=True))
        for dtype in dict.fromkeys(value.dtype for value in sums.values()):
            names = [name for name, value in sums.items() if value.dtype == dtype]
            flat = torch.cat([_padded(sums[name], sizes[name]).reshape(-1) for name in names])
            dist.all_reduce(flat, group=group)
            for name, part in zip(names, flat.split([sizes[name] for name in names]), strict=True):
                setattr(self, name, part if sums[name].dim() else part.reshape(()))


class RatioMetric(SumMetric):
    """A sum divided by the number of its summands.

    Args:
        nonfinite: Treatment of a batch whose sum is NaN or infinite. `"exclude"` skips the batch, and `compute` warns.
            `"error"` makes `compute` raise on every rank. `"keep"` adds the batch.
        weights: True if the counts are float64 weights instead of integers.
        kwargs: Arguments of `torchmetrics.Metric`.

    Attributes:
        total: The sum.
        count: Number or weight of the summands.
        num_nonfinite: Number of batches with a NaN or infinite sum.
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
            raise ValueError(f"{type(self).__name__} takes integer counts, not {count}.")
        total = torch.as_tensor(total, dtype=self.total.dtype, device=self.device).detach()
        count = torch.as_tensor(count, dtype=self.count.dtype, device=self.device).detach()
        if total.numel() != 1 or count.numel() != 1:
            raise ValueError(
                f"{type(self).__name__} takes scalars, sums over a batch, but the shapes are {tuple(total.shape)} and "
                f"{tuple(count.shape)}. Sum the values first."
            )
        finite = total.reshape(()).isfinite()
        taken = finite | (self.nonfinite == "keep")
        # Branching on the values would make the host wait for the device.
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
            raise ValueError(f'{text}. Find the cause, or set nonfinite="exclude" to skip such batches.')
        rank_zero_warn(f"{text}, which the metric skips.")


class TokenLoss(RatioMetric):
    """Mean loss per token in nats: the sum of the losses over the number of tokens."""

    higher_is_better = False

    def update(self, loss_sum: Tensor | float, num_tokens: Tensor | int) -> None:
        """Add a batch.

        Args:
            loss_sum: Sum of the losses of the batch's tokens in nats, a scalar.
            num_tokens: Number of these tokens.
        """
        self._add(loss_sum, num_tokens)


class Perplexity(TokenLoss):
    """The exponential of the mean loss per token."""

    def value(self) -> Tensor | None:
        """Return the perplexity."""
        loss = super().value()
        return None if loss is None else loss.exp()


class BitsPerByte(RatioMetric):
    """Bits per byte of text, a loss that is comparable between tokenizers."""

    higher_is_better = False

    def update(self, loss_sum: Tensor | float, num_bytes: Tensor | int) -> None:
        """Add a batch.

        Args:
            loss_sum: Sum of the losses of the batch's tokens in nats, a scalar.
            num_bytes: Number of UTF-8 bytes of the tokens' text.
        """
        self._add(loss_sum, num_bytes)

    def value(self) -> Tensor | None:
        """Return the bits per byte."""
        nats = super().value()
        return None if nats is None else nats / log(2)


class TokenAccuracy(RatioMetric):
    """Fraction of the tokens to which the model gives the highest probability."""

    higher_is_better = True

    def update(self, num_correct: Tensor | int, num_tokens: Tensor | int) -> None:
        """Add a batch: its number of correct tokens, and its number of tokens."""
        self._add(num_correct, num_tokens)


class WeightedAccuracy(RatioMetric):
    """Mean of batch accuracies, weighted with `accuracy_denom`.

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
            accuracy_denom: Number of items, such as tokens, of which the accuracy is the mean.
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
        """Add a batch; ignore it if it does not have the position.

        Args:
            accepted: Number of accepted draft tokens, int [positions].
            total: Number of draft tokens, int [positions].
        """
        accepted, total = _counts(accepted, total, self.device)
        if self.position < total.numel():
            self._add(accepted[self.position], total[self.position])


class AcceptanceLength(SumMetric):
    """Expected number of draft tokens accepted in a row: the sum of the cumulative products of the acceptance rates.

    The acceptance rate of a position is taken over all batches and ranks; it is zero at positions without draft tokens.

    Attributes:
        accepted: Number of accepted draft tokens, int64 [positions].
        total: Number of draft tokens, int64 [positions].
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
            accepted: Number of accepted draft tokens, int [positions]; the number of positions may vary by batch.
            total: Number of draft tokens, int [positions].
        """
        counts = _counts(accepted, total, self.device)
        self._reduce_states(dict(zip(("accepted", "total"), counts, strict=True)))

    def value(self) -> Tensor | None:
        """Return the expected number of draft tokens accepted in a row, or None without data."""
        if not self.total.numel() or not self.total[0]:
            return None
        rates = torch.where(self.total > 0, self.accepted.double() / self.total.clamp(min=1), 0.0)
        return rates.cumprod(0).sum()


class PositionScores(SumMetric):
    """Loss and accuracy of tokens by position, for example by place in an answer, or by draft head.

    `compute` returns a dict of scalars: `loss_0` and `accuracy_0` for the bucket that begins at position 0, and so on.
    A bucket without a token has no entry.

    Args:
        num_buckets: Number of buckets; the last one also takes all later positions.
        bucket_size: Number of positions in a bucket.
        kwargs: Arguments of `torchmetrics.Metric`.

    Attributes:
        loss_sum: Sum of the losses in nats, float64 [num_buckets].
        num_correct: Number of tokens to which the model gives the highest probability, int64 [num_buckets].
        num_tokens: Number of tokens, int64 [num_buckets].
    """

    loss_sum: Tensor
    num_correct: Tensor
    num_tokens: Tensor

    def __init__(self, num_buckets: int = 8, bucket_size: int = 1, **kwargs: Any) -> None:
        for name, number in (("num_buckets", num_buckets), ("bucket_size", bucket_size)):
            if number < 1:
                raise ValueError(f"{name}={number}: give at least 1.")
        super().__init__(**kwargs)
        self.num_buckets, self.bucket_size = num_buckets, bucket_size
        self.set_apart(f"buckets_{num_buckets}_{bucket_size}")
        for name, dtype in (("loss_sum", torch.float64), ("num_correct", torch.int64), ("num_tokens", torch.int64)):
            self.add_state(name, torch.zeros(num_buckets, dtype=dtype), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor, position: Tensor | int) -> None:
        """Add tokens.

        Args:
            preds: Logits, [tokens, vocab].
            target: Token ids, int64 [tokens].
            position: Position of each token, int64 [tokens]; a number is the position of all tokens.
        """
        position = torch.as_tensor(position, device=target.device).expand(target.shape)
        bucket = (position // self.bucket_size).clamp(max=self.num_buckets - 1)
        losses = F.cross_entropy(preds.detach().float(), target, reduction="none").double()
        self.loss_sum = self.loss_sum.index_add(0, bucket, losses)
        self.num_correct = self.num_correct.index_add(0, bucket, (preds.argmax(-1) == target).long())
        self.num_tokens = self.num_tokens.index_add(0, bucket, torch.ones_like(target))

    def value(self) -> dict[str, Tensor]:
        """Return loss (nats) and accuracy of each bucket with a token, by name and first position."""
        filled = [index for index, count in enumerate(self.num_tokens.tolist()) if count]
        sums = {"loss": self.loss_sum, "accuracy": self.num_correct.double()}
        return {
            f"{name}_{index * self.bucket_size}": total[index] / self.num_tokens[index]
            for name, total in sums.items()
            for index in filled
        }


# Number of tokens of the batch on which metrics are tried.
TRIED = 8


def metrics_by_name(given: Any, taken: Collection[str]) -> dict[str, Metric]:
    """Return metrics that the user has given, by name.

    Args:
        given: Map from names to metrics, a MetricCollection, or None.
        taken: Names that are not available.

    Raises:
        ValueError: If `given` has something else than metrics, or a name that cannot be used.
    """
    if isinstance(given, MetricCollection):
        given = dict(given.items(copy_state=False))
    check_kinds(Mapping, "a mapping from names to metrics", metrics=given)
    for name, metric in (given or {}).items():
        if not isinstance(metric, Metric):
            raise ValueError(f"Metric {name!r} is {type(metric).__name__}. Give a metric of torchmetrics.")
        if name in taken:
            raise ValueError(f"The metric {name!r} is always logged. Rename your metric.")
        if not str(name).isidentifier() or hasattr(MetricCollection({}), name):
            raise ValueError(f"A metric cannot have the name {name!r}. Use letters, digits and '_'.")
        if any(True for _ in metric.parameters()):
            raise ValueError(f"Metric {name!r} ({type(metric).__name__}) has parameters, which would be trained.")
    return dict(given or {})


def update_with_logits(metric: Metric, preds: Tensor, target: Tensor, position: Tensor) -> None:
    """Update a metric of the user.

    Args:
        metric: The metric; only one whose `update` has an argument `position` gets the positions.
        preds: Logits, float32 [tokens, vocab].
        target: Token ids, int64 [tokens].
        position: Position of each token within its trained turn, counted from 0, int64 [tokens].
    """
    takes = "position" in metric._update_signature.parameters
    metric.update(preds, target, **({"position": position} if takes else {}))


def scalars(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return computed metrics as they are logged.

    Raises:
        ValueError: If a value is not a scalar.
    """
    for name, value in values.items():
        if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
            kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"Metric {name!r} computes {kind}, but only scalars, or a dict of scalars, are logged.")
    return {name: torch.as_tensor(value).detach().double().reshape(()) for name, value in values.items()}


def try_metrics(metrics: Mapping[str, Metric], vocab_size: int) -> None:
    """Compute copies of metrics on a few random tokens, so that a metric that cannot be used is refused early.

    Raises:
        ValueError: If a metric refuses logits and token ids, or does not compute scalars.
    """
    random = torch.Generator().manual_seed(0)
    preds = torch.randn(TRIED, vocab_size, generator=random)
    target = torch.randint(vocab_size, (TRIED,), generator=random)
    for name, metric in metrics.items():
        tried = metric.clone().cpu()
        tried.reset()
        for part in tried.modules():
            if isinstance(part, Metric):
                part.sync_on_compute = False
        try:
            with warnings.catch_warnings(action="ignore"):
                update_with_logits(tried, preds, target, torch.arange(TRIED))
                values = MetricCollection({name: tried}).compute()
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"Metric {name!r} ({type(metric).__name__}) cannot be computed on logits of shape "
                f"{list(preds.shape)} and token ids of shape {list(target.shape)}: {error}"
            ) from error
        scalars(values)


def _counts(accepted: Tensor, total: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    accepted, total = (torch.as_tensor(count, device=device).detach() for count in (accepted, total))
    if accepted.shape != total.shape or accepted.dim() != 1:
        raise ValueError(
            f"`accepted` has the shape {tuple(accepted.shape)} and `total` has {tuple(total.shape)}: both must be "
            "[positions], with one count for each position."
        )
    if accepted.is_floating_point() or total.is_floating_point():
        raise ValueError(f"`accepted` is {accepted.dtype} and `total` is {total.dtype}: give counts, not ratios.")
    return accepted.long(), total.long()


def _padded(value: Tensor, size: int) -> Tensor:
    return F.pad(value, (0, size - value.numel())) if value.dim() else value
