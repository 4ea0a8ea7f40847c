from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.buffers import Buffers
from lightning_protrain.planner.chunks import chunks_of, pack_chunks, with_residency
from lightning_protrain.planner.memory import memory_terms, minimum_chunk_buffers
from lightning_protrain.profiler.records import ModelLayout
from tests.planner.layouts import layouts


@given(layouts(), st.integers(1, 3000), st.integers(0, 20_000))
def test_buffers_are_those_of_memory_terms(layout: ModelLayout, chunk_bytes: int, room: int) -> None:
    streamed = pack_chunks(layout, chunk_bytes)
    nbytes = np.array([chunk.nbytes for chunk in streamed], dtype=np.int64)
    buffers = Buffers(layout, nbytes, chunks_of(layout, streamed))
    for persistent in range(len(streamed) + 1):
        chunks = [with_residency(layout, chunk, index < persistent) for index, chunk in enumerate(streamed)]
        least, offloaded = minimum_chunk_buffers(layout, chunks), len(streamed) - persistent
        sizes = {
            number: memory_terms(layout, chunks, number, 0.0).chunk_buffers for number in range(least, offloaded + 1)
        }
        at = np.array([persistent])
        assert buffers.least[persistent] == least
        for number, nbytes in sizes.items():
            assert buffers.bytes(at, np.array([number])).tolist() == [nbytes]
        most = max((number for number, nbytes in sizes.items() if nbytes <= room), default=-1)
        assert buffers.most(at, np.array([room])).tolist() == [most]
        assert buffers.at_most(at, np.array([room]))[0] >= most
