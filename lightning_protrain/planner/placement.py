"""The records in a plan: chunks, blocks with their policies, and the terms of device memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NamedTuple


class BlockPolicy(StrEnum):
    """The treatment of a block's activations between its forward and its backward (paper, section 3.2)."""

    KEEP = "keep"
    SELECTIVE = "selective"  # keeps the products and computes the rest again, see [Note: Products]
    CHECKPOINT = "checkpoint"
    SWAP = "swap"


class Sharding(StrEnum):
    """The placement of offloaded chunks on several ranks (the modes of ProTrain, section 3.3)."""

    REPLICATE = "replicate"  # every rank holds all offloaded chunks, with their gradients and optimizer states
    SHARD = "shard"  # the ranks of a node share one copy; each rank steps a part of it


class ChunkPlan(NamedTuple):
    """A group of parameters that share one device storage (S_chunk in the paper).

    Attributes:
        parameters: First names of its parameters, in storage order.
        unit: Name of the unit that owns it; a tied parameter belongs to the first unit that needs it.
        dtype: Dtype of all its elements, without the `torch.` prefix.
        trainable: True if its parameters required gradients when the plan was made.
        nbytes: Bytes of the storage on the device, alignment included.
        resident: True if the chunk stays on the device (persistent in the paper); False if it is streamed from the
            host.
        streamed_dtype: Two-byte dtype of the shadow copy that is streamed; None: the chunk is streamed in its own
            dtype.
    """

    parameters: tuple[str, ...]
    unit: str
    dtype: str
    trainable: bool
    nbytes: int
    resident: bool
    streamed_dtype: str | None = None


@dataclass(frozen=True)
class BlockPlan:
    """One block and its activation policy.

    Attributes:
        name: Fully qualified name.
        policy: Treatment of its activations.
        swap_bytes: Host bytes that one call of the block swaps, with each storage rounded up to whole pages. Under
            `SWAP` all saved activations, under `CHECKPOINT` the block's inputs (0: these stay on the device), else 0.
            Storages of less than a 1024th of it stay on the device.
    """

    name: str
    policy: BlockPolicy
    swap_bytes: int = 0


@dataclass(frozen=True)
class MemoryTerms:
    """Device memory of a plan, bytes.

    Attributes:
        resident_states: Parameters, gradients and optimizer states of resident chunks.
        chunk_buffers: Maximum of the offloaded chunks on the device at one time.
        gradients_in_flight: Gradients of offloaded chunks from their computation until they are on the host.
        module_buffers: Registered buffers of the model.
        swapped_activations: Maximum of the swapped tensors on the device at one time: those of two neighbouring blocks.
        activations: Other activations and temporaries at the peak of the step; 0 means unknown.
    """

    resident_states: int
    chunk_buffers: int
    gradients_in_flight: int
    module_buffers: int
    swapped_activations: int = 0
    activations: int = 0

    @property
    def by_name(self) -> dict[str, int]:
        """All terms by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> int:
        """Sum of all terms."""
        return sum(self.by_name.values())
