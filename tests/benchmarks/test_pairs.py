"""The ratio of pairs: coverage, symmetry, and that one useless pair does not move it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import pairs
from benchmarks.pairs import Comparison, compare, median_ratio
from benchmarks.subjects import Facts, Step, Subject

positive = st.floats(0.01, 100.0)


@given(st.lists(positive, min_size=6, max_size=60))
def test_the_interval_holds_the_median_of_the_pairs(ratios: list[float]) -> None:
    ratio = median_ratio(ratios)
    assert min(ratios) <= ratio.lower <= ratio.median <= ratio.upper <= max(ratios)
    assert 0.95 <= ratio.confidence < 1


@given(st.lists(positive, min_size=1, max_size=21).filter(lambda ratios: len(ratios) % 2 == 1))
def test_the_peer_over_the_subject_is_the_reciprocal(ratios: list[float]) -> None:
    forth, back = median_ratio(ratios), median_ratio([1 / ratio for ratio in ratios])
    assert (back.median, back.lower, back.upper) == pytest.approx((1 / forth.median, 1 / forth.upper, 1 / forth.lower))


@pytest.mark.parametrize("num_pairs", [6, 11, 12, 40])
def test_the_interval_holds_the_true_median_as_often_as_it_says(num_pairs: int) -> None:
    draw = random.Random(3)
    trials = [median_ratio([math.exp(draw.gauss(0, 0.1)) for _ in range(num_pairs)]) for _ in range(2000)]
    held = sum(trial.lower <= 1 <= trial.upper for trial in trials) / len(trials)
    assert held == pytest.approx(trials[0].confidence, abs=0.02)


@pytest.mark.parametrize(("num_pairs", "confidence"), [(1, 0.0), (2, 0.5), (5, 0.9375)])
def test_few_pairs_give_their_range_and_say_what_it_is_worth(num_pairs: int, confidence: float) -> None:
    ratios = [1.0 + 0.1 * index for index in range(num_pairs)]
    ratio = median_ratio(ratios)
    assert (ratio.lower, ratio.upper) == (ratios[0], ratios[-1])
    assert ratio.confidence == pytest.approx(confidence)


def test_one_disturbed_pair_does_not_move_the_interval() -> None:
    ratios = [0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06]
    disturbed = median_ratio([*ratios[:-1], 50.0])
    assert disturbed.upper < 1.06
    assert disturbed.median == median_ratio(ratios).median


def _steps(*losses: float) -> tuple[Step, ...]:
    return tuple(Step(wall_seconds=2.0 + i, cpu_seconds=1.0, loss=loss) for i, loss in enumerate(losses))


def test_losses_are_compared_bit_for_bit() -> None:
    facts = Facts(num_params=1)
    same = Comparison(_steps(1.0, 0.5), _steps(1.0, 0.5), facts, facts)
    other = Comparison(_steps(1.0, 0.5), _steps(1.0, math.nextafter(0.5, 1)), facts, facts)
    assert same.same_losses
    assert not other.same_losses
    assert same.wall.median == same.cpu.median == 1.0


def test_pairs_of_all_launches_count(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(num_params=1)
    launches = [
        Comparison(_steps(1.0, 0.5), _steps(1.0, 0.5), facts, facts),
        Comparison(_steps(2.0), _steps(2.0), facts, facts),
    ]
    monkeypatch.setattr(pairs, "_launch", lambda *_: launches.pop(0))
    comparison = compare(Subject("a", None, steps=2), Subject("b", None, steps=2), warmup=1, launches=2)
    assert [step.loss for step in comparison.steps] == [step.loss for step in comparison.peer_steps] == [1.0, 0.5, 2.0]


def test_both_runs_must_be_of_the_same_length() -> None:
    with pytest.raises(AssertionError):
        compare(Subject("a", None, steps=3), Subject("b", None, steps=4), warmup=1)
