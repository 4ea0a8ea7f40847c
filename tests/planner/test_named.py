"""What a profile says of parameters, as numbers, against the names it has them by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from lightning_protrain.planner.named import Casts, Named, Parameters, come_together
from lightning_protrain.profiler.records import ModelLayout
from tests.planner.layouts import transformer
from tests.planner.problems import random_problem

# Problems, some of which have weights that are cast, and ones that are tied.
SEEDS = range(60)


def lists_of(layout: ModelLayout, casts: Casts, count: int) -> list[list[tuple[str, int]]]:
    """The same by name."""
    lists: list[list[tuple[str, int]]] = [[] for _ in range(count)]
    for which, number, nbytes in zip(casts.lists, casts.numbers, casts.nbytes, strict=True):
        lists[which].append((layout.parameters[number].fqn, int(nbytes)))
    return lists


def as_lists(entries: Sequence[Sequence[tuple[str, int]]]) -> list[list[tuple[str, int]]]:
    """Lists in place of tuples."""
    return [list(each) for each in entries]


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_stand_for_the_names_of_a_profile(seed: int) -> None:
    problem = random_problem(seed)
    profile, layout = problem.profile, problem.layout
    named = Named.of(profile, layout)
    blocks = {block.name for block in layout.blocks}
    calls = [call.saved_casts for call in profile.calls if call.name in blocks]
    assert lists_of(layout, named.casts, len(profile.segments)) == as_lists([it.casts for it in profile.segments])
    assert lists_of(layout, named.calls, len(calls)) == as_lists(calls)

    landing = [(at, fqn) for at, segment in list(enumerate(profile.segments))[::-1] for fqn in segment.gradients]
    names = [layout.parameters[number].fqn for number in named.gradients]
    assert list(zip(named.positions.tolist(), names, strict=True)) == landing
    parts: list[float] = []
    for segment in profile.segments[::-1]:
        parts += come_together(segment.gradients, [layout.parameter(fqn).numel for fqn in segment.gradients])
    assert named.parts.tolist() == parts


def test_some_of_these_problems_have_casts() -> None:
    found = [Named.of(problem.profile, problem.layout) for problem in map(random_problem, SEEDS)]
    assert sum(named.casts.numbers.size > 0 for named in found) > 5
    assert sum(named.calls.numbers.size > 0 for named in found) > 5
    assert sum(bool(named.parameters.shared.any()) for named in found) > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_parameters_are_those_of_the_layout(seed: int) -> None:
    layout = random_problem(seed).layout
    parameters = Parameters.of(layout)
    for number, info in enumerate(layout.parameters):
        users = sum(info.fqn in unit.parameters for unit in layout.units)
        assert parameters.number[info.fqn] == number
        assert (parameters.numel[number], parameters.own[number]) == (info.numel, info.nbytes)
        assert parameters.low[number] == (info.streamed_dtype is not None)
        assert parameters.shared[number] == (len(info.sites) > 1 or users > 1)


def test_names_that_a_layout_has_not_are_told() -> None:
    parameters = Parameters.of(transformer())
    assert parameters.numbers(()).tolist() == []
    with pytest.raises(KeyError, match="elsewhere"):
        parameters.numbers(("elsewhere.weight",))


def test_gradients_of_a_module_come_together() -> None:
    shapes = {"a.bias": (2,), "a.weight": (2, 3), "norm.weight": (2,)}
    assert come_together(tuple(shapes), [math.prod(shape) for shape in shapes.values()]) == [0.8, 0.8, 1.0]
    assert come_together((), []) == []


def test_there_may_be_nothing_to_list() -> None:
    casts = Casts.of(Parameters.of(transformer()), [(), ()])
    assert casts.lists.tolist() == casts.numbers.tolist() == casts.nbytes.tolist() == []
