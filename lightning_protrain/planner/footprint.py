"""What candidates of the search take on the device and on the host, for many of them at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import ceil

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.activations import ActivationCurve, gradient_bytes
from lightning_protrain.planner.buffers import Buffers
from lightning_protrain.planner.chunks import users_of
from lightning_protrain.planner.host import _own_bytes, _pages, _weights
from lightning_protrain.planner.memory import resident_bytes
from lightning_protrain.planner.plan import BlockPolicy, ChunkPlan
from lightning_protrain.planner.policies import lay_out
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile, swapped_bytes

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Footprint:
    """Bytes of candidates over the same chunks: the first p are resident, blocks at the first s places swap.

    Args:
        profile: One step with forward and backward.
        layout: The model.
        chunks: All its chunks in execution order, all offloaded.
        places: Indices of the blocks that may swap, in the order in which they are taken.
        hardware: Whether copies run beside computation.
        state_bytes: Bytes of optimizer states for each trainable element.
        accumulate: Micro-batches in a step.
        alpha: As in `memory_timeline`.
        foreach: As in `memory_timeline`.

    Attributes:
        buffers: Bytes of chunk buffers.
        swap_bytes: Host bytes that a block swaps if the first p chunks are resident, (B, N + 1).
    """

    def __init__(
        self,
        profile: ModelProfile,
        layout: ModelLayout,
        chunks: Sequence[ChunkPlan],
        places: Sequence[int],
        hardware: HardwareProfile,
        state_bytes: float,
        accumulate: int = 1,
        alpha: float = 1.0,
        foreach: bool = False,
    ) -> None:
        self.buffers = Buffers(layout, chunks)
        self.swap_bytes = swap_table(profile, layout, chunks)
        num_blocks = len(layout.blocks)
        self._rank = np.full(num_blocks, num_blocks, dtype=np.int64)
        self._rank[list(places)] = np.arange(len(places))
        self._places_before = np.searchsorted(np.array(places, dtype=np.int64), np.arange(num_blocks))
        self._curve = _Curve(
            profile,
            layout,
            chunks,
            partial(_assign, num_blocks, tuple(places)),
            hardware.asynchronous,
            accumulate,
            alpha,
            foreach,
        )
        resident = _prefix([resident_bytes(layout, chunk, state_bytes) for chunk in chunks])
        gradients = _prefix([gradient_bytes(layout, chunk) for chunk in chunks])
        held = self._curve.held(np.arange(len(chunks) + 1))
        self._fixed = resident + held + layout.buffer_bytes
        self._states = resident + gradients + _in_flight(layout, chunks) + layout.buffer_bytes
        # The least if at least the first p are resident.
        self._least_fixed, self._least_states = _least_after(self._fixed), _least_after(self._states)
        self._host = _host_states(layout, chunks, state_bytes, accumulate, hardware.asynchronous)
        self._least_host = np.minimum.accumulate(self._host, axis=1)

    def swaps(self, num_swap: Integers) -> Flags:
        """Which blocks swap, (B, K)."""
        swaps: Flags = self._rank[:, None] < num_swap
        return swaps

    def checkpoints(self, num_swap: Integers, num_checkpoint: Integers) -> Flags:
        """Which blocks recompute, (B, K)."""
        among_others = np.arange(len(self._rank))[:, None] - np.minimum(self._places_before[:, None], num_swap)
        checkpoints: Flags = ~self.swaps(num_swap) & (among_others < num_checkpoint)
        return checkpoints

    def swapped(self, num_swap: Integers, persistent: Integers) -> Integers:
        """Host bytes that each block swaps, (B, K)."""
        return np.where(self.swaps(num_swap), self.swap_bytes[:, persistent], 0)

    def device(self, num_swap: Integers, num_checkpoint: Integers, fewest: Integers, point: Flags) -> Integers:
        """Bytes on the device but for chunk buffers, (K,).

        Args:
            num_swap: Swapping blocks.
            num_checkpoint: Checkpointing blocks.
            fewest: Resident chunks.
            point: Whether there are exactly so many of them, or so many or more: then it is what no plan is below.
        """
        peaks = self._curve.peaks(num_checkpoint, num_swap, fewest)
        fixed = np.where(point, self._fixed[fewest], self._least_fixed[fewest])
        states = np.where(point, self._states[fewest], self._least_states[fewest])
        swapped = np.pad(self.swapped(num_swap, fewest), ((1, 1), (0, 0)))
        return np.maximum(peaks + fixed, states + (swapped[1:] + swapped[:-1]).max(axis=0))

    def host(self, num_swap: Integers, fewest: Integers, most: Integers) -> Integers:
        """Bytes on the host, (K,), of plans with `fewest` to `most` resident chunks at least."""
        training, loading = np.where(fewest == most, self._host[:, most], self._least_host[:, most])
        return np.maximum(training + self.swapped(num_swap, fewest).sum(axis=0), loading)


class _Curve(ActivationCurve):
    """The same for hundreds of pairs of counts: policies are compared all at once."""

    def _policies_of(self, num_swap: int, num_checkpoint: int) -> tuple[Flags, Flags, int]:
        key = num_swap, num_checkpoint
        if key not in self._policies and not self._reserve.kept:
            blocks = np.array([*self._assignment(num_swap, num_checkpoint), BlockPolicy.KEEP])
            policies = blocks[self._positions.block]
            reserve = self._reserve.total({})
            self._policies[key] = policies == BlockPolicy.CHECKPOINT, policies == BlockPolicy.SWAP, reserve
        return super()._policies_of(num_swap, num_checkpoint)


def swap_table(profile: ModelProfile, layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> Integers:
    """Host bytes that one call of each block swaps if the first p chunks are resident, (B, N + 1).

    What `ModelProfile.swap_bytes` says for the weights that are streamed in another dtype then.
    """
    index_of = {block.name: index for index, block in enumerate(layout.blocks)}
    streamed = {fqn: index for index, chunk in enumerate(chunks) if chunk.streamed_dtype for fqn in chunk.parameters}
    table = np.zeros((len(index_of), len(chunks) + 1), dtype=np.int64)
    for call in profile.calls:
        if call.name in index_of:
            nbytes = np.full(len(chunks) + 1, call.swap_bytes, dtype=np.int64)
            for fqn, cast in call.saved_casts:
                nbytes[: streamed.get(fqn, -1) + 1] -= swapped_bytes(cast)
            row = table[index_of[call.name]]
            np.maximum(row, nbytes, out=row)
    return table


def _assign(num_blocks: int, places: tuple[int, ...], num_swap: int, num_checkpoint: int) -> tuple[BlockPolicy, ...]:
    return lay_out(num_blocks, places[:num_swap], num_checkpoint)


def _in_flight(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> Integers:
    """Gradients in flight, as in `memory_terms`, if the first p chunks are resident, (N + 1,)."""
    users = users_of(layout)
    found = np.zeros(len(chunks) + 1, dtype=np.int64)
    shared, largest = 0, [0, 0]
    for index in range(len(chunks) - 1, -1, -1):
        for fqn in chunks[index].parameters if chunks[index].trainable else ():
            info = layout.parameter(fqn)
            if len(info.sites) > 1 or len(users[fqn]) > 1:
                shared += info.streamed_nbytes
            else:
                largest = sorted([*largest, info.streamed_nbytes])[-2:]
        found[index] = shared + sum(largest)
    return found


def _host_states(
    layout: ModelLayout, chunks: Sequence[ChunkPlan], state_bytes: float, accumulate: int, asynchronous: bool
) -> Integers:
    """Bytes of the host while it trains, without what is swapped, and while the model is placed, (2, N + 1).

    The larger ones of `host_bytes` and of `host_terms` and `loading_terms`.
    """
    whole = sum(info.nbytes for info in layout.parameters)
    table = np.zeros((2, len(chunks) + 1), dtype=np.int64)
    table[1, -1] = whole
    states = placed = copies = gradients = elements = weights = largest = 0
    pool = _Pool(asynchronous)
    for index in range(len(chunks) - 1, -1, -1):
        chunk = chunks[index]
        infos = [layout.parameter(fqn) for fqn in chunk.parameters]
        own = _own_bytes(layout, chunk)
        copied = 0 if chunk.streamed_dtype is None else chunk.nbytes
        states += resident_bytes(layout, chunk, state_bytes) + gradient_bytes(layout, chunk) + copied
        placed += _weights(layout, chunk)
        copies += _pages(chunk.nbytes) if copied or chunk.streamed_dtype else 0
        weights += sum(info.nbytes for info in infos)
        largest = max(largest, _pages(own))
        if chunk.trainable:
            gradients += _pages(own)
            elements += sum(info.numel for info in infos)
        pool.add(chunk.nbytes, chunk.trainable and (accumulate > 1 or chunk.streamed_dtype is not None))
        terms = placed + copies + gradients + ceil(state_bytes * elements) + pool.nbytes
        resident = 0 if asynchronous else whole - weights
        table[0, index] = max(states, terms)
        table[1, index] = max(whole, placed + largest + resident) + copies
    return table


class _Pool:
    """Host memory for gradients that land, as in `host_terms`, while chunks are added."""

    def __init__(self, asynchronous: bool) -> None:
        self.nbytes = 0
        self._asynchronous = asynchronous
        self._pending = 0
        self._counts: Counter[int] = Counter()

    def add(self, nbytes: int, waits: bool) -> None:
        """One more chunk, whose gradients wait or do not."""
        if self._asynchronous and 2 * nbytes > self._pending:
            self._pending = 2 * nbytes
            self.nbytes = sum(map(self._share, self._counts))
        if waits:
            self.nbytes -= self._share(nbytes)
            self._counts[nbytes] += 1
            self.nbytes += self._share(nbytes)

    def _share(self, size: int) -> int:
        return _pages(size) * min(self._counts[size], self._pending // max(size, 1) + 2)


def _prefix(values: Sequence[int]) -> Integers:
    return np.array([0, *np.cumsum(values, dtype=np.int64)], dtype=np.int64)


def _least_after(values: Integers) -> Integers:
    least: Integers = np.minimum.accumulate(values[::-1])[::-1]
    return least
