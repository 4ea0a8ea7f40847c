"""What activations and gradients take at most, as a function of counts, for many plans at once.

[Note: Upper bound]
`ActivationCurve` is never below `memory_timeline`, never grows with the number of checkpointed blocks and never falls
with that of resident chunks, whatever a profile says. For that, a kept block counts as if it were run again where that
takes more, and as if checkpointing cost it something where it costs more than it frees; casts count for the whole of a
segment as soon as one of its weights is resident, and for all segments before; and a gradient counts as if it were
there as early as that of any chunk before it in execution order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lightning_protrain.planner.plan import BlockPolicy, ChunkPlan, chunk_offsets
from lightning_protrain.planner.positions import LOSS_COPIES, NOWHERE, Flags, Integers, Positions, before
from lightning_protrain.planner.unexercised import Reserve
from lightning_protrain.profiler.records import ModelLayout, ModelProfile

Assignment = Callable[[int, int], Sequence[BlockPolicy]]


class ActivationCurve:
    """The peak of activations and gradients as a function of counts, see [Note: Upper bound].

    Args:
        profile: One step with forward and backward.
        layout: The model.
        chunks: All chunks in execution order; of their residency nothing is read.
        assignment: Policies of all blocks of `layout.blocks`, in that order, if so many swap and so many checkpoint:
            `assignment(num_swap, num_checkpoint)`. Which blocks swap does not depend on the number of checkpoints, and
            one more checkpoint turns one `KEEP` into a `CHECKPOINT`. It is called once for each pair.
        asynchronous: Whether copies run beside computation (`HardwareProfile.asynchronous`).
        accumulate: Micro-batches in a step.
        alpha: Fragmentation factor for activations and temporaries; below 1, and on a synchronous device, it counts
            as 1.
        foreach: As in `memory_timeline`.

    Raises:
        ValueError: The profile has no backward.
    """

    def __init__(
        self,
        profile: ModelProfile,
        layout: ModelLayout,
        chunks: Sequence[ChunkPlan],
        assignment: Assignment,
        asynchronous: bool,
        accumulate: int = 1,
        alpha: float = 1.0,
        foreach: bool = False,
    ) -> None:
        self._positions = Positions.of(profile, layout)
        self._inside = self._positions.block != NOWHERE
        self._reserve = Reserve.of(profile, layout)
        self._blocks = tuple(block.name for block in layout.blocks)
        self._assignment = assignment
        self._accumulates = accumulate > 1
        self._alpha = max(alpha, 1.0) if asynchronous else 1.0
        self._gradients = _Gradients(self._positions, layout, chunks)
        self._temporaries = _temporaries(layout, chunks, foreach)
        self._held = _held(layout, chunks) if asynchronous else np.zeros(len(chunks) + 1, dtype=np.int64)
        streamed = frozenset(info.fqn for info in layout.parameters if info.streamed_dtype is not None)
        self._casts = self._positions.casts(streamed)
        self._first_streamed = _first_streamed(self._positions, chunks, streamed)
        self._policies: dict[tuple[int, int], tuple[Flags, Flags, int]] = {}

    def peaks(self, checkpointed: Integers, swapped: Integers, persistent: Integers) -> Integers:
        """The largest, over all positions and the optimizer step, of activations, temporaries and resident gradients.

        What else is on the device is added by the caller: resident parameters and optimizer states
        (`memory.resident_bytes`, without gradients), chunk buffers (`memory_terms(...).chunk_buffers`), module buffers,
        and `held`. Swapped activations are counted here.

        Args:
            checkpointed: Number of checkpointing blocks of every candidate, (K,).
            swapped: Number of swapping blocks, (K,).
            persistent: How many of the first chunks are resident, (K,).

        Returns:
            Bytes, (K,): they do not grow with `checkpointed`, and do not fall with `persistent`.
        """
        width = len(self._blocks) + 1
        pairs, pair = np.unique(swapped * width + checkpointed, return_inverse=True)
        known = [self._policies_of(*divmod(int(entry), width)) for entry in pairs]
        checkpoints = np.stack([entry[0] for entry in known], axis=1)  # (S, U)
        swaps = np.stack([entry[1] for entry in known], axis=1)
        reserve = np.array([entry[2] for entry in known], dtype=np.int64)
        forward, forward_credit, forward_own = self._forward(checkpoints, swaps)
        backward, backward_credit, backward_own = self._backward(checkpoints, swaps)
        all_gradients = self._gradients.total[persistent]

        levels = backward[:, pair]
        if self._casts.any():
            streamed_from = self._first_streamed[persistent]
            own = np.arange(len(forward))[:, None] >= streamed_from
            highest = (
                forward[:, pair] - _credit(forward_credit[:, pair], streamed_from, own, forward_own[:, pair])
            ).max(0)
            levels -= _credit(backward_credit[:, pair], streamed_from, own, backward_own)
        else:
            highest = forward.max(axis=0)[pair]
        reserved = reserve[pair] + LOSS_COPIES
        highest = self._fragmented(highest + reserved) + all_gradients
        if self._accumulates:
            highest = np.maximum(highest, self._fragmented(levels.max(axis=0) + reserved) + all_gradients)
        else:
            levels += reserved
            levels = self._fragmented(levels)
            levels += self._gradients.at(self._positions, persistent)
            highest = np.maximum(highest, levels.max(axis=0))
        step: Integers = self._fragmented(self._temporaries[persistent]) + all_gradients
        return np.maximum(highest, step)

    def held(self, persistent: Integers) -> Integers:
        """Bytes of gradients of offloaded chunks that are held while they land, (K,); 0 on a synchronous device.

        They fall with `persistent`, by no more than the parameters that become resident have.
        """
        return self._held[persistent]

    def _policies_of(self, num_swap: int, num_checkpoint: int) -> tuple[Flags, Flags, int]:
        key = num_swap, num_checkpoint
        if key not in self._policies:
            blocks = self._assignment(num_swap, num_checkpoint)
            flags = [self._positions.policies(blocks, kind) for kind in (BlockPolicy.CHECKPOINT, BlockPolicy.SWAP)]
            reserve = self._reserve.total(dict(zip(self._blocks, blocks, strict=True)))
            self._policies[key] = flags[0], flags[1], reserve
        return self._policies[key]

    def _forward(self, checkpoints: Flags, swaps: Flags) -> tuple[Integers, Integers, Integers]:
        """Levels in forward, (S, U), and what is not there if all weights are streamed: casts before, and own ones."""
        at, inside = self._positions, self._inside
        saved = at.checkpoint_saving
        freed = _choose(checkpoints, swaps, saved, at.swap_saving, np.where(inside, np.minimum(saved, 0), 0))
        levels = np.where(checkpoints, at.unsaved_peak[:, None], at.forward_peak[:, None])
        levels += self._held_anyway(checkpoints) - at.freed_before(freed) + at.window(freed, swaps)
        casts = self._casts * at.reached
        kept = np.where(inside, np.clip(np.minimum(casts, saved), 0, None), casts)
        nothing = np.zeros_like(saved)
        own = np.where(checkpoints, at.unsaved_casts[:, None], at.forward_casts[:, None])
        return levels, before(_choose(checkpoints, swaps, nothing, nothing, kept)), own

    def _backward(self, checkpoints: Flags, swaps: Flags) -> tuple[Integers, Integers, Integers]:
        """The same in backward."""
        at, inside = self._positions, self._inside
        saved = at.checkpoint_saving
        freed = _choose(checkpoints, swaps, saved, at.swap_saving, np.where(inside, np.minimum(saved, 0), 0))
        kept, again = at.backward_peak + np.where(inside, at.newly_held, 0), at.recomputation()
        highest = np.where(inside, np.maximum(kept, again), at.backward_peak)
        without = np.where(
            inside, np.maximum(kept - at.backward_casts, again - at.forward_casts), kept - at.backward_casts
        )
        levels = highest[:, None] + self._held_anyway(checkpoints) - before(freed * at.reached[:, None])
        levels += at.window(at.swap_bytes[:, None], swaps)
        levels += np.where(swaps, at.copies()[:, None], 0)
        credit = np.where(inside, np.clip(np.minimum(self._casts, saved), 0, None), self._casts)
        nothing = np.zeros_like(saved)
        chosen = _choose(checkpoints, swaps, nothing, nothing, credit * at.reached)
        return levels, before(chosen), (highest - without)[:, None]

    def _held_anyway(self, checkpoints: Flags) -> Integers:
        """What recomputations would keep if all blocks were recomputed, (S, U)."""
        return self._positions.held(checkpoints, np.broadcast_to(self._inside[:, None], checkpoints.shape))

    def _fragmented(self, values: Integers) -> Integers:
        return values if self._alpha == 1.0 else np.ceil(values * self._alpha).astype(np.int64)


class _Gradients:
    """Gradients of resident chunks by position; chunks are taken to get theirs in the reverse of execution order.

    Attributes:
        total: Bytes of all gradients of the first n chunks, (N + 1,).
    """

    def __init__(self, positions: Positions, layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> None:
        whole_at = {fqn: index for index, segment in enumerate(positions.segments) for fqn in segment.gradients}
        never = len(positions.segments)  # Of a part that did not run, another batch may have left one.
        sizes, arrivals = np.zeros(len(chunks), dtype=np.int64), np.zeros(len(chunks), dtype=np.int64)
        for index, chunk in enumerate(chunks):
            if chunk.trainable:
                sizes[index] = gradient_bytes(layout, chunk)
                arrivals[index] = max(whole_at.get(fqn, never) for fqn in chunk.parameters)
        ever = arrivals < never
        self.total = _sums(sizes)
        self._always = _sums(np.where(ever, 0, sizes))
        self._ordered = _sums(np.where(ever, sizes, 0))
        latest = np.maximum.accumulate(np.where(ever, arrivals, 0))
        # For every segment, how many chunks get their gradients in it or in an earlier one, and in an earlier one.
        self._until = np.searchsorted(latest, np.arange(never), side="right")
        self._before = np.searchsorted(latest, np.arange(never), side="left")

    def at(self, positions: Positions, persistent: Integers) -> Integers:
        """Gradients at the peak of the backward of every segment if the first `persistent` chunks stay, (S, K)."""
        until = self._ordered[np.minimum(persistent, self._until[:, None])]
        own = until - self._ordered[np.minimum(persistent, self._before[:, None])]
        np.minimum(own, positions.own_gradients[:, None], out=own)
        own -= until
        own += (self._ordered + self._always)[persistent]
        return own


def gradient_bytes(layout: ModelLayout, chunk: ChunkPlan) -> int:
    """Bytes of the gradients of a chunk that stays on the device, alignment included."""
    return chunk_offsets([layout.parameter(fqn).nbytes for fqn in chunk.parameters])[1] if chunk.trainable else 0


def _choose(checkpoints: Flags, swaps: Flags, checkpointed: Integers, swapped: Integers, kept: Integers) -> Integers:
    """For every segment and column the value of its policy, (S, U)."""
    chosen: Integers = np.where(swaps, swapped[:, None], np.where(checkpoints, checkpointed[:, None], kept[:, None]))
    return chosen


def _credit(sums: Integers, streamed_from: Integers, reached: Flags, own: Integers) -> Integers:
    """What is not there if weights are streamed from a segment on: sums since then, and the segment's own, (S, K)."""
    since: Integers = np.maximum(sums - sums[streamed_from, np.arange(sums.shape[1])], 0)
    return since + np.where(reached, own, 0)


def _first_streamed(positions: Positions, chunks: Sequence[ChunkPlan], streamed: frozenset[str]) -> Integers:
    """From which segment on no cast is made if the first n chunks are resident, (N + 1,)."""
    index_of = {fqn: index for index, chunk in enumerate(chunks) for fqn in chunk.parameters}
    first = [
        min((index_of[fqn] for fqn, _ in segment.casts if fqn in streamed), default=len(chunks))
        for segment in positions.segments
    ]
    lowest = np.minimum.accumulate(np.array(first, dtype=np.int64)[::-1])[::-1]
    return np.minimum(np.searchsorted(lowest, np.arange(len(chunks) + 1), side="left"), len(first) - 1)


def _temporaries(layout: ModelLayout, chunks: Sequence[ChunkPlan], foreach: bool) -> Integers:
    """What the optimizer step on the device makes if the first n chunks are resident, (N + 1,)."""
    sizes = [
        [chunk_offsets([layout.parameter(fqn).nbytes])[1] for fqn in chunk.parameters if chunk.trainable]
        for chunk in chunks
    ]
    if foreach:
        return _sums(np.array([sum(entry) for entry in sizes], dtype=np.int64))
    largest = np.array([0, *(2 * max(entry, default=0) for entry in sizes)], dtype=np.int64)
    return np.maximum.accumulate(largest)


def _held(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> Integers:
    """The second largest gradient of all chunks but the first n, (N + 1,)."""
    held = np.zeros(len(chunks) + 1, dtype=np.int64)
    largest = [0, 0]
    for index in range(len(chunks) - 1, -1, -1):
        if chunks[index].trainable:
            sizes = [layout.parameter(fqn).streamed_nbytes for fqn in chunks[index].parameters]
            largest = sorted([*largest, *sizes])[-2:]
        held[index] = largest[0]
    return held


def _sums(values: Integers) -> Integers:
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums
