"""Estimates for clusters: hand-computed traffic, limits that hold for any plan, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.plan import ChunkPlan, MemoryTerms, Plan, Sharding
from lightning_protrain.planner.prediction import PhasePrediction, Prediction
from lightning_protrain.planner.scaling import Cluster, scale

PREDICTION = Prediction(
    hardware="GPU",
    budget=10**9,
    phases=(PhasePrediction("step", "", {"states": 10}, {"parameters": 600}),),
    step_seconds=2.0,
    busy={"compute": 1.5},
    bound="compute",
    tokens=100,
)


def plan_of(resident: int, offloaded: int, sharding: Sharding = Sharding.SHARD, low: bool = False) -> Plan:
    chunks = (
        ChunkPlan(("a",), "a", "float32", True, resident, True),
        ChunkPlan(("b",), "b", "float32", True, offloaded, False, "bfloat16" if low else None),
        ChunkPlan(("c",), "c", "float32", False, 10**6, True),
    )
    return Plan(chunks, (), 1, MemoryTerms(0, 0, 0, 0), {}, PREDICTION, sharding)


def gathered(plan: Plan, here: int) -> Plan:
    return replace(plan, gathered_by=here)


def cluster(here: int, nodes: int = 1, link: float = 100.0, network: float = 10.0) -> Cluster:
    return Cluster(here, nodes, link, network, 1e12)


@pytest.mark.parametrize(
    ("plan", "where", "seconds"),
    [
        (plan_of(0, 400), cluster(1), 0.0),
        (plan_of(0, 400), cluster(4), 3 / 4 * 400 / 100),
        (plan_of(0, 400, low=True), cluster(4), 3 / 4 * 800 / 100),
        (plan_of(0, 400, Sharding.REPLICATE), cluster(4), 2 * 3 / 4 * 400 / 100),
        (plan_of(200, 0), cluster(4), 2 * 3 / 4 * 200 / 100),
        (plan_of(200, 400), cluster(2), 2 * 1 / 2 * 200 / 100 + 1 / 2 * 400 / 100),
        (plan_of(0, 400), cluster(4, 2), 3 / 4 * 400 / 100 + 2 * 1 / 2 * 400 / 10),
        (plan_of(0, 400, Sharding.REPLICATE), cluster(1, 2), 2 * 1 / 2 * 400 / 10),
        (plan_of(200, 0), cluster(4, 2), 2 * 7 / 8 * 200 / 10),
    ],
)
def test_traffic_by_hand(plan: Plan, where: Cluster, seconds: float) -> None:
    assert scale(plan, where).sent_seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("plan", "where", "sums", "exchange"),
    [
        # One machine sends all of its part, and the other waits; then the other way round.
        (plan_of(0, 400), cluster(1, 2), 1 / 2 * 400 / 10, 400 / 10),
        # Two ranks of a machine do so at the same time, and fill the network.
        (plan_of(0, 400), cluster(2, 2), 1 / 2 * 400 / 100 + 1 / 2 * 400 / 10, 1 / 2 * 400 / 10),
        (plan_of(0, 400), cluster(8, 8), 7 / 8 * 400 / 100 + 7 / 8 * 400 / 10, 7 / 8 * 400 / 10),
        # Along a tree, four machines are reached in two turns.
        (plan_of(0, 400), cluster(1, 4), 3 / 4 * 400 / 10, 2 * 400 / 10),
        (plan_of(0, 400, low=True), cluster(2, 2), 1 / 2 * 800 / 100 + 1 / 2 * 800 / 10, 1 / 2 * 800 / 10),
        (plan_of(200, 0), cluster(2, 2), 2 * 3 / 4 * 200 / 10, 0.0),
        (plan_of(0, 400, Sharding.REPLICATE), cluster(1, 2), 2 * 1 / 2 * 400 / 10, 0.0),
        (plan_of(0, 400), cluster(2, 1), 1 / 2 * 400 / 100, 0.0),
    ],
)
def test_machines_that_divide_steps_send_weights(plan: Plan, where: Cluster, sums: float, exchange: float) -> None:
    found = scale(plan, replace(where, divides_steps=True))
    assert found.sent_seconds == pytest.approx(sums)
    assert found.exchange_seconds == pytest.approx(exchange)
    assert scale(plan, where).exchange_seconds == 0


@pytest.mark.parametrize(("overlaps", "shown"), [(True, 20.0 - 0.5), (False, 20.0)])
def test_what_forward_hides_of_new_weights_costs_nothing(overlaps: bool, shown: float) -> None:
    where = replace(cluster(2, 2, link=1e9), divides_steps=True, overlaps=overlaps)
    found = scale(plan_of(0, 400), where)
    assert found.step_seconds == pytest.approx(2.0 + found.sent_seconds - 1.0 + shown)


def test_what_backward_hides_costs_nothing() -> None:
    hidden, shown = scale(plan_of(0, 400), cluster(4, link=400.0)), scale(plan_of(0, 400), cluster(4, link=100.0))
    assert (hidden.sent_seconds, hidden.step_seconds, hidden.efficiency) == (0.75, 2.0, 1.0)
    assert shown.step_seconds == pytest.approx(2.0 + 3.0 - 1.0)
    assert shown.tokens_per_second == pytest.approx(400 / 4.0)


def test_only_the_last_micro_batch_hides() -> None:
    plan = plan_of(0, 400)
    assert plan.prediction is not None
    plan = replace(plan, prediction=replace(plan.prediction, accumulate=2))
    assert scale(plan, cluster(4)).step_seconds == pytest.approx(2.0 + 3.0 - 0.5)


def test_devices_share_the_memory_of_their_host() -> None:
    narrow = replace(cluster(4, link=1e9), host_memory=100.0)
    assert scale(plan_of(0, 400), narrow).step_seconds == pytest.approx(4 * (2 * 400 + 400) / 100)
    assert scale(plan_of(0, 400), narrow).node_bytes == 600
    assert scale(plan_of(0, 400, Sharding.REPLICATE), narrow).node_bytes == 2400


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(1, 64),
    st.sampled_from(list(Sharding)),
    st.booleans(),
    st.floats(1.0, 1e6),
)
def test_no_cluster_is_better_than_its_devices(
    resident: int, offloaded: int, here: int, nodes: int, sharding: Sharding, gathers: bool, rate: float
) -> None:
    plan = gathered(plan_of(resident, offloaded, sharding), here if gathers else 1)
    found = scale(plan, cluster(here, nodes, rate, rate))
    assert 0 < found.efficiency <= 1
    assert found.tokens_per_second is not None
    assert found.tokens_per_second <= here * nodes * 100 / 2.0 * (1 + 1e-9)


def test_without_a_prediction_there_is_nothing_to_scale() -> None:
    with pytest.raises(ValueError, match="no prediction to scale"):
        scale(replace(plan_of(1, 1), prediction=None), cluster(2))


@pytest.mark.parametrize(
    ("plan", "where", "host", "link"),
    [
        # Four ranks read a quarter each of 400 bytes, twice, and write 400 bytes of gradients each.
        (gathered(plan_of(0, 400), 4), cluster(4), 4 * (2 * 400 / 4 + 400), 3 / 4 * (2 * 400 + 400) / 100),
        (gathered(plan_of(0, 400, low=True), 4), cluster(4), 4 * (2 * 400 / 4 + 800), 3 / 4 * (2 * 400 + 800) / 100),
        (
            gathered(plan_of(200, 400), 2),
            cluster(2),
            2 * (2 * 400 / 2 + 400),
            (1 / 2 * (2 * 400 + 400) + 2 * 1 / 2 * 200) / 100,
        ),
        # Sums of other machines cross the network, not this link.
        (gathered(plan_of(0, 400), 4), cluster(4, 2), 4 * (2 * 400 / 4 + 400), 3 / 4 * (2 * 400 + 400) / 100),
        (plan_of(0, 400), cluster(4), 4 * (2 * 400 + 400), 0.0),
    ],
)
def test_parts_leave_the_host_once_and_cross_the_link(plan: Plan, where: Cluster, host: float, link: float) -> None:
    found = scale(plan, where)
    assert found.host_seconds == pytest.approx(host / where.host_memory)
    assert found.link_seconds == pytest.approx(link)


def test_micro_batches_gather_each_and_sum_once() -> None:
    plan = gathered(plan_of(0, 400), 4)
    assert plan.prediction is not None
    plan = replace(plan, prediction=replace(plan.prediction, accumulate=3))
    assert scale(plan, cluster(4)).link_seconds == pytest.approx(3 / 4 * (3 * 2 * 400 + 400) / 100)


def test_a_step_takes_no_less_than_the_link_between_devices() -> None:
    plan, slow = gathered(plan_of(0, 400), 4), cluster(4, link=10.0)
    assert scale(plan, slow).step_seconds == scale(plan, slow).link_seconds == pytest.approx(90.0)
    narrow = replace(cluster(4, link=1e9), host_memory=100.0)
    assert scale(plan, narrow).step_seconds == pytest.approx(4 * (2 * 400 / 4 + 400) / 100)
