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
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.named import Named
from lightning_protrain.planner.plan import BlockPolicy, ChunkPlan
from lightning_protrain.planner.positions import LOSS_COPIES, NOWHERE, Flags, Integers, Positions, before
from lightning_protrain.planner.sizes import Sizes, aligned, before_each, second_largest, totals
from lightning_protrain.planner.unexercised import Reserve
from lightning_protrain.profiler.records import ModelLayout, ModelProfile

Floats = NDArray[np.float64]
Assignment = Callable[[int, int], Sequence[BlockPolicy]]


@dataclass(frozen=True)
class Levels:
    """Activations under U layouts of policies, before chunks are placed, (U, S); see `Activations`.

    Whole numbers; a row of each layout, as candidates take whole rows.

    Attributes:
        forward: The highest level in forward, of the segments before each and of all, (U, S + 1).
        forward_streamed: The highest of each segment and those after it if all weights are streamed.
        backward: Levels in backward.
        backward_streamed: The same if all weights are streamed.
        credit: What is not there for that: casts of the segments before.
        reserve: For blocks that have not run, (U,).
    """

    forward: Floats
    forward_streamed: Floats
    backward: Floats
    backward_streamed: Floats
    credit: Floats
    reserve: Floats

    def beside(self, used: int, others: Levels) -> Levels:
        """The first `used` rows of these and behind them others, with room for more so that few rows are copied."""
        end = used + len(others.reserve)
        levels = self
        if end > len(self.reserve):
            kept = (getattr(self, field.name)[:used] for field in fields(self))
            levels = Levels(*(np.concatenate((rows, np.zeros((2 * end - used, *rows.shape[1:])))) for rows in kept))
        for field in fields(self):
            getattr(levels, field.name)[used:end] = getattr(others, field.name)
        return levels


class Activations:
    """The peak of activations and gradients under any policies, see [Note: Upper bound].

    Args:
        profile: One step with forward and backward.
        layout: The model.
        named: What the profile says of parameters.
        sizes: All chunks in execution order.
        asynchronous: Whether copies run beside computation (`HardwareProfile.asynchronous`).
        accumulate: Micro-batches in a step.
        alpha: Fragmentation factor for activations and temporaries; below 1, and on a synchronous device, it counts
            as 1.
        foreach: As in `memory_timeline`.
        selective: Whether blocks may keep their products alone.

    Raises:
        ValueError: The profile has no backward.
    """

    def __init__(
        self,
        profile: ModelProfile,
        layout: ModelLayout,
        named: Named,
        sizes: Sizes,
        asynchronous: bool,
        accumulate: int = 1,
        alpha: float = 1.0,
        foreach: bool = False,
        selective: bool = False,
    ) -> None:
        self._positions = Positions.of(profile, layout)
        self._inside = self._positions.block != NOWHERE
        self._reserve = Reserve.of(profile, layout)
        self._blocks = tuple(block.name for block in layout.blocks)
        self._reserved = [
            np.array([*(of.get(name, 0) for name in self._blocks), 0], dtype=np.int64)[:, None]
            for of in (self._reserve.kept, self._reserve.checkpointed)
        ]
        self._accumulates = accumulate > 1
        self._alpha = max(alpha, 1.0) if asynchronous else 1.0
        self._gradients = _Gradients(named, self._positions.own_gradients, sizes)
        self._temporaries = _temporaries(sizes, foreach)
        self._held = _held(sizes) if asynchronous else np.zeros(len(sizes.nbytes) + 1, dtype=np.int64)
        self._casts = self._positions.castable
        self._any_casts = bool(self._casts.any())
        at, kept = self._positions, np.clip(np.minimum(self._casts, self._positions.checkpoint_saving), 0, None)
        self._kept_casts = (np.where(self._inside, kept, self._casts) * at.reached)[:, None]
        self._first_streamed = _first_streamed(named, len(profile.segments), sizes)
        self._highest, self._without_casts = self._backward_levels(selective)
        self._kept_peaks = self._forward_peaks(selective)

    def levels(self, recomputes: Flags, swaps: Flags, selects: Flags | None = None) -> Levels:
        """What `highest` needs to know of U layouts of policies.

        Args:
            recomputes: Which blocks recompute, (B + 1, U); the last row is of what is in no block.
            swaps: Which swap, (B + 1, U).
            selects: Which of those that recompute keep their products, (B + 1, U); None: none.
        """
        kept, given = self._reserved
        wholly = recomputes if selects is None else recomputes & ~selects
        reserve = np.where(swaps, 0, np.where(wholly, given, kept)).sum(axis=0) + self._reserve.total({})
        at = self._positions.block  # `NOWHERE` is the last one.
        return self._levels(recomputes[at], swaps[at], None if selects is None else selects[at], reserve)

    def highest(self, levels: Levels, pair: Integers, persistent: Integers) -> Integers:
        """The peaks of K candidates, as in `ActivationCurve.peaks`.

        Args:
            levels: Of U layouts of policies.
            pair: Which of them each candidate has, (K,).
            persistent: How many of the first chunks are resident, (K,).
        """
        all_gradients = self._gradients.total[persistent]
        reserved = levels.reserve[pair] + LOSS_COPIES
        if self._any_casts:
            # From there on no casts are made, and those before are still there.
            since = self._first_streamed[persistent]
            credit = levels.credit[pair, since]
            forward = np.maximum(levels.forward[pair, since], levels.forward_streamed[pair, since] + credit)
            backward = levels.backward_streamed.take(pair, axis=0)
            backward += (credit + reserved)[:, None]
            ahead = backward[:, : int(since.max(initial=0))]
            there = levels.backward[:, : ahead.shape[1]].take(pair, axis=0) + reserved[:, None]
            np.copyto(ahead, there, where=np.arange(ahead.shape[1]) < since[:, None])
        else:
            forward = levels.forward[pair, -1]
            backward = levels.backward.take(pair, axis=0)
            backward += reserved[:, None]
        highest = self._fragmented(forward + reserved) + all_gradients
        if self._accumulates:
            highest = np.maximum(highest, self._fragmented(backward.max(axis=1)) + all_gradients)
        else:
            backward = self._fragmented(backward)
            backward += self._gradients.at(persistent)
            highest = np.maximum(highest, backward.max(axis=1))
        step = self._fragmented(self._temporaries[persistent].astype(np.float64)) + all_gradients
        return np.maximum(highest, step).astype(np.int64)

    @property
    def gradients(self) -> Integers:
        """Bytes of all gradients of the first n chunks, which peaks have at most on top of activations, (N + 1,)."""
        return self._gradients.total

    def held(self, persistent: Integers) -> Integers:
        """Bytes of gradients of offloaded chunks that are held while they land, (K,); 0 on a synchronous device.

        They fall with `persistent`, by no more than the parameters that become resident have.
        """
        return self._held[persistent]

    def _levels(self, checkpoints: Flags, swaps: Flags, selects: Flags | None, reserve: Integers) -> Levels:
        at = self._positions
        saved = at.checkpoint_saving
        freed = _choose(checkpoints, swaps, saved, at.swap_saving, np.where(self._inside, np.minimum(saved, 0), 0))
        if selects is not None:
            freed -= np.where(selects, at.products[:, None], 0)
        there = self._held_anyway(checkpoints) - at.freed_before(freed)
        credit = before(np.where(checkpoints | swaps, 0, self._kept_casts))
        forward, own = self._forward(checkpoints, selects, there + at.window(freed, swaps))
        backward = self._backward(swaps, there)
        highest = np.full((len(forward) + 1, forward.shape[1]), np.iinfo(np.int64).min)
        np.maximum.accumulate(forward, axis=0, out=highest[1:])
        streamed = np.maximum.accumulate((forward - own - credit)[::-1], axis=0)[::-1]
        found = highest, streamed, backward, backward - credit - self._without_casts[:, None], credit
        return Levels(*(np.ascontiguousarray(levels.T, dtype=np.float64) for levels in (*found, reserve)))

    def _forward(self, checkpoints: Flags, selects: Flags | None, there: Integers) -> tuple[Integers, Integers]:
        """Levels in forward, (S, U), and casts of their own, which are not there if all weights are streamed.

        `there` is what comes on top of the profile's levels, or goes off them.
        """
        at = self._positions
        (kept_peak, kept_own), (selective, selective_own) = self._kept_peaks
        levels = np.where(checkpoints, at.unsaved_peak[:, None], kept_peak)
        own = np.where(checkpoints, at.unsaved_casts[:, None], kept_own)
        if selects is not None:
            levels, own = np.where(selects, selective, levels), np.where(selects, selective_own, own)
        levels += there
        return levels, own

    def _forward_peaks(self, selective: bool) -> tuple[tuple[Integers, Integers], tuple[Integers, Integers]]:
        """Levels in forward if everything or all products are kept, and what they lose without own casts, (S, 1) each.

        Neither is below what the next step of a block would take.
        """
        at, inside = self._positions, self._inside & selective
        higher = np.maximum(at.selective_peak, at.unsaved_peak)
        higher_casts = np.minimum(at.selective_casts, at.unsaved_casts)
        highest = np.where(inside, np.maximum(higher, at.forward_peak), at.forward_peak)
        highest_casts = np.where(inside, np.minimum(higher_casts, at.forward_casts), at.forward_casts)
        return (highest[:, None], highest_casts[:, None]), (higher[:, None], higher_casts[:, None])

    def _backward_levels(self, selective: bool) -> tuple[Integers, Integers]:
        """Levels in backward if everything is kept or run again, (S, 1), and what they lose without own casts, (S,)."""
        at, inside = self._positions, self._inside
        kept, again = at.backward_peak + np.where(inside, at.newly_held, 0), at.recomputation()
        again_without = again - at.forward_casts
        if selective:
            kept, found = kept + np.where(inside, at.idle_products, 0), at.selective_recomputation()
            again, again_without = np.maximum(again, found), np.maximum(again_without, found - at.again_casts)
        highest = np.where(inside, np.maximum(kept, again), at.backward_peak)
        without = np.where(inside, np.maximum(kept - at.backward_casts, again_without), kept - at.backward_casts)
        return highest[:, None], highest - without

    def _backward(self, swaps: Flags, there: Integers) -> Integers:
        """Levels in backward, (S, U)."""
        at = self._positions
        levels = self._highest + there
        levels += at.window(at.swap_bytes[:, None], swaps)
        levels += np.where(swaps, at.copies()[:, None], 0)
        return levels

    def _held_anyway(self, checkpoints: Flags) -> Integers:
        """What recomputations would keep if all blocks were recomputed, (S, U)."""
        return self._positions.held(checkpoints, self._inside[:, None])

    def _fragmented(self, values: Floats) -> Floats:
        """These, which may be changed."""
        if self._alpha != 1.0:
            np.multiply(values, self._alpha, out=values)
            np.ceil(values, out=values)
        return values


class ActivationCurve(Activations):
    """The peak of activations and gradients as a function of counts, see [Note: Upper bound].

    Args:
        profile: One step with forward and backward.
        layout: The model.
        chunks: All chunks in execution order; of their residency nothing is read.
        assignment: Policies of all blocks of `layout.blocks`, in that order, if so many swap and the others take so
            many steps (see [Note: Layout of policies]): `assignment(num_swap, num_steps)`. It is called once for each
            pair.
        asynchronous: Whether copies run beside computation (`HardwareProfile.asynchronous`).
        accumulate: Micro-batches in a step.
        alpha: Fragmentation factor for activations and temporaries; below 1, and on a synchronous device, it counts
            as 1.
        foreach: As in `memory_timeline`.
        selective: Whether blocks may keep their products alone.

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
        selective: bool = False,
    ) -> None:
        named = Named.of(profile, layout)
        how = asynchronous, accumulate, alpha, foreach, selective
        super().__init__(profile, layout, named, Sizes.of(chunks, named.parameters), *how)
        self._assignment = assignment
        self._policies: dict[tuple[int, int], tuple[Flags, Flags, Flags, int]] = {}

    def peaks(self, num_steps: Integers, swapped: Integers, persistent: Integers) -> Integers:
        """The largest, over all positions and the optimizer step, of activations, temporaries and resident gradients.

        What else is on the device is added by the caller: resident parameters and optimizer states
        (`memory.resident_bytes`, without gradients), chunk buffers (`memory_terms(...).chunk_buffers`), module buffers,
        and `held`. Swapped activations are counted here.

        Args:
            num_steps: Steps of the blocks that do not swap, of every candidate, (K,).
            swapped: Number of swapping blocks, (K,).
            persistent: How many of the first chunks are resident, (K,).

        Returns:
            Bytes, (K,): they do not grow with `num_steps`, and do not fall with `persistent`.
        """
        width = 2 * len(self._blocks) + 1
        pairs, pair = np.unique(swapped * width + num_steps, return_inverse=True)
        known = [self._policies_of(*divmod(int(entry), width)) for entry in pairs]
        checkpoints = np.stack([entry[0] for entry in known], axis=1)  # (S, U)
        swaps, selects = (np.stack([entry[number] for entry in known], axis=1) for number in (1, 2))
        reserve = np.array([entry[3] for entry in known], dtype=np.int64)
        return self.highest(self._levels(checkpoints | selects, swaps, selects, reserve), pair.reshape(-1), persistent)

    def _policies_of(self, num_swap: int, num_steps: int) -> tuple[Flags, Flags, Flags, int]:
        key = num_swap, num_steps
        if key not in self._policies:
            blocks = self._assignment(num_swap, num_steps)
            kinds = BlockPolicy.CHECKPOINT, BlockPolicy.SWAP, BlockPolicy.SELECTIVE
            checkpoints, swaps, selects = (self._positions.policies(blocks, kind) for kind in kinds)
            reserve = self._reserve.total(dict(zip(self._blocks, blocks, strict=True)))
            self._policies[key] = checkpoints, swaps, selects, reserve
        return self._policies[key]


class _Gradients:
    """Gradients of resident chunks by position; chunks are taken to get theirs in the reverse of execution order.

    Attributes:
        total: Bytes of all gradients of the first n chunks, (N + 1,).
    """

    def __init__(self, named: Named, own_gradients: Integers, of: Sizes) -> None:
        sizes, arrivals = of.gradient_bytes, np.zeros(len(of.nbytes), dtype=np.int64)
        # Of a part that did not run, another batch may have left one.
        never = len(own_gradients)
        of_each = np.full(len(of.place), never)
        of_each[of.place[named.gradients]] = named.positions
        np.maximum.at(arrivals, of.chunk, np.where(of.trainable[of.chunk], of_each, 0))
        ever = arrivals < never
        self.total = before_each(sizes)
        self._own = own_gradients.astype(np.float64)
        self._always = before_each(np.where(ever, 0, sizes)).astype(np.float64)
        self._ordered = before_each(np.where(ever, sizes, 0)).astype(np.float64)
        latest = np.maximum.accumulate(np.where(ever, arrivals, 0))
        # For every segment, bytes of the chunks that get their gradients in it or in an earlier one; in an earlier one.
        self._until = self._ordered[np.searchsorted(latest, np.arange(never), side="right")]
        self._before = self._ordered[np.searchsorted(latest, np.arange(never), side="left")]
        # What `at` has said so far, (N + 1, S): many plans have as many resident chunks.
        self._table, self._known = np.empty((len(sizes) + 1, never)), np.zeros(len(sizes) + 1, dtype=np.bool_)

    def at(self, persistent: Integers) -> Floats:
        """Gradients at the peak of the backward of every segment if the first `persistent` chunks stay, (K, S)."""
        if (new := persistent[~self._known[persistent]]).size:
            self._known[new] = True
            self._table[new] = self._at(new)
        return self._table.take(persistent, axis=0)

    def _at(self, persistent: Integers) -> Floats:
        ordered = self._ordered[persistent][:, None]
        until = np.minimum(ordered, self._until)
        own = np.minimum(until - np.minimum(ordered, self._before), self._own)
        found: Floats = own - until + ordered + self._always[persistent][:, None]
        return found


def _choose(checkpoints: Flags, swaps: Flags, checkpointed: Integers, swapped: Integers, kept: Integers) -> Integers:
    """For every segment and column the value of its policy, (S, U)."""
    chosen: Integers = np.where(swaps, swapped[:, None], np.where(checkpoints, checkpointed[:, None], kept[:, None]))
    return chosen


def _first_streamed(named: Named, num_segments: int, sizes: Sizes) -> Integers:
    """From which segment on no cast is made if the first n chunks are resident, (N + 1,)."""
    count, casts = len(sizes.nbytes), named.casts
    streamed = named.parameters.low[casts.numbers]
    first = np.full(num_segments, count)
    np.minimum.at(first, casts.lists[streamed], sizes.chunk[sizes.place[casts.numbers[streamed]]])
    lowest = np.minimum.accumulate(first[::-1])[::-1]
    return np.minimum(np.searchsorted(lowest, np.arange(count + 1), side="left"), num_segments - 1)


def _temporaries(sizes: Sizes, foreach: bool) -> Integers:
    """What the optimizer step on the device makes if the first n chunks are resident, (N + 1,)."""
    count = len(sizes.nbytes)
    made = np.where(sizes.trainable[sizes.chunk], aligned(sizes.own), 0)
    if foreach:
        return before_each(totals(sizes.chunk, made, count))
    largest = np.zeros(count + 1, dtype=np.int64)
    np.maximum.at(largest, sizes.chunk + 1, 2 * made)
    return np.maximum.accumulate(largest)


def _held(sizes: Sizes) -> Integers:
    """The second largest gradient of all chunks but the first n, (N + 1,)."""
    made = np.where(sizes.trainable[sizes.chunk], sizes.streamed, 0)
    return second_largest(made, sizes.chunk, len(sizes.nbytes))
