"""Who holds offloaded chunks where several ranks train together: the sharding whose step is expected to be shorter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_protrain.planner.explain import short_seconds
from lightning_protrain.planner.plan import Plan, Sharding

# By so much of the shortest step one that needs less memory of the host may be longer, and is taken all the same: times
# of several ranks are predicted no better, and what is measured of a network differs from run to run.
NEAR = 0.05
Answers = Mapping[Sharding, Plan | ValueError]


@dataclass(frozen=True)
class Choice:
    """A plan, and why it is this one.

    Attributes:
        plan: The sentence is among its advice, if anything was predicted.
        sentence: For the user; empty: there was nothing to choose.
    """

    plan: Plan
    sentence: str = ""


def plan_each(
    shardings: Sequence[Sharding], make: Callable[[Sharding], Plan], compares: bool = True
) -> dict[Sharding, Plan | ValueError]:
    """A plan under each sharding, or why there is none; a plan that offloads nothing is the same under all of them.

    Args:
        shardings: That with the least memory of the host first.
        make: Makes a plan, or raises a ValueError.
        compares: Whether there is something to choose by; else the first plan is the last one.
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
    """Of one step; None: nothing was predicted."""
    return plan.prediction.step_seconds if plan.prediction is not None else None


def choose(found: Answers, seconds: Callable[[Plan], float | None] = predicted_seconds, where: str = "") -> Choice:
    """The plan with the shortest step among those that there are.

    Args:
        found: As `plan_each` gives it. Of steps that are as good as equally long, the first is taken; and where it
            offloads nothing, or it is not known how long they take.
        seconds: How long the step of a plan takes.
        where: It does: `" on all GPUs"`.

    Raises:
        ValueError: There is no plan; that of the first sharding.
    """
    plans = {sharding: plan for sharding, plan in found.items() if isinstance(plan, Plan)}
    if not plans:
        raise next(error for error in found.values() if isinstance(error, ValueError))
    first, plan = next(iter(plans.items()))
    times = {sharding: seconds(plan) for sharding, plan in plans.items()}
    known = {sharding: time for sharding, time in times.items() if time is not None}
    if len(known) < len(plans):
        refused = [_of_other(each, error) for each, error in found.items() if isinstance(error, ValueError)]
        # Of the first that there would be, nobody needs to hear why there is no other one.
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
