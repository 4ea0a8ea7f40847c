"""The search finds what trying all plans finds, and every planted bug of it is found."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any, Literal

import pytest

from lightning_protrain.config import Knobs
from lightning_protrain.planner import candidates
from lightning_protrain.planner import search as searching
from lightning_protrain.planner.candidates import device_bytes
from lightning_protrain.planner.infeasible import NoFeasiblePlan
from lightning_protrain.planner.memory import HostUse, StatesProblem, check_fits
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.plan import BlockPolicy, Plan, check_plan
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.planner.replay import peak
from lightning_protrain.planner.search import find_any, search, search_with_evaluation
from lightning_protrain.planner.step_time import step_time
from lightning_protrain.profiler.records import Segment
from tests.planner.brute import Candidate, all_candidates, fastest
from tests.planner.layouts import forward_of
from tests.planner.problems import (
    large_problem,
    random_network,
    random_problem,
    with_budgets,
    with_calls_of_the_head,
    with_repeats,
    with_tied_head,
)

NAMES = (
    "num_persistent_chunks",
    "num_chunk_buffers",
    "num_swap_blocks",
    "num_checkpoint_blocks",
    "num_keep_offloaded_blocks",
    "chunk_bytes",
)
COUNTED = {"num_checkpoint_blocks", "num_keep_offloaded_blocks"}


def random_case(seed: int, most_blocks: int = 4, most_chunks: int = 8) -> tuple[Problem, Knobs, list[Candidate]]:
    """A problem with ranks and budgets, pins, and all plans that these allow."""
    source = random.Random(seed)
    problem = random_problem(seed, most_blocks, most_chunks)
    if seed % 2 == 0:
        problem = with_repeats(random.Random(seed), problem)
    if seed % 3 == 0:
        problem = replace(problem, network=random_network(seed, problem), sharers=source.choice([1, 2, 4]))
    names = source.choice([(), (), *((name,) for name in NAMES), *combinations(NAMES, 2)])
    # Where blocks are counted, none keeps its products.
    open_policies = not COUNTED & set(names)
    knobs = random_pins(source, problem, names, open_policies) if names else Knobs()
    allowed = list(all_candidates(problem, knobs))
    if not allowed:
        return problem, knobs, []
    devices, hosts = sorted(one.device for one in allowed), sorted(one.host for one in allowed)
    tight = devices[: len(devices) // 3 + 1]
    device = source.choice(
        [None, devices[0], devices[0] - 1, *(source.choice(part) for part in (tight, devices, tight))]
    )
    host = source.choice([None, None, hosts[-1], source.choice(hosts), source.choice(hosts)])
    return with_budgets(problem, device, host), knobs, allowed


def random_pins(source: random.Random, problem: Problem, names: tuple[str, ...], selective: bool) -> Knobs:
    """Return settings that at least one plan has, or nearly has."""
    free = Knobs() if selective else Knobs(num_keep_offloaded_blocks=0)
    packing = source.choice(candidates.packings(problem, free))
    point = source.choice([point for point in packing.points(Knobs()) if not point.num_inputs])
    persistent = len(packing.chunks) - point.offloaded
    values = {
        "num_persistent_chunks": persistent,
        "num_chunk_buffers": source.randint(packing.fewest_buffers(point.offloaded), point.offloaded + 1),
        "num_swap_blocks": point.num_swap,
        "num_checkpoint_blocks": point.num_steps,
        "num_keep_offloaded_blocks": sum(last >= persistent for last in packing._kept(point.num_swap, point.num_steps)),
        "chunk_bytes": packing.chunk_bytes or 1 << 40,
    }
    return Knobs(**{name: values[name] for name in names})


def excess(problem: Problem, knobs: Knobs, allowed: list[Candidate]) -> float | None:
    """Return the excess of the found plan's step time over the fastest, as a fraction; None: no plan fits."""
    if not any(one.fits(problem) for one in allowed):
        with pytest.raises(ValueError, match=r"No plan fits|contradict|needs at least"):
            search(problem, knobs)
        return None
    found = find_any(problem, knobs)
    assert found is not None, "a plan fits, and none was found"
    timeline = memory_timeline(problem, found.plan)
    assert device_bytes(timeline, found.plan, problem.evaluates) <= (problem.device_bytes or 1 << 62)
    assert timeline.host_peak <= (1 << 62 if problem.host_bytes is None else problem.host_bytes)
    check_plan(found.plan, problem.layout, "bfloat16")
    use = HostUse(problem.sharers, problem.training.accumulate)
    check_fits(found.plan, StatesProblem(problem.layout, problem.state_bytes, problem.device_bytes, use=use))
    assert found.seconds <= (1 + searching.WORTH) * found.fastest
    return found.fastest / fastest(problem, allowed) - 1


def hold(found: Iterable[float | None], least: int) -> None:
    """Check excesses against the bounds of the search; at least `least` of them must be of plans that fit."""
    known = sorted(part for part in found if part is not None)
    assert len(known) >= least
    assert min(known) > -1e-6
    assert median(known) == pytest.approx(0, abs=1e-9)
    assert known[int(0.99 * (len(known) - 1))] <= 0.005
    assert known[-1] <= 0.02


def copies(problem: Problem, plan: Plan) -> tuple[bool, float, int]:
    """Whether inputs move to the host, the seconds of all copies, and the number of streamed chunks."""
    time = step_time(problem, plan)
    link = round(time.upload + time.download, 12)
    return moves_inputs(plan), link, plan.num_offloaded_chunks


def moves_inputs(plan: Plan) -> bool:
    return any(block.swap_bytes and block.policy is BlockPolicy.CHECKPOINT for block in plan.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("few", [candidates.FEW, 40], ids=["all are tried", "some are tried"])
def test_of_plans_about_as_fast_the_one_with_the_fewest_copies_is_taken(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "FEW", few)
    ratios, saved = [], 0
    for seed in range(100):
        problem, knobs, allowed = random_case(seed)
        fitting = [one.plan for one in allowed if one.fits(problem)]
        if fitting:
            found = find_any(problem, knobs)
            times = {index: step_time(problem, plan).seconds for index, plan in enumerate(fitting)}
            fastest = fitting[min(times, key=times.__getitem__)]
            close = [fitting[index] for index in times if times[index] <= (1 + searching.WORTH) * found.fastest]
            least = min(copies(problem, plan) for plan in close)
            took = copies(problem, found.plan)
            assert took[0] == least[0]
            ratios.append((took[1] + 1e-12) / (least[1] + 1e-12))
            saved += took < copies(problem, fastest)
    assert len(ratios) > 60
    assert max(ratios) == pytest.approx(1, abs=1e-9)
    assert saved > len(ratios) // 10


@pytest.mark.parametrize("share", [1.2, 1.4])
def test_plans_that_stream_nothing_are_not_missed(share: float) -> None:
    """A single streamed chunk takes the memory of buffers, so candidates beside such a plan are far slower."""
    problem = large_problem(24, 4)
    infos = tuple(replace(info, trainable=False) for info in problem.layout.parameters)
    nbytes = int(share * sum(info.nbytes for info in infos))
    layout = replace(problem.layout, parameters=infos)
    problem = replace(problem, layout=layout, device_bytes=nbytes, chunk_bytes=(None, 1))
    found = find_any(problem, Knobs())
    packing, times = candidates.packings(problem, Knobs())[0], []
    for num_swap, num_steps in packing.policies_allowed(Knobs()):
        point = candidates.Point(num_swap, num_steps, 0)
        if packing.allows(point, Knobs()) and packing.device_bytes(point, 0) <= nbytes:
            times.append(step_time(problem, packing.plan(point, 0)))
    assert found.fastest <= (1 + 1e-9) * min(time.seconds for time in times)
    close = [time for time in times if time.seconds <= (1 + searching.WORTH) * found.fastest]
    least = min(time.upload + time.download for time in close)
    assert copies(problem, found.plan)[1] <= least + 1e-9


@pytest.mark.slow
def test_the_search_finds_what_trying_all_plans_finds() -> None:
    hold((excess(*random_case(seed)) for seed in range(100)), 60)


@pytest.mark.parametrize(("seed", "can_fit"), [(51, True), (131, False)])
def test_evaluation_fits_as_well_or_a_line_says_that_it_does_not(seed: int, can_fit: bool) -> None:
    problem, knobs, _ = random_case(seed)
    budget = problem.device_bytes
    assert memory_timeline(problem, search(problem, knobs)).device_peak > budget  # Training alone would fit.
    said: list[str] = []
    timeline = memory_timeline(problem, search_with_evaluation(problem, knobs, said.append))
    assert max(phase.total for phase in timeline.phases if phase.name != "evaluation") <= budget
    assert (timeline.device_peak <= budget, len(said)) == (can_fit, int(not can_fit))
    assert all("may run out of memory; training fits" in sentence for sentence in said)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1600, 50))
def test_the_search_finds_what_trying_all_plans_finds_in_many_cases(first: int) -> None:
    found = []
    for seed in range(first, first + 50):
        found.append(excess(*(random_case(seed, 8, 14) if seed % 4 == 0 else random_case(seed, 5, 9))))
    hold(found, 25)


@pytest.mark.slow
def test_going_downhill_is_about_as_good_as_trying_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are many candidates, the search evaluates few of them."""
    monkeypatch.setattr(candidates, "FEW", 40)
    parts, evaluations = [], 0
    for seed in range(3000, 3120):
        problem, knobs, allowed = random_case(seed, 8, 14)
        if any(one.fits(problem) for one in allowed) and not set(knobs.given) & COUNTED:
            parts.append(excess(problem, knobs, allowed))
            evaluations += find_any(problem, knobs).evaluations
    hold(parts, 35)
    assert evaluations < 40 * len(parts)


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["no descent", "no grid", "fewest buffers", "everything offloaded"])
def test_planted_bugs_are_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def most(_: Any, low: int, high: int, *__: Any) -> int:
        return high

    def nothing(*_: Any) -> Any:
        return iter(())

    monkeypatch.setattr(candidates, "FEW", 0)
    monkeypatch.setattr(searching, "STEPS", 2)
    if planted == "no descent":
        monkeypatch.setattr(searching._Search, "_descend", lambda *_: None)
    elif planted == "no grid":
        monkeypatch.setattr(searching._Search, "_grid", nothing)
    elif planted == "fewest buffers":
        monkeypatch.setattr(
            searching._Search, "_buffers", lambda self, point: self._packing.fewest_buffers(point.offloaded)
        )
    else:
        monkeypatch.setattr(searching, "_first", most)
    with pytest.raises((AssertionError, NoFeasiblePlan)):
        hold((excess(*random_case(seed, 6, 12)) for seed in range(4000, 4060)), 30)


def curve(first: int, number: int) -> float:
    return (3.0 if number < first else 1.0) * (first - number)


@pytest.mark.parametrize("slack", [1, 3])
def test_bisection_ends_next_to_the_first_number_without_excess(slack: int) -> None:
    for high in range(12):
        for first in range(high + 2):
            for guess in range(-1, high + 2):
                found = searching._first(partial(curve, first), (0, high), slack, guess, 2.0)
                assert (found is None) == (first > high)
                assert found is None or first <= found < first + slack


def test_what_fits_and_costs_nothing_stays() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        problem = replace(
            problem, hardware=replace(problem.hardware, device_step=1e30, memory=1e30), chunk_bytes=(None,)
        )
        plan = find_any(problem, Knobs()).plan
        assert plan.num_offloaded_chunks == 0
        assert {block.policy for block in plan.blocks} == {BlockPolicy.KEEP}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("overlap", "gibibytes", "head_calls", "is_tied"),
    [
        ("backward", 8, 1, False),
        ("backward", 60, 1, True),
        ("backward", 4, 8, True),
        ("forward", 20, 1, False),
        ("off", 4, 8, False),
    ],
)
def test_large_models_take_few_evaluations(
    overlap: Literal["off", "backward", "forward"], gibibytes: int, head_calls: int, is_tied: bool
) -> None:
    problem = with_budgets(large_problem(80, 25), gibibytes << 30, None)
    problem = with_calls_of_the_head(with_tied_head(problem) if is_tied else problem, head_calls)
    problem = replace(problem, training=Training(overlap))
    found = find_any(problem, Knobs())
    assert 0 < found.plan.num_offloaded_chunks < len(found.plan.chunks) == (2002 if is_tied else 2004)
    assert device_bytes(memory_timeline(problem, found.plan), found.plan, problem.evaluates) <= gibibytes << 30
    assert found.evaluations <= searching.LIMIT


def test_there_is_an_answer_under_every_budget() -> None:
    """Also where blocks recompute inside by themselves, so that checkpointing frees nothing."""
    problem = large_problem(12, 3)
    segments = tuple(
        replace(one, forward=forward_of(one.forward.live_bytes, peak(one.forward), 0, one.forward.operations))
        for one in problem.profile.segments
    )
    problem = replace(problem, profile=replace(problem.profile, segments=segments), chunk_bytes=(None, 1))
    fitting = 0
    for gibibytes in (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 6.0):
        try:
            fitting += bool(search(replace(problem, device_bytes=int(gibibytes * (1 << 30))), Knobs()))
        except NoFeasiblePlan:
            assert not fitting
    assert fitting >= 2


def test_inputs_that_move_are_those_of_the_first_checkpointed_blocks_that_can() -> None:
    moved = 0
    for seed in range(60):
        problem = random_problem(seed)
        packing, given = candidates.packings(problem, Knobs())[0], problem.movable_inputs
        assert problem.layout.blocks[-1].name not in given
        for point in packing.points(Knobs()):
            plan = packing.plan(point, packing.fewest_buffers(point.offloaded))
            able = [block for block in plan.blocks if block.policy is BlockPolicy.CHECKPOINT and block.name in given]
            expected = [given[block.name] * (index < point.num_inputs) for index, block in enumerate(able)]
            assert [block.swap_bytes for block in able] == expected
            others = [block for block in plan.blocks if block.swap_bytes and block not in able]
            assert all(block.policy is BlockPolicy.SWAP for block in others)
            moved += point.num_inputs > 0
    assert moved > 100


def with_large_inputs(problem: Problem, given: int) -> Problem:
    """Return the problem with blocks whose inputs take `given` bytes, so that recomputation leaves much."""

    def raised(one: Segment, more: int) -> Segment:
        ahead, back = one.forward, one.backward
        return replace(
            one,
            forward=replace(ahead, live_bytes=ahead.live_bytes + more),
            backward=replace(back, live_bytes=back.live_bytes + more, peak_bytes=back.peak_bytes + more),
            input_bytes=given,
            input_swap_bytes=given if one.input_swap_bytes else 0,
        )

    segments = [raised(one, at * given) for at, one in enumerate(problem.profile.segments)]
    return replace(problem, profile=replace(problem.profile, segments=tuple(segments)))


def test_inputs_move_only_where_that_makes_room() -> None:
    given = 400 << 20
    problem, took = with_large_inputs(large_problem(24, 4), given), []
    for gibibytes in (16, 13, 11, 9, 7, 5, 3):
        plan = search(replace(problem, device_bytes=gibibytes << 30), Knobs())
        took.append(sum(block.policy is BlockPolicy.CHECKPOINT and block.swap_bytes > 0 for block in plan.blocks))
    assert took == sorted(took)
    assert took[0] == 0 < took[-1] < 24


def test_the_plan_is_the_same_every_time() -> None:
    problem = random_problem(5)
    assert isinstance(search(problem, Knobs()), Plan)
    assert search(problem, Knobs()) == search(problem, Knobs())
