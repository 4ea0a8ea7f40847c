"""How a model scores the tokens of a batch in evaluation: losses summed in float64, and how many are right."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_protrain.loss import IGNORE_INDEX, labelled


class TokenScores(NamedTuple):
    """Sums over the scored tokens of a batch; the names are those of the arguments of `lightning_protrain.metrics`.

    Attributes:
        loss_sum: Of the losses in nats, a float64 scalar: the same, but for the last bits, in whatever batches.
        num_correct: Tokens that the model holds to be the likeliest, an int64 scalar.
        num_tokens: All of them.
    """

    loss_sum: Tensor
    num_correct: Tensor
    num_tokens: int


@torch.no_grad()
def token_scores(
    hidden: Tensor, head: nn.Module, labels: Tensor, chunk_tokens: int = 1024, ignore_index: int = IGNORE_INDEX
) -> TokenScores:
    """Scores the labelled tokens, a slice at a time, as `chunked_cross_entropy` does; there is nothing to go backward.

    Args:
        hidden: Last hidden states, [batch, seq, hidden].
        head: Maps [tokens, hidden] to logits, [tokens, vocab]; called once per slice, at least once.
        labels: Token ids, [batch, seq], not shifted; `ignore_index` marks tokens that are not scored.
        chunk_tokens: Most tokens whose logits exist at the same time.
        ignore_index: The label of a token that is not scored.

    Raises:
        ValueError: If `chunk_tokens` is below 1, or if the shapes of `hidden` and `labels` disagree.
    """
    selected, targets, _ = labelled(hidden, labels, chunk_tokens, ignore_index)
    loss_sum = torch.zeros((), dtype=torch.float64, device=hidden.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    # Zero tokens split into one empty slice, which runs the head too: streamed weights are used on every rank alike.
    for part, expected in zip(selected.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        logits = head(part).float()  # [tokens, vocab]
        loss_sum += F.cross_entropy(logits, expected, reduction="none").double().sum()
        num_correct += (logits.argmax(-1) == expected).sum()
    return TokenScores(loss_sum, num_correct, targets.numel())
