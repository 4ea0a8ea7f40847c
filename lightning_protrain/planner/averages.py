"""Averages of gradients over ranks, in the backward that ends a step: what is sent where, and how long it takes.

Sends:
Chunks are sent in the order of backward, each when the first gradient of a later position has been computed, as it is
known then that backward has left it; what is left goes when backward has ended. What has been sent lands when the next
one is sent, and the device waits for it there. So of several chunks of one position it waits for all but the last, and
computation goes on beside the sum of that one. Downloads begin as sums land; the device waits for them, too, where more
than may be held would be under way. Sums of resident gradients go as they are computed, and nobody waits for them
before the optimizer step. All sums share one network, one after the other.

[Note: Sends of sets]
In each plan of a set a chunk that some have on the device and others offload is sent one way or the other, at different
times, and in the second case another chunk may be the last one of its position. So the bound of a set leaves it out but
for its part of the least that is sent in all, none of which goes before the first position of backward that has
gradients. Chunks that all plans offload go where any plan sends something. Where all do, the device waits as it does in
each: what had been sent there in the bound had been sent in every plan, as gradients of a chunk are themselves a reason
to send what was there before. Downloads of the last one, too, begin with those of the others: so many more are held.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile, Segment

Seconds = NDArray[np.float64]
Whole = NDArray[np.int64] | NDArray[np.float64]
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
        held: Downloads that may be under way while the device computes what follows; more of it is no later.
        least: In a set of plans, the least that each sends in all, where it may begin; else 0.
        waits: Whether the device waits, if something is sent there; flags.
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
    least: Seconds
    waits: Flags

    def broadcast(self, num_positions: int, num_columns: int) -> Averages:
        """The same with all columns."""
        shape = num_positions, num_columns
        return Averages(**{field.name: np.broadcast_to(getattr(self, field.name), shape) for field in fields(self)})

    @property
    def sent(self) -> Seconds:
        """All sums of each plan, (K,)."""
        found: Seconds = np.maximum((self.early + self.late + self.resident).sum(axis=0), self.least.sum(axis=0))
        return found


@dataclass(frozen=True)
class Amounts:
    """What K plans send at P positions, summed up; whole numbers, (P, K).

    Attributes:
        chunks: Offloaded ones with gradients, in two parts, (2, P, K): all but the last one of a position, and that.
        calls: Collectives of these, as of `Network.calls`, the same.
        numel: Elements of their gradients, the same.
        nbytes: Bytes of these, the same.
        resident: Bytes of gradients of resident chunks.
        sends: Whether there is a gradient of an offloaded chunk; flags.
        largest: Bytes of the largest of these gradients, (1, K).
    """

    chunks: Whole
    calls: Whole
    numel: Whole
    nbytes: Whole
    resident: Whole
    sends: Flags
    largest: Whole

    def seconds(self, lead: Seconds, hardware: HardwareProfile, accumulates: bool, network: Network) -> Averages:
        """How long that takes; `lead` as in `Averages`."""
        early, late = network.sum_of_chunks(self.chunks, self.calls, self.numel, self.nbytes)
        down_early, down_late = self.nbytes / (hardware.download_beside * network.owners)
        every = self.numel.sum(axis=0)
        return Averages(
            lead=lead,
            sends=self.sends,
            early=early,
            late=late,
            down_early=down_early,
            down_late=down_late,
            worked=self.numel[0] / np.maximum(every, 1),
            resident=network.sum_of_resident(self.resident),
            older=self.nbytes.sum(axis=0) / hardware.upload_beside if accumulates else np.zeros((1, 1)),
            # Beside what is computed next; the largest may be.
            held=self.largest / hardware.download_beside,
            least=np.zeros((1, 1)),
            waits=np.ones((1, 1), dtype=np.bool_),
        )


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
    return _amounts(profile, layout, plan, network).seconds(
        leads(profile, layout, hardware), hardware, accumulates, network
    )


def leads(profile: ModelProfile, layout: ModelLayout, hardware: HardwareProfile) -> Seconds:
    """From when the computation of each position begins in backward until its first gradient is there, (P, 1)."""
    parts = (_first_part(segment, layout) for segment in profile.segments)
    seconds = (hardware.seconds(segment.backward.operations) for segment in profile.segments)
    return np.array([part * time for part, time in zip(parts, seconds, strict=True)])[:, None]


def last_positions(profile: ModelProfile) -> dict[str, int]:
    """Where the gradient of each parameter is complete, by name: backward comes last to the first position."""
    return {fqn: at for at, segment in reversed(list(enumerate(profile.segments))) for fqn in segment.gradients}


def _amounts(profile: ModelProfile, layout: ModelLayout, plan: Plan, network: Network) -> Amounts:
    """What one plan sends, one column."""
    last, count = last_positions(profile), len(profile.segments)
    chunks, calls, numel, nbytes = np.zeros((4, 2, count, 1), dtype=np.int64)
    resident, largest = np.zeros((count, 1), dtype=np.int64), 0
    sent: set[int] = set()
    # Of the chunks that are complete at a position the first one is sent last.
    for chunk in plan.chunks:
        infos = [layout.parameter(fqn) for fqn in chunk.parameters if fqn in last]
        if not infos:
            continue
        at = min(last[info.fqn] for info in infos)
        if chunk.resident:
            resident[at] += sum(info.nbytes for info in infos)
            continue
        part = 0 if at in sent else 1
        sent.add(at)
        largest = max(largest, *(info.nbytes for info in infos))
        chunks[part, at] += 1
        calls[part, at] += network.calls(len(infos))
        numel[part, at] += sum(info.numel for info in infos)
        nbytes[part, at] += sum(info.nbytes for info in infos)
    offloaded = {fqn for chunk in plan.chunks if not chunk.resident for fqn in chunk.parameters}
    sends = np.array([not offloaded.isdisjoint(segment.gradients) for segment in profile.segments], dtype=np.bool_)
    return Amounts(chunks, calls, numel, nbytes, resident, sends[:, None], np.array([[largest]]))


def _first_part(segment: Segment, layout: ModelLayout) -> float:
    """Which part of the backward of a position has been computed when its first gradient is there."""
    if not segment.gradients:
        return 0.0
    module = segment.gradients[0].rpartition(".")[0]
    numel = {fqn: layout.parameter(fqn).numel for fqn in segment.gradients}
    first = sum(numel[fqn] for fqn in segment.gradients if fqn.rpartition(".")[0] == module)
    return first / max(sum(numel.values()), 1)
