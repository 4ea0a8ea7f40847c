from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_protrain.planner import space
from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.problem import Packing
from tests.planner.brute import all_candidates, times
from tests.planner.problems import large_problem, random_problem, with_repeats
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


@pytest.mark.parametrize("backward", [False, True])
def test_sets_hold_back_no_more_than_any_of_their_plans(backward: bool) -> None:
    per_block, resident = 10, 23
    packing = Packing(large_problem(8, per_block), 1, None)
    numbers, resident_chunks = np.arange(per_block, 4 * per_block), np.full(3 * per_block, resident)
    shape = len(packing.candidates.block), len(numbers)
    nothing = np.zeros(shape, dtype=np.bool_), None, np.zeros(shape, dtype=np.int64)

    def late(loose: bool):
        each = np.full(len(numbers), loose)
        columns = packing.candidates.columns(resident_chunks, resident_chunks, numbers, *nothing, each)
        if backward:
            return columns.late_backward, columns.wait_backward, columns.compute_backward
        return columns.late_forward, columns.wait_forward, columns.compute_forward

    (of_plans, waits, computes), (of_sets, same_waits, _) = late(False), late(True)
    assert (waits == same_waits).all()
    assert (of_sets <= of_plans).all()
    step = -1 if backward else 1
    for position in range(shape[0]):
        for most in range(len(numbers)):
            for fewer in range(most + 1):
                first, later = waits[position, most], waits[position, fewer]
                between = range(first + step, later + step, step) if first >= 0 else ()
                meanwhile = sum(computes[place, 0] for place in between)
                assert of_sets[position, most] <= of_plans[position, fewer] + meanwhile
    # With room for less than two blocks all plans wait for the block before: as many chunks as do not fit beside it.
    few = np.arange(per_block - 1)
    inside = waits[:, few] == np.arange(shape[0])[:, None] - step
    assert inside.any()
    assert (of_sets[:, few] == of_plans[:, few])[inside].all()
    assert len(np.unique(of_sets[:, few][inside])) > 4
