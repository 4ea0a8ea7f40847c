"""Chooses the sharding of offloaded chunks whose step is predicted to be shorter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_protrain.planner.explain import short_seconds
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.progress import waiting

# A placement that needs less host memory is taken if its step is at most this fraction longer: predictions for several
# ranks are no more accurate, and measured rates of a network vary.
NEAR = 0.05
Answers = Mapping[Sharding, Plan | ValueError]


@dataclass(frozen=True)
class Choice:
    """A plan, and why it is this one.

    Attributes:
        plan: The sentence is among its advice, if anything was predicted.
        sentence: Reason for the choice, for the user; empty if there was nothing to choose.
    """

    plan: Plan
    sentence: str = ""


@waiting("Searching for a plan")
def plan_each(
    shardings: Sequence[Sharding], make: Callable[[Sharding], Plan], compares: bool = True
) -> dict[Sharding, Plan | ValueError]:
    """Return a plan under each sharding, or the error; a plan that offloads nothing is the same under all shardings.

    Args:
        shardings: Placements to plan, starting with the one that needs the least host memory.
        make: Makes a plan, or raises a ValueError.
        compares: True if plans can be compared; otherwise only the first feasible one is made.
    """
    found: dict[Sharding, Plan | ValueError] = {}
    for sharding in shardings:
        try:
            plan = found[sharding] = make(sharding)
        except ValueError as error:
            found[sharding] = error
            continue
        if not (compares and plan.num_offloaded_chunks):
            break
    return found


def predicted_seconds(plan: Plan) -> float | None:
    """Return the predicted seconds of one step, or None without a prediction."""
    return plan.prediction.step_seconds if plan.prediction is not None else None


def choose(found: Answers, seconds: Callable[[Plan], float | None] = predicted_seconds, where: str = "") -> Choice:
    """Return the plan with the shortest step among the feasible ones.

    Args:
        found: Result of `plan_each`. The first sharding wins if steps are about equally long, it offloads nothing, or
            times are unknown.
        seconds: Returns the step time of a plan, or None.
        where: Scope of the step, for messages: `" on all GPUs"`.

    Raises:
        ValueError: If there is no plan; the error of the first sharding.
    """
    plans = {sharding: plan for sharding, plan in found.items() if isinstance(plan, Plan)}
    if not plans:
        raise next(error for error in found.values() if isinstance(error, ValueError))
    first, plan = next(iter(plans.items()))
    times = {sharding: seconds(plan) for sharding, plan in plans.items()}
    known = {sharding: time for sharding, time in times.items() if time is not None}
    if len(known) < len(plans):
        refused = [_of_other(each, error) for each, error in found.items() if isinstance(error, ValueError)]
        # If the preferred placement has a plan, the log does not say why the other has none.
        says = first is not next(iter(found))
        return Choice(plan, f'sharding="auto" takes "{first}": {", ".join(refused)}.' if says else "")
    if len(found) == 1:
        return Choice(plan)
    chosen = next(each for each, time in known.items() if time <= (1 + NEAR) * min(known.values()))
    others = [_of_other(each, found[each], known.get(each), known[chosen]) for each in found if each is not chosen]
    taken = f'sharding="auto" takes "{chosen}": a step{where} is expected to take {short_seconds(known[chosen])}'
    sentence = f"{', '.join([taken, *others])}."
    plan = plans[chosen]
    if plan.prediction is not None:
        plan = replace(plan, prediction=plan.prediction.with_advice(sentence))
    return Choice(plan, sentence)


def _of_other(sharding: Sharding, answer: Plan | ValueError, seconds: float | None = None, chosen: float = 0.0) -> str:
    if seconds is None:
        return f'under "{sharding}" there is no plan ({str(answer).partition(". ")[0].removesuffix(".")})'
    why = " (too little less for a copy on every rank)" if seconds < chosen else ""
    return f'under "{sharding}" {short_seconds(seconds)}{why}'
