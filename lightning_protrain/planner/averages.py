"""Averages of gradients over ranks, in the backward that ends a step: what is sent where, and how long it takes.

[Note: Sends]
Chunks are sent in the order of backward, each when the first gradient of a later position has been computed, as it is
known then that backward has left it; what is left goes when backward has ended. What has been sent lands when the next
one is sent, and the device waits for it there. So of several chunks of one position it waits for all but the last, and
computation goes on beside the sum of that one. Downloads begin as sums land; the device waits for them, too, where more
than may be held would be under way. Sums of resident gradients go as they are computed, and nobody waits for them
before the optimizer step. All sums share one network, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile, Segment

Seconds = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Averages:
    """What K plans send at P positions, and when, see [Note: Sends]; seconds, (P, K) or fewer, which are broadcast.

    Attributes:
        lead: From when the computation of the position begins until its first gradient has been computed.
        sends: Whether what is waiting is sent there; flags.
        early: Sums of all chunks whose gradients are complete there, but of the last one.
        late: Sum of that one.
        down_early: Downloads of the first.
        down_late: Of the last one.
        worked: Which part of the worker's work on these chunks is that on the first.
        resident: Sums of resident gradients.
        older: Uploads of what earlier micro-batches have left.
        held: Downloads that may be under way while the device computes, (1, K); more of it is no later.
    """

    lead: Seconds
    sends: Flags
    early: Seconds
    late: Seconds
    down_early: Seconds
    down_late: Seconds
    worked: Seconds
    resident: Seconds
    older: Seconds
    held: Seconds

    def broadcast(self, num_positions: int, num_columns: int) -> Averages:
        """The same with all columns."""
        shape = num_positions, num_columns
        return Averages(**{field.name: np.broadcast_to(getattr(self, field.name), shape) for field in fields(self)})

    @property
    def sent(self) -> Seconds:
        """All sums of each plan, (K,)."""
        found: Seconds = (self.early + self.late + self.resident).sum(axis=0)
        return found


def averages_of(
    profile: ModelProfile,
    layout: ModelLayout,
    plan: Plan,
    hardware: HardwareProfile,
    accumulates: bool,
    network: Network | None,
) -> Averages | None:
    """What a plan sends to other ranks, one column; None: there are none.

    Args:
        profile: One step with its backward.
        layout: The model.
        plan: A whole plan.
        hardware: The machine.
        accumulates: Whether earlier micro-batches have left something.
        network: How gradients are summed; None: there is one rank.
    """
    if network is None:
        return None
    early, late, down_early, down_late, worked, resident = _sums(profile, layout, plan, network)
    backward = [hardware.seconds(segment.backward.operations) for segment in profile.segments]
    offloaded = {fqn for chunk in plan.chunks if not chunk.resident for fqn in chunk.parameters}
    nbytes = [
        layout.parameter(fqn).nbytes for segment in profile.segments for fqn in segment.gradients if fqn in offloaded
    ]
    rate = hardware.download_beside * network.owners
    left = (down_early + down_late) / hardware.upload_beside
    return Averages(
        lead=_column(map(_first_part, profile.segments, [layout] * len(backward))) * _column(backward),
        sends=_column(not offloaded.isdisjoint(segment.gradients) for segment in profile.segments) > 0,
        early=early,
        late=late,
        down_early=down_early / rate,
        down_late=down_late / rate,
        worked=worked,
        resident=resident,
        older=left if accumulates else np.zeros((1, 1)),
        # Beside what is computed next; the largest may be.
        held=np.array([[max(nbytes, default=0) / hardware.download_beside]]),
    )


def _sums(profile: ModelProfile, layout: ModelLayout, plan: Plan, network: Network) -> tuple[Seconds, ...]:
    """From `early` to `resident` as in `Averages`, of one plan, (P, 1) each; of downloads the bytes."""
    last = {fqn: at for at, segment in reversed(list(enumerate(profile.segments))) for fqn in segment.gradients}
    early, late, down_early, down_late, first, every, resident = np.zeros((7, len(profile.segments), 1))
    sent: set[int] = set()
    # Of the chunks that are complete at a position the first one is sent last.
    for chunk in plan.chunks:
        infos = [layout.parameter(fqn) for fqn in chunk.parameters if fqn in last]
        if not infos:
            continue
        # The last position in backward is the first in forward.
        at = min(last[info.fqn] for info in infos)
        nbytes, numel = sum(info.nbytes for info in infos), sum(info.numel for info in infos)
        if chunk.resident:
            resident[at] += network.sum_of_resident(nbytes)
            continue
        is_last = at not in sent
        sent.add(at)
        every[at] += numel
        first[at] += 0 if is_last else numel
        (late if is_last else early)[at] += network.sum_of_chunk(len(infos), numel, nbytes)
        (down_late if is_last else down_early)[at] += nbytes
    return early, late, down_early, down_late, first / np.maximum(every, 1), resident


def _column(values: Iterable[float]) -> Seconds:
    return np.array([float(value) for value in values])[:, None]


def _first_part(segment: Segment, layout: ModelLayout) -> float:
    """Which part of the backward of a position has been computed when its first gradient is there."""
    if not segment.gradients:
        return 0.0
    module = segment.gradients[0].rpartition(".")[0]
    numel = {fqn: layout.parameter(fqn).numel for fqn in segment.gradients}
    first = sum(numel[fqn] for fqn in segment.gradients if fqn.rpartition(".")[0] == module)
    return first / max(sum(numel.values()), 1)
