from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_protrain.planner import space
from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.problem import Packing
from tests.planner.brute import all_candidates, times
from tests.planner.problems import random_problem, with_repeats
from tests.planner.test_search import rounded


@pytest.mark.parametrize("seed", range(40))
def test_candidates_are_columns_of_plans(seed: int) -> None:
    problem = random_problem(seed, 5, 9)
    if seed % 2:
        problem = with_repeats(random.Random(seed), problem)
    packing = Packing(problem, problem.chunk_bytes[0], None)
    over = space.Space(packing, Knobs())
    for candidate in all_candidates(replace(problem, chunk_bytes=problem.chunk_bytes[:1]), Knobs()):
        _, num_swap, num_checkpoint, offloaded, buffers = candidate.order
        if random.Random(repr(candidate.order)).random() > 0.1:
            continue
        pinned = space.Space(packing, Knobs(num_chunk_buffers=-buffers))
        point = np.array([[num_swap], [num_checkpoint], [offloaded]])
        assert pinned.seconds(point, point)[0] == rounded(problem, times(problem, [candidate]))[0]
    assert over.num_chunks == len(packing.chunks)
