from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from lightning_protrain.planner.branch import Floats, Integers, divide, minimize


def grid_of(seed: int) -> Floats:
    """Values at all points of a small box, many of them alike, some not allowed."""
    generator = np.random.default_rng(seed)
    values = generator.integers(0, 6, generator.integers(1, 9, 3)).astype(float)
    values[generator.random(values.shape) < generator.random()] = np.inf
    return values


def brute_force(values: Floats) -> tuple[float, tuple[int, ...]]:
    least = min((values[point], point) for point in product(*map(range, values.shape)))
    return least if np.isfinite(least[0]) else (np.inf, ())


def bound_of(values: Floats, slack: float):
    def bound(low: Integers, high: Integers, _: float) -> Floats:
        bounds = []
        for first, last in zip(low.T, high.T, strict=True):
            box = values[tuple(slice(start, end + 1) for start, end in zip(first, last, strict=True))]
            bounds.append(box.min() - slack * (box.size > 1))
        return np.array(bounds)

    return bound


def whole(values: Floats) -> tuple[Integers, Integers]:
    high = np.array(values.shape)[:, None] - 1
    return np.zeros_like(high), high


@pytest.mark.parametrize("slack", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("batch", [1, 16, 768])
def test_the_least_value_is_found_whatever_the_bounds(slack: float, batch: int) -> None:
    for seed in range(60):
        values = grid_of(seed)
        for probe in (lambda low, high: low, lambda low, high: high):
            found = minimize(bound_of(values, slack), probe, *whole(values), batch=batch)
            assert (found.value, found.point) == brute_force(values)


@pytest.mark.parametrize("planted", [0.5, 1.0, 2.0])
def test_bounds_that_are_none_are_found_out(planted: float) -> None:
    wrong = 0
    for seed in range(60):
        values = grid_of(seed)
        found = minimize(bound_of(values, -planted), lambda low, high: high, *whole(values), batch=16)
        wrong += (found.value, found.point) != brute_force(values)
    assert wrong


def cut_of(values: Floats, wrong: bool = False):
    """Cuts a box off up to the first point in the last direction that is allowed; or one further."""

    def cut(low: Integers, high: Integers) -> tuple[Integers, Integers]:
        low = low.copy()
        for column in range(low.shape[1]):
            box = values[tuple(slice(a, b + 1) for a, b in zip(low[:, column], high[:, column], strict=True))]
            some = np.flatnonzero(np.isfinite(box).any(axis=(0, 1)))
            low[2, column] += (some[0] if some.size else box.shape[2]) + wrong
        return low, high

    return cut


@pytest.mark.parametrize("weights", [None, np.array([[1.0], [0.1], [7.0]])])
@pytest.mark.parametrize("batch", [1, 16, 768])
def test_what_is_not_allowed_is_cut_off(batch: int, weights: Floats | None) -> None:
    plain = fewer = wrong = 0
    for seed in range(60):
        values = grid_of(seed)
        bound, corner = bound_of(values, 1.0), lambda low, high: low
        found = minimize(bound, corner, *whole(values), batch=batch, cut=cut_of(values), weights=weights)
        assert (found.value, found.point) == brute_force(values)
        plain += minimize(bound, corner, *whole(values), batch=batch).evaluations
        fewer += found.evaluations
        planted = minimize(bound, corner, *whole(values), batch=batch, cut=cut_of(values, True), weights=weights)
        wrong += (planted.value, planted.point) != brute_force(values)
    assert fewer < plain
    assert wrong


@pytest.mark.timeout(60)
@pytest.mark.parametrize("weights", [[1.0, 0.0, 7.0], [0.0, 0.0, 0.0]])
def test_sides_that_cost_nothing_are_divided_too(weights: list[float]) -> None:
    for seed in range(60):
        values = grid_of(seed)
        found = minimize(
            bound_of(values, 1.0), lambda low, high: low, *whole(values), batch=16, weights=np.array(weights)[:, None]
        )
        assert (found.value, found.point) == brute_force(values)


def test_the_search_ends_at_a_limit_with_the_best_that_was_found() -> None:
    evaluations = limited = 0
    for seed in range(60):
        values = grid_of(seed)
        how = bound_of(values, 100.0), lambda low, high: low, *whole(values)
        found = minimize(*how, batch=4, limit=8)
        assert bool(found.point) == bool(np.isfinite(values).any())
        assert not found.point or found.value == values[found.point]
        limited += found.evaluations
        evaluations += minimize(*how, batch=4).evaluations
    assert limited < evaluations / 2


def test_only_values_below_are_of_interest() -> None:
    for seed in range(60):
        values = grid_of(seed)
        least, point = brute_force(values)
        for below in (least, least + 0.5):
            found = minimize(bound_of(values, 0.0), lambda low, high: low, *whole(values), below=below)
            assert (found.value, found.point) == ((least, point) if least < below else (below, ()))


def test_several_boxes_and_empty_ones() -> None:
    values = np.arange(24.0)[::-1].reshape(2, 3, 4)
    low, high = np.array([[0, 1, 1], [0, 2, 1], [1, 0, 3]]), np.array([[0, 1, 1], [1, 1, 2], [2, 3, 3]])
    found = minimize(bound_of(values, 0.0), lambda low, high: low, low, high)
    assert (found.value, found.point) == (0.0, (1, 2, 3))
    assert minimize(bound_of(values, 0.0), lambda low, high: low, high[:, :0], high[:, :0]).point == ()


@pytest.mark.parametrize("pieces", [2, 3, 16, 1000])
def test_pieces_make_up_the_box(pieces: int) -> None:
    generator = np.random.default_rng(pieces)
    low = generator.integers(0, 5, (3, 7))
    high = low + generator.integers(0, 9, (3, 7))
    new_low, new_high = divide(low, high, pieces)
    assert (new_low <= new_high).all()
    points = [
        (*point,)
        for first, last in zip(new_low.T, new_high.T, strict=True)
        for point in product(*(range(start, end + 1) for start, end in zip(first, last, strict=True)))
    ]
    expected = [
        (*point,)
        for first, last in zip(low.T, high.T, strict=True)
        for point in product(*(range(start, end + 1) for start, end in zip(first, last, strict=True)))
    ]
    assert sorted(points) == sorted(expected)
    divisible = int(((high > low).any(axis=0)).sum())
    assert new_low.shape[1] >= low.shape[1] + divisible
