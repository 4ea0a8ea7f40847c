"""Seconds of sums over ranks: by hand, for clusters, and on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_protrain.config import Knobs
from lightning_protrain.planner.network import DDP_BUCKET, Network, Route
from lightning_protrain.planner.plan import ChunkPlan, MemoryTerms, Plan, Sharding
from lightning_protrain.planner.prediction import PhasePrediction, Prediction
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.planner.scaling import LATENCY_BETWEEN, LATENCY_WITHIN, NO_TIME, Cluster, scale
from lightning_protrain.planner.step_time import step_time
from tests.planner import together, virtual
from tests.planner.brute import all_candidates
from tests.planner.problems import random_problem

ALL, OWNER, PEERS = Route(1.0, 100.0), Route(0.5, 200.0), Route(2.0, 50.0)


@pytest.mark.parametrize(
    ("network", "seconds"),
    [
        # 100 elements of 4 bytes in 3 parameters, to all ranks.
        (Network(ALL), 1 + 400 / 100),
        (Network(ALL, element=2), 1 + 200 / 100),
        # To two owners, in as many sums; to four, of whom three have one.
        (Network(ALL, OWNER, owners=2), 2 * 0.5 + 400 / 200),
        (Network(ALL, OWNER, owners=4), 3 * 0.5 + 400 / 200),
        # Then each owner's half among the nodes.
        (Network(ALL, OWNER, PEERS, owners=2), 2 * 0.5 + 400 / 200 + 2 + 200 / 50),
        (Network(ALL, OWNER, PEERS, owners=2, element=2), 2 * 0.5 + 200 / 200 + 2 + 100 / 50),
    ],
    ids=str,
)
def test_sums_of_a_chunk_by_hand(network: Network, seconds: float) -> None:
    assert network.sum_of_chunks(1, network.calls(3), 100, 400) == pytest.approx(seconds)


def test_resident_gradients_go_to_all_in_buckets() -> None:
    fast = Network(Route(1.0, DDP_BUCKET), OWNER, owners=2)
    assert fast.sum_of_resident(2 * DDP_BUCKET) == pytest.approx(2 + 2)


@pytest.mark.parametrize("figures", [(0.0, 0.0), (0.0, -1.0), (-1.0, 1.0), (math.nan, 1.0), (0.0, math.inf)], ids=str)
def test_what_is_no_figure_is_refused(figures: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="Measure it again"):
        Route(*figures)


def test_rates_are_said() -> None:
    said = Network(Route(1e-5, 25e9), Route(2e-6, 1.5e9), owners=2).describe()
    assert said == "all-reduce 25 GB/s (latency 10 us), reduce 1.5 GB/s (latency 2 us)"


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
    """Return the duration of a collective without its latency, seconds."""
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
    assert scale(plan_of(0, 400, low=True), narrow).step_seconds == pytest.approx(4 * (2 * 400 + 800) / 100)
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


# On the virtual clock.
TOLERANCE = 0.04


@pytest.fixture
def recomputation_runs_to_its_end() -> Iterator[None]:
    with set_checkpoint_early_stop(False):
        yield


def problem_of(seed: int) -> Problem:
    network = Network(Route(1e-4, 1e6), Route(2e-4, 2e6), owners=2) if seed % 2 else Network(Route(1e-4, 1e6))
    return replace(random_problem(seed, 4, 8), network=network, chunk_bytes=(None,))


@pytest.mark.parametrize("seed", range(8))
def test_every_trained_chunk_is_sent_once(seed: int) -> None:
    problem = problem_of(seed)
    assert problem.network is not None
    whole = {fqn for segment in problem.profile.segments for fqn in segment.gradients}
    for candidate in all_candidates(problem, Knobs(num_checkpoint_blocks=0, num_swap_blocks=0)):
        expected = 0.0
        for chunk in candidate.plan.chunks:
            infos = [problem.layout.parameter(fqn) for fqn in chunk.parameters if fqn in whole]
            nbytes = sum(info.nbytes for info in infos)
            if infos and chunk.resident:
                expected += problem.network.sum_of_resident(nbytes)
            elif infos:
                calls, numel = problem.network.calls(len(infos)), sum(info.numel for info in infos)
                expected += problem.network.sum_of_chunks(1, calls, numel, nbytes)
        assert step_time(problem, candidate.plan).network == pytest.approx(expected, abs=1e-9)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("recomputation_runs_to_its_end")
@pytest.mark.parametrize("link", [0.25, 1.0])
@pytest.mark.parametrize("ratio", [0.01, 1.0, 2.0])
@pytest.mark.parametrize(
    ("overlap", "sharding"),
    [
        ("off", Sharding.REPLICATE),
        ("backward", Sharding.REPLICATE),
        ("off", Sharding.SHARD),
        ("backward", Sharding.SHARD),
    ],
)
def test_steps_of_ranks_take_what_is_predicted(link: float, ratio: float, overlap: str, sharding: Sharding) -> None:
    training = Training(overlap)  # type: ignore[arg-type]
    case = virtual.Case(
        training, link=link, host=0.2, num_blocks=6, num_tokens=64, policies=lambda _: virtual.CHECKPOINT
    )
    layout, profile = virtual.profile_of(6, 64, False)
    profile = virtual.to_the_end(profile)
    rates = together.rates_of(case, ratio)
    hardware, route, owners = virtual.hardware_of(rates), Route(0.0, rates.network), 1
    if sharding is Sharding.SHARD:  # Each rank steps its half.
        hardware, owners = replace(hardware, host_step=2 * hardware.host_step), 2
    plan = virtual.plan_of(case, layout, profile)
    alone = virtual.problem_of(case, profile=profile, hardware=hardware)
    problem = replace(alone, network=Network(route, route if owners > 1 else None, owners=owners))
    predicted, single = step_time(problem, plan), step_time(alone, plan)
    measured = together.measure(case, ratio, sharding)
    assert predicted.seconds == pytest.approx(measured, rel=TOLERANCE)
    # Without the network the prediction would be that of one rank.
    assert ratio < 2 or single.seconds < 0.8 * measured
    assert (predicted.bound == "network") is (predicted.network > max(single.compute, single.upload, single.host))
