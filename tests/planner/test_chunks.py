"""Chunks are a partition in execution order, aligned, and no larger than allowed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.packing import chunks_of, pack_chunks, users_of
from lightning_protrain.planner.plan import ALIGNMENT, chunk_offsets
from lightning_protrain.profiler.records import ModelLayout
from tests.planner.layouts import layout_of, layouts, parameter, transformer

CHUNK_BYTES = st.none() | st.integers(1, 8192)


@given(layouts(), CHUNK_BYTES)
def test_chunks_are_a_partition_in_execution_order(layout: ModelLayout, chunk_bytes: int | None) -> None:
    chunks = pack_chunks(layout, chunk_bytes)
    placed = [fqn for chunk in chunks for fqn in chunk.parameters]
    assert sorted(placed) == sorted(info.fqn for info in layout.parameters)
    names = [unit.name for unit in layout.units]
    positions = [names.index(chunk.unit) for chunk in chunks]
    assert positions == sorted(positions)
    assert not any(chunk.resident for chunk in chunks)
    assert all(chunk.parameters for chunk in chunks)


@given(layouts(), CHUNK_BYTES)
def test_a_chunk_holds_what_the_same_units_need_in_one_form(layout: ModelLayout, chunk_bytes: int | None) -> None:
    users = users_of(layout)
    order = [info.fqn for info in layout.parameters]
    for chunk in pack_chunks(layout, chunk_bytes):
        infos = [layout.parameter(fqn) for fqn in chunk.parameters]
        assert {info.dtype for info in infos} == {chunk.dtype}
        assert {info.trainable for info in infos} == {chunk.trainable}
        assert len({users[fqn] for fqn in chunk.parameters}) == 1
        assert users[chunk.parameters[0]][0] == chunk.unit
        assert list(chunk.parameters) == sorted(chunk.parameters, key=order.index)


@given(layouts(), CHUNK_BYTES)
def test_chunks_are_aligned_and_no_larger_than_allowed(layout: ModelLayout, chunk_bytes: int | None) -> None:
    for chunk in pack_chunks(layout, chunk_bytes):
        sizes = [layout.parameter(fqn).nbytes for fqn in chunk.parameters]
        offsets, total = chunk_offsets(sizes)
        assert chunk.nbytes == total
        assert all(offset % ALIGNMENT == 0 for offset in (*offsets, total))
        assert all(start + size <= end for start, end, size in zip(offsets, (*offsets[1:], total), sizes, strict=True))
        assert chunk_bytes is None or chunk.nbytes <= chunk_bytes or len(chunk.parameters) == 1


@given(layouts(), st.integers(1, 8192))
def test_a_chunk_ends_only_where_the_next_parameter_does_not_fit(layout: ModelLayout, chunk_bytes: int) -> None:
    users = users_of(layout)
    for left, right in pairwise(pack_chunks(layout, chunk_bytes)):
        same_group = (left.unit, left.dtype, left.trainable) == (right.unit, right.dtype, right.trainable)
        if same_group and users[left.parameters[0]] == users[right.parameters[0]]:
            _, first = chunk_offsets([layout.parameter(right.parameters[0]).nbytes])
            assert left.nbytes + first > chunk_bytes


@given(layouts())
def test_without_a_limit_there_is_one_chunk_for_each_group(layout: ModelLayout) -> None:
    users = users_of(layout)
    groups = {(users[info.fqn], info.dtype, info.trainable) for info in layout.parameters}
    assert len(pack_chunks(layout)) == len(groups)


@given(layouts(), CHUNK_BYTES)
def test_chunks_of_a_unit_hold_exactly_its_parameters(layout: ModelLayout, chunk_bytes: int | None) -> None:
    chunks = pack_chunks(layout, chunk_bytes)
    needed = chunks_of(layout, chunks)
    assert list(needed) == [unit.name for unit in layout.units]
    for unit in layout.units:
        held = [fqn for index in needed[unit.name] for fqn in chunks[index].parameters]
        assert sorted(held) == sorted(unit.parameters)
        assert list(needed[unit.name]) == sorted(set(needed[unit.name]))


def test_a_tied_parameter_lies_apart_in_the_first_unit_that_needs_it() -> None:
    layout = layout_of(
        [parameter("embed.weight", sites=("head.weight",)), parameter("embed.scale"), parameter("head.bias")],
        {"embed": ["embed.weight", "embed.scale"], "head": ["embed.weight", "head.bias"]},
    )
    chunks = pack_chunks(layout)
    assert [(chunk.unit, chunk.parameters) for chunk in chunks] == [
        ("embed", ("embed.weight",)),
        ("embed", ("embed.scale",)),
        ("head", ("head.bias",)),
    ]
    assert chunks_of(layout, chunks) == {"embed": (0, 1), "head": (0, 2)}


@pytest.mark.parametrize(
    ("chunk_bytes", "sizes"),
    [(None, [8192]), (8192, [8192]), (8191, [4096, 4096]), (4096, [4096, 4096]), (1, [4096, 4096])],
)
def test_blocks_split_at_chunk_bytes(chunk_bytes: int | None, sizes: list[int]) -> None:
    chunks = pack_chunks(transformer(), chunk_bytes)
    assert [chunk.nbytes for chunk in chunks if chunk.unit == "layers.1"] == sizes


@pytest.mark.parametrize("chunk_bytes", [0, -1])
def test_chunk_bytes_out_of_range(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_bytes is {chunk_bytes}; give a positive number"):
        pack_chunks(transformer(), chunk_bytes)


def test_a_model_without_parameters_has_no_chunks() -> None:
    layout = layout_of([], {})
    assert pack_chunks(layout) == ()
    assert chunks_of(layout, ()) == {}
