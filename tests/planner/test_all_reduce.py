"""What plans send to other ranks: the sums of their chunks, bounds of sets, and step times on the virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_protrain.config import Knobs
from lightning_protrain.planner.network import Network, Route
from lightning_protrain.planner.plan import Sharding
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.planner.step_time import step_time
from tests.planner import together, virtual
from tests.planner.brute import all_candidates
from tests.planner.problems import random_problem

# On the virtual clock.
TOLERANCE = 0.04


@pytest.fixture(autouse=True)
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
