"""The prediction of a plan, and the advice that comes with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from lightning_protrain.config import Knobs
from lightning_protrain.planner.advice import expected, predict, scaled
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.search import Problem, search
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


def test_few_samples_are_warned_of() -> None:
    problem, _ = next(found for found in map(_tight, SEEDS) if found[1].num_offloaded_chunks)
    for samples, accumulate, warned in ((1, 1, True), (1, 3, True), (2, 2, False), (4, 1, False), (0, 1, False)):
        training = replace(problem.training, accumulate=accumulate)
        few = replace(problem, profile=replace(problem.profile, samples=samples), training=training)
        prediction = predict(few, search(few, Knobs())).prediction
        assert prediction is not None
        said = f"Warning: a step of {samples * accumulate} sample{'s' if accumulate > 1 else ''} streams weights"
        assert any(sentence.startswith(said) for sentence in prediction.advice) == warned


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scaled_profile_is_that_of_more_samples(seed: int) -> None:
    problem = random_problem(seed)
    double = scaled(problem.profile, 2)
    for one, two in zip(problem.profile.segments, double.segments, strict=True):
        assert two.forward.peak_bytes == 2 * one.forward.peak_bytes
        assert two.backward.live_bytes == 2 * one.backward.live_bytes
        assert (two.unit, two.gradients, two.casts) == (one.unit, one.gradients, one.casts)
        hardware = problem.hardware
        for way, name in (("backward", "operations"), ("forward", "operations"), ("forward", "again_operations")):
            seconds, more = (hardware.seconds(getattr(getattr(segment, way), name)) for segment in (one, two))
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
