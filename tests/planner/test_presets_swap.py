"""Plans that swap: which blocks, how many bytes, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.memory import host_bytes
from tests.planner.layouts import layout_of, parameter, transformer
from tests.planner.preset_plans import CHECKPOINT, KEEP, SAVED, STATE_BYTES, SWAP, pinned, policies


@pytest.mark.parametrize(
    ("num_swap", "num_checkpoint", "letters"),
    [
        (2, 4, "SCCSCCKK"),
        (3, 3, "SCSCSCKK"),
        (4, 2, "SSCSSCKK"),
        (3, 0, "SSSKKKKK"),
        (1, 7, "SCCCCCCC"),
        (0, 2, "CCKKKKKK"),
    ],
)
def test_swapped_blocks_come_early_between_checkpointed_ones(num_swap: int, num_checkpoint: int, letters: str) -> None:
    plan = pinned(transformer(num_blocks=8), num_swap_blocks=num_swap, num_checkpoint_blocks=num_checkpoint)
    assert "".join(policy.name[0] for policy in policies(plan)) == letters
    assert all(block.swap_bytes == SAVED[block.name] * (block.policy is SWAP) for block in plan.blocks)
    neighbours = (sum(block.swap_bytes for block in plan.blocks[index : index + 2]) for index in range(8))
    assert plan.memory.swapped_activations == max(neighbours)


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 10))
def test_the_numbers_of_blocks_are_those_of_the_knobs(num_swap: int, num_checkpoint: int, persistent: int) -> None:
    knobs = {"num_swap_blocks": num_swap, "num_persistent_chunks": persistent}
    if num_swap + num_checkpoint > 8:
        with pytest.raises(ValueError, match=f"num_checkpoint_blocks={num_checkpoint}: this model has 8 blocks"):
            pinned(transformer(num_blocks=8), num_checkpoint_blocks=num_checkpoint, **knobs)
        return
    plan = pinned(transformer(num_blocks=8), num_checkpoint_blocks=num_checkpoint, **knobs)
    found = policies(plan)
    assert (found.count(SWAP), found.count(CHECKPOINT)) == (num_swap, num_checkpoint)
    assert found[num_swap + num_checkpoint :] == [KEEP] * (8 - num_swap - num_checkpoint)
    # Pinned by what they leave instead.
    streamed = {chunk.unit for chunk in plan.chunks if not chunk.resident}
    keep = sum(block.policy is KEEP and block.name in streamed for block in plan.blocks)
    again = pinned(transformer(num_blocks=8), num_keep_offloaded_blocks=keep, **knobs)
    assert sum(block.policy is KEEP and block.name in streamed for block in again.blocks) == keep
    assert policies(again).count(SWAP) == num_swap


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_swap_blocks": 1, "saved": None}, "num_swap_blocks=1: the activations of this model are not known"),
        ({"num_swap_blocks": 2, "saved": {"layers.0": 1}}, r"of block 'layers\.1' are known.*\['layers\.0'\]"),
        ({"num_swap_blocks": 1, "saved": {"layers.0": 0}}, r"of block 'layers\.0' are known"),
        ({"num_swap_blocks": 5}, "num_swap_blocks=5: this model has 4 blocks"),
        (
            {"num_swap_blocks": 2, "num_checkpoint_blocks": 3},
            "num_swap_blocks=2 and num_checkpoint_blocks=3: this model has 4 blocks",
        ),
        (
            {"num_swap_blocks": 2, "num_keep_offloaded_blocks": 3},
            "num_keep_offloaded_blocks=3 contradicts .*checkpoint_blocks=0 and num_swap_blocks=2, which leave 2 blocks",
        ),
    ],
)
def test_swap_that_cannot_be(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pinned(transformer(), **knobs)


def test_a_model_without_blocks_cannot_swap() -> None:
    layout = layout_of([parameter("w")], {"": ["w"]}, blocks=[""])
    with pytest.raises(ValueError, match="num_swap_blocks=1: this model has no repeated list of blocks"):
        pinned(layout, num_swap_blocks=1)


def test_host_memory_for_swapped_activations() -> None:
    plan = pinned(transformer(), num_swap_blocks=2, num_persistent_chunks=6)
    needed = host_bytes(transformer(), plan.chunks, STATE_BYTES, plan.blocks)
    assert needed == SAVED["layers.0"] + SAVED["layers.1"]
    knobs = {"num_swap_blocks": 2, "num_persistent_chunks": 6}
    assert pinned(transformer(), host=needed, **knobs) == plan
    with pytest.raises(ValueError, match=rf"\({needed} bytes\) of host memory.*swap fewer blocks"):
        pinned(transformer(), host=needed - 1, **knobs)
