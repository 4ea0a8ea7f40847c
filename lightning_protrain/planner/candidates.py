"""What many plans over the same chunks do at every position of a step: `columns_of` for all of them at once.

[Note: In order]
If the step uses every offloaded chunk once in forward, in the order of the chunks, then what is there at any time are
the `num_buffers` chunks used last, and all that `traffic` finds out chunk by chunk are differences of sums: a chunk
takes the place of the one that many before it; backward finds the last ones there. A chunk that is used out of order or
twice (a tied embedding) has no such form, unless it is resident. So there is a number of resident chunks from which on
it holds: `in_order_from`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.chunks import chunks_of
from lightning_protrain.planner.clock import Columns, Seconds, Training
from lightning_protrain.planner.columns import ADD, NORM, SCALE, _has_tables_only, _Landing, _streamed_bytes, _sums
from lightning_protrain.planner.plan import ChunkPlan
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class _Entries:
    """Things that belong to chunks and to positions, summed over the chunks from some number on.

    Args:
        num_positions: How many positions there are.
        num_chunks: How many chunks there are.
        entries: (position, chunk, amounts) of each.
        once: Whether a chunk out of order is also one that has several entries.

    Attributes:
        in_order_from: From which chunk on positions and chunks rise together; only these entries are kept.
        positions: Of each entry, in order; and one for none.
        chunks: The same.
        sums: Of each of three amounts, of the entries before, (3, E + 1).
        start: First entry of each position, (P, 1).
        end: The one after its last, (P, 1).
        first: First entry that is not of the first n chunks, (N + 1,).
        largest: The largest of the first amount from an entry to the end of its position.
        least: The least of the first amount in each position, (P, 1).
    """

    def __init__(
        self,
        num_positions: int,
        num_chunks: int,
        entries: Iterable[tuple[int, int, tuple[int, ...]]],
        once: bool = False,
    ) -> None:
        ordered = sorted(entries, key=lambda entry: entry[:2])
        highest = self.in_order_from = -1
        for _, chunk, _ in ordered:
            if chunk < highest + once:
                self.in_order_from = max(self.in_order_from, chunk)
            highest = max(highest, chunk)
        self.in_order_from += 1
        ordered = [entry for entry in ordered if entry[1] >= self.in_order_from]
        self.size = len(ordered)
        self.positions = np.array([*(entry[0] for entry in ordered), -1], dtype=np.int64)
        self.chunks = np.array([*(entry[1] for entry in ordered), num_chunks], dtype=np.int64)
        amounts = np.array([(*entry[2], 0, 0)[:3] for entry in ordered], dtype=np.int64).reshape(-1, 3)
        self.sums = np.zeros((3, self.size + 1), dtype=np.int64)
        np.cumsum(amounts.T, axis=1, out=self.sums[:, 1:])
        bounds = np.searchsorted(self.positions[:-1], np.arange(num_positions + 1))
        self.start, self.end = bounds[:-1, None], bounds[1:, None]
        self.first = np.searchsorted(self.chunks[:-1], np.arange(num_chunks + 1))
        self.largest = np.array([*(entry[2][0] for entry in ordered), 0], dtype=np.int64)
        for index in range(self.size - 2, -1, -1):
            if self.positions[index] == self.positions[index + 1]:
                self.largest[index] = max(self.largest[index], self.largest[index + 1])

        least = [min((int(amounts[i, 0]) for i in range(*span)), default=0) for span in pairwise(bounds)]
        self.least = np.array(least, dtype=np.int64)[:, None]

    def begin(self, persistent: Integers) -> Integers:
        """The first entry of each position that is not of the first `persistent` chunks, (P, K)."""
        begin: Integers = np.clip(self.first[persistent], self.start, self.end)
        return begin


@dataclass(frozen=True)
class _Uploads:
    """Bytes, (P, K): all that come, the late part of them, and the position that these wait for."""

    nbytes: Integers
    late: Integers
    waits: Integers


class Candidates:
    """Plans over the same chunks, of which the first p are resident; see [Note: In order].

    Args:
        profile: One step with its backward.
        layout: The model.
        chunks: All its chunks in execution order, as they are if they are streamed.
        hardware: The machine.
        training: How plans are used.

    Attributes:
        block: Index among the blocks of the layout at each position; the number of blocks where there is none, (P,).
        in_order_from: For fewer resident chunks than these `columns` does not hold.
        computation: Seconds of a forward and a backward without recomputation.
    """

    def __init__(
        self,
        profile: ModelProfile,
        layout: ModelLayout,
        chunks: Sequence[ChunkPlan],
        hardware: HardwareProfile,
        training: Training,
    ) -> None:
        self._hardware, self._training = hardware, training
        index_of = {block.name: index for index, block in enumerate(layout.blocks)}
        segments = profile.segments
        self.block = np.array([index_of.get(segment.unit, len(index_of)) for segment in segments], dtype=np.int64)
        self._forward = np.array([hardware.seconds(segment.forward.operations) for segment in segments])[:, None]
        self._backward = np.array([hardware.seconds(segment.backward.operations) for segment in segments])[:, None]
        self.computation = float(self._forward.sum() + self._backward.sum()) or 1.0
        self._uses, self._reads, self._pinned = _uses(profile, layout, chunks)
        self._pinned_bytes = _suffix(np.where(self._pinned, [chunk.nbytes for chunk in chunks], 0))
        self._num_pinned = _suffix(self._pinned)
        self._gradients, self._steps, self._resident, self._held = _landing(profile, layout, chunks)
        parts = (self._uses, self._reads, self._gradients, self._steps)
        self.in_order_from = max(part.in_order_from for part in parts)
        self._most = max((info.nbytes for info in layout.parameters), default=0)
        sizes = np.array([*(chunk.nbytes for chunk in chunks), 0], dtype=np.int64)
        self._pending = 2 * np.maximum.accumulate(sizes[::-1])[::-1]
        self._late_sums: dict[int, dict[str, Seconds]] = {}

    def columns(
        self,
        persistent: Integers,
        fewest: Integers,
        buffers: Integers,
        checkpointed: Flags,
        swapped: Integers,
        loose: Flags,
    ) -> Columns:
        """The columns of K plans, or bounds of K sets of plans.

        Args:
            persistent: Resident chunks, (K,); the most of any plan of the set, from `in_order_from` on.
            fewest: The least resident chunks of the set, (K,).
            buffers: Chunk buffers, (K,); the most of the set.
            checkpointed: Whether a position's block recomputes, (P, K); in a set, whether in all its plans.
            swapped: Bytes that a position swaps, (P, K).
            loose: Whether it is a set, (K,): what is late, and when the host's main thread works, depends on the plan,
                so only the smallest chunk counts, and nothing.
        """
        machine, training = self._hardware, self._training
        widths = np.maximum(buffers - self._num_pinned[persistent], 1)
        ups, backs = self._ups(persistent, widths, loose), self._backs(persistent, widths, loose)
        entries = self._gradients
        begin = entries.begin(persistent)
        download, cast, added = entries.sums[:, entries.end] - entries.sums[:, begin]
        tail = np.where(begin < entries.end, entries.largest[begin], 0)
        numel, stepped, copied = (
            self._steps.sums[:, self._steps.end] - self._steps.sums[:, self._steps.begin(persistent)]
        )
        rate_forward = np.where(_near(swapped), machine.upload_beside, machine.upload)
        rate_out = np.where(_near(ups.nbytes), machine.download_beside, machine.download)
        rate_backward = np.where(_near(download), machine.upload_beside, machine.upload)
        rate_download = np.where(_near(backs.nbytes + swapped), machine.download_beside, machine.download)
        host_step = numel / machine.host_step
        if training.overlap == "off":
            host_step = host_step + copied / machine.host_memory
        held, after = self._held[fewest], np.append(tail[1:], np.zeros_like(tail[:1]), axis=0)
        # In a set, the slower link makes it longer.
        rate_ahead = np.where(loose, min(machine.download, machine.download_beside), rate_download)
        return Columns(
            compute_forward=self._forward,
            recompute=checkpointed * self._forward,
            compute_backward=self._backward,
            upload_forward=ups.nbytes / rate_forward,
            late_forward=ups.late / rate_forward,
            wait_forward=ups.waits,
            upload_backward=backs.nbytes / rate_backward,
            late_backward=backs.late / rate_backward,
            wait_backward=backs.waits,
            download=download / rate_download,
            tail=tail / rate_download,
            ahead=np.maximum(held - tail - after, 0) / rate_ahead,
            held=np.maximum(np.where(loose, self._largest(fewest), tail), held) / rate_ahead,
            land=cast / machine.host_memory,
            add=added / machine.host_memory,
            **self._sums(persistent, loose, download, cast, added),
            norm=NORM * stepped / machine.host_memory,
            scale=SCALE * stepped / machine.host_memory,
            host_step=host_step,
            swap_out=swapped / rate_out,
            swap_in=swapped / rate_backward,
            device_step=self._device_step(fewest),
        )

    def _sums(
        self, persistent: Integers, loose: Flags, download: Integers, cast: Integers, added: Integers
    ) -> dict[str, Seconds]:
        """What the host's main thread does with gradients, and when; in a set of plans it may be any time: none."""
        names = ("land_early", "land_rest", "add_early", "add_rest")
        if self._training.accumulate == 1 and not cast.any():
            return dict.fromkeys(names, np.zeros((1, 1)))
        sums = {name: np.zeros(download.shape) for name in names}
        for column in np.flatnonzero(~loose).tolist():
            number = int(persistent[column])
            if number not in self._late_sums:
                landing = _Landing(len(download))
                landing.nbytes = download[:, column].tolist()
                landing.pending_bytes = int(self._pending[number])
                found = _sums("land", cast[:, column].tolist(), landing, self._hardware)
                self._late_sums[number] = found | _sums("add", added[:, column].tolist(), landing, self._hardware)
            for name, values in sums.items():
                values[:, column] = self._late_sums[number][name][:, 0]
        return sums

    def _ups(self, persistent: Integers, widths: Integers, loose: Flags) -> _Uploads:
        """Forward begins with no chunk: each comes, and takes the place of the one so many before it."""
        uses, sums = self._uses, self._uses.sums[0]
        end, begin, first = uses.end, uses.begin(persistent), uses.first[persistent]
        freed = end - 1 - widths
        waiting = (begin < end) & (freed >= first)
        waits = uses.positions[np.where(waiting, freed, -1)]
        late = np.maximum(begin, np.maximum(uses.start[waits, 0], first) + widths)
        late_bytes = sums[end] - sums[np.where(waiting, late, end)]
        nbytes = sums[end] - sums[begin]
        nbytes[0] += self._pinned_bytes[persistent]
        return _Uploads(nbytes, np.where(loose & waiting, uses.least, late_bytes), waits)

    def _backs(self, persistent: Integers, widths: Integers, loose: Flags) -> _Uploads:
        """Backward finds the chunks used last; each other one takes the place of the one so many before it, if any."""
        uses, reads, sums = self._uses, self._reads, self._reads.sums[0]
        there = uses.chunks[np.maximum(uses.size - widths, uses.first[persistent])]
        begin = reads.begin(persistent)
        end = np.clip(np.searchsorted(reads.chunks[:-1], there), begin, reads.end)
        freed = begin + widths
        waiting = (begin < end) & (freed < reads.size)
        waits = reads.positions[np.where(waiting, freed, -1)]
        late = np.where(waiting, np.minimum(end, reads.end[waits, 0] - widths), begin)
        late_bytes = np.where(loose & waiting, reads.least, sums[late] - sums[begin])
        return _Uploads(sums[end] - sums[begin], late_bytes, waits)

    def _largest(self, persistent: Integers) -> Integers:
        """The largest gradient of each position, (P, K); where chunks are out of order, the largest of all."""
        entries = self._gradients
        begin = entries.begin(persistent)
        largest = np.where(begin < entries.end, entries.largest[begin], 0)
        return np.where(persistent >= self.in_order_from, largest, self._most)

    def _device_step(self, persistent: Integers) -> Seconds:
        numel, nbytes = self._resident[:, persistent]
        training = self._training
        touched = nbytes * (ADD * (training.accumulate - 1) + (NORM + SCALE if training.clips else 0))
        seconds: Seconds = numel / self._hardware.device_step + touched / self._hardware.memory
        return seconds


def _uses(profile: ModelProfile, layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> tuple[_Entries, _Entries, Flags]:
    """Chunks that positions need in forward and read in backward, and which ones are there all the time."""
    needed = chunks_of(layout, chunks)
    pinned = {index for unit in layout.units if unit.encloses for index in needed[unit.name]}
    tables = {unit.name for unit in layout.units if not unit.is_block and _has_tables_only(layout, unit.parameters)}
    needs, reads = [], []
    for position, segment in enumerate(profile.segments):
        found = [
            (position, index, (chunks[index].nbytes,)) for index in needed.get(segment.unit, ()) if index not in pinned
        ]
        looks_up = segment.unit in tables and not any(cost.flops for cost in segment.forward.operations)
        needs += found
        reads += found if segment.backward.operations and not looks_up else []
    sizes = len(profile.segments), len(chunks)
    always = np.array([index in pinned for index in range(len(chunks))], dtype=np.bool_)
    return _Entries(*sizes, needs, once=True), _Entries(*sizes, reads, once=True), always


def _landing(
    profile: ModelProfile, layout: ModelLayout, chunks: Sequence[ChunkPlan]
) -> tuple[_Entries, _Entries, Integers, Integers]:
    """Gradients, steps, elements and bytes of what is trained in the first p chunks, and the second largest gradient.

    The last one is that of all chunks but the first p, (N + 1,).
    """
    placed = {fqn: index for index, chunk in enumerate(chunks) for fqn in chunk.parameters}
    gradients, last, sizes = [], {}, []
    trained = np.zeros((2, len(chunks) + 1), dtype=np.int64)
    for position, segment in reversed(list(enumerate(profile.segments))):
        for fqn in segment.gradients:
            info, index = layout.parameter(fqn), placed[fqn]
            last[index] = position
            nbytes = _streamed_bytes(info, chunks[index])
            cast = nbytes + info.nbytes if chunks[index].streamed_dtype else 0
            gradients.append((position, index, (nbytes, cast, 2 * info.nbytes + nbytes)))
            trained[:, index + 1] += info.numel, info.nbytes
            sizes.append((index, nbytes))
    steps = []
    for segment in profile.segments:
        for fqn in segment.gradients:
            info, index = layout.parameter(fqn), placed[fqn]
            copied = info.nbytes + 2 * info.numel if chunks[index].streamed_dtype else 0
            steps.append((last[index], index, (info.numel, info.nbytes, copied)))
    shape = len(profile.segments), len(chunks)
    held, largest = np.zeros(len(chunks) + 1, dtype=np.int64), [0, 0]
    by_chunk = sorted(sizes, reverse=True)
    for index in range(len(chunks) - 1, -1, -1):
        while by_chunk and by_chunk[0][0] >= index:
            largest = sorted([*largest, by_chunk.pop(0)[1]])[-2:]
        held[index] = largest[0]
    return _Entries(*shape, gradients), _Entries(*shape, steps), np.cumsum(trained, axis=1), held


def _near(amounts: Integers) -> Flags:
    """Where a position or a neighbour of it has some, (P, K)."""
    near: Flags = amounts > 0
    some = near.copy()
    near[1:] |= some[:-1]
    near[:-1] |= some[1:]
    return near


def _suffix(values: Integers | Flags) -> Integers:
    """Sums of all but the first n, (N + 1,)."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    sums[:-1] = np.cumsum(values[::-1])[::-1]
    return sums
