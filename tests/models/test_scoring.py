"""Sums over the scored tokens of a batch, however it is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_protrain.models.loss import chunked_cross_entropy
from lightning_protrain.models.module import token_scores

VOCAB, HIDDEN = 13, 6


def batch(rows: int = 4, length: int = 9) -> tuple[Tensor, nn.Linear, Tensor]:
    labels = torch.randint(VOCAB, (rows, length))
    labels[torch.rand(rows, length) < 0.3] = -100
    return torch.randn(rows, length, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False), labels


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 1000])
def test_sums_over_all_labelled_tokens(chunk_tokens: int) -> None:
    hidden, head, labels = batch()
    logits, targets = head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    scored = targets != -100
    scores = token_scores(hidden, head, labels, chunk_tokens)
    expected = F.cross_entropy(logits[scored].double(), targets[scored], reduction="sum")
    assert scores.loss_sum.dtype == torch.float64
    assert scores.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
    assert scores.num_correct.item() == (logits.argmax(-1) == targets)[scored].sum().item()
    assert scores.num_tokens == scored.sum().item()


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
def test_the_loss_is_that_of_training(chunk_tokens: int) -> None:
    hidden, head, labels = batch()
    loss_sum, num_tokens = chunked_cross_entropy(hidden, head, labels, chunk_tokens)
    scores = token_scores(hidden, head, labels, chunk_tokens)
    assert scores.num_tokens == num_tokens
    assert scores.loss_sum.item() == pytest.approx(loss_sum.item(), rel=1e-6)


def test_the_same_losses_in_any_batches_and_slices() -> None:
    """A head that is a table gives every token the same loss whatever it is computed with."""
    hidden, labels = F.one_hot(torch.randint(VOCAB, (40, 11)), VOCAB).float(), torch.randint(VOCAB, (40, 11))
    head = nn.Embedding(VOCAB, VOCAB)

    def logits(each: Tensor) -> Tensor:
        return head(each.argmax(-1))

    table = nn.Identity()
    table.forward = logits  # type: ignore[method-assign]
    whole = token_scores(hidden, table, labels, 10_000)
    for size in (1, 3, 8):
        for chunk_tokens in (1, 10, 64):
            pairs = zip(hidden.split(size), labels.split(size), strict=True)
            parts = [token_scores(*(rows, table, wanted), chunk_tokens) for rows, wanted in pairs]
            assert sum(part.loss_sum.item() for part in parts) == pytest.approx(whole.loss_sum.item(), rel=1e-12)
            assert sum(part.num_correct.item() for part in parts) == whole.num_correct.item()


def test_without_labels_the_head_still_runs() -> None:
    hidden, head, labels = batch()
    calls: list[Tensor] = []
    head.register_forward_hook(lambda module, args, output: calls.append(output))
    scores = token_scores(hidden, head, torch.full_like(labels, -100))
    assert (scores.loss_sum.item(), scores.num_correct.item(), scores.num_tokens) == (0.0, 0, 0)
    assert len(calls) == 1


def test_no_graph() -> None:
    hidden, head, labels = batch()
    assert not token_scores(hidden.requires_grad_(), head, labels).loss_sum.requires_grad


@pytest.mark.parametrize(
    ("shape", "chunk_tokens", "message"), [((4, 8), 4, "needs labels of shape"), ((4, 9), 0, "at least 1")]
)
def test_bad_input(shape: tuple[int, int], chunk_tokens: int, message: str) -> None:
    hidden, head, _ = batch()
    with pytest.raises(ValueError, match=message):
        token_scores(hidden, head, torch.zeros(shape, dtype=torch.int64), chunk_tokens)
