"""What many plans send at once is what each of them sends."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest

from lightning_protrain.planner.averages import averages_of
from lightning_protrain.planner.problem import Packing
from tests.planner.problems import random_network, random_problem, with_repeats


@pytest.mark.parametrize("seed", range(30))
def test_all_plans_at_once_send_what_each_sends(seed: int) -> None:
    problem = random_problem(seed, 5, 9)
    if seed % 2:
        problem = with_repeats(random.Random(seed), problem)
    network = random_network(seed, problem)
    packing = Packing(replace(problem, network=network), problem.chunk_bytes[0], None)
    assert packing.sums is not None
    count = len(packing.chunks)
    persistent = np.arange(count + 1)
    together = packing.sums.of(persistent, persistent, np.zeros(count + 1, dtype=np.bool_))
    for resident in range(count + 1):
        plan = packing.plan(0, 0, resident, count - resident)
        known = problem.hardware, problem.training.accumulate > 1, network
        alone = averages_of(problem.profile, problem.layout, plan, *known)
        assert alone is not None
        shape = len(problem.profile.segments), 1
        for field in fields(alone):
            one, many = (
                getattr(alone, field.name),
                np.broadcast_to(getattr(together, field.name), (shape[0], count + 1)),
            )
            assert (np.broadcast_to(one, shape)[:, 0] == many[:, resident]).all(), field.name


@pytest.mark.parametrize("seed", range(10))
def test_in_a_set_the_device_waits_where_it_does_in_all_plans(seed: int) -> None:
    problem = random_problem(seed, 5, 9)
    packing = Packing(replace(problem, network=random_network(seed, problem)), problem.chunk_bytes[0], None)
    assert packing.sums is not None
    first, last = np.array([0]), np.array([len(packing.chunks) // 2])
    of_set = packing.sums.of(last, first, np.ones(1, dtype=np.bool_))
    of_first, of_last = (packing.sums.of(each, each, np.zeros(1, dtype=np.bool_)) for each in (first, last))
    assert (of_set.waits == of_last.sends).all()
    assert (of_set.sends == of_first.sends).all()
    assert of_set.sent <= min(of_first.sent, of_last.sent) * (1 + 1e-12)


def test_where_there_is_one_rank_nothing_is_sent() -> None:
    problem = random_problem(1, 4, 8)
    assert Packing(problem, problem.chunk_bytes[0], None).sums is None
