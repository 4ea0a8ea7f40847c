"""What activations take at every position of a step.

Positions:
A step goes through the segments of the profile forward, then backward: two *positions* for each segment. The profile
knows the level of all activations there if every block keeps them. What a plan frees in the segments before is taken
off: they have been run forward and not yet backward. A segment without backward frees nothing, as it goes anyway.

Two things come on top. What the last block has swapped is still on the device while the next one runs forward, and
there again, as copies of its own, while the next one runs backward (see [Note: Windows] of the runtime). And a
checkpointed block is run forward once more at the start of its backward.

Casts:
A copy of a weight in the dtype of autocast counts as an activation. A weight that is streamed in that dtype is not
copied. Lightning switches autocast's cache off; with one, copies would outlive their block, and count too long here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.plan import ALIGNMENT, BlockPolicy
from lightning_protrain.profiler.records import ModelLayout, ModelProfile, Segment

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
NOWHERE = -1
# Bytes: the training loop has copies of the loss, of this step and of the one before, that a profile knows nothing of.
LOSS_COPIES = 2 * ALIGNMENT


@dataclass(frozen=True)
class Positions:
    """The segments of a profile as arrays, one element for each; bytes unless said otherwise, as in `Segment`.

    Attributes:
        segments: The segments.
        forward_live: `forward.live_bytes`.
        forward_peak: `forward.peak_bytes`.
        unsaved_peak: `forward.unsaved_peak`; `forward_peak` where it is not known.
        backward_live: `backward.live_bytes`.
        backward_peak: `backward.peak_bytes`.
        forward_casts: What own casts, if none is made, take off `forward_peak`; 0 where one is made anyway.
        unsaved_casts: The same of `unsaved_peak`.
        backward_casts: The same of `backward_peak`.
        castable: Bytes of copies that are not made if all weights that can come in the dtype in which they are used do.
        own_gradients: What gradients add to the peak of the backward in which they are made, if they stay.
        checkpoint_saving: As in `Segment`.
        newly_held: What the segment is given and a recomputation alone keeps, where no earlier one was given it.
        shared_held: The same, where an earlier one was.
        swap_saving: As in `Segment`.
        swap_bytes: What comes back if it has been swapped: with copies of what other segments save too.
        input_bytes: As in `Segment`.
        products: `product_bytes`; 0 where they cannot be kept.
        idle_products: `idle_product_bytes`.
        selective_peak: `forward.selective_peak`.
        selective_casts: What own casts, if none is made, take off it.
        again_peak: `forward.again_peak`.
        again_casts: The same of it.
        asked_live: As in `Segment`; at least `backward_live`.
        block: Index among the blocks of the layout; `NOWHERE` outside.
        reached: 1 where there is a backward, else 0.
        previous: Index of the latest segment of a block before it; `NOWHERE` if there is none.
    """

    segments: tuple[Segment, ...]
    forward_live: Integers
    forward_peak: Integers
    unsaved_peak: Integers
    backward_live: Integers
    backward_peak: Integers
    forward_casts: Integers
    unsaved_casts: Integers
    backward_casts: Integers
    castable: Integers
    own_gradients: Integers
    checkpoint_saving: Integers
    newly_held: Integers
    shared_held: Integers
    swap_saving: Integers
    swap_bytes: Integers
    input_bytes: Integers
    products: Integers
    idle_products: Integers
    selective_peak: Integers
    selective_casts: Integers
    again_peak: Integers
    again_casts: Integers
    asked_live: Integers
    block: Integers
    reached: Integers
    previous: Integers

    @classmethod
    def of(cls, profile: ModelProfile, layout: ModelLayout, streamed: frozenset[str] = frozenset()) -> Positions:
        """The positions of a profile.

        Args:
            profile: One step with forward and backward.
            layout: The model.
            streamed: Parameters that come in the dtype in which they are used.

        Raises:
            ValueError: It has no backward.
        """
        segments = profile.segments
        if not any(segment.backward.peak_bytes for segment in segments):
            raise ValueError(
                "The profile has no backward, so what it takes is not known. Profile a step that returns the loss."
            )
        index_of = {block.name: index for index, block in enumerate(layout.blocks)}
        block = [NOWHERE if entry.between else index_of.get(entry.unit, NOWHERE) for entry in segments]
        swap_bytes = profile.swap_bytes(streamed)
        castable = np.array([_casts(it, layout.low) for it in segments], dtype=np.int64)
        only = np.array([layout.low.issuperset(dict(it.casts)) for it in segments], dtype=np.bool_)

        def array(value: Callable[[Segment], int]) -> Integers:
            return np.array([value(segment) for segment in segments], dtype=np.int64)

        def own_casts(value: Callable[[Segment], int]) -> Integers:
            return np.where(only, np.minimum(array(value), castable), 0)

        held = array(lambda it: it.held_bytes)
        shared = np.where(_held_before(segments), held, 0)
        return cls(
            segments=segments,
            forward_live=array(lambda it: it.forward.live_bytes),
            forward_peak=array(lambda it: it.forward.peak_bytes),
            unsaved_peak=array(lambda it: it.forward.unsaved_peak or it.forward.peak_bytes),
            backward_live=array(lambda it: it.backward.live_bytes),
            backward_peak=array(lambda it: it.backward.peak_bytes),
            forward_casts=own_casts(lambda it: _less(it.forward.peak_bytes, it.forward.peak_without_casts)),
            unsaved_casts=own_casts(lambda it: _less(it.forward.unsaved_peak, it.forward.unsaved_peak_without_casts)),
            backward_casts=own_casts(lambda it: _less(it.backward.peak_bytes, it.backward.peak_without_casts)),
            castable=castable,
            own_gradients=array(lambda it: max(it.peak_with_gradients - it.backward.peak_bytes, 0)),
            checkpoint_saving=array(lambda it: it.checkpoint_saving),
            newly_held=held - shared,
            shared_held=shared,
            swap_saving=array(lambda it: it.swap_saving),
            swap_bytes=array(lambda it: swap_bytes.get(it.unit, 0)),
            input_bytes=array(lambda it: it.input_bytes),
            products=array(lambda it: it.product_bytes or 0),
            idle_products=array(lambda it: it.idle_product_bytes),
            selective_peak=array(lambda it: it.forward.selective_peak),
            selective_casts=own_casts(
                lambda it: _less(it.forward.selective_peak, it.forward.selective_peak_without_casts)
            ),
            again_peak=array(lambda it: it.forward.again_peak),
            asked_live=array(lambda it: max(it.asked_live, it.backward.live_bytes)),
            again_casts=own_casts(lambda it: _less(it.forward.again_peak, it.forward.again_peak_without_casts)),
            block=np.array(block, dtype=np.int64),
            reached=array(lambda it: it.backward.peak_bytes > 0),
            previous=np.array(_previous(block), dtype=np.int64),
        )

    def casts(self, streamed: frozenset[str]) -> Integers:
        """Bytes of copies, in every segment, that are not made if the parameters `streamed` come in their dtype."""
        return np.array([_casts(segment, streamed) for segment in self.segments], dtype=np.int64)

    def policies(self, blocks: Sequence[BlockPolicy], policy: BlockPolicy) -> Flags:
        """Whether the block of every segment has `policy`, (S,)."""
        chosen = np.array([*(entry is policy for entry in blocks), False])  # `NOWHERE` is the last one.
        return chosen[self.block]

    def recomputation(self) -> Integers:
        """The most activations while a checkpointed block is run again, over the level without it."""
        return self.backward_live - self.checkpoint_saving + self.forward_peak - self.forward_live

    def selective_recomputation(self) -> Integers:
        """The same while a block that has kept its products is run again."""
        return self.asked_live - self.checkpoint_saving + self.again_peak - self.forward_live

    def freed_before(self, freed: Integers) -> Integers:
        """What has been `freed`, (S, C), in forward until each segment, and is not gone anyway."""
        return before(freed * self.reached[:, None])  # When the rest goes is not known.

    def held(self, checkpoints: Flags, holding: Flags) -> Integers:
        """What recomputations of the segments `holding` keep, where the first of their list does not do it, (S, C).

        The blocks of one list share what they are given beside what the one before has made. In the profile, the first
        of them keeps it.
        """
        total = np.zeros(checkpoints.shape, dtype=np.int64)
        for first, sharing in self._lists:
            holds = holding[sharing] * self.shared_held[sharing, None]
            since = np.maximum.accumulate(_scattered(holds, sharing, len(total)), axis=0)
            total += np.where(checkpoints[first], 0, since)
        return total

    @cached_property
    def _lists(self) -> list[tuple[int, list[int]]]:
        """The first segment of each list of blocks that share what they are given, and those that share it."""
        names = [segment.unit.rpartition(".")[0] for segment in self.segments]
        lists: dict[str, list[int]] = {}
        for index in np.flatnonzero(self.shared_held).tolist():
            lists.setdefault(names[index], []).append(index)
        return [(names.index(name), sharing) for name, sharing in lists.items()]

    def copies(self) -> Integers:
        """What comes back of a swapped segment beside the level, which has it once if others save it too."""
        return np.maximum(self.swap_bytes - self.swap_saving, 0)

    def window(self, values: Integers, swaps: Flags) -> Integers:
        """Those of `values`, (S, 1) or (S, C), that belong to the latest block before, if it swaps, (S, C)."""
        padded = np.concatenate([np.where(swaps, values, 0), np.zeros((1, swaps.shape[1]), dtype=np.int64)])
        of_latest: Integers = padded[self.previous]
        return of_latest


def before(values: Integers) -> Integers:
    """Sums of all rows before each row, (S, C)."""
    sums = np.zeros_like(values)
    np.cumsum(values[:-1], axis=0, out=sums[1:])
    return sums


def _scattered(values: Integers, rows: Sequence[int], count: int) -> Integers:
    wide = np.zeros((count, values.shape[1]), dtype=np.int64)
    wide[rows] = values
    return wide


def _previous(block: Sequence[int]) -> list[int]:
    """Index of the latest segment of a block before each."""
    previous, latest = [], NOWHERE
    for index, entry in enumerate(block):
        previous.append(latest)
        latest = index if entry != NOWHERE else latest
    return previous


def _less(peak: int, other: int) -> int:
    return peak - other if other else 0  # 0: not known.


def _held_before(segments: Sequence[Segment]) -> Flags:
    """Whether a segment of the same list, before each, is given as much that only a recomputation keeps, (S,)."""
    most: dict[str, int] = {}
    found = []
    for segment in segments:
        name = segment.unit.rpartition(".")[0]
        found.append(0 < segment.held_bytes <= most.get(name, 0))
        most[name] = max(most.get(name, 0), segment.held_bytes)
    return np.array(found)


def _casts(segment: Segment, names: frozenset[str]) -> int:
    return sum([nbytes for fqn, nbytes in segment.casts if fqn in names])
