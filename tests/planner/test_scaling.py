"""Clusters: hand-computed rates of what is sent, limits that hold for any plan, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.network import Network, Route
from lightning_protrain.planner.plan import ChunkPlan, MemoryTerms, Plan, Sharding
from lightning_protrain.planner.prediction import PhasePrediction, Prediction
from lightning_protrain.planner.scaling import LATENCY_BETWEEN, LATENCY_WITHIN, NO_TIME, Cluster, scale

PREDICTION = Prediction(
    hardware="GPU",
    budget=10**9,
    phases=(PhasePrediction("step", "", {"states": 10}, {"parameters": 600}),),
    step_seconds=2.0,
    busy={"compute": 1.5, "network": 0.75},
    bound="compute",
    tokens=100,
    alone_seconds=1.5,
)


def plan_of(resident: int, offloaded: int, sharding: Sharding = Sharding.SHARD, low: bool = False) -> Plan:
    chunks = (
        ChunkPlan(("a",), "a", "float32", True, resident, True),
        ChunkPlan(("b",), "b", "float32", True, offloaded, False, "bfloat16" if low else None),
        ChunkPlan(("c",), "c", "float32", False, 10**6, True),
    )
    return Plan(chunks, (), 1, MemoryTerms(0, 0, 0, 0), {}, PREDICTION, sharding)


def cluster(here: int, nodes: int = 1, link: float = 100.0, network: float = 10.0) -> Cluster:
    return Cluster(here, nodes, link, network, 1e12)


def seconds_of(route: Route, nbytes: float) -> float:
    """Of a collective, but for what one of a few bytes takes."""
    return route.seconds(0, nbytes)


@pytest.mark.parametrize("sharding", Sharding)
@pytest.mark.parametrize(
    ("where", "seconds", "latency"),
    [
        (cluster(4), 2 * 3 / 4 * 400 / 100, LATENCY_WITHIN),
        (cluster(4, 2), 2 * 7 / 8 * 400 / 10, LATENCY_BETWEEN),
        (cluster(1, 2), 2 * 1 / 2 * 400 / 10, LATENCY_BETWEEN),
        # The slower one of both.
        (cluster(4, 2, link=5.0), 2 * 7 / 8 * 400 / 5, LATENCY_BETWEEN),
    ],
)
def test_sums_to_all_by_hand(where: Cluster, seconds: float, latency: float, sharding: Sharding) -> None:
    found = where.network_under(sharding)
    assert seconds_of(found.everyone, 400) == pytest.approx(seconds)
    assert found.everyone.latency == latency
    if sharding is Sharding.REPLICATE:
        assert found == Network(found.everyone)


@pytest.mark.parametrize(("here", "nodes"), [(4, 1), (4, 2), (2, 2), (8, 8), (1, 2), (1, 4)])
def test_sums_of_shared_chunks_by_hand(here: int, nodes: int) -> None:
    """All ranks of a machine send 400 bytes together, to owners of 400 / here each."""
    found = cluster(here, nodes).network_under(Sharding.SHARD)
    assert found.owner is not None
    assert found.owners == here
    assert seconds_of(found.owner, 400) == pytest.approx((here - 1) / here * 400 / 100)
    assert found.owner.latency == (LATENCY_WITHIN if here > 1 else 0)
    if nodes == 1:
        assert found.peers is None
        return
    assert found.peers is not None
    assert seconds_of(found.peers, 400 / here) == pytest.approx(2 * (nodes - 1) / nodes * 400 / 10)
    assert found.peers.latency == LATENCY_BETWEEN


@pytest.mark.parametrize("sharding", Sharding)
def test_the_dtype_of_sums_is_that_of_the_network(sharding: Sharding) -> None:
    assert cluster(2, 2).network_under(sharding, 2) == replace(cluster(2, 2).network_under(sharding), element=2)


@given(
    st.integers(1, 16), st.integers(1, 64), st.sampled_from(list(Sharding)), st.floats(1e3, 1e12), st.floats(1.0, 1e3)
)
def test_what_is_faster_never_takes_longer(here: int, nodes: int, sharding: Sharding, rate: float, more: float) -> None:
    slow, fast = (Cluster(here, nodes, each, each, 1e12).network_under(sharding) for each in (rate, more * rate))
    assert 0 <= fast.sum_of_resident(1e9) <= slow.sum_of_resident(1e9) * (1 + 1e-9)
    assert 0 <= fast.sum_of_chunks(9, 99, 1e9, 4e9) <= slow.sum_of_chunks(9, 99, 1e9, 4e9) * (1 + 1e-9)


def test_nothing_is_sent_where_there_is_one_device() -> None:
    found = cluster(1).network_under(Sharding.SHARD)
    assert found == Network(NO_TIME, NO_TIME)
    assert found.sum_of_chunks(100, 100, 1e15, 1e15) + found.sum_of_resident(1e15) == pytest.approx(0, abs=1e-9)


def test_the_step_is_that_of_the_prediction() -> None:
    found = scale(plan_of(0, 400), cluster(4))
    assert (found.step_seconds, found.sent_seconds) == (2.0, 0.75)
    assert found.efficiency == 1.5 / 2.0
    assert found.tokens_per_second == pytest.approx(400 / 2.0)


def test_devices_share_the_memory_of_their_host() -> None:
    narrow = replace(cluster(4, link=1e9), host_memory=100.0)
    assert scale(plan_of(0, 400), narrow).step_seconds == pytest.approx(4 * (2 * 400 + 400) / 100)
    assert scale(plan_of(0, 400, low=True), narrow).host_seconds == pytest.approx(4 * (2 * 400 + 800) / 100)
    assert scale(plan_of(0, 400), narrow).node_bytes == 600
    assert scale(plan_of(0, 400, Sharding.REPLICATE), narrow).node_bytes == 2400


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(1, 64),
    st.sampled_from(list(Sharding)),
    st.floats(1.0, 1e6),
    st.floats(0.1, 10.0),
)
def test_no_cluster_is_better_than_its_devices(
    resident: int, offloaded: int, here: int, nodes: int, sharding: Sharding, rate: float, alone: float
) -> None:
    plan = replace(plan_of(resident, offloaded, sharding), prediction=replace(PREDICTION, alone_seconds=alone))
    found = scale(plan, cluster(here, nodes, rate, rate))
    assert 0 < found.efficiency <= 1
    assert found.tokens_per_second is not None
    assert found.tokens_per_second <= here * nodes * 100 / 2.0 * (1 + 1e-9)


def test_without_a_prediction_there_is_nothing_to_scale() -> None:
    with pytest.raises(ValueError, match="no prediction to scale"):
        scale(replace(plan_of(1, 1), prediction=None), cluster(2))


def test_what_was_timed_for_one_device_is_not_scaled() -> None:
    alone = replace(PREDICTION, busy={"compute": 1.5}, alone_seconds=None)
    with pytest.raises(ValueError, match=r"timed for one GPU alone: make it for `num_gpus`"):
        scale(replace(plan_of(1, 1), prediction=alone), cluster(2))
