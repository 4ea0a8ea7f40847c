"""How long segments take, and to run a block again, as a whole or but for its products, see [Note: Products]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import Segment

# Seconds of Python for each operation of a block that keeps its products, as measured on one slow core: PyTorch looks
# at every operation there. A device that computes meanwhile waits for what is longer.
WATCHED = 25e-6


def selective_seconds(segment: Segment, hardware: HardwareProfile) -> float:
    """Seconds to run a segment's forward again where its products are kept, with what keeping them has cost before."""
    operations = segment.forward.operations
    again, watched = (
        hardware.seconds(segment.forward.again_operations),
        WATCHED * sum(cost.count for cost in operations),
    )
    if not hardware.asynchronous:
        return again + 2 * watched
    return max(again, watched) + max(watched - hardware.seconds(operations), 0.0)


def again_seconds(segment: Segment, policy: BlockPolicy, hardware: HardwareProfile) -> float:
    """Seconds to run a segment's forward again under a policy of its block; 0 where it keeps its activations."""
    if policy is BlockPolicy.SELECTIVE:
        return selective_seconds(segment, hardware)
    return hardware.seconds(segment.forward.recomputed) if policy is BlockPolicy.CHECKPOINT else 0.0


class Durations(NamedTuple):
    """Seconds of the device for a segment.

    Attributes:
        forward: For its forward.
        recomputed: When that runs again.
        selective: The same, but for its products.
        backward: For its backward.
    """

    forward: float
    recomputed: float
    selective: float
    backward: float


def durations(segments: Sequence[Segment], hardware: HardwareProfile) -> list[Durations]:
    """Those of each segment; of segments that share their operations, as alike blocks do, they are summed once."""
    known: dict[tuple[int, ...], Durations] = {}
    found = []
    for segment in segments:
        ahead, back = segment.forward, segment.backward.operations
        shared = id(ahead.operations), id(ahead.recomputed), id(ahead.again_operations), id(back)
        if shared not in known:
            again = again_seconds(segment, BlockPolicy.CHECKPOINT, hardware), selective_seconds(segment, hardware)
            known[shared] = Durations(hardware.seconds(ahead.operations), *again, hardware.seconds(back))
        found.append(known[shared])
    return found
