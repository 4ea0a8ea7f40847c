"""What the user says about a plan, before anything is known of the model."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast, get_args

from lightning_protrain.config import PlanOptions, Preset
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.profiler.records import HardwareProfile

if TYPE_CHECKING:
    PlanChoice = Plan | str | os.PathLike[str]
else:
    # Parsers of command lines read annotations: told of Plan, they would read the file in place of its path.
    PlanChoice = str | os.PathLike[str]


@dataclass(frozen=True)
class PlanRequest:
    """What the user says about the plan.

    Attributes:
        choice: A whole plan, or the way to make one.
        options: What the plan must keep to.
        hardware: What the machine can do; None: it is measured.
        copies: How many ranks of this machine hold what is offloaded, each all of it.
        ranks: How many train together.
        sharers: How many of them, all on this machine, share one copy of what is offloaded.
    """

    choice: Plan | Preset
    options: PlanOptions
    hardware: HardwareProfile | None
    copies: int = 1
    ranks: int = 1
    sharers: int = 1

    @property
    def num_nodes(self) -> int:
        """Machines that train together."""
        return max(self.ranks // (self.copies * self.sharers), 1)

    def among(self, sharding: Sharding, here: int | None = None, ranks: int | None = None) -> PlanRequest:
        """The same for ranks that share one copy of what is offloaded, or have a copy each.

        Args:
            sharding: Which of both.
            here: How many ranks this machine has; None: as many as before.
            ranks: How many train together; None: the same.
        """
        here = here or self.copies * self.sharers
        copies, sharers = (1, here) if sharding is Sharding.SHARD else (here, 1)
        return replace(self, copies=copies, sharers=sharers, ranks=ranks or self.ranks)


def read_plan_spec(plan: PlanChoice) -> Plan | Preset:
    """A plan, or the way to make one.

    Args:
        plan: `"auto"`, `"resident"`, `"offload"`, a plan, or the path of one.

    Raises:
        ValueError: Nothing of these.
    """
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, (str, os.PathLike)):
        raise ValueError(f'plan={plan!r}: give "auto", "resident", "offload", a Plan, or the path of one.')
    return cast(Preset, plan) if plan in get_args(Preset) else Plan.load(os.fspath(plan))
