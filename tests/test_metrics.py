"""The metrics do not depend on how tokens fell into batches, nor on the number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_protrain.metrics import Perplexity, TokenLoss

BATCHES = st.lists(st.tuples(st.floats(0, 1e3, width=32), st.integers(1, 5000)), min_size=1, max_size=20)


def updated(metric: TokenLoss, batches: list[tuple[float, int]]) -> TokenLoss:
    for loss_sum, num_tokens in batches:
        metric.update(torch.tensor(loss_sum), num_tokens)
    return metric


@given(BATCHES)
def test_token_loss_weighs_every_token_the_same(batches):
    value = updated(TokenLoss(), batches).compute()
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(math.fsum(loss for loss, _ in batches) / sum(count for _, count in batches))


def test_perplexity_is_the_exponential_of_the_loss_per_token():
    batches = [(6.0, 2), (1.0, 8)]
    assert updated(Perplexity(), batches).compute().item() == pytest.approx(math.exp(0.7))


@pytest.mark.parametrize("metric_class", [TokenLoss, Perplexity])
def test_a_small_batch_after_many_large_ones_is_not_lost(metric_class):
    metric = updated(metric_class(), [(2.0**24, 2**24), (1.0, 0)])  # in float32, 2**24 + 1 is 2**24
    assert metric.loss_sum.item() == 2**24 + 1


@given(BATCHES, BATCHES)
def test_the_states_of_two_ranks_add_up(first, second):
    together = updated(TokenLoss(), first + second)
    ranks = [updated(TokenLoss(), first), updated(TokenLoss(), second)]
    reductions = ranks[0]._reductions
    assert set(reductions) == {"loss_sum", "num_tokens"}
    for state, reduce in reductions.items():
        total = reduce(torch.stack([getattr(rank, state) for rank in ranks]))
        assert total.item() == pytest.approx(getattr(together, state).item())


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize("metric_class", [TokenLoss, Perplexity])
def test_without_tokens_the_value_is_nan(metric_class):
    assert metric_class().compute().isnan()
    assert updated(metric_class(), [(0.0, 0)]).compute().isnan()


def test_an_empty_batch_changes_nothing():
    assert updated(TokenLoss(), [(3.0, 2), (0.0, 0)]).compute().item() == 1.5


def test_reset_forgets():
    metric = updated(TokenLoss(), [(3.0, 1)])
    metric.reset()
    assert updated(metric, [(5.0, 2)]).compute().item() == 2.5


def test_a_cast_of_the_module_around_it_leaves_float64_sums():
    parent = nn.Module()
    parent.metric = TokenLoss()
    parent.to(torch.bfloat16)
    assert updated(parent.metric, [(2.0**24, 1), (1.0, 1)]).loss_sum.item() == 2**24 + 1


def test_holds_no_graph_and_no_state_dict_keys():
    metric = TokenLoss()
    metric.update(torch.tensor(1.0, requires_grad=True) * 2, 1)
    assert not metric.loss_sum.requires_grad
    assert metric.state_dict() == {}
