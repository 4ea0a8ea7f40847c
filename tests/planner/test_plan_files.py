"""Files of plans by name of the machine: the one plan is found, and what is no such file is left as it is."""

from __future__ import annotations

import pytest

from lightning_protrain.planner.plan import only_plan

PLAN = {"format": 1, "chunks": []}


@pytest.mark.parametrize("content", [{"RTX 3090": PLAN}, {"RTX 3060": None, "RTX 3090": PLAN, "H200": None}])
def test_the_one_plan_is_found(content: object) -> None:
    assert only_plan(content) is PLAN


@pytest.mark.parametrize("content", [PLAN, {}, [], None, "plan", {"RTX 3090": []}, {"RTX 3090": {"chunks": []}}])
def test_anything_else_is_left_as_it_is(content: object) -> None:
    assert only_plan(content) is content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"RTX 3090": PLAN, "H200": PLAN}, r"several machines: 'RTX 3090', 'H200'\. Write one with .*`--gpu` alone"),
        ({"RTX 3060": None, "T4": None}, "no plan that fits 'RTX 3060', 'T4'"),
    ],
)
def test_none_and_several_are_refused(content: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        only_plan(content)
