"""Bytes of candidates are those of their plans, and what is cut off does not fit."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_protrain.planner import space
from lightning_protrain.planner.footprint import Footprint
from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.problem import Packing, Problem
from tests.planner.brute import Candidate, all_candidates
from tests.planner.problems import random_problem, with_budgets


@pytest.mark.parametrize("sharers", [1, 3])
@pytest.mark.parametrize("seed", range(12))
def test_bytes_are_those_of_each_plan(seed: int, sharers: int) -> None:
    problem = random_problem(seed, 4, 8)
    problem = replace(problem, chunk_bytes=problem.chunk_bytes[:1], sharers=sharers)
    packing = Packing(problem, problem.chunk_bytes[0], None)
    yes = np.array([True])
    for candidate in all_candidates(problem, Knobs()):
        _, num_swap, num_checkpoint, offloaded, buffers = candidate.order
        if random.Random(repr(candidate.order)).random() > 0.2:
            continue
        persistent = np.array([len(packing.chunks) - offloaded])
        counts = np.array([num_swap]), np.array([num_checkpoint])
        footprint = packing.footprint
        device = footprint.device(*counts, persistent, yes) + footprint.buffers.bytes(persistent, np.array([-buffers]))
        assert device.tolist() == [candidate.device]
        assert footprint.host(counts[0], persistent, persistent).tolist() == [candidate.host]
        assert footprint.device(*counts, persistent, ~yes)[0] <= footprint.device(*counts, persistent, yes)[0]


def fewest(problem: Problem, found: list[Candidate], known: int) -> dict[tuple[int, int], int]:
    """What is cut off, by numbers of swapped and checkpointed blocks."""
    packing = Packing(problem, problem.chunk_bytes[0], None)
    pairs = sorted({candidate.order[1:3] for candidate in found})
    swap, checkpoint = np.array(pairs).T
    budget, over = problem.device_bytes, space.Space(packing, Knobs())
    assert budget is not None
    least = packing.footprint.fewest_offloaded(swap, checkpoint, np.full_like(swap, known), budget, over._beside)
    return dict(zip(pairs, least.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(24))
def test_nothing_that_fits_is_cut_off(seed: int) -> None:
    source = random.Random(seed)
    problem = random_problem(seed, 4, 8)
    found = [candidate for candidate in all_candidates(problem, Knobs()) if candidate.order[0] == 0]
    budget = source.choice(found).device
    known = source.randint(0, 3)
    cut = fewest(with_budgets(problem, budget, None), found, known)
    fitting = [candidate for candidate in found if candidate.device <= budget and candidate.order[3] >= known]
    assert fitting or known
    for candidate in fitting:
        assert candidate.order[3] >= cut[candidate.order[1:3]]


def test_as_much_is_cut_off_as_does_not_fit() -> None:
    exact = total = 0
    for seed in range(24):
        problem = random_problem(seed, 4, 8)
        found = [candidate for candidate in all_candidates(problem, Knobs()) if candidate.order[0] == 0]
        budget = random.Random(seed).choice(found).device
        least: dict[tuple[int, ...], int] = {}
        for candidate in found:
            if candidate.device <= budget:
                pair = candidate.order[1:3]
                least[pair] = min(least.get(pair, 99), candidate.order[3])
        cut = fewest(with_budgets(problem, budget, None), found, 0)
        exact += sum(cut[pair] == number for pair, number in least.items())  # type: ignore[index]
        total += len(least)
    assert exact > 0.9 * total > 0


def test_where_nothing_fits_nothing_is_left() -> None:
    problem = with_budgets(random_problem(3, 4, 8), 1, None)
    found = [candidate for candidate in all_candidates(problem, Knobs()) if candidate.order[0] == 0]
    count = len(found[0].plan.chunks)
    assert set(fewest(problem, found, 0).values()) == {count + 1}


@pytest.mark.parametrize("seed", range(24))
def test_what_was_known_does_not_matter_where_more_has_to_fit(seed: int) -> None:
    source = random.Random(seed)
    problem = random_problem(seed, 4, 8)
    budget = source.choice([candidate.device for candidate in all_candidates(problem, Knobs())])

    def sought(footprint: Footprint, known: int, more: int) -> list[int]:
        beside = footprint.buffers.bytes(np.arange(count + 1), footprint.buffers.least) + more
        return footprint.fewest_offloaded(swap, steps, np.full_like(swap, known), budget, beside).tolist()

    footprint, fresh = (Packing(problem, problem.chunk_bytes[0], None).footprint for _ in range(2))
    count = len(footprint.buffers.least) - 1
    swap = np.repeat(np.arange(footprint.num_steps.size), footprint.num_steps + 1)
    steps = np.concatenate([np.arange(number + 1) for number in footprint.num_steps])
    sought(footprint, source.randint(0, count), 0)
    footprint.tighten()
    assert sought(footprint, 0, budget // 20) == sought(fresh, 0, budget // 20)
