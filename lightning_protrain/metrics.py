"""Metrics of language models, exact over batches of any size and over any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenLoss(Metric):
    """Mean loss per token: the sum of the losses over the number of tokens.

    Both are summed over batches and ranks before they are divided, in float64 and int64, so that the value does not
    depend on how the tokens fell into batches. Without any token it is nan.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    loss_sum: Tensor
    num_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss_sum: Tensor, num_tokens: int) -> None:
        """Add the losses of a batch.

        Args:
            loss_sum: Sum of the losses of its tokens in nats, a scalar.
            num_tokens: How many tokens that is.
        """
        # A cast of the whole module to half precision takes the states along: return to float64 here.
        self.loss_sum = self.loss_sum.double() + loss_sum.detach().double()
        self.num_tokens += num_tokens

    def compute(self) -> Tensor:
        """Return the mean loss per token, a float64 scalar."""
        return self.loss_sum / self.num_tokens


class Perplexity(TokenLoss):
    """The exponential of the mean loss per token."""

    def compute(self) -> Tensor:
        """Return the perplexity, a float64 scalar."""
        return super().compute().exp()
