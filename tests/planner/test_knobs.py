from __future__ import annotations

import re
from dataclasses import fields

import pytest

from lightning_protrain.planner.knobs import Knobs


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
