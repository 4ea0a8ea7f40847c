from __future__ import annotations

import random

import numpy as np
import pytest

from lightning_protrain.planner import space
from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.problem import Packing
from tests.planner.brute import all_candidates
from tests.planner.problems import random_problem, with_budgets, with_repeats
from tests.planner.test_search import budgets


@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_below_all_their_plans(seed: int) -> None:
    source = random.Random(seed)
    problem = random_problem(seed, 4, 8)
    if seed % 2:
        problem = with_repeats(source, problem)
    found = list(all_candidates(problem, Knobs()))
    problem = with_budgets(problem, *budgets(source, found))
    packing = Packing(problem, problem.chunk_bytes[0], None)
    over = space.Space(packing, Knobs())
    low, high = over.roots()
    for swap, root_low, root_high in zip(low[0], low.T, high.T, strict=True):
        axes = [np.arange(first, last + 1) for first, last in zip(root_low[1:], root_high[1:], strict=True)]
        points = np.stack([np.full((len(axes[0]), len(axes[1])), swap), *np.meshgrid(*axes, indexing="ij")]).reshape(
            3, -1
        )
        values = over.seconds(points, points)
        for _ in range(20):
            first = np.array([source.randint(*pair) for pair in zip(root_low, root_high, strict=True)])
            last = np.array([source.randint(*pair) for pair in zip(first, root_high, strict=True)])
            inside = ((points >= first[:, None]) & (points <= last[:, None])).all(axis=0)
            if (first < last).any():
                assert over.seconds(first[:, None], last[:, None])[0] <= values[inside].min()
