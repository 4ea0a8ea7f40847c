"""The choice of a sharding for given step times, and the message to the user."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.planner.prediction import PhasePrediction, Prediction
from lightning_protrain.planner.sharding_choice import ShardingDecision, choose, plan_each
from tests.support.plans import preset

SHARD, REPLICATE = Sharding.SHARD, Sharding.REPLICATE
NONE = ValueError("No plan fits: the host would need 3.5 GiB. Use another one.")
REFUSED = "there is no plan (No plan fits: the host would need 3.5 GiB)"
TOO_LITTLE = "(too little less for a copy on every rank)"
OFFLOAD, RESIDENT = (preset(nn.Linear(3, 2), name) for name in ("offload", "resident"))


def answer(sharding: Sharding, seconds: float | ValueError | None) -> Plan | ValueError:
    """A plan whose step is predicted to take so long; None: nothing is predicted."""
    if isinstance(seconds, ValueError):
        return seconds
    phases = (PhasePrediction("step", "", {}, {}),)
    prediction = None if seconds is None else Prediction("a GPU", 0, phases, seconds, {}, "link", advice=("More.",))
    return replace(OFFLOAD, sharding=sharding, prediction=prediction)


def chosen(shard: float | ValueError | None, replicate: float | ValueError | None) -> ShardingDecision:
    return choose({SHARD: answer(SHARD, shard), REPLICATE: answer(REPLICATE, replicate)})


@pytest.mark.parametrize(
    ("shard", "replicate", "taken", "said"),
    [
        (1.0, 2.0, SHARD, 'takes "shard": a step is expected to take 1 s, under "replicate" 2 s.'),
        (2.0, 1.0, REPLICATE, 'takes "replicate": a step is expected to take 1 s, under "shard" 2 s.'),
        (1.0, 1.0, SHARD, 'takes "shard": a step is expected to take 1 s, under "replicate" 1 s.'),
        (1.0, 0.96, SHARD, f'takes "shard": a step is expected to take 1 s, under "replicate" 960 ms {TOO_LITTLE}.'),
        (1.0, 0.94, REPLICATE, 'takes "replicate": a step is expected to take 940 ms, under "shard" 1 s.'),
        (1.0, NONE, SHARD, f'takes "shard": a step is expected to take 1 s, under "replicate" {REFUSED}.'),
        (NONE, 9.0, REPLICATE, f'takes "replicate": a step is expected to take 9 s, under "shard" {REFUSED}.'),
    ],
    ids=str,
)
def test_the_shorter_step_is_taken(
    shard: float | ValueError, replicate: float | ValueError, taken: Sharding, said: str
) -> None:
    found = chosen(shard, replicate)
    assert found.plan.sharding is taken
    assert found.sentence == f'sharding="auto" {said}'
    assert found.plan.prediction is not None
    assert found.plan.prediction.advice == ("More.", found.sentence)


@pytest.mark.parametrize(("shard", "replicate"), [(None, None), (None, 1.0), (2.0, None)])
def test_what_cannot_be_compared_is_not(shard: float | None, replicate: float | None) -> None:
    found = chosen(shard, replicate)
    assert (found.plan, found.sentence) == (answer(SHARD, shard), "")


def test_the_seconds_may_be_others_than_those_of_one_device() -> None:
    plans = {SHARD: answer(SHARD, 1.0), REPLICATE: answer(REPLICATE, 2.0)}
    found = choose(plans, lambda plan: 3.0 if plan.sharding is SHARD else 2.0, " on all GPUs")
    assert found.plan.sharding is REPLICATE
    assert 'a step on all GPUs is expected to take 2 s, under "shard" 3 s.' in found.sentence


@pytest.mark.parametrize("only", [SHARD, REPLICATE])
def test_where_there_is_no_choice_nothing_is_said(only: Sharding) -> None:
    found = choose({only: answer(only, 1.0)})
    assert (found.plan, found.sentence) == (answer(only, 1.0), "")
    with pytest.raises(ValueError, match="No plan fits"):
        choose({only: NONE})


def test_the_error_of_the_first_is_raised_if_there_is_no_plan() -> None:
    with pytest.raises(ValueError, match=r"^the first$"):
        chosen(ValueError("the first"), ValueError("the second"))


def test_what_offloads_nothing_is_planned_once() -> None:
    asked: list[Sharding] = []

    def make(sharding: Sharding) -> Plan:
        asked.append(sharding)
        return replace(RESIDENT, sharding=sharding)

    found = plan_each((SHARD, REPLICATE), make)
    assert asked == [SHARD]
    assert choose(found) == ShardingDecision(replace(RESIDENT, sharding=SHARD))


def test_without_anything_to_choose_by_the_first_plan_is_taken() -> None:
    asked: list[Sharding] = []

    def make(sharding: Sharding) -> Plan:
        asked.append(sharding)
        return replace(OFFLOAD, sharding=sharding)

    found = plan_each((SHARD, REPLICATE), make, compares=False)
    assert asked == [SHARD]
    assert choose(found) == ShardingDecision(replace(OFFLOAD, sharding=SHARD))


def test_it_is_said_why_the_first_is_not_taken_if_nothing_is_predicted() -> None:
    found = chosen(NONE, None)
    assert found.plan == answer(REPLICATE, None)
    assert found.sentence == f'sharding="auto" takes "replicate": under "shard" {REFUSED}.'
    assert chosen(None, NONE).sentence == ""


def test_what_fails_under_one_is_planned_under_the_other() -> None:
    def make(sharding: Sharding) -> Plan:
        if sharding is SHARD:
            raise NONE
        return replace(OFFLOAD, sharding=sharding)

    found = plan_each((SHARD, REPLICATE), make)
    assert found == {SHARD: NONE, REPLICATE: replace(OFFLOAD, sharding=REPLICATE)}
    assert choose(found).plan.sharding is REPLICATE
