"""The lanes of a predicted step are what its time is made of, and its course what its phases take."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_protrain.config import Knobs
from lightning_protrain.planner import candidates
from lightning_protrain.planner.lanes import LANES, work_of
from lightning_protrain.planner.memory_timeline import memory_course, memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.step_time import lanes, step_time
from tests.planner.problems import random_network, random_problem, with_repeats


def case(seed: int) -> tuple[Problem, Plan]:
    """A problem, of several ranks or not, and any plan for it."""
    source = random.Random(seed)
    problem = random_problem(seed)
    if seed % 2 == 0:
        problem = with_repeats(source, problem)
    if seed % 3 == 0:
        problem = replace(problem, network=random_network(seed, problem))
    packing = source.choice(candidates.packings(problem, Knobs()))
    point = source.choice([point for point in packing.points(Knobs()) if not point.num_inputs])
    most = packing.most_inputs(point.num_swap, point.num_steps)
    point = point._replace(num_inputs=random.Random(seed).randint(0, most))
    least = packing.fewest_buffers(point.offloaded)
    return problem, packing.plan(point, source.randint(least, max(point.offloaded, least)))


@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 600, 100)], ids=str)
def test_lanes_add_up_to_the_step(seeds: Iterable[int]) -> None:
    for seed in seeds:
        problem, plan = case(seed)
        time, spans = step_time(problem, plan), lanes(problem, plan)
        assert max(span.end for span in spans) == pytest.approx(time.seconds, rel=1e-9), seed
        for lane in LANES:
            assert work_of(spans, lane) == pytest.approx(getattr(time, lane), rel=1e-9, abs=1e-15), (seed, lane)
            own = [span for span in spans if span.lane == lane]
            assert all(one.end <= other.begin * (1 + 1e-9) for one, other in pairwise(own)), (seed, lane)


@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 300, 100)], ids=str)
def test_the_course_has_the_peaks_of_the_phases(seeds: Iterable[int]) -> None:
    for seed in seeds:
        problem, plan = case(seed)
        course, timeline = memory_course(problem, plan), memory_timeline(problem, plan)
        number = len(problem.profile.segments)
        assert [phase.name for phase in course] == ["forward"] * number + ["backward"] * number + ["step"], seed
        units = [segment.unit for segment in problem.profile.segments]
        assert [phase.unit for phase in course] == [*units, *units[::-1], ""], seed
        for name in ("forward", "backward", "step"):
            peak = timeline.phase(name)
            assert replace(peak, host={}) in [replace(phase, host={}) for phase in course], (seed, name)
            assert max(phase.total for phase in course if phase.name == name) >= peak.total, (seed, name)
