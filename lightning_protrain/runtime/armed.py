"""What is known of an optimizer step that is to be overlapped, from the moment it is announced to its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.host import Job
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.guard import below_guard
from lightning_protrain.runtime.hoststep import Steps, Update
from lightning_protrain.runtime.low_gradients import stored
from lightning_protrain.runtime.optimizer import PartGroups
from lightning_protrain.runtime.slot import Slot


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
        lends: Whether gradients may lie in the memory of copies, see [Note: Low gradients].
        late_bound: Bound of gradient values that steps have still to apply, as gradients lie there.
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
    lends: bool = False
    late_bound: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether some weights may have been stepped."""
        return bool(self.stepped or self.left)


@dataclass(eq=False)
class Pending:
    """The pending step of one chunk: the job that does it, and what it steps."""

    job: Job
    slots: tuple[Slot, ...]


def updates_of(
    groups: Iterable[dict[str, Any]], slots: Sequence[Slot]
) -> Iterator[tuple[dict[str, Any], list[Update]]]:
    """What is to be stepped of these groups: the parameters that have gradients, wherever they lie."""
    copies = {id(slot.host): slot.copy for slot in slots}
    for group in groups:
        given = [(parameter, parameter.grad) for parameter in group["params"]]
        yield group, [Update(p, stored(gradient), copies[id(p)]) for p, gradient in given if gradient is not None]


def have_user_hooks(chunks: Iterable[Chunk]) -> bool:
    """Whether the user has hooks on the gradient of some parameter."""
    with below_guard():  # or to ask would wait for every pending step
        return any(slot.has_user_hooks for chunk in chunks for slot in chunk.slots)
