"""Arrays of sizes against sums over parameters."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.chunks import pack_chunks
from lightning_protrain.planner.memory import resident_bytes
from lightning_protrain.planner.named import Parameters
from lightning_protrain.planner.plan import chunk_offsets
from lightning_protrain.planner.sizes import Sizes, from_each, largest, second_largest, totals
from lightning_protrain.profiler.records import ModelLayout
from tests.planner.layouts import layouts


@given(layouts(), st.integers(1, 3000), st.sampled_from([0.0, 2.06, 8.0]), st.booleans())
def test_chunks_are_summed_up(layout: ModelLayout, chunk_bytes: int, state_bytes: float, low: bool) -> None:
    if low:
        names = {info.fqn for info in layout.parameters if info.dtype == "float32" and info.shape[0] % 2}
        layout = layout.streaming(names, "bfloat16")
    chunks = pack_chunks(layout, chunk_bytes)
    sizes = Sizes.of(chunks, Parameters.of(layout))
    infos = [layout.parameter(fqn) for chunk in chunks for fqn in chunk.parameters]
    assert [infos[place] for place in sizes.place.tolist()] == list(layout.parameters)
    assert sizes.own.tolist() == [info.nbytes for info in infos]
    assert sizes.streamed.tolist() == [info.streamed_nbytes for info in infos]
    assert sizes.resident_bytes(state_bytes).tolist() == [resident_bytes(layout, c, state_bytes) for c in chunks]
    gradients = [chunk_offsets([layout.parameter(fqn).nbytes for fqn in chunk.parameters])[1] for chunk in chunks]
    expected = [nbytes if chunk.trainable else 0 for chunk, nbytes in zip(chunks, gradients, strict=True)]
    assert sizes.gradient_bytes.tolist() == expected
    assert sizes.nbytes.tolist() == [chunk.nbytes for chunk in chunks]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9))), st.integers(7, 9))
def test_sums_and_the_largest_by_key(entries: list[tuple[int, int]], count: int) -> None:
    entries.sort(key=lambda entry: entry[0])
    keys, amounts = np.array(entries, dtype=np.int64).reshape(-1, 2).T
    expected = [sum(amount for key, amount in entries if key == number) for number in range(count)]
    assert totals(keys, amounts, count).tolist() == expected
    second = [sorted([0, 0, *(amount for key, amount in entries if key >= n)])[-2] for n in range(count + 1)]
    assert second_largest(amounts, keys, count).tolist() == second
    first = [max([0, *(amount for key, amount in entries if key >= n)]) for n in range(count + 1)]
    assert largest(amounts, keys, count).tolist() == first


@given(st.lists(st.integers(0, 9)))
def test_sums_of_all_but_the_first(amounts: list[int]) -> None:
    expected = [sum(amounts[n:]) for n in range(len(amounts) + 1)]
    assert from_each(np.array(amounts, dtype=np.int64)).tolist() == expected
