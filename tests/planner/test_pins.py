from __future__ import annotations

import pytest

from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.search import NoFeasiblePlan, search
from tests.planner.problems import random_problem


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_persistent_chunks": 99}, "num_persistent_chunks=99: this model has"),
        ({"num_checkpoint_blocks": 99}, "num_checkpoint_blocks=99: this model has"),
        ({"num_swap_blocks": 99}, "num_swap_blocks=99: this model has"),
        ({"num_chunk_buffers": 0, "num_persistent_chunks": 0}, "num_chunk_buffers=0: this model needs at least"),
        ({"num_keep_offloaded_blocks": 99}, "num_keep_offloaded_blocks=99: at most"),
        (
            {
                "num_keep_offloaded_blocks": 1,
                "num_checkpoint_blocks": 0,
                "num_swap_blocks": 0,
                "num_persistent_chunks": 0,
            },
            "num_keep_offloaded_blocks=1 contradicts num_persistent_chunks=0 and num_swap_blocks=0",
        ),
    ],
)
def test_knobs_that_contradict(knobs: dict[str, int], message: str) -> None:
    problem = next(p for p in map(random_problem, range(99)) if len(p.layout.blocks) >= 3)
    with pytest.raises(ValueError, match=message) as caught:
        search(problem, Knobs(**knobs))
    assert not isinstance(caught.value, NoFeasiblePlan)
