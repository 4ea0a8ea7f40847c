"""What it takes to run a block again, as a whole or but for its products, see [Note: Products]."""

from __future__ import annotations

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
