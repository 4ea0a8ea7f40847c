"""What a plan is expected to give, and which advice goes with it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from lightning_protrain.config import Knobs
from lightning_protrain.planner import advice
from lightning_protrain.planner.advice import expected, predict, scaled
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.problem import Training
from lightning_protrain.planner.search import NoFeasiblePlan, Problem, search
from lightning_protrain.planner.step_time import step_time
from lightning_protrain.profiler.records import ModelProfile, OperationCost, ParameterUse, Pass, Segment, UnitCall
from tests.planner.layouts import transformer
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
    predicted = predict(problem, plan, Knobs())
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
    searched = predict(problem, plan, knobs).prediction
    assert searched is not None
    assert replace(searched, advice=()) == prediction
    alone = expected(replace(problem, network=None), plan)
    assert (alone.alone_seconds, "network" in alone.busy) == (None, False)


def test_nothing_is_advised_where_nothing_is_streamed() -> None:
    seen = 0
    for seed in SEEDS:
        problem = replace(random_problem(seed), device_bytes=1 << 50, host_bytes=1 << 50)
        plan = search(problem, Knobs())
        prediction = predict(problem, plan, Knobs()).prediction
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
        prediction = predict(few, search(few, Knobs()), Knobs()).prediction
        assert prediction is not None
        said = f"Warning: a step of {samples * accumulate} sample{'s' if accumulate > 1 else ''} streams weights"
        assert any(sentence.startswith(said) for sentence in prediction.advice) == warned


def test_more_memory_is_advised_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "GIB", 1 << 40)
    said = [
        (predict(problem, plan, Knobs()).prediction, problem)
        for problem, plan in map(_tight, SEEDS)
        if plan.num_offloaded_chunks
    ]
    helped = 0
    for prediction, problem in said:
        assert prediction is not None
        best = search(replace(problem, device_bytes=(problem.device_bytes or 0) + (1 << 40)), Knobs())
        seconds = step_time(problem, best).seconds
        worth = seconds < 0.98 * prediction.step_seconds
        helped += worth
        said_of_it = [sentence for sentence in prediction.advice if sentence.startswith("One more GiB")]
        assert len(said_of_it) == 1
        assert ("would buy nothing" in said_of_it[0]) == (not worth)
    assert 0 < helped < len(said)


def test_a_larger_batch_is_advised_only_if_it_is_faster_for_each_sample() -> None:
    advised = 0
    for problem, _ in map(_tight, SEEDS):
        loose = replace(problem, profile=replace(problem.profile, samples=8, tokens=800), device_bytes=1 << 50)
        streamed = replace(Knobs(), num_persistent_chunks=0)
        plan = search(loose, streamed)
        prediction = predict(loose, plan, streamed).prediction
        assert prediction is not None
        sentences = [sentence for sentence in prediction.advice if sentence.startswith("A micro-batch of ")]
        advised += len(sentences)
        if plan.num_offloaded_chunks and prediction.bound == "compute":
            assert not sentences
        for sentence in sentences:
            assert float(sentence.partition(": ")[2].partition(" times")[0]) >= 1.0
            assert "tokens per second in place of" in sentence
    assert advised


def _hand_made(host_step: float, upload: float) -> tuple[Problem, Plan]:
    """Four blocks that are streamed on a device that is full with the working memory of one micro-batch."""
    layout = transformer(num_blocks=4, numel=1000, vocabulary=1000, tied=False)
    cost = (OperationCost(1000, 0, "float32"),)
    segments, calls = [], []
    for place, unit in enumerate(layout.units):
        way = Pass(0, 1_000_000, cost)
        segments.append(Segment(unit.name, way, way, 1_000_000, 0, 0, 0, (), unit.parameters))
        calls.append(UnitCall(unit.name, place, 0, (), 0, 0, 1000, 0, 0))
    uses = tuple(ParameterUse(info.fqn) for info in layout.parameters)
    profile = ModelProfile(tuple(calls), uses, 0, (), 0, 0, 1_000_000, tuple(segments), samples=4, tokens=400)
    rates = {"upload": upload, "upload_beside": upload, "download": upload, "download_beside": upload}
    machine = replace(random_problem(0).hardware, **rates, host_step=host_step, flops={"float32": 1e6}, memory=1e12)
    machine = replace(machine, device_step=1e12, host_memory=1e12, asynchronous=True)
    problem = Problem(profile, layout, machine, Training(), 8.0, 1 << 40, 1 << 40)
    plan = search(problem, STREAMED)
    return replace(problem, device_bytes=memory_timeline(problem, plan).device_peak), plan


STREAMED = Knobs(num_persistent_chunks=0, num_chunk_buffers=3)


@pytest.mark.parametrize("present", [1, 3])
def test_accumulation_is_advised_where_no_larger_batch_fits(present: int) -> None:
    """The host steps 10,064 elements for 1 s; a micro-batch takes a few hundredths of that."""
    problem, plan = _hand_made(host_step=10_000, upload=1e9)
    with pytest.raises(NoFeasiblePlan):
        search(replace(problem, profile=scaled(problem.profile, 2)), STREAMED)
    problem = replace(problem, training=Training(accumulate=present))
    prediction = predict(problem, plan, STREAMED).prediction
    assert prediction is not None
    assert prediction.bound == "host"
    (sentence,) = [sentence for sentence in prediction.advice if "micro-batch" in sentence]
    found = re.fullmatch(
        r"A step of (\d+) micro-batches \(accumulate_grad_batches\) would hide (?:more of )?the host's optimizer step: "
        r"([\d.]+) times the throughput, ([\d,]+) tokens per second in place of ([\d,]+)\.",
        sentence,
    )
    assert found is not None
    count, times, then, now = (float(part.replace(",", "")) for part in found.groups())
    more = replace(problem, training=Training(accumulate=int(count)))
    seconds = step_time(more, search(more, STREAMED)).seconds
    assert count in {present * factor for factor in (2, 4, 8, 16)}
    assert then == pytest.approx(count * 400 / seconds, abs=0.5)
    assert now == pytest.approx(present * 400 / prediction.step_seconds, abs=0.5)
    assert times == pytest.approx(then / now, rel=0.05)
    assert then > 1.02 * now


def test_nothing_is_advised_where_neither_batch_nor_accumulation_helps() -> None:
    """Every micro-batch streams all weights again, and the link is all that the step waits for."""
    problem, plan = _hand_made(host_step=1e12, upload=1e4)
    prediction = predict(problem, plan, STREAMED).prediction
    assert prediction is not None
    assert prediction.bound == "link"
    assert not any("micro-batch" in sentence for sentence in prediction.advice)


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
