"""Chooses the sharding of offloaded chunks with the shorter predicted step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_protrain.planner.explain import short_seconds
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.progress import waiting

# The sharding that needs less host memory is chosen if its step is longer by at most this fraction. Predictions for
# several ranks are no more accurate, and measured network rates vary.
NEAR = 0.05
Answers = Mapping[Sharding, Plan | ValueError]


@dataclass(frozen=True)
class ShardingDecision:
    """The chosen plan and the reason for the choice.

    Attributes:
        plan: The plan; its advice includes `sentence` if it has a prediction.
        sentence: Reason for the choice, for the user; empty if there was only one choice.
    """

    plan: Plan
    sentence: str = ""


@waiting("Searching for a plan")
def plan_each(
    shardings: Sequence[Sharding], make: Callable[[Sharding], Plan], compares: bool = True
) -> dict[Sharding, Plan | ValueError]:
    """Return the plan under each sharding, or the error; stop at a plan that offloads nothing.

    Args:
        shardings: Shardings to plan, the one with the least host memory first.
        make: Makes a plan, or raises a ValueError.
        compares: True if plans can be compared; False: stop at the first plan that fits.
    """
    answers: dict[Sharding, Plan | ValueError] = {}
    for sharding in shardings:
        try:
            plan = answers[sharding] = make(sharding)
        except ValueError as error:
            answers[sharding] = error
            continue
        if not (compares and plan.num_offloaded_chunks):
            break
    return answers


def predicted_seconds(plan: Plan) -> float | None:
    """Return the predicted step time of a plan, seconds; None without a prediction."""
    return plan.prediction.step_seconds if plan.prediction is not None else None


def choose(
    found: Answers, seconds: Callable[[Plan], float | None] = predicted_seconds, where: str = ""
) -> ShardingDecision:
    """Return the plan with the shortest step.

    Args:
        found: Result of `plan_each`. The first plan wins if step times are about equal or unknown.
        seconds: Returns the step time of a plan, or None.
        where: Scope of the step, for messages: `" on all GPUs"`.

    Raises:
        ValueError: Every sharding failed; the error is that of the first one.
    """
    plans = {sharding: plan for sharding, plan in found.items() if isinstance(plan, Plan)}
    if not plans:
        raise next(error for error in found.values() if isinstance(error, ValueError))
    first, plan = next(iter(plans.items()))
    times = {sharding: seconds(plan) for sharding, plan in plans.items()}
    known = {sharding: time for sharding, time in times.items() if time is not None}
    if len(known) < len(plans):
        refused = [_of_other(other, error) for other, error in found.items() if isinstance(error, ValueError)]
        # Do not explain why the other sharding failed if the preferred one has a plan.
        says = first is not next(iter(found))
        return ShardingDecision(plan, f'sharding="auto" takes "{first}": {", ".join(refused)}.' if says else "")
    if len(found) == 1:
        return ShardingDecision(plan)
    chosen = next(other for other, time in known.items() if time <= (1 + NEAR) * min(known.values()))
    others = [_of_other(other, found[other], known.get(other), known[chosen]) for other in found if other is not chosen]
    taken = f'sharding="auto" takes "{chosen}": a step{where} is expected to take {short_seconds(known[chosen])}'
    sentence = f"{', '.join([taken, *others])}."
    plan = plans[chosen]
    if plan.prediction is not None:
        plan = replace(plan, prediction=plan.prediction.with_advice(sentence))
    return ShardingDecision(plan, sentence)


def _of_other(sharding: Sharding, answer: Plan | ValueError, seconds: float | None = None, chosen: float = 0.0) -> str:
    if seconds is None:
        return f'under "{sharding}" there is no plan ({str(answer).partition(". ")[0].removesuffix(".")})'
    why = " (too little less for a copy on every rank)" if seconds < chosen else ""
    return f'under "{sharding}" {short_seconds(seconds)}{why}'
