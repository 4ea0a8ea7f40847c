"""The prediction of a plan, and the advice that comes with it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from operator import attrgetter

import pytest

from lightning_protrain.config import Knobs
from lightning_protrain.planner.advice import expected, larger_steps, predict, scaled, square_tensors
from lightning_protrain.planner.candidates import packings
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.replay import peak
from lightning_protrain.planner.search import Problem, find_any, search
from lightning_protrain.planner.step_time import step_time
from tests.planner.problems import random_network, random_problem

SEEDS = range(25)


@cache
def _tight(seed: int, share: float = 0.5) -> tuple[Problem, Plan]:
    """A problem whose budget lies between what the leanest and what the fastest plan take, and its plan."""
    problem = replace(random_problem(seed), device_bytes=1 << 50, host_bytes=1 << 50)
    roomy = memory_timeline(problem, search(problem, Knobs())).device_peak
    for part in (share, 0.8, 1.0):
        tight = replace(problem, device_bytes=int(roomy * part) + 1)
        try:
            return tight, search(tight, Knobs())
        except ValueError:
            continue
    return problem, search(problem, Knobs())


@pytest.mark.sample(18)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_prediction_is_that_of_the_models(seed: int) -> None:
    problem, plan = _tight(seed)
    predicted = predict(problem, plan)
    prediction = predicted.prediction
    assert prediction is not None
    timeline, time = (
        memory_timeline(problem, plan),
        step_time(problem, plan),
    )
    assert prediction.device_bytes == timeline.device_peak
    assert prediction.host_bytes == timeline.host_peak
    assert (prediction.step_seconds, prediction.bound) == (time.seconds, time.bound)
    assert prediction.budget == problem.device_bytes
    assert predicted.memory.total == max(timeline.device_peak, plan.memory.total)
    assert replace(predicted, prediction=None, memory=plan.memory) == plan
    assert Plan.from_json(predicted.to_json()) == predicted


@pytest.mark.parametrize("seed", SEEDS)
def test_what_ranks_would_take_alone_is_predicted_too(seed: int) -> None:
    problem = replace(random_problem(seed), device_bytes=1 << 50, host_bytes=1 << 50)
    problem = replace(problem, network=random_network(seed, problem))
    knobs = Knobs(num_persistent_chunks=seed % 3)
    plan = search(problem, knobs)
    prediction = expected(problem, plan)
    assert prediction.alone_seconds is not None
    time = step_time(problem, plan)
    assert prediction.alone_seconds == step_time(replace(problem, network=None), plan).seconds
    assert prediction.step_seconds == time.seconds
    assert prediction.busy["network"] == time.network
    searched = predict(problem, plan).prediction
    assert searched is not None
    assert replace(searched, advice=()) == prediction
    alone = expected(replace(problem, network=None), plan)
    assert (alone.alone_seconds, "network" in alone.busy) == (None, False)


def test_nothing_is_advised_where_nothing_is_streamed() -> None:
    seen = 0
    for seed in SEEDS:
        problem = replace(random_problem(seed), device_bytes=1 << 50, host_bytes=1 << 50)
        plan = search(problem, Knobs())
        prediction = predict(problem, plan).prediction
        assert prediction is not None
        if not plan.num_offloaded_chunks:
            seen += 1
            assert not any("GiB" in sentence or "batch" in sentence for sentence in prediction.advice)
    assert seen


def gains(problem: Problem, plan: Plan) -> dict[str, int]:
    """Percentages by the change that is named."""
    said = re.compile(r"(.+) is expected to train (\d+) % more tokens per second\.")
    found = [said.fullmatch(sentence) for sentence in larger_steps(problem, plan, Knobs())]
    return {match[1]: int(match[2]) for match in found if match}


def tokens_per_second(problem: Problem, plan: Plan) -> float:
    return problem.profile.tokens * problem.training.accumulate / step_time(problem, plan).seconds


def test_the_best_change_is_named_if_and_only_if_the_planner_expects_five_per_cent() -> None:
    batch, more, named = "Twice the micro-batch size", "accumulate_grad_batches={}", set[str]()
    for problem, plan in map(_tight, SEEDS):
        problem = replace(problem, profile=replace(problem.profile, tokens=64))
        plan = predict(problem, plan)
        found, now = gains(problem, plan), tokens_per_second(problem, plan)
        if not plan.num_offloaded_chunks:
            assert found == {}
            continue
        twice = replace(problem, profile=scaled(problem.profile, 2), chunk_bytes=problem.chunk_bytes[:1])
        count = 2 * problem.training.accumulate
        layout = replace(problem.layout, lends_copies=False)
        accumulated = replace(problem, training=replace(problem.training, accumulate=count), layout=layout)
        timeline = memory_timeline(accumulated, plan)
        expected = {}
        if (larger := find_any(twice, Knobs())) is not None:
            expected[batch] = tokens_per_second(twice, larger.plan) / now
        if timeline.device_peak <= problem.device_bytes and timeline.host_peak <= (problem.host_bytes or 1 << 62):
            expected[more.format(count)] = tokens_per_second(accumulated, plan) / now
        best = max(expected, key=expected.__getitem__, default="")
        gain = expected.get(best, 1.0)
        assert found == ({best: round(100 * (gain - 1))} if gain >= 1.05 else {})
        named |= found.keys()
    assert batch in named
    assert len(named) > 1


@pytest.mark.parametrize("seed", [1, 5])
def test_pins_that_only_smaller_chunks_allow_are_advised_on(seed: int) -> None:
    problem = replace(random_problem(seed), device_bytes=1 << 50, host_bytes=1 << 50)
    few, most = (count(len(packing.chunks) for packing in packings(problem, Knobs())) for count in (min, max))
    knobs = Knobs(num_persistent_chunks=few + 1)
    assert few < most
    plan = predict(problem, search(problem, knobs))
    assert all("more tokens per second" in sentence for sentence in larger_steps(problem, plan, knobs))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scaled_profile_is_that_of_more_samples(seed: int) -> None:
    problem = random_problem(seed)
    double = scaled(problem.profile, 2)
    for one, two in zip(problem.profile.segments, double.segments, strict=True):
        assert peak(two.forward) == 2 * peak(one.forward)
        assert two.backward.live_bytes == 2 * one.backward.live_bytes
        assert (two.unit, two.gradients, two.casts) == (one.unit, one.gradients, one.casts)
        hardware = problem.hardware
        for of in (attrgetter("backward.operations"), attrgetter("forward.operations")):
            seconds, more = (hardware.seconds(of(segment)) for segment in (one, two))
            assert more == pytest.approx(2 * seconds)
    assert scaled(problem.profile, 1) == problem.profile


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_device_has_not_is_warned_of(seed: int) -> None:
    problem, plan = _tight(seed)
    taken = memory_timeline(problem, plan).device_peak
    for has, said in ((taken, ()), (taken - 1, ("Warning: it would run out of memory",))):
        on = replace(problem, hardware=replace(problem.hardware, device_bytes=has))
        advice = expected(on, plan).advice
        assert len(advice) == len(said)
        assert all(sentence.startswith(start) for sentence, start in zip(advice, said, strict=True))


def _advised(nbytes: int, kernels: tuple[tuple[str, int], ...], peak: int = 1 << 30, length: int = 16_384) -> list[str]:
    profile = replace(random_problem(0).profile, samples=2, tokens=2 * 16_384, attention=kernels)
    return [*square_tensors(replace(profile, squares=((length, nbytes),)), peak)]


@pytest.mark.parametrize(
    ("kernels", "instead"), [((("efficient", 4),), "give sdpa rows without padding"), ((), "or sdpa if the model has")]
)
def test_masks_and_scores_are_named_with_what_avoids_them(kernels: tuple[tuple[str, int], ...], instead: str) -> None:
    (said,) = _advised(512 << 20, kernels)
    assert "16,384 x 16,384 tokens, 512.0 MiB" in said
    assert "attn_implementation: flash_attention_2" in said
    assert instead in said


def test_small_masks_and_other_squares_are_not_named() -> None:
    kernels = (("efficient", 4),)
    assert _advised(512 << 20, kernels, peak=1 << 40) == []
    assert _advised(512 << 20, kernels, length=4096) == []
    assert [*square_tensors(random_problem(0).profile, 1)] == []


def test_a_plan_names_a_mask() -> None:
    problem, plan = _tight(0)
    profile = replace(problem.profile, samples=1, tokens=4096, squares=((4096, 1 << 40),))
    prediction = predict(replace(problem, profile=profile), plan).prediction
    assert prediction is not None
    assert any("4,096 x 4,096 tokens, 1024.0 GiB" in said for said in prediction.advice)
