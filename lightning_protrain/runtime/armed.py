"""What is known of an optimizer step that is to be overlapped, between the moment it is announced and its launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.host import Job
from lightning_protrain.runtime.hoststep import Steps
from lightning_protrain.runtime.optimizer import PartGroups


class Overlap(StrEnum):
    """Behind what the host's optimizer step runs, see [Note: Overlap]."""

    OFF = "off"
    BACKWARD = "backward"
    FORWARD = "forward"


@dataclass
class Armed:
    """What is known of the micro-batch that ends in an optimizer step.

    Attributes:
        optimizer: Whose step it is.
        groups: Gives groups of some of its parameters.
        overlap: `BACKWARD` or `FORWARD`.
        clip_value: Bound of gradient values, applied in the steps that run behind backward.
        take_norms: Whether norms are taken as gradients land.
        norms: Those that have been taken, by the identity of the parameter.
        landings: Jobs that take them.
        coefficient: Factor of the gradients that steps have still to apply, in the pass in which they read them.
        steps: Those that have been submitted; None: none yet.
        stepped: Chunks whose steps have been submitted.
        parameters: Identities of what they step.
        left: Chunks that other ranks may be stepping, see [Note: Turns].
    """

    optimizer: Optimizer
    groups: PartGroups
    overlap: Overlap
    clip_value: float | None
    take_norms: bool
    norms: dict[int, Tensor] = field(default_factory=dict)
    landings: list[Job] = field(default_factory=list)
    coefficient: Tensor | None = None
    steps: Steps | None = None
    stepped: set[int] = field(default_factory=set)
    parameters: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)

    @property
    def has_begun(self) -> bool:
        """Whether some weights may have been stepped."""
        return bool(self.stepped or self.left)
