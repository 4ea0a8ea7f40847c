"""How the training loop uses a plan: what the host's steps run behind, micro-batches, clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Training:
    """How the training loop uses the plan.

    Attributes:
        overlap: Behind what the host steps offloaded chunks: nothing, the backward, or the next forward.
        accumulate: Micro-batches in a step.
        clips: Whether the norm of all gradients is bounded.

    Raises:
        ValueError: An unknown overlap, or no micro-batch; or norms are clipped and the host is to step behind backward,
            before they are known.
    """

    overlap: Literal["off", "backward", "forward"] = "off"
    accumulate: int = 1
    clips: bool = False

    def __post_init__(self) -> None:
        """Checks values."""
        if self.overlap not in ("off", "backward", "forward"):
            raise ValueError(f"overlap={self.overlap!r}: give 'off', 'backward' or 'forward'.")
        if self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate}: give at least one micro-batch.")
        if self.clips and self.overlap == "backward":
            raise ValueError("overlap='backward' steps chunks before the norm is known: with clipping give 'forward'.")

    @property
    def works_in_backward(self) -> bool:
        """Whether the host's worker steps chunks, or takes norms of their gradients, while backward goes on."""
        return self.overlap == "backward" or (self.overlap == "forward" and self.clips)
