"""The search for a plan of a run, which evaluates as well."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.memory import format_bytes
from lightning_protrain.planner.outlook import expected_memory
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.search import NoFeasiblePlan, Problem, search


def search_with_evaluation(problem: Problem, knobs: Knobs) -> Plan:
    """The plan of `search`, whose evaluation fits the device too.

    The search counts what training takes; where evaluation takes more, for weights that it may need whole, it is told
    to leave so much room. If there is no such plan, evaluation may run out of memory, and that is said.

    Args:
        problem: With a limit for the device.
        knobs: What is pinned.

    Raises:
        NoFeasiblePlan: Training fits nowhere.
    """
    assert problem.device_bytes is not None
    first = plan = search(problem, knobs)
    allowed = problem.device_bytes
    while (excess := expected_memory(problem, plan).device_peak - problem.device_bytes) > 0:
        allowed -= excess
        try:
            plan = search(replace(problem, device_bytes=allowed), knobs)
        except NoFeasiblePlan:
            rank_zero_info(
                f"Evaluation may take {format_bytes(expected_memory(problem, first).device_peak)} on the device, of "
                f"which {format_bytes(problem.device_bytes)} are allowed; training fits."
            )
            return first
    return plan
