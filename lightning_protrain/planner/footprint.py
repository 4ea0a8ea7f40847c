"""What candidates of the search take on the device and on the host, for many of them at once.

[Note: Fewest offloaded]
What a candidate takes at least, with the fewest buffers, does not fall with resident chunks once every table of bytes
is replaced by its least from there on. So for each layout of policies there is a number of offloaded chunks below
which nothing fits, and boxes of candidates are cut there. What peaks have beside all gradients of resident chunks
hardly depends on that number, so the one that is sought is next to where they would just fit if it did not; halving now
and then makes sure that it is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from mmap import PAGESIZE

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.activations import Activations, Levels
from lightning_protrain.planner.buffers import Buffers
from lightning_protrain.planner.host import _pages
from lightning_protrain.planner.named import Named
from lightning_protrain.planner.plan import BlockPolicy, ChunkPlan, MemoryTerms, gathers_gradients
from lightning_protrain.planner.policies import Step, first_steps, steps_before
from lightning_protrain.planner.sizes import Sizes, before_each, second_largest, swap_table, totals
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
# Of so many guesses of the fewest offloaded chunks that fit, one halves.
HALVED = 8
# From so many chunks away a guess goes by the slope between the last two.
FAR = 8
UNKNOWN = 1 << 60
_RECOMPUTES = BlockPolicy.CHECKPOINT, BlockPolicy.SELECTIVE


class Footprint:
    """Bytes of candidates over the same chunks: the first p are resident, blocks at the first s places swap.

    Args:
        profile: One step with forward and backward.
        layout: The model.
        named: What the profile says of parameters.
        chunks: All its chunks in execution order, all offloaded.
        needed: Indices of the chunks that each unit needs.
        sizes: Those of `chunks`.
        places: Indices of the blocks that may swap, in the order in which they are taken.
        steps: What blocks give up, in that order, see [Note: Layout of policies].
        hardware: Whether copies run beside computation.
        state_bytes: Bytes of optimizer states for each trainable element.
        accumulate: Micro-batches in a step.
        alpha: As in `memory_timeline`.
        foreach: As in `memory_timeline`.
        checkpoint_copy: As in `memory_timeline`.
        sharers: As in `memory_timeline`.

    Attributes:
        buffers: Bytes of chunk buffers.
        swap_bytes: Host bytes that a block swaps if the first p chunks are resident, (B + 1, N + 1); the last row is of
            what is in no block, as in all that has a row for each block.
        num_steps: How many steps there are if the first s places swap, (S + 1,).
    """

    def __init__(
        self,
        profile: ModelProfile,
        layout: ModelLayout,
        named: Named,
        chunks: Sequence[ChunkPlan],
        needed: Mapping[str, tuple[int, ...]],
        sizes: Sizes,
        places: Sequence[int],
        steps: Sequence[Step],
        hardware: HardwareProfile,
        state_bytes: float,
        accumulate: int = 1,
        alpha: float = 1.0,
        foreach: bool = False,
        checkpoint_copy: int = 0,
        sharers: int = 1,
    ) -> None:
        self.buffers = Buffers(layout, sizes.nbytes, needed)
        self.swap_bytes = swap_table(profile, layout, named.calls, sizes)
        self._layout, self._sizes, self._state_bytes = layout, sizes, state_bytes
        self._accumulates, self._asynchronous = accumulate > 1, hardware.asynchronous
        self._chunks, self._checkpoint_copy, self._sharers = tuple(chunks), checkpoint_copy, sharers
        num_blocks = len(layout.blocks)
        self._levels: Levels | None = None
        self._num_levels = 0
        # The fewest offloaded chunks of each layout of policies, from where on they were sought, and how many they are
        # at least.
        self._fewest = np.full((3, 0), UNKNOWN, dtype=np.int64)
        self._width = len(steps) + 1
        self._column = np.full((len(places) + 1) * self._width, -1, dtype=np.int64)
        self._rank = np.full(num_blocks + 1, num_blocks, dtype=np.int64)
        self._rank[list(places)] = np.arange(len(places))
        begins, ends = (first_steps(steps, kinds, num_blocks) for kinds in (_RECOMPUTES, _RECOMPUTES[:1]))
        self._begin, self._end = (steps_before(first, steps, places) for first in (begins, ends))
        self._selects = bool((begins < ends).any())
        taken = np.bincount(np.array([index for index, _ in steps], dtype=np.int64), minlength=num_blocks)[list(places)]
        self.num_steps = len(steps) - before_each(taken)
        how = hardware.asynchronous, accumulate, alpha, foreach, self._selects
        self._activations = Activations(profile, layout, named, sizes, *how)
        resident, gradients = before_each(sizes.resident_bytes(state_bytes)), before_each(sizes.gradient_bytes)
        held = self._activations.held(np.arange(len(chunks) + 1))
        self._fixed = resident + held + layout.buffer_bytes
        self._resident, self._in_flight = resident + gradients, _in_flight(sizes, gathers_gradients(layout, chunks))
        self._states = self._resident + self._in_flight + layout.buffer_bytes
        # The least if at least the first p are resident.
        self._least_fixed, self._least_states = _least_after(self._fixed), _least_after(self._states)

    @cached_property
    def _host(self) -> tuple[Integers, Integers]:
        """Bytes of the host, without what is swapped, and the least if at most the first p are resident, (2, N + 1)."""
        lends = self._layout.lends_copies and self._sharers == 1
        how = self._state_bytes, self._accumulates, self._asynchronous, self._sharers, lends
        table = _host_states(self._chunks, self._sizes, *how) + np.array([[self._checkpoint_copy], [0]])
        return table, np.minimum.accumulate(table, axis=1)

    def swaps(self, num_swap: Integers) -> Flags:
        """Which blocks swap, (B + 1, K)."""
        swaps: Flags = self._rank[:, None] < num_swap
        return swaps

    def recomputes(self, num_swap: Integers, num_steps: Integers) -> Flags:
        """Which blocks recompute, as a whole or but for their products, (B + 1, K)."""
        recomputes: Flags = ~self.swaps(num_swap) & (self._begin.take(num_swap, axis=1) < num_steps)
        return recomputes

    def selects(self, num_swap: Integers, num_steps: Integers) -> Flags | None:
        """Which of these keep their products, (B + 1, K); None: none does, whatever the number."""
        if not self._selects:
            return None
        selects: Flags = self.recomputes(num_swap, num_steps) & (self._end.take(num_swap, axis=1) >= num_steps)
        return selects

    def swapped(self, num_swap: Integers, persistent: Integers) -> Integers:
        """Host bytes that each block swaps, (B + 1, K)."""
        return np.where(self.swaps(num_swap), self.swap_bytes.take(persistent, axis=1), 0)

    def device(self, num_swap: Integers, num_steps: Integers, fewest: Integers, point: Flags) -> Integers:
        """Bytes on the device but for chunk buffers, (K,).

        Args:
            num_swap: Swapping blocks.
            num_steps: Steps of the others, see [Note: Layout of policies].
            fewest: Resident chunks.
            point: Whether there are exactly so many of them, or so many or more: then it is what no plan is below.
        """
        peaks = self._activations.highest(*self._levels_of(num_swap, num_steps), fewest)
        fixed = np.where(point, self._fixed[fewest], self._least_fixed[fewest])
        states = np.where(point, self._states[fewest], self._least_states[fewest])
        return np.maximum(peaks + fixed, states + self._neighbours(num_swap, fewest))

    def fewest_offloaded(
        self, num_swap: Integers, num_steps: Integers, known: Integers, budget: int, beside: Integers
    ) -> Integers:
        """Offloaded chunks below which no candidate fits the device, (K,); N + 1 where none fits at all.

        Args:
            num_swap: Swapping blocks.
            num_steps: Steps of the others, see [Note: Layout of policies].
            known: Chunks that are offloaded at least: the result is of interest from there on.
            budget: Bytes of the device.
            beside: Bytes of the fewest chunk buffers if the first p are resident, (N + 1,); as the budget, the same in
                every call.
        """
        levels, columns = self._levels_of(num_swap, num_steps)
        more = np.full((3, self._num_levels - self._fewest.shape[1]), [[UNKNOWN], [UNKNOWN], [0]])
        self._fewest = found, since, least = np.concatenate((self._fewest, more), axis=1)
        if (new := np.flatnonzero(since[columns] > known)).size:
            chosen = columns[new]
            np.minimum.at(since, chosen, known[new])
            sought = np.maximum(since[chosen], least[chosen])
            found[chosen] = self._search_fewest(levels, chosen, num_swap[new], sought, budget, beside)
        return np.maximum(found[columns], known)

    def tighten(self) -> None:
        """Forgets the fewest offloaded chunks: more has to fit beside from now on, so that they are as many or more."""
        found, since, least = self._fewest
        least[:] = np.where((since < UNKNOWN) & (found > since), found, least)
        found[:] = since[:] = UNKNOWN

    def _search_fewest(
        self, levels: Levels, columns: Integers, num_swap: Integers, known: Integers, budget: int, beside: Integers
    ) -> Integers:
        fixed, states = _least_after(self._fixed + beside), _least_after(self._states + beside)
        gradients = self._activations.gradients
        growing = fixed + gradients
        # Of resident chunks, `fits` fit (-1: none), `over` are too many; often all there may be fit.
        fits, over, step = np.full_like(known, -1), len(beside) - known, 0
        guess = over - 1
        last, taken = np.full_like(known, -1), np.zeros_like(known)
        while (sought := np.flatnonzero(over - fits > 1)).size:
            step += 1
            low, high = fits[sought], over[sought]
            tried = np.maximum(np.clip(guess[sought], low + 1, high - 1) if step % HALVED else (low + high) // 2, 0)
            peaks = self._activations.highest(levels, columns[sought], tried)
            needed = np.maximum(peaks + fixed[tried], states[tried] + self._neighbours(num_swap[sought], tried))
            enough = needed <= budget
            # Peaks do not fall with resident chunks: what they have beside tells of more of them, too.
            too_many = np.maximum(np.searchsorted(fixed, budget - peaks, side="right"), tried + 1)
            fits[sought] = np.where(enough, tried, low)
            over[sought] = np.where(enough, np.minimum(too_many, high), tried)
            level = np.searchsorted(growing, budget - peaks + gradients[tried], side="right") - 1
            # From far away the last two tell more: gradients of resident chunks are part of the peaks.
            apart, more = tried - last[sought], needed - taken[sought]
            known_slope = (np.abs(level - tried) > FAR) & (last[sought] >= 0) & (apart * more > 0)
            slope = np.where(known_slope, more, 1) / np.where(known_slope, apart, 1)
            guess[sought] = np.where(known_slope, tried + np.floor((budget - needed) / slope), level)
            last[sought], taken[sought] = tried, needed
        return len(beside) - 1 - fits

    def host(self, num_swap: Integers, fewest: Integers, most: Integers) -> Integers:
        """Bytes on the host, (K,), of plans with `fewest` to `most` resident chunks at least."""
        states, least = self._host
        training, loading = np.where(fewest == most, states[:, most], least[:, most])
        return np.maximum(training + self._sharers * self.swapped(num_swap, fewest).sum(axis=0), loading)

    def terms(self, num_swap: int, persistent: int, buffers: int) -> MemoryTerms:
        """What `memory_terms` says of one candidate."""
        swap, at = np.array([num_swap]), np.array([persistent])
        return MemoryTerms(
            resident_states=int(self._resident[persistent]),
            chunk_buffers=int(self.buffers.bytes(at, np.array([buffers]))[0]),
            gradients_in_flight=int(self._in_flight[persistent]),
            module_buffers=self._layout.buffer_bytes,
            swapped_activations=int(self._neighbours(swap, at)[0]),
        )

    def _levels_of(self, num_swap: Integers, num_steps: Integers) -> tuple[Levels, Integers]:
        """Levels of all layouts of policies that were asked for so far, and which of them these have, (K,)."""
        pairs = num_swap * self._width + num_steps
        new = pairs[self._column[pairs] < 0]
        if new.size:
            new = np.unique(new)
            swap, steps = np.divmod(new, self._width)
            recomputes, selects = self.recomputes(swap, steps), self.selects(swap, steps)
            found = self._activations.levels(recomputes, self.swaps(swap), selects)
            self._levels = (self._levels or found).beside(self._num_levels, found)
            self._column[new] = self._num_levels + np.arange(new.size)
            self._num_levels += new.size
        assert self._levels is not None
        return self._levels, self._column[pairs]

    def _neighbours(self, num_swap: Integers, persistent: Integers) -> Integers:
        """What two neighbours swap at most, (K,)."""
        most: Integers = self._most_swapped[num_swap, persistent]
        return most

    @cached_property
    def _most_swapped(self) -> Integers:
        """What two neighbours swap at most if the first s places swap and the first p chunks are resident, (S, N)."""
        found = np.zeros((self.num_steps.size, self.swap_bytes.shape[1]), dtype=np.int64)
        rank = self._rank.tolist()
        for place in np.argsort(self._rank[:-1], kind="stable")[: len(found) - 1].tolist():
            number, own = rank[place], self.swap_bytes[place]
            # The neighbours that were taken before it, and nobody where there is none.
            beside = [self.swap_bytes[other] for other in (place - 1, place + 1) if other >= 0 and rank[other] < number]
            found[number + 1] = np.maximum.reduce([found[number], own, *(own + other for other in beside)])
        return found


def _in_flight(sizes: Sizes, gathered: Sequence[bool]) -> Integers:
    """Gradients in flight, as in `memory_terms`, if the first p chunks are resident, (N + 1,)."""
    trained, count = np.where(sizes.trainable[sizes.chunk], sizes.streamed, 0), len(sizes.nbytes)
    together = totals(sizes.chunk, np.where(sizes.shared, trained, 0), count)
    alone = np.where(sizes.shared, 0, trained)
    staged = np.where(np.array(gathered, dtype=np.bool_), sizes.nbytes, 0)
    alone = np.where(staged[sizes.chunk] > 0, 0, alone)
    alone[np.searchsorted(sizes.chunk, np.flatnonzero(staged))] = staged[staged > 0]
    largest = np.zeros(count + 1, dtype=np.int64)
    np.maximum.at(largest, sizes.chunk, alone)
    two = np.maximum.accumulate(largest[::-1])[::-1] + second_largest(alone, sizes.chunk, count)
    most: Integers = np.maximum.accumulate(np.append(staged, 0)[::-1])[::-1]
    return two + np.append(np.cumsum(together[::-1])[::-1], 0) + most


def _host_states(
    chunks: Sequence[ChunkPlan],
    sizes: Sizes,
    state_bytes: float,
    accumulates: bool,
    asynchronous: bool,
    sharers: int,
    lends: bool,
) -> Integers:
    """Bytes of the host while it trains, without what is swapped, and while the model is placed, (2, N + 1).

    The larger ones of `host_bytes` and of `host_terms` and `loading_terms`.
    """
    count = len(sizes.nbytes)
    weights = totals(sizes.chunk, sizes.own, count)
    whole = int(weights.sum())
    copied = np.where(sizes.low, sizes.nbytes, 0)
    copies = _after(np.where(sizes.low, _in_pages(sizes.nbytes), 0))
    own_pages = _in_pages(sizes.own_bytes)
    placed = _after(np.where(sizes.low, weights, _in_pages(sizes.nbytes)))
    optimizer = np.ceil(state_bytes * _after(np.where(sizes.trainable, sizes.elements, 0))).astype(np.int64)
    lent = sizes.trainable & sizes.low & lends
    states = _after(sizes.resident_bytes(state_bytes) + np.where(lent, 0, sizes.gradient_bytes) + copied)
    pool = np.zeros(count + 1, dtype=np.int64)
    growing = _Pool(asynchronous)
    waits = (sizes.trainable & ~lent & (accumulates | (sizes.low & (sharers == 1)))).tolist()
    for index, nbytes in reversed(list(enumerate(sizes.nbytes.tolist()))):
        growing.add(chunks[index].unit, nbytes, waits[index])
        pool[index] = growing.nbytes
    gradients = _after(np.where(sizes.trainable & ~lent, own_pages, 0))
    pool += np.maximum.accumulate(np.append(np.where(lent, sizes.own_bytes, 0), 0)[::-1])[::-1]
    largest = np.maximum.accumulate(np.append(own_pages, 0)[::-1])[::-1]
    resident = 0 if asynchronous else whole - _after(weights)
    if accumulates:
        states = states + (sharers - 1) * _after(sizes.gradient_bytes)
    others = _of_other_ranks(sizes, accumulates, gradients, pool, sharers)
    table = np.stack(
        (np.maximum(states, placed + copies + gradients + optimizer + pool + others),
         np.maximum(whole, placed + largest + resident) + copies)
    )  # fmt: skip
    table[:, -1] = 0, whole
    return table


def _of_other_ranks(sizes: Sizes, accumulates: bool, gradients: Integers, pool: Integers, sharers: int) -> Integers:
    """Their own gradients, as in `host_terms`, if the first p chunks are resident, (N + 1,)."""
    if accumulates:
        return (sharers - 1) * (pool + gradients)
    owners = np.minimum(np.bincount(sizes.chunk, minlength=len(sizes.nbytes)), sharers)
    return (sharers - 1) * pool + PAGESIZE * _after(np.where(sizes.trainable, owners - 1, 0))


class _Pool:
    """Host memory for gradients that land, as in `host_terms`, while chunks are added."""

    def __init__(self, asynchronous: bool) -> None:
        self.nbytes = 0
        self._asynchronous = asynchronous
        self._pending = 0
        self._units: Counter[str] = Counter()
        self._counts: Counter[int] = Counter()

    def add(self, unit: str, nbytes: int, waits: bool) -> None:
        """One more chunk of a unit, whose gradients wait or do not."""
        self._units[unit] += nbytes
        if self._asynchronous and 2 * self._units[unit] > self._pending:
            self._pending = 2 * self._units[unit]
            self.nbytes = sum(map(self._share, self._counts))
        if waits:
            self.nbytes -= self._share(nbytes)
            self._counts[nbytes] += 1
            self.nbytes += self._share(nbytes)

    def _share(self, size: int) -> int:
        return _pages(size) * min(self._counts[size], self._pending // max(size, 1) + 2)


def _in_pages(nbytes: Integers) -> Integers:
    return np.maximum(-(-nbytes // PAGESIZE), 1) * PAGESIZE


def _after(values: Integers) -> Integers:
    """Sums of all but the first p, (N + 1,)."""
    return np.append(np.cumsum(values[::-1])[::-1], 0)


def _least_after(values: Integers) -> Integers:
    least: Integers = np.minimum.accumulate(values[::-1])[::-1]
    return least
