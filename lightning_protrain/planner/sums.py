"""What many plans over the same chunks send to other ranks: `averages_of` for all of them at once, and for sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.averages import Amounts, Averages, last_positions, leads
from lightning_protrain.planner.entries import Entries
from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import ChunkPlan
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
# What is summed of chunks.
CHUNKS, CALLS, NUMEL, NBYTES = range(4)


class Sums:
    """Sums of gradients of chunks, of which the first p are resident.

    Args:
        profile: One step with its backward.
        layout: The model.
        chunks: All of them, in execution order.
        hardware: The machine.
        accumulates: Whether earlier micro-batches have left something.
        network: How gradients are summed.
    """

    def __init__(
        self,
        profile: ModelProfile,
        layout: ModelLayout,
        chunks: Sequence[ChunkPlan],
        hardware: HardwareProfile,
        accumulates: bool,
        network: Network,
    ) -> None:
        self._known = hardware, accumulates, network
        self._lead = leads(profile, layout, hardware)
        last, index_of = (
            last_positions(profile),
            {fqn: at for at, chunk in enumerate(chunks) for fqn in chunk.parameters},
        )
        found: list[tuple[int, ...]] = []
        largest = np.zeros(len(chunks) + 1, dtype=np.int64)
        for index, chunk in enumerate(chunks):
            infos = [layout.parameter(fqn) for fqn in chunk.parameters if fqn in last]
            if infos:
                at, largest[index] = min(last[info.fqn] for info in infos), max(info.nbytes for info in infos)
                numel, nbytes = sum(info.numel for info in infos), sum(info.nbytes for info in infos)
                found.append((at, index, 1, network.calls(len(infos)), numel, nbytes))
        found.sort()
        positions, own, *amounts = np.array(found, dtype=np.int64).reshape(-1, 6).T
        self._entries = Entries(len(profile.segments), len(chunks), positions, own, np.stack(amounts))
        least = np.minimum(network.sum_of_chunks(*amounts), network.sum_of_resident(amounts[NBYTES]))
        # Of the entries before, each one way or the other.
        self._either = np.append(0.0, np.cumsum(least))
        self._largest = np.maximum.accumulate(largest[::-1])[::-1]
        # The last chunk with a gradient at each position; where it is resident, all are.
        self._latest = np.array([
            max((index_of[fqn] for fqn in segment.gradients), default=-1) for segment in profile.segments
        ])[:, None]  # fmt: skip
        # Where backward has its first gradient.
        self._first = max(positions, default=0)

    def of(self, persistent: Integers, fewest: Integers, loose: Flags) -> Averages:
        """What K plans, or sets of them, send.

        Args:
            persistent: Resident chunks, (K,); the most of any plan of the set.
            fewest: The least resident chunks of the set, (K,).
            loose: Whether it is a set, (K,), see [Note: Sends of sets].
        """
        exact = self._amounts(persistent, fewest).seconds(self._lead, *self._known)
        if not loose.any():
            return exact
        least = np.zeros(exact.early.shape)
        least[self._first] = np.where(loose, self._least(exact, persistent, fewest), 0.0)
        return replace(
            exact,
            down_early=np.where(loose, exact.down_early + exact.down_late, exact.down_early),
            down_late=np.where(loose, 0.0, exact.down_late),
            worked=np.where(loose, 1.0, exact.worked),
            held=np.where(loose, self._largest[fewest] / self._known[0].download_beside + exact.down_late, exact.held),
            least=least,
            waits=~loose | (self._latest >= persistent),
        )

    def _amounts(self, persistent: Integers, fewest: Integers) -> Amounts:
        entries = self._entries
        begin, sums = entries.begin(persistent), entries.sums
        every = sums[:, entries.end] - sums[:, begin]
        # Entries of a position are in the order of chunks, the first of which is sent last.
        late = np.where(begin < entries.end, sums[:, np.minimum(begin + 1, sums.shape[1] - 1)] - sums[:, begin], 0)
        chunks, calls, numel, nbytes = np.stack((every - late, late), axis=1)
        resident = entries.amount(NBYTES, entries.begin(np.zeros_like(fewest)))
        resident = resident - entries.amount(NBYTES, entries.begin(fewest))
        largest = self._largest[persistent][None]
        return Amounts(chunks, calls, numel, nbytes, resident, self._latest >= fewest, largest)

    def _least(self, exact: Averages, persistent: Integers, fewest: Integers) -> NDArray[np.float64]:
        """Seconds of all sums that any plan of each set has at least, (K,)."""
        first, last = (self._either[self._entries.begin(persistent)] for persistent in (fewest, persistent))
        found: NDArray[np.float64] = (exact.early + exact.late + exact.resident + last - first).sum(axis=0)
        return found
