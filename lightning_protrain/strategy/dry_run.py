"""The part of a strategy that plans for machines that are not here: a fit ends when its plans are made."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_protrain.planner.plan import Sharding
from lightning_protrain.planner.scaling import Cluster
from lightning_protrain.strategy.plan_options import PlanRequest
from lightning_protrain.strategy.plan_session import Answers, Machines
from lightning_protrain.strategy.states import StatesStrategy


class DryRunStrategy(StatesStrategy):
    """Makes plans of a fit, and no weights, within `planning_only`.

    Args:
        arguments: As of `StatesStrategy`.
    """

    _plan_request: PlanRequest

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._machines: Machines | None = None
        self._clusters: Mapping[str, Cluster] | None = None
        self._answers: Answers = {}

    @contextmanager
    def planning_only(
        self,
        machines: Machines,
        ranks: int = 1,
        here: int = 1,
        clusters: Mapping[str, Cluster] | None = None,
    ) -> Generator[Answers]:
        """Within it, a fit ends when its plan is made, and no weights are.

        Args:
            machines: What to plan for.
            ranks: How many train together.
            here: How many of them are on one machine.
            clusters: What each of `machines` is one of, by its name, with which sums are timed; None: they are not.

        Yields:
            A dict that the fit fills: a plan for each machine under each sharding, or why there is none.
        """
        plan_request = self._plan_request
        self._plan_request = plan_request.among(Sharding.REPLICATE, here, ranks)
        self._machines, self._clusters, self._answers = machines, clusters, {}
        try:
            yield self._answers
        finally:
            self._machines, self._clusters, self._plan_request = None, None, plan_request
