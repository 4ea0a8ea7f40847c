"""The chunked loss and its sums over scored tokens: parity, memory and graph, however batches are cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig

from lightning_protrain.models.loss import (
    PLAIN_HEAD_MODEL_TYPES,
    RESCALED_LOGITS,
    chunked_cross_entropy,
    has_plain_head,
)
from lightning_protrain.models.module import token_scores
from tests.support.tiny_networks import VOCAB, tiny_model


def neutral_settings(model_type: str) -> dict[str, float | None]:
    base = AutoConfig.for_model(model_type)
    return {key: value for key, value in RESCALED_LOGITS.items() if hasattr(base, key)}


def full_cross_entropy(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
    logits = head(hidden[:, :-1]).float().flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")


def random_case(batch: int, seq: int, width: int, seed: int) -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    hidden = torch.randn(batch, seq, width, generator=generator).requires_grad_()
    labels = torch.randint(0, VOCAB, (batch, seq), generator=generator)
    return hidden, nn.Linear(width, VOCAB), labels


def gradients(loss: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *head.parameters()]))


class LargestTensor(TorchDispatchMode):
    """Records the most elements of a tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


@given(
    batch=st.integers(1, 4),
    seq=st.integers(1, 9),
    chunk_tokens=st.integers(1, 40),
    ignored=st.floats(0, 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_equals_the_full_loss_and_its_gradients(batch, seq, chunk_tokens, ignored, seed):
    hidden, head, labels = random_case(batch, seq, 8, seed)
    labels[torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed)) < ignored] = -100

    loss, num_tokens = chunked_cross_entropy(hidden, head, labels, chunk_tokens)
    expected = full_cross_entropy(hidden, head, labels)

    assert num_tokens == int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    pairs = zip(gradients(loss, hidden, head), gradients(expected, hidden, head), strict=True)
    for gradient, expected_gradient in pairs:
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_one_chunk_is_bitwise_the_full_loss():
    hidden, head, labels = random_case(3, 17, 16, seed=1)
    loss, _ = chunked_cross_entropy(hidden, head, labels, chunk_tokens=3 * 16)
    expected = full_cross_entropy(hidden, head, labels)
    assert torch.equal(loss, expected)
    for gradient, expected_gradient in zip(
        gradients(loss, hidden, head), gradients(expected, hidden, head), strict=True
    ):
        assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("chunk_tokens", [3, 64])
def test_weights_are_factors_of_single_losses_and_are_not_rounded(chunk_tokens, autocast):
    hidden, head, labels = random_case(2, 9, 8, seed=4)
    labels[0, 2:5] = -100
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(4))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, num_tokens = chunked_cross_entropy(hidden, head, labels, chunk_tokens, weights=weights)
        logits = head(hidden[:, :-1]).float().flatten(0, 1)
    losses = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
    expected = (losses * weights[:, 1:].flatten()).sum()
    assert num_tokens == 13
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    pairs = zip(gradients(loss, hidden, head), gradients(expected, hidden, head), strict=True)
    for gradient, expected_gradient in pairs:
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-2 if autocast else 1e-5)


@pytest.mark.parametrize("chunk_tokens", [8, 32, 100])
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(chunk_tokens):
    hidden, head, labels = random_case(4, 65, 4, seed=3)
    labels = labels[:, :64]
    hidden = hidden[:, :64].detach().requires_grad_()  # 4 * 64 * 4 elements, fewer than 32 * VOCAB
    with LargestTensor() as mode:
        chunked_cross_entropy(hidden, head, labels, chunk_tokens)[0].backward()
    assert mode.largest == max(chunk_tokens * VOCAB, hidden.numel())

    with LargestTensor() as full:
        full_cross_entropy(hidden, head, labels).backward()
    assert full.largest == 4 * 63 * VOCAB


def test_saves_no_logits_for_the_backward():
    hidden, head, labels = random_case(4, 65, 4, seed=3)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunked_cross_entropy(hidden, head, labels, chunk_tokens=100)
    assert saved
    assert max(saved) == 100 * 4  # the hidden states of a slice


def test_without_labels_the_loss_is_a_connected_zero():
    hidden, head, labels = random_case(2, 5, 8, seed=4)
    loss, num_tokens = chunked_cross_entropy(hidden, head, torch.full_like(labels, -100))
    assert num_tokens == 0
    assert loss.item() == 0.0
    for gradient in gradients(loss, hidden, head):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_positions_without_a_label_never_reach_the_head():
    hidden, head, labels = random_case(2, 6, 8, seed=5)
    labels[0, :4] = -100
    rows: list[int] = []
    head.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    with torch.no_grad():
        chunked_cross_entropy(hidden, head, labels, chunk_tokens=3)
    assert rows == [3, 3, 1]  # 2 labels of the first sequence, 5 of the second


def test_hooks_of_the_head_run_in_the_forward_and_in_the_recomputation():
    hidden, head, labels = random_case(1, 9, 8, seed=6)
    calls: list[int] = []
    head.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    loss, _ = chunked_cross_entropy(hidden, head, labels, chunk_tokens=4)
    assert calls == [4, 4]
    loss.backward()
    assert calls == [4, 4, 4, 4]


def test_forward_replaced_on_the_instance_is_used():
    hidden, head, labels = random_case(1, 9, 8, seed=7)
    head.forward = lambda rows: rows.new_zeros(len(rows), VOCAB) + 0 * rows.sum()
    loss, num_tokens = chunked_cross_entropy(hidden, head, labels)
    torch.testing.assert_close(loss / num_tokens, torch.tensor(VOCAB).log())


def test_autocast_reaches_the_recomputation_and_the_loss_is_float32():
    hidden, head, labels = random_case(2, 9, 8, seed=8)
    dtypes: list[torch.dtype] = []
    head.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = chunked_cross_entropy(hidden, head, labels, chunk_tokens=16)
        expected = full_cross_entropy(hidden, head, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert set(dtypes) == {torch.bfloat16}
    assert head.weight.grad.dtype == torch.float32


def test_half_precision_logits_are_scored_in_float32():
    logits, _, labels = random_case(2, 9, VOCAB, seed=8)
    logits = logits.detach().bfloat16()
    loss, _ = chunked_cross_entropy(logits, nn.Identity(), labels, chunk_tokens=16)
    assert torch.equal(loss, full_cross_entropy(logits, nn.Identity(), labels))
    assert loss != loss.bfloat16()


def test_without_gradients_nothing_is_recorded():
    hidden, head, labels = random_case(2, 9, 8, seed=9)
    with torch.inference_mode():
        loss, _ = chunked_cross_entropy(hidden, head, labels, chunk_tokens=5)
    assert not loss.requires_grad
    torch.testing.assert_close(loss.clone(), full_cross_entropy(hidden, head, labels).detach())


def test_frozen_head_passes_the_gradient_on():
    hidden, head, labels = random_case(2, 9, 8, seed=10)
    expected = torch.autograd.grad(full_cross_entropy(hidden, head, labels), hidden)[0]
    head.requires_grad_(False)
    chunked_cross_entropy(hidden, head, labels, chunk_tokens=5)[0].backward()
    assert head.weight.grad is None
    torch.testing.assert_close(hidden.grad, expected)


@pytest.mark.parametrize("chunk_tokens", [0, -3])
def test_refuses_a_chunk_without_tokens(chunk_tokens):
    hidden, head, labels = random_case(1, 3, 8, seed=0)
    with pytest.raises(ValueError, match=f"chunk_tokens is {chunk_tokens}"):
        chunked_cross_entropy(hidden, head, labels, chunk_tokens)


def test_refuses_labels_of_another_shape():
    hidden, head, labels = random_case(2, 3, 8, seed=0)
    with pytest.raises(ValueError, match=r"labels of shape \(2, 3\); their shape is \(2, 2\)"):
        chunked_cross_entropy(hidden, head, labels[:, :2])


@pytest.mark.parametrize("model_type", sorted(PLAIN_HEAD_MODEL_TYPES))
def test_every_listed_architecture_has_the_loss_of_transformers(model_type):
    model = tiny_model(model_type, **neutral_settings(model_type))
    assert has_plain_head(model)
    for parameter in model.parameters():  # biases and norms start where they would hide a mistake
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    input_ids = torch.randint(3, VOCAB, (2, 12))
    labels = input_ids.clone()
    labels[0, :5] = -100
    batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "use_cache": False}
    with torch.no_grad():
        expected = model(**batch, labels=labels).loss
        hidden = model.base_model(**batch)[0]
        loss, num_tokens = chunked_cross_entropy(hidden, model.get_output_embeddings(), labels, chunk_tokens=5)
    torch.testing.assert_close(loss / num_tokens, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("gemma2", {}),  # caps by default
        ("gemma3_text", {"final_logit_softcapping": 30.0}),
        ("cohere", {"logit_scale": 0.0625}),
        ("granite", {"logits_scaling": 8.0}),
        ("mixtral", {"output_router_logits": True}),
        ("modernbert-decoder", {}),  # not listed: a dense layer stands before its output embeddings
    ],
)
def test_a_head_that_is_not_all_there_is_to_the_logits_is_seen(model_type, overrides):
    assert not has_plain_head(tiny_model(model_type, **overrides))


def test_a_module_of_another_library_has_no_known_head():
    assert not has_plain_head(nn.Linear(2, 2))


SCORED_VOCAB, HIDDEN = 13, 6


def batch(rows: int = 4, length: int = 9) -> tuple[Tensor, nn.Linear, Tensor]:
    labels = torch.randint(SCORED_VOCAB, (rows, length))
    labels[torch.rand(rows, length) < 0.3] = -100
    return torch.randn(rows, length, HIDDEN), nn.Linear(HIDDEN, SCORED_VOCAB, bias=False), labels


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


def test_the_same_losses_in_any_batches_and_slices() -> None:
    """A head that is a table gives every token the same loss whatever it is computed with."""
    hidden, labels = (
        F.one_hot(torch.randint(SCORED_VOCAB, (40, 11)), SCORED_VOCAB).float(),
        torch.randint(SCORED_VOCAB, (40, 11)),
    )
    head = nn.Embedding(SCORED_VOCAB, SCORED_VOCAB)

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
