from __future__ import annotations

import re
from dataclasses import fields

import pytest

from lightning_protrain.config import Knobs
from lightning_protrain.planner.search import NoFeasiblePlan, search
from tests.planner.problems import random_problem


@pytest.mark.parametrize("name", [field.name for field in fields(Knobs)])
@pytest.mark.parametrize("value", [True, False, -1, 1.0, "2", [1]])
def test_knobs_refuse_values(name: str, value: object) -> None:
    least = 1 if name == "chunk_bytes" else 0
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: give an integer of at least {least}")):
        Knobs(**{name: value})  # type: ignore[arg-type]


def test_knobs_that_are_given() -> None:
    assert Knobs().given == ()
    assert Knobs(num_chunk_buffers=0, chunk_bytes=1).given == ("num_chunk_buffers", "chunk_bytes")
    with pytest.raises(ValueError, match="chunk_bytes=0: give an integer of at least 1"):
        Knobs(chunk_bytes=0)
    assert Knobs(num_swap_blocks=2).given == ("num_swap_blocks",)


def test_a_plan_beside_knobs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plan=a Plan .* ignore num_chunk_buffers=3, chunk_bytes=9"):
        Knobs(num_chunk_buffers=3, chunk_bytes=9).refuse("a Plan")
    forbidden = r"num_swap_blocks=1, num_keep_offloaded_blocks=0 \(or forbid_keep_offload_with_fused_lora=True\)\. "
    with pytest.raises(ValueError, match=forbidden):
        Knobs(num_swap_blocks=1).without_keep_offloaded().refuse("a Plan")


def test_to_forbid_kept_blocks_with_offloaded_chunks_pins_their_number() -> None:
    knobs = Knobs(num_persistent_chunks=2).without_keep_offloaded()
    assert knobs == Knobs(num_persistent_chunks=2, num_keep_offloaded_blocks=0)
    assert knobs.without_keep_offloaded() == knobs
    assert knobs.forbids_alone == ("num_keep_offloaded_blocks",)
    assert Knobs().forbids_alone == Knobs(num_keep_offloaded_blocks=1).forbids_alone == ()
    with pytest.raises(ValueError, match="num_keep_offloaded_blocks=3 asks for blocks that forbid_keep_offload"):
        Knobs(num_keep_offloaded_blocks=3).without_keep_offloaded()


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
