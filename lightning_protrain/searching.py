"""The search for a plan of a run, which evaluates as well."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_protrain.planner.advice import predict
from lightning_protrain.planner.constraints import Knobs
from lightning_protrain.planner.memory import format_bytes
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.search import NoFeasiblePlan, search


def search_and_predict(problem: Problem, knobs: Knobs, min_num_params: int, room: int) -> Plan:
    """The plan for a run, with its prediction.

    Args:
        problem: With a limit for the device.
        knobs: What is pinned.
        min_num_params: From this size on a module outside blocks is large.
        room: Bytes of the device beside a plan that offloads anything.

    Raises:
        NoFeasiblePlan: Training fits nowhere.
    """
    assert problem.device_bytes is not None
    budget = problem.device_bytes
    plan = _plan_if_all_fits(problem, knobs, min_num_params)
    if plan is None:
        problem = replace(problem, device_bytes=budget - room, reserved=room)
        plan = search_with_evaluation(problem, knobs)
    plan = predict(problem, plan, knobs)
    assert plan.prediction is not None
    return replace(plan, prediction=replace(plan.prediction, budget=budget))


def _plan_if_all_fits(problem: Problem, knobs: Knobs, min_num_params: int) -> Plan | None:
    """The plan that streams nothing and keeps everything, if it fits and no knob is against it.

    Where the host steps beside the device, to offload a little may look shorter by less than anybody can predict; but
    what fits must cost nothing.
    """
    if set(knobs.given) - set(knobs.forbids_alone):
        return None
    plan = make_plan(problem.layout, "resident", Knobs(), None, None, problem.state_bytes, min_num_params)
    return plan if memory_timeline(problem, plan).device_peak <= (problem.device_bytes or 0) else None


def search_with_evaluation(problem: Problem, knobs: Knobs) -> Plan:
    """The plan of `search`, whose evaluation fits the device too.

    Evaluation may take more than training, for weights that it may need whole. If there is no plan whose evaluation
    fits, evaluation may run out of memory, and that is said.

    Args:
        problem: With a limit for the device.
        knobs: What is pinned.

    Raises:
        NoFeasiblePlan: Training fits nowhere.
    """
    assert problem.device_bytes is not None
    try:
        return search(replace(problem, evaluates=True), knobs)
    except NoFeasiblePlan:
        plan = search(problem, knobs)
    rank_zero_info(
        f"Evaluation may take {format_bytes(memory_timeline(problem, plan).device_peak)} on the device, of which "
        f"{format_bytes(problem.device_bytes)} are allowed; training fits."
    )
    return plan
