"""What is reserved for the parts of a model that the profiled batch did not run.

[Note: Unexercised]
A batch of text alone does not run a vision tower, the next batch may. Such a block is taken to save, to hold at its
peak, and to be given as many bytes for each byte of its weights as the most demanding block that did run. Of the blocks
that keep their activations all are saved at one time; one of them runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.profiler.records import ModelLayout, ModelProfile, UnitInfo


@dataclass(frozen=True)
class Reserve:
    """Estimates for the blocks that did not run, see [Note: Unexercised].

    Attributes:
        names: All units that have parameters and did not run.
        kept: Bytes that each block leaves on the device if it keeps its activations, by name.
        checkpointed: The same if it checkpoints.
        running: Bytes while it runs.
    """

    names: tuple[str, ...]
    kept: Mapping[str, int]
    checkpointed: Mapping[str, int]
    running: Mapping[str, int]

    @classmethod
    def of(cls, profile: ModelProfile, layout: ModelLayout) -> Reserve:
        """The estimates for a profile."""
        ran = {segment.unit for segment in profile.segments}
        around = {unit.name for unit in layout.units if any(inner in ran for inner in unit.encloses)}
        idle = [unit for unit in layout.units if unit.parameters and unit.name not in ran | around]
        blocks = {unit.name: _weights(layout, unit) for unit in idle if unit.is_block}
        # Only what is estimated needs to know what others take.
        weights = {unit.name: _weights(layout, unit) for unit in layout.blocks} if blocks else {}
        kept, given, running = 0.0, 0.0, 0.0
        for segment in profile.segments:
            if weights.get(segment.unit):
                share = 1 / weights[segment.unit]
                transient = max(
                    segment.forward.peak_bytes - segment.forward.live_bytes,
                    segment.backward.peak_bytes - segment.backward.live_bytes + segment.checkpoint_saving,
                )
                kept = max(kept, (segment.checkpoint_saving + segment.input_bytes) * share)
                given = max(given, segment.input_bytes * share)
                running = max(running, transient * share)
        return cls(
            names=tuple(unit.name for unit in idle),
            kept={name: ceil(max(kept, given) * nbytes) for name, nbytes in blocks.items()},
            checkpointed={name: ceil(given * nbytes) for name, nbytes in blocks.items()},
            running={name: ceil(running * nbytes) for name, nbytes in blocks.items()},
        )

    def total(self, policies: Mapping[str, BlockPolicy]) -> int:
        """Bytes to reserve under these policies; a block that is swapped, or has none here, leaves nothing."""
        left = {BlockPolicy.KEEP: self.kept, BlockPolicy.CHECKPOINT: self.checkpointed}
        left[BlockPolicy.SELECTIVE] = self.kept  # It is not known what its products take.
        saved = sum(left[policies[name]][name] for name in self.kept if policies.get(name) in left)
        return saved + max(self.running.values(), default=0)


def without_gradients(profile: ModelProfile, layout: ModelLayout) -> frozenset[str]:
    """Parameters that get no gradient: of units that ran and of which not one parameter got any.

    What is computed there does not reach the loss, whatever the batch is. A part of a unit that got none (an expert)
    may get one with the next batch.
    """
    ran = {segment.unit for segment in profile.segments}
    reached = {fqn for segment in profile.segments for fqn in segment.gradients}
    users = [unit for unit in layout.units if unit.name not in ran or not reached.isdisjoint(unit.parameters)]
    trained = {fqn for unit in users for fqn in unit.parameters}
    return frozenset(info.fqn for info in layout.parameters) - trained


def _weights(layout: ModelLayout, unit: UnitInfo) -> int:
    return sum(layout.parameter(fqn).nbytes for fqn in unit.parameters)
