from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.problem import Packing
from tests.planner.brute import all_candidates
from tests.planner.problems import random_problem


@pytest.mark.parametrize("seed", range(12))
def test_bytes_are_those_of_each_plan(seed: int) -> None:
    problem = random_problem(seed, 4, 8)
    problem = replace(problem, chunk_bytes=problem.chunk_bytes[:1])
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
