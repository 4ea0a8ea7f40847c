"""The part of a strategy that plans for machines that are not here: a fit ends when its plans are made."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning_protrain.joint_planning import Answers, Machines
from lightning_protrain.overlap import OverlapChoice
from lightning_protrain.parallelism import Parallelism
from lightning_protrain.planner.plan import Sharding
from lightning_protrain.planner.scaling import Cluster
from lightning_protrain.states import StatesStrategy
from lightning_protrain.wishes import Wishes


class PaperStrategy(StatesStrategy):
    """Makes plans of a fit, and no weights, within `planning_only`.

    Args:
        arguments: As of `StatesStrategy`.
    """

    _wishes: Wishes
    _overlap_choice: OverlapChoice

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._machines: Machines | None = None
        self._clusters: Mapping[str, Cluster] | None = None
        self._answers: Answers = {}

    def ways(self, num_nodes: int) -> tuple[Parallelism, ...]:
        """What so many machines may divide, in the order in which it is tried."""
        return self._wanted.ways(num_nodes)

    @contextmanager
    def dividing(self, way: Parallelism) -> Generator[None]:
        """Within it, machines on paper divide what one of the `ways` says."""
        wanted, self._wanted, self._parallelism = self._wanted, way, way
        try:
            yield
        finally:
            self._wanted, self._parallelism = wanted, wanted.ways(1)[0]

    @contextmanager
    def planning_only(
        self,
        machines: Machines,
        ranks: int = 1,
        here: int = 1,
        link: float | None = None,
        network: float = math.inf,
        clusters: Mapping[str, Cluster] | None = None,
    ) -> Generator[Answers]:
        """Within it, a fit ends when its plan is made, and no weights are.

        Args:
            machines: What to plan for.
            ranks: How many train together.
            here: How many of them are on one machine.
            link: Bytes per second that a device sends to another one of its machine; None: what it sends to its host.
            network: Bytes per second that a machine sends to another one.
            clusters: The same of each of `machines` by its name, with which sums are timed; None: they are not.

        Yields:
            A dict that the fit fills: a plan for each machine under each sharding, or why there is none.
        """
        uploads = [machine.upload for under in machines.values() for machine in under.values() if machine is not None]
        known = here, ranks // here, link, network
        gathering = self._parallelism.gathering_on_paper(*known, max(uploads, default=0.0))
        divided = self._parallelism.machines_on_paper(ranks, here)
        choice, wishes = self._overlap_choice, self._wishes
        if gathering is not None and gathering.rows:
            self._overlap_choice = "off"
        self._wishes = replace(wishes.among(Sharding.REPLICATE, here, ranks), gathering=gathering, machines=divided)
        self._machines, self._clusters, self._answers = machines, clusters, {}
        try:
            yield self._answers
        finally:
            self._machines, self._clusters, self._wishes, self._overlap_choice = None, None, wishes, choice
