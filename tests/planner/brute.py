"""The fastest plan by trying all of them, one by one, over the same two models: what the search is held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_protrain.config import Knobs
from lightning_protrain.planner.candidates import Packing, Point, device_bytes, packings
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.step_time import step_time


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted time and memory."""

    plan: Plan
    packing: Packing
    point: Point
    device: int
    host: int

    def fits(self, problem: Problem) -> bool:
        budgets = (self.device, problem.device_bytes), (self.host, problem.host_bytes)
        return all(budget is None or nbytes <= budget for nbytes, budget in budgets)


def all_candidates(problem: Problem, knobs: Knobs) -> Iterator[Candidate]:
    """Every plan that the knobs allow, with every number of buffers, whether it fits or not."""
    for packing in packings(replace(problem, host_bytes=1 << 62), knobs):
        for point in packing.points(knobs):
            least = packing.least_buffers(point, knobs)
            most = point.offloaded if knobs.num_chunk_buffers is None else least
            for buffers in range(least, max(least, most) + 1):
                plan = packing.plan(point, buffers)
                timeline = memory_timeline(problem, plan)
                device = device_bytes(timeline, plan, problem.evaluates)
                yield Candidate(plan, packing, point, device, timeline.host_peak)


def fastest(problem: Problem, candidates: list[Candidate]) -> float:
    """Seconds of the shortest step of all that fit."""
    return min(step_time(problem, one.plan).seconds for one in candidates if one.fits(problem))
