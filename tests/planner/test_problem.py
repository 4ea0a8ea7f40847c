from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_protrain.config import Knobs
from lightning_protrain.planner.candidates import packings
from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.planner.problem import Problem, Training
from tests.planner.problems import random_problem


def test_a_profile_of_another_model() -> None:
    one, other = random_problem(0), next(p for p in map(random_problem, range(1, 99)) if len(p.layout.blocks) == 8)
    assert len(one.layout.blocks) < 8
    with pytest.raises(ValueError, match=r"The profile has units that the model has not .*of another model"):
        replace(one, profile=other.profile)
    with pytest.raises(ValueError, match="no backward"):
        replace(one, profile=replace(one.profile, segments=()))


def test_no_block_keeps_its_products_where_the_step_was_measured() -> None:
    def selects(problem: Problem) -> bool:
        return any(policy is BlockPolicy.SELECTIVE for _, policy in packings(problem, Knobs())[0].steps)

    problem = next(problem for problem in map(random_problem, range(99)) if selects(problem))
    assert not selects(replace(problem, profile=replace(problem.profile, measured="A kernel cannot be traced.")))


@pytest.mark.parametrize("wrong", [("never", 1, False), ("off", 0, False), ("backward", 1, True)])
def test_a_training_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(ValueError, match="give"):
        Training(*wrong)
