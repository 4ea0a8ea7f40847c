"""What many plans over the same chunks do at every position of a step: `columns_of` for all of them at once.

[Note: Order of chunks]
If the step uses every offloaded chunk in one run in forward (see [Note: Runs]), in the order of the chunks, then what
is there at any time are the `num_buffers` chunks used last, and all that `traffic` finds out chunk by chunk are
differences of sums: a chunk takes the place of the one that many before it; backward finds the last ones there. A chunk
that is used out of order or in two runs (a tied embedding) has no such form, unless it is resident. So there is a
number of resident chunks from which on it holds: `in_order_from`. Plans with fewer have what `traffic` says for their
numbers of resident chunks and of buffers; sets of plans are bounded by the one with just so many resident.

[Note: Held back]
Of the plans of a set, the one with the most resident chunks and buffers waits for the earliest position. Another one
waits for the same, and holds as much back or more; or for a later one, and holds back one chunk at least, when that
position has been computed, too. If the later one is the position that the chunks come for, none can wait for it. So a
set is told from its plans where buffers are too few for the next block to come while one is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.activity import Backward, Columns, Forward, Seconds
from lightning_protrain.planner.columns import _has_tables_only, tails_of, traffic
from lightning_protrain.planner.entries import Entries, Remembered, Uses, runs_of
from lightning_protrain.planner.hostwork import ADD, NORM, SCALE, Gradients
from lightning_protrain.planner.landing import Landings
from lightning_protrain.planner.named import Named
from lightning_protrain.planner.sizes import Sizes, before_each, from_each, largest, second_largest, totals
from lightning_protrain.planner.training import Training
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
# Amounts of gradients: bytes that land, that are touched to cast them, to add them; of steps: elements, bytes of
# gradients, bytes that are touched to write copies.
DOWNLOAD, CAST, ADDED = range(3)
NUMEL, STEPPED, COPIED = range(3)
AHEAD, BACK = range(2)


@dataclass(frozen=True)
class _Uploads:
    """Bytes, (P, K): all that come, the late part of them, and the position that these wait for.

    In forward also what `Steps.tails` says, at both rates, without what is there all the time, (2, P, K).
    """

    nbytes: Seconds
    late: Seconds
    waits: Integers
    tails: Seconds | None = None


class Candidates:
    """Plans over the same chunks, of which the first p are resident; see [Note: Order of chunks].

    Args:
        profile: One step with its backward.
        layout: The model.
        named: What the profile says of parameters.
        needed: Indices of the chunks that each unit needs.
        sizes: Those of all chunks in execution order.
        computes: Seconds of the device at each position: in forward, in a forward that runs again, in one
            that does so but for its products, in backward.
        hardware: The machine.
        training: How plans are used.

    Attributes:
        block: Index among the blocks of the layout at each position; the number of blocks where there is none, (P,).
        in_order_from: For fewer resident chunks than these every plan is walked through chunk by chunk.
        computation: Seconds of a forward and a backward without recomputation.
        each: Seconds in a step of the recomputation of one block, and of what streams one chunk if nothing hides it, on
            average.
        computes: Seconds of the device from each position of forward on, (P,).
        last: The last positions of forward that chunks come for, (L,).
    """

    def __init__(
        self,
        profile: ModelProfile,
        layout: ModelLayout,
        named: Named,
        needed: Mapping[str, tuple[int, ...]],
        sizes: Sizes,
        computes: tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]],
        hardware: HardwareProfile,
        training: Training,
    ) -> None:
        self._hardware, self._training = hardware, training
        index_of = {block.name: index for index, block in enumerate(layout.blocks)}
        segments = profile.segments
        self.block = np.array([index_of.get(segment.unit, len(index_of)) for segment in segments], dtype=np.int64)
        arrays = (np.array(seconds)[:, None] for seconds in computes)
        self._forward, self._recomputed, self._selective, self._backward = arrays
        of_block = self.block < len(index_of)
        copied = sizes.nbytes * (2 / hardware.upload) + sizes.trainable * sizes.nbytes / hardware.download
        streamed = training.accumulate * copied + sizes.trainable * sizes.elements / hardware.host_step
        self.each = (
            training.accumulate * float(self._recomputed[of_block].sum()) / max(len(index_of), 1),
            float(streamed.sum()) / max(len(streamed), 1),
        )
        self.computation = float(self._forward.sum() + self._backward.sum()) or 1.0
        needs, reads, pinned = _uses(profile, layout, needed, len(streamed))
        self._sizes = sizes.nbytes.tolist()
        self._pinned_bytes, self._num_pinned = from_each(np.where(pinned, sizes.nbytes, 0)), from_each(pinned)
        (needed_from, runs), (read_from, runs_back) = runs_of(needs), runs_of(reads)
        self._needs, self._reads = needs, reads
        self._ahead = Uses(len(segments), runs, sizes.nbytes, backward=False)
        self._back = Uses(len(segments), runs_back, sizes.nbytes, backward=True)
        self.in_order_from = max(needed_from, read_from)
        self._walked: dict[tuple[int, int], tuple[Integers, Seconds | None]] = {}
        gradients = _gradients(named, sizes)
        self._gradients, self._steps, self._resident, self._room = _landing(gradients, len(segments), len(streamed))
        works = gradients.works(hardware, training)
        each = gradients.positions, gradients.chunks, gradients.streamed, named.parts, works
        rates = hardware.download, hardware.download_beside
        self._landings = Landings(*each, self._backward[:, 0], rates)
        self._held = Remembered(self._holding_of)
        # Only then the forward follows steps chunk by chunk.
        self._host_steps = gradients.steps(len(sizes.nbytes)) if training.overlap == "forward" else None
        self._tails: Seconds | None = None
        if self._host_steps is not None:
            first, chunks = np.array(runs.first, dtype=np.int64), np.array(runs.chunks, dtype=np.int64)
            self._tails = self._host_steps.tails(first, chunks, sizes.nbytes[chunks], hardware, training)
        self._casts = bool(sizes.low.any())
        # One byte less that comes meanwhile is more than what additions in another order are off.
        slowest = min(hardware.upload, hardware.upload_beside)
        meanwhile = (np.floor(seconds[:, 0] * slowest) - 1 for seconds in (self._forward, self._backward))
        self._least_held = [
            uses.least_held(each) for uses, each in zip((self._ahead, self._back), meanwhile, strict=True)
        ]
        self._places = np.arange(len(segments))[:, None]
        self.computes, self.last = np.cumsum(self._forward[::-1, 0])[::-1], self._ahead.last
        self._which_held = self._places * (len(segments) + 1) + 1

    def columns(
        self,
        persistent: Integers,
        fewest: Integers,
        buffers: Integers,
        recomputes: Flags,
        selects: Flags | None,
        swapped: Integers,
        loose: Flags,
    ) -> Columns:
        """The columns of K plans, or bounds of K sets of plans.

        Args:
            persistent: Resident chunks, (K,); the most of any plan of the set.
            fewest: The least resident chunks of the set, (K,).
            buffers: Chunk buffers, (K,); the most of the set.
            recomputes: Whether a position's block recomputes, (P, K); in a set, whether in all its plans.
            selects: Whether it does so but for its products, (P, K); in a set, whether in any plan. None: never.
            swapped: Bytes that a position swaps, (P, K).
            loose: Whether it is a set, (K,): what is late depends on the plan, see [Note: Held back].
        """
        back = self.backward(persistent, fewest, buffers, recomputes, selects, swapped, loose)
        return Columns(**vars(self.forward(persistent, buffers, swapped, loose)), **vars(back))

    def forward(self, persistent: Integers, buffers: Integers, swapped: Integers, loose: Flags) -> Forward:
        """What `columns` says of forward."""
        machine = self._hardware
        ups, swaps = self._stream(AHEAD, persistent, buffers, loose), swapped.astype(np.float64)
        # Where the link is in use the other way.
        leaving = _near(swaps)
        rate = np.where(leaving, machine.upload_beside, machine.upload)
        rate_out = np.where(_near(ups.nbytes), machine.download_beside, machine.download)
        return Forward(
            compute_forward=self._forward,
            upload_forward=ups.nbytes / rate,
            late_forward=ups.late / rate,
            wait_forward=ups.waits,
            tail=self._tail(ups, persistent, rate, leaving),
            swap_out=swaps / rate_out,
        )

    def last_tail(self, persistent: Integers) -> Seconds:
        """The least that `tail` may be at `last`, with steps of the host beside forward, (L, K)."""
        assert self._tails is not None
        begin = self._ahead.begin_of_last(np.maximum(persistent, self.in_order_from))
        return self._tails.take(begin, axis=1).min(axis=0)

    def backward(
        self,
        persistent: Integers,
        fewest: Integers,
        buffers: Integers,
        recomputes: Flags,
        selects: Flags | None,
        swapped: Integers,
        loose: Flags,
    ) -> Backward:
        """What `columns` says of the rest."""
        machine, training = self._hardware, self._training
        backs, swaps = self._stream(BACK, persistent, buffers, loose), swapped.astype(np.float64)
        begin = self._gradients.begin(persistent)
        download = self._gradients.amount(DOWNLOAD, begin)
        nothing = np.zeros((1, 1))
        cast = self._gradients.amount(CAST, begin) if self._casts else nothing
        added = self._gradients.amount(ADDED, begin) if training.accumulate > 1 else nothing
        begin = self._steps.begin(persistent)
        touched = (self._steps.amount(STEPPED, begin) if training.clips else nothing) / machine.host_memory
        again = self._recomputed if selects is None else np.where(selects, self._selective, self._recomputed)
        landing, coming = _near(download), _near(backs.nbytes + swaps)
        rate_backward = np.where(landing, machine.upload_beside, machine.upload)
        rate_download = np.where(coming, machine.download_beside, machine.download)
        host_step = self._steps.amount(NUMEL, begin) / machine.host_step
        if training.overlap == "off":
            host_step = host_step + self._steps.amount(COPIED, begin) / machine.host_memory
        stall, drain, landed, carry, ready, ready_behind = self._holding(persistent, self._room[fewest], loose, coming)
        return Backward(
            recompute=recomputes * again,
            compute_backward=self._backward,
            upload_backward=backs.nbytes / rate_backward,
            late_backward=backs.late / rate_backward,
            wait_backward=backs.waits,
            download=download / rate_download,
            stall=stall,
            drain=drain,
            landed=landed,
            carry=carry,
            ready=ready,
            ready_behind=ready_behind,
            land=cast / machine.host_memory,
            add=added / machine.host_memory,
            norm=NORM * touched,
            scale=SCALE * touched,
            host_step=host_step,
            swap_in=swaps / rate_backward,
            device_step=self._device_step(fewest),
        )

    def _holding(self, persistent: Integers, room: Integers, loose: Flags, beside: Flags) -> Seconds:
        """What `Landings.of` says, each position at its rate of downloads, (6, P, K); in a set, at the best one.

        Where all plans of a set have uploads at their side, so has the set.
        """
        # Many differ in nothing that counts here.
        keys = (room * (len(self._sizes) + 1) + persistent) * 2 + loose
        table, which = self._held.of(keys)
        flat = beside * table.shape[-1] + (self._places * (2 * table.shape[-1]) + which)
        return table.reshape(len(table), -1).take(flat, axis=1)

    def _holding_of(self, keys: Integers) -> Seconds:
        """What `_holding` chooses from, at the rate of downloads alone and beside uploads, (6, P, 2, K)."""
        rest, loose = np.divmod(keys, 2)
        room, persistent = np.divmod(rest, len(self._sizes) + 1)
        alone, beside = self._landings.of(persistent, room, loose > 0)
        return np.stack((np.where(loose > 0, np.minimum(alone, beside), alone), beside), axis=2)

    def _stream(self, way: int, persistent: Integers, buffers: Integers, loose: Flags) -> _Uploads:
        """What comes in forward or in backward."""
        ordered = np.maximum(persistent, self.in_order_from)
        widths = np.maximum(buffers - self._num_pinned[ordered], 1)
        which = self._which_held + np.where(loose, 0, self._which_held.size * (self._which_held.size + 1))
        found = (self._ups, self._backs)[way](ordered, widths, which)
        for column in np.flatnonzero(~loose & (persistent < self.in_order_from)).tolist():
            walked, tails = self._walk(int(persistent[column]), int(buffers[column]))
            found.nbytes[:, column], found.late[:, column], found.waits[:, column] = walked[way]
            if found.tails is not None:
                found.tails[..., column] = tails
        return found

    def _tail(self, ups: _Uploads, persistent: Integers, rates: Seconds, near: Flags) -> Seconds:
        """From when the steps of a position have ended until its uploads have, (P, K)."""
        if ups.tails is None:
            return ups.nbytes / rates
        alone, beside = ups.tails
        found: Seconds = np.where(near, beside, alone)
        found[0] += self._pinned_bytes[persistent] / rates[0]
        return found

    def _walk(self, persistent: int, buffers: int) -> tuple[Integers, Seconds | None]:
        """The same chunk by chunk, for one plan: bytes, late bytes and waits of forward and backward, (2, 3, P).

        And tails at both rates, (2, P).
        """
        if (persistent, buffers) not in self._walked:
            needs, reads = (
                [[chunk for chunk in chunks if chunk >= persistent] for chunks in lists]
                for lists in (self._needs, self._reads)
            )
            width = max(buffers - int(self._num_pinned[persistent]), 1)
            ups = traffic(needs, range(len(needs)), self._sizes, width)
            backward = [chunks[::-1] for chunks in reads]
            backs = traffic(backward, reversed(range(len(reads))), self._sizes, width, ups.live)
            found = np.array([(way.nbytes, way.late, way.waits) for way in (ups, backs)], dtype=np.int64)
            found[0, 0, 0] += self._pinned_bytes[persistent]
            tails, steps = None, self._host_steps
            if steps is not None:
                tails = tails_of(ups, np.array(self._sizes), steps, self._hardware, self._training)
            self._walked[persistent, buffers] = found, tails
        return self._walked[persistent, buffers]

    def _ups(self, persistent: Integers, widths: Integers, which: Integers) -> _Uploads:
        """Forward begins with no chunk: each comes, and takes the place of the one so many before it.

        `which` are places in the tables of `Uses.least_held`, where nothing is waited for, (P, K).
        """
        uses, before = self._ahead, self._ahead.sums.take
        end, begin, first = uses.end, uses.begin(persistent), uses.first[persistent]
        some, freed = begin < end, end - 1 - widths
        waiting = some & (freed >= first)
        waits = uses.until.take(np.where(waiting, freed, -1))
        late = np.maximum(begin, np.maximum(uses.ending(waits), first) + widths)
        late_bytes = before(end) - before(np.where(waiting, late, end))
        nbytes = before(end) - before(begin)
        nbytes[0] += self._pinned_bytes[persistent]
        tails = None if self._tails is None else self._tails.take(np.where(some, begin, uses.size), axis=1)
        held = np.minimum(late_bytes, self._least_held[0].take(which + waits))
        return _Uploads(nbytes, held, waits, tails)

    def _backs(self, persistent: Integers, widths: Integers, which: Integers) -> _Uploads:
        """Backward finds the chunks used last; each other one takes the place of the one so many before it, if any.

        `which` as in `_ups`.
        """
        uses, reads, before = self._ahead, self._back, self._back.sums.take
        there = uses.chunks[np.maximum(uses.size - widths, uses.first[persistent])]
        begin = reads.begin(persistent)
        end = np.minimum(np.maximum(reads.first.take(there), begin), reads.end)
        freed = begin + widths
        waiting = (begin < end) & (freed < reads.size)
        waits = reads.until.take(np.where(waiting, freed, -1))
        late = np.where(waiting, np.minimum(end, reads.ending(waits + 1) - widths), begin)
        held = np.minimum(before(late) - before(begin), self._least_held[1].take(which + waits))
        return _Uploads(before(end) - before(begin), held, waits)

    def _device_step(self, persistent: Integers) -> Seconds:
        numel, nbytes = self._resident[:, persistent]
        training = self._training
        touched = nbytes * (ADD * (training.accumulate - 1) + (NORM + SCALE if training.clips else 0))
        seconds: Seconds = numel / self._hardware.device_step + touched / self._hardware.memory
        return seconds


def _uses(
    profile: ModelProfile, layout: ModelLayout, needed: Mapping[str, tuple[int, ...]], count: int
) -> tuple[list[list[int]], list[list[int]], Flags]:
    """Chunks that positions need in forward and read in backward, and which ones are there all the time."""
    pinned = {index for unit in layout.units if unit.encloses for index in needed[unit.name]}
    tables = {unit.name for unit in layout.units if not unit.is_block and _has_tables_only(layout, unit.parameters)}
    own = {name: [index for index in indices if index not in pinned] for name, indices in needed.items()}
    needs, reads = [], []
    for segment in profile.segments:
        found = own.get(segment.unit, [])
        looks_up = segment.unit in tables and not any(cost.flops for cost in segment.forward.operations)
        needs.append(found)
        reads.append(found if segment.backward.operations and not looks_up else [])
    return needs, reads, np.array([index in pinned for index in range(count)], dtype=np.bool_)


def _gradients(named: Named, sizes: Sizes) -> Gradients:
    """All in the order in which they land."""
    each = sizes.place[named.gradients]
    chunks = sizes.chunk[each]
    return Gradients(
        named.positions, chunks, sizes.numel[each], sizes.own[each], sizes.streamed[each], sizes.low[chunks]
    )


def _landing(of: Gradients, num_positions: int, count: int) -> tuple[Entries, Entries, Integers, Integers]:
    """Gradients, steps, elements and bytes of what is trained in the first p chunks, and the two largest gradients.

    The last one is that of all chunks but the first p, together, (N + 1,), where N is `count`.
    """
    positions, chunks, numel, own, nbytes, low = of.positions, of.chunks, of.numel, of.own, of.streamed, of.low
    gradients = np.stack((nbytes, np.where(low, nbytes + own, 0), 2 * own + nbytes))
    steps = np.stack((numel, own, np.where(low, own + 2 * numel, 0)))
    # Chunks are stepped when their last gradient is there: at the earliest position.
    last = np.full(count, num_positions, dtype=np.int64)
    np.minimum.at(last, chunks, positions)
    by_chunk = np.argsort(chunks, kind="stable")
    ordered, shape = chunks[by_chunk], (num_positions, count)
    return (
        Entries(*shape, positions, chunks, gradients),
        Entries(*shape, last[chunks], chunks, steps),
        np.stack([before_each(totals(ordered, trained[by_chunk], count)) for trained in (numel, own)]),
        largest(nbytes[by_chunk], ordered, count) + second_largest(nbytes[by_chunk], ordered, count),
    )


def _near(amounts: Seconds) -> Flags:
    """Where a position or a neighbour of it has some, (P, K)."""
    near: Flags = amounts > 0
    some = near.copy()
    near[1:] |= some[:-1]
    near[:-1] |= some[1:]
    return near
