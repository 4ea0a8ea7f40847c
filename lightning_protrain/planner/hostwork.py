"""What the host's worker does for each gradient that lands, and how uploads follow its steps, chunk by chunk.

[Note: Chunk by chunk]
The clock goes by positions, and most positions have several chunks. The worker begins with the first of them that has
landed, and waits for each later one; so its work on a position ends no sooner than any of them has landed and it and
all after it have been worked on. Behind the forward it is the other way round: a chunk is uploaded when it has been
stepped, while the later ones are stepped, so the uploads of a position end no sooner than any of its chunks has been
stepped and it and all after it have been uploaded. Both are the largest of a few sums, which is found here once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.activity import Seconds
from lightning_protrain.planner.training import Training
from lightning_protrain.profiler.machine import HardwareProfile

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
# Bytes read and written for each byte of a gradient. It is scaled as it is stepped: what is written back comes on top.
ADD, NORM, SCALE = 3, 1, 1


@dataclass(frozen=True)
class Gradients:
    """Gradients in the order in which they land, (M,).

    Attributes:
        positions: Where each becomes whole; falling.
        chunks: The chunk of each.
        numel: Elements.
        own: Bytes in the dtype of their parameters.
        streamed: Bytes as they are streamed.
        low: Whether they are streamed in another dtype.
    """

    positions: Integers
    chunks: Integers
    numel: Integers
    own: Integers
    streamed: Integers
    low: Flags

    def works(self, hardware: HardwareProfile, training: Training) -> Seconds:
        """Seconds of the worker in the backward that ends a step, at the last gradient of a chunk at a position, (M,).

        Where the worker takes norms or steps while backward goes on, that of a whole chunk comes with its last one.
        """
        count = len(self.positions)
        works = np.zeros(count)
        if not count:
            return works
        every = training.accumulate > 1
        touched = 2 * self.own + self.streamed if every else np.where(self.low, self.streamed + self.own, 0)
        keys = self.positions * (int(self.chunks.max()) + 1) + self.chunks
        last, sums = _sums(keys, touched)
        works[last] = sums / hardware.host_memory
        if training.works_in_backward:
            last, sums = _sums(self.chunks, self.own if training.clips else self.numel)
            works[last] += NORM * sums / hardware.host_memory if training.clips else sums / hardware.host_step
        return works

    def steps(self, count: int) -> Steps:
        """What the optimizer steps of `count` chunks are made of."""
        last = np.full(count, -1, dtype=np.int64)
        last[self.chunks[::-1]] = self.positions[::-1]
        np.minimum.at(last, self.chunks, self.positions)
        numel, own = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        np.add.at(numel, self.chunks, self.numel)
        np.add.at(own, self.chunks, self.own)
        return Steps(last, numel, own)


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of chunks, (N,).

    Attributes:
        positions: Where the last gradient of each lands; -1: none does.
        numel: Elements that are stepped.
        own: Bytes of their gradients.
    """

    positions: Integers
    numel: Integers
    own: Integers

    def tails(
        self, positions: Integers, chunks: Integers, nbytes: Integers, hardware: HardwareProfile, training: Training
    ) -> Seconds:
        """From when all of a position have been stepped until all its uploads have ended, see [Note: Chunk by chunk].

        Args:
            positions: For which each upload comes, rising, (E,).
            chunks: The chunk of each, in the order in which they are needed, (E,).
            nbytes: Of each, (E,).
            hardware: The machine.
            training: Says whether gradients are scaled.

        Returns:
            If each upload were the first of its position, at the rate of uploads alone and beside downloads; and 0 for
            none, (2, E + 1).
        """
        here = self.positions[chunks] == positions
        numel = _after_each(np.where(here, self.numel[chunks], 0))
        scaled = _after_each(np.where(here, self.own[chunks], 0)) * (SCALE if training.clips else 0)
        stop = np.searchsorted(positions, positions, side="right")
        later = stop, np.arange(1, len(positions) + 1)
        worked = (numel[later[1]] - numel[stop]) / hardware.host_step
        worked += (scaled[later[1]] - scaled[stop]) / hardware.host_memory
        comes = _after_each(nbytes)
        found = np.zeros((2, len(positions) + 1))
        rates = np.array([[hardware.upload], [hardware.upload_beside]])
        found[:, :-1] = (comes[:-1] - comes[stop]) / rates - worked
        for begin, end in pairwise([*np.flatnonzero(np.diff(positions, prepend=-1)).tolist(), len(positions)]):
            own = found[:, begin:end]
            own[:] = np.maximum.accumulate(own[:, ::-1], axis=1)[:, ::-1]
        return np.maximum(found, 0.0)


def _sums(keys: Integers, amounts: Integers) -> tuple[Integers, Integers]:
    """Where each key comes last, and the sum of its amounts."""
    _, since_last, which = np.unique(keys[::-1], return_index=True, return_inverse=True)
    sums = np.zeros(len(since_last), dtype=np.int64)
    np.add.at(sums, which.reshape(-1), amounts[::-1])
    return len(keys) - 1 - since_last, sums


def _after_each(amounts: Integers) -> Integers:
    """Sums of each and all after it, (N + 1,)."""
    sums = np.zeros(len(amounts) + 1, dtype=np.int64)
    sums[:-1] = np.cumsum(amounts[::-1])[::-1]
    return sums
