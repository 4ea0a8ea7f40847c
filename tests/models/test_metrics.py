"""The metrics do not depend on how tokens fell into batches, nor on the number of ranks."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection

from lightning_protrain.models.metrics import (
    AcceptanceLength,
    AcceptanceRate,
    BitsPerByte,
    Perplexity,
    TokenAccuracy,
    TokenLoss,
    WeightedAccuracy,
)

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


@pytest.mark.parametrize("metric_class", [TokenLoss, Perplexity])
def test_a_small_batch_after_many_large_ones_is_not_lost(metric_class):
    metric = updated(metric_class(), [(2.0**24, 2**24), (1.0, 0)])  # in float32, 2**24 + 1 is 2**24
    assert metric.total.item() == 2**24 + 1


@given(BATCHES, BATCHES)
def test_the_states_of_two_ranks_add_up(first, second):
    together = updated(TokenLoss(), first + second)
    ranks = [updated(TokenLoss(), first), updated(TokenLoss(), second)]
    reductions = {name: reduce for name, reduce in ranks[0]._reductions.items() if reduce is not None}
    assert set(reductions) == {"total", "count", "num_nonfinite"}
    for state, reduce in reductions.items():
        total = reduce(torch.stack([getattr(rank, state) for rank in ranks]))
        assert total.item() == pytest.approx(getattr(together, state).item())


def test_an_empty_batch_changes_nothing():
    assert updated(TokenLoss(), [(3.0, 2), (0.0, 0)]).compute().item() == 1.5


def test_holds_no_graph_and_no_state_dict_keys():
    metric = TokenLoss()
    metric.update(torch.tensor(1.0, requires_grad=True) * 2, 1)
    assert not metric.total.requires_grad
    assert metric.state_dict() == {}


# --- every metric


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


# Two updates, and the value after the first and after both.
METRICS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...], float, float]] = {
    "loss": (TokenLoss, (6.0, 3), (2.0, 1), 2.0, 2.0),
    "perplexity": (Perplexity, (6.0, 3), (4.0, 1), math.exp(2), math.exp(2.5)),
    "bits": (BitsPerByte, (math.log(2), 4), (math.log(2), 1), 0.25, 0.4),
    "accuracy": (TokenAccuracy, (ints(1), 4), (3, ints(4)), 0.25, 0.5),
    "weighted": (WeightedAccuracy, (0.25, 4), (1.0, 0.5), 0.25, 1.5 / 4.5),
    "rate": (lambda: AcceptanceRate(1), (ints(4, 1), ints(4, 4)), (ints(2, 3), ints(4, 4)), 0.25, 0.5),
    "length": (AcceptanceLength, (ints(2), ints(4)), (ints(2, 2, 3), ints(4, 4, 4)), 0.5, 0.5 + 0.25 + 0.1875),
}


@pytest.fixture(params=METRICS)
def case(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    return METRICS[request.param]


def test_the_value_after_each_update(case):
    made, first, second, after_first, after_both = case
    metric = made()
    metric.update(*first)
    assert metric.compute().item() == pytest.approx(after_first, rel=1e-15)
    metric.update(*second)
    assert metric.compute().item() == pytest.approx(after_both, rel=1e-15)
    assert metric.compute().dtype == torch.float64


def test_calling_it_gives_the_value_of_the_batch_and_adds_it(case):
    made, first, second, after_first, after_both = case
    metric = made()
    assert metric(*first).item() == pytest.approx(after_first)
    metric(*second)
    assert metric.compute().item() == pytest.approx(after_both)


def test_states_are_merged(case):
    made, first, second, _, after_both = case
    ours, theirs = made(), made()
    ours.update(*second)
    theirs.update(*first)
    ours.merge_state(theirs)
    assert ours.compute().item() == pytest.approx(after_both)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric)), Metric.clone])
def test_a_copy_goes_on_alone(case, clone):
    made, first, second, after_first, after_both = case
    metric = made()
    metric.update(*first)
    other = clone(metric)
    other.update(*second)
    assert metric.compute().item() == pytest.approx(after_first)
    assert other.compute().item() == pytest.approx(after_both)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_absent_until_there_is_something_and_again_after_a_reset(case):
    made, first, _, after_first, _ = case
    metric = made()
    assert metric.compute() is None
    metric.update(*first)
    assert metric.compute().item() == pytest.approx(after_first)
    metric.reset()
    assert metric.compute() is None


def test_a_cast_after_updates_loses_nothing(case):
    made, first, second, _, after_both = case
    parent = nn.Module()
    parent.metric = made()
    parent.metric.update(*first)
    parent.to(torch.float16)
    parent.metric.update(*second)
    assert parent.metric.compute().item() == pytest.approx(after_both, rel=1e-15)


class Logging(LightningModule):
    """Logs a metric through `self.log`; its batches are the two updates, or none."""

    def __init__(self, metric: Metric, updates: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.metric, self.updates = metric, updates

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx < len(self.updates):
            self.metric.update(*self.updates[batch_idx])

    def on_validation_epoch_end(self) -> None:
        self.log("value", self.metric, prog_bar=True)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_logged_by_lightning_or_absent_from_the_log(case, number):
    made, first, second, after_first, after_both = case
    options = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=1, **options)
    module = Logging(made(), [first, second][:number])
    logged = trainer.validate(module, DataLoader(torch.zeros(2)), verbose=False)[0]
    assert logged == ({} if number == 0 else {"value": pytest.approx((after_first, after_both)[number - 1])})
    assert set(trainer.callback_metrics) == set(logged)


@pytest.mark.parametrize("compute_groups", [True, False])
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_in_a_collection_each_takes_its_own_arguments(compute_groups):
    metrics = {"loss": TokenLoss(), "perplexity": Perplexity(), "accuracy": TokenAccuracy()}
    collection = MetricCollection(metrics, compute_groups=compute_groups)
    for _ in range(3):
        collection.update(loss_sum=6.0, num_tokens=3, num_correct=1)
    values = {name: value.item() for name, value in collection.compute().items()}
    assert values == {"loss": 2.0, "perplexity": pytest.approx(math.exp(2)), "accuracy": pytest.approx(1 / 3)}
    collection.reset()
    assert set(collection.compute().values()) == {None}


@pytest.mark.parametrize("first", [(0.0, 0), (6.0, 3)], ids=["empty", "as all others"])
@pytest.mark.filterwarnings("ignore:.*NaN or infinite values in")
def test_a_collection_merges_no_metrics_of_different_kinds(first):
    """After a first batch like this all of them have the same sums."""
    total, count = first
    metrics = {
        "loss": TokenLoss(),
        "kept": TokenLoss(nonfinite="keep"),
        "bits": BitsPerByte(),
        "accuracy": TokenAccuracy(),
        "weighted": WeightedAccuracy(),
        **{f"rate_{position}": AcceptanceRate(position) for position in range(2)},
    }
    collection = MetricCollection(metrics)
    for loss_sum, num_bytes, num_correct, accuracy, accepted in (
        (total, count, int(total), total / (count or 1), ints(int(total), int(total))),
        (math.nan, 9, 1, 0.25, ints(4, 0)),
    ):
        collection.update(
            loss_sum=loss_sum,
            num_tokens=count or 5,
            num_bytes=num_bytes,
            num_correct=num_correct,
            accuracy=accuracy,
            accuracy_denom=count,
            accepted=accepted,
            total=ints(count, count),
        )
    for name, metric in metrics.items():
        assert [name] in collection.compute_groups.values()
        assert metric.nonfinite == ("keep" if name == "kept" else "exclude")
    values = collection.compute()
    assert values["kept"].isnan()
    assert values["loss"] is None or values["loss"] == total / (count or 5)
    assert values["rate_0"] is None or values["rate_0"] != values["rate_1"]


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_what_was_absent_is_there_once_there_is_something(case):
    """This holds for metrics that share states, after a merge, and if only the last batch has no value."""
    made, first, _, after_first, _ = case
    shared = MetricCollection({"one": made(), "other": made()})
    assert set(shared.compute().values()) == {None}
    shared.update(*first)
    assert [value.item() for value in shared.compute().values()] == [pytest.approx(after_first)] * 2
    ours, theirs = made(), made()
    assert ours.compute() is None
    theirs.update(*first)
    ours.merge_state(theirs)
    assert ours.compute().item() == pytest.approx(after_first)
    nothing = [torch.zeros_like(torch.as_tensor(each)) for each in first]
    assert theirs(*nothing) is None
    assert theirs.compute().item() == pytest.approx(after_first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_no_cast_changes_a_sum(case, dtype):
    made, first, second, _, after_both = case
    metric = made()
    dtypes = [each.dtype for each in metric.metric_state.values()]
    metric.set_dtype(dtype)
    metric.update(*first)
    metric.set_dtype(dtype)
    metric.update(*second)
    assert [each.dtype for each in metric.metric_state.values()] == dtypes
    assert metric.compute().item() == pytest.approx(after_both, rel=1e-15)


@pytest.mark.parametrize("count", [3, torch.tensor(3), torch.tensor(3, dtype=torch.int32), True])
def test_counts_stay_integers(count):
    metric = TokenLoss()
    metric.update(6.0, count)
    assert metric.count.dtype == torch.int64


def test_weights_keep_their_precision():
    metric = TokenLoss(weights=True)
    metric.update(6.0, 0.1)
    assert metric.compute().item() == pytest.approx(60.0, rel=1e-15)


def test_counts_above_the_integers_of_float32_are_exact():
    metric = TokenAccuracy()
    for _ in range(4):
        metric.update(2**24 + 1, 2**25 + 1)
    assert (metric.total.item(), metric.count.item()) == (4 * 2**24 + 4, 4 * 2**25 + 4)


# --- batches that are not finite


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_batch_that_is_not_finite_is_left_out_and_counted(wrong):
    metric = TokenLoss()
    metric.update(6.0, 3)
    metric.update(wrong, 5)
    with pytest.warns(UserWarning, match="NaN or infinite values in 1 batch, .* skips"):
        assert metric.compute().item() == 2.0
    assert (metric.num_nonfinite.item(), metric.count.item()) == (1, 3)


def test_a_batch_that_is_not_finite_is_fatal_when_read():
    metric = TokenLoss(nonfinite="error")
    metric.update(math.nan, 5)
    with pytest.raises(ValueError, match=r"TokenLoss: NaN or infinite values in 1 batch\..* nonfinite=\"exclude\""):
        metric.compute()


@pytest.mark.filterwarnings("ignore:TokenLoss")
def test_nothing_but_batches_that_are_not_finite_is_nothing():
    metric = TokenLoss()
    metric.update(math.nan, 5)
    assert metric.compute() is None


def test_an_accuracy_without_weight_may_be_anything():
    metric = WeightedAccuracy()
    metric.update(math.nan, 0)
    metric.update(0.5, 2)
    assert metric.compute().item() == 0.5
    assert metric.num_nonfinite.item() == 0


# --- positions


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5), max_size=6))
def test_acceptance_by_position(batches):
    rates, length = [AcceptanceRate(position) for position in range(5)], AcceptanceLength()
    totals = [[0, 0] for _ in range(5)]
    for batch in batches:
        pairs = [(min(pair), max(pair)) for pair in batch]
        accepted, total = (torch.tensor([pair[i] for pair in pairs], dtype=torch.int64) for i in (0, 1))
        for metric in (*rates, length):
            metric.update(accepted, total)
        for position, pair in enumerate(pairs):
            totals[position][0] += pair[0]
            totals[position][1] += pair[1]
    product = expected = 1.0 * bool(totals[0][1])
    expected = 0.0
    for metric, (accepted_sum, total_sum) in zip(rates, totals, strict=True):
        if total_sum:
            assert metric.compute().item() == pytest.approx(accepted_sum / total_sum)
        product *= accepted_sum / total_sum if total_sum else 0.0
        expected += product
    if totals[0][1]:
        assert length.compute().item() == pytest.approx(expected)
    else:
        assert length.value() is None


# --- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TokenLoss(nonfinite="skip"), "nonfinite='skip'"),
        (lambda: AcceptanceRate(-1), "position=-1"),
        (lambda: TokenLoss().update(torch.ones(3), 3), r"takes scalars, sums over a batch, but the shapes are \(3,\)"),
        (lambda: AcceptanceLength().update(ints(1, 2), ints(1)), r"one count for each position"),
        (lambda: AcceptanceLength().update(ints(1)[0], ints(1)[0]), r"one count for each position"),
        (lambda: AcceptanceRate(0).update(torch.ones(2) / 2, ints(1, 1)), "give counts, not ratios"),
        (lambda: TokenLoss().update(6.0, torch.tensor(3.0)), "TokenLoss takes integer counts, not 3.0"),
        (lambda: BitsPerByte().update(6.0, 2.5), "BitsPerByte takes integer counts, not 2.5"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
