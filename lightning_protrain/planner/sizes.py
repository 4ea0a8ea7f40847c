"""Sizes of chunks and of their parameters as arrays: made once for a packing, read by all that sums them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from mmap import PAGESIZE

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.named import Casts, Parameters
from lightning_protrain.planner.plan import ALIGNMENT, ChunkPlan
from lightning_protrain.profiler.records import ModelLayout, ModelProfile

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Sizes:
    """Chunks as they are if they are streamed, (N,), and their parameters in the order of chunks, (M,).

    Attributes:
        place: Where each parameter of the layout stands among them, by its number.
        chunk: The chunk of each parameter.
        numel: Elements of each.
        own: Bytes of each in its own dtype.
        streamed: Bytes of each as it is streamed.
        nbytes: Bytes of each chunk, streamed.
        own_bytes: The same in its own dtype, alignment included.
        elements: Elements of each chunk.
        trainable: Whether a chunk is trained.
        low: Whether it is streamed in another dtype than its own.
        shared: Whether several modules or units need a parameter, (M,).
    """

    place: Integers
    chunk: Integers
    numel: Integers
    own: Integers
    streamed: Integers
    nbytes: Integers
    own_bytes: Integers
    elements: Integers
    trainable: Flags
    low: Flags
    shared: Flags

    @classmethod
    def of(cls, chunks: Sequence[ChunkPlan], parameters: Parameters) -> Sizes:
        """Those of `chunks`, all of them offloaded."""
        count = len(chunks)
        members = [chunk.parameters for chunk in chunks]
        order = parameters.numbers(chain.from_iterable(members))
        chunk = np.repeat(np.arange(count), list(map(len, members)))
        numel, own, low = parameters.numel[order], parameters.own[order], parameters.low[order]
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        first = np.searchsorted(chunk, np.arange(count))
        return cls(
            place=place,
            chunk=chunk,
            numel=numel,
            own=own,
            streamed=np.where(low, 2 * numel, own),
            nbytes=np.array([chunk.nbytes for chunk in chunks], dtype=np.int64),
            own_bytes=totals(chunk, aligned(own), count),
            elements=totals(chunk, numel, count),
            trainable=np.array([chunk.trainable for chunk in chunks], dtype=np.bool_),
            low=low[first],
            shared=parameters.shared[order],
        )

    @property
    def gradient_bytes(self) -> Integers:
        """Bytes of the gradients of each chunk if it stays on the device, alignment included."""
        return np.where(self.trainable, self.own_bytes, 0)

    def resident_bytes(self, state_bytes: float) -> Integers:
        """Parameters and optimizer states of each chunk if it stays on the device, without gradients."""
        states = np.ceil(state_bytes * self.elements).astype(np.int64)
        return self.own_bytes + np.where(self.trainable, states, 0)


def aligned(nbytes: Integers) -> Integers:
    """Bytes that tensors take in a chunk."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def totals(keys: Integers, amounts: Integers, count: int) -> Integers:
    """Sums of the amounts of each key, (count,); keys rise."""
    bounds = np.searchsorted(keys, np.arange(count + 1))
    sums = before_each(amounts)
    return sums[bounds[1:]] - sums[bounds[:-1]]


def before_each(amounts: Integers) -> Integers:
    """Sums of all amounts before each, and of all, (N + 1,)."""
    sums = np.zeros(len(amounts) + 1, dtype=np.int64)
    np.cumsum(amounts, out=sums[1:])
    return sums


def from_each(amounts: Integers | Flags) -> Integers:
    """Sums of all amounts but the first n, (N + 1,)."""
    sums = np.zeros(len(amounts) + 1, dtype=np.int64)
    sums[:-1] = np.cumsum(amounts[::-1])[::-1]
    return sums


def largest(amounts: Integers, keys: Integers, count: int) -> Integers:
    """The largest of the amounts of key n and all later ones, (count + 1,); keys rise; 0 where there is none."""
    later: Integers = np.maximum.accumulate(np.append(amounts, 0)[::-1])[::-1]
    return later[np.searchsorted(keys, np.arange(count + 1))]


def second_largest(amounts: Integers, keys: Integers, count: int) -> Integers:
    """The second largest of the amounts of key n and all later ones, (count + 1,); keys rise; 0 where there is none."""
    padded = np.append(amounts, (0, 0))
    later = np.maximum.accumulate(padded[::-1])[::-1]
    second = np.maximum.accumulate(np.minimum(padded[:-1], later[1:])[::-1])[::-1]
    return second[np.searchsorted(keys, np.arange(count + 1))]


def swap_table(profile: ModelProfile, layout: ModelLayout, saved: Casts, sizes: Sizes) -> Integers:
    """Host bytes that one call of each block swaps if the first p chunks are resident, (B + 1, N + 1).

    What `ModelProfile.swap_bytes` says for the weights that are streamed in another dtype then; `saved` are copies of
    these, by call.
    """
    index_of = {block.name: index for index, block in enumerate(layout.blocks)}
    calls = [call for call in profile.calls if call.name in index_of]
    count, every = len(sizes.nbytes), np.arange(len(calls))
    chunk_of = np.where(sizes.low[sizes.chunk], sizes.chunk, count)
    call_of, casts = saved.lists, _swapped(saved.nbytes)
    chunks = chunk_of[sizes.place[saved.numbers]]
    # What is not streamed in another dtype counts for nothing, and stands behind all chunks, as the end of a call does.
    casts, chunks = np.append(np.where(chunks < count, casts, 0), 0 * every), np.append(chunks, 0 * every + count)
    call_of = np.append(call_of, every)
    order = np.lexsort((chunks, call_of))
    casts, chunks, call_of = casts[order], chunks[order], call_of[order]
    begin, end = (np.searchsorted(call_of, every, side=side) for side in ("left", "right"))
    sums, previous = before_each(casts), np.append(-1, chunks)[:-1]
    previous[begin] = -1
    # It changes behind each of these chunks.
    fewer = np.repeat(sums[end][call_of] - sums[:-1], chunks - previous).reshape(len(calls), count + 1)
    table = np.zeros((len(index_of) + 1, count + 1), dtype=np.int64)
    for call, row in zip(calls, fewer, strict=True):
        own = table[index_of[call.name]]
        np.maximum(own, call.swap_bytes - row, out=own)
    return table


def _swapped(nbytes: Integers) -> Integers:
    """`swapped_bytes` of many."""
    return np.where(nbytes < PAGESIZE, 0, -(-nbytes // PAGESIZE) * PAGESIZE)
