"""Bounds of boxes of candidates, and what is cut off them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_protrain.planner import space
from lightning_protrain.planner.averages import Averages
from lightning_protrain.planner.candidates import Candidates
from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.problem import Packing
from lightning_protrain.planner.sums import Sums
from lightning_protrain.planner.training import Training
from tests.planner.brute import all_candidates
from tests.planner.problems import large_problem, random_network, random_problem, with_budgets, with_repeats
from tests.planner.test_search import budgets


def check_bounds(seed: int, sends: bool = False) -> None:
    """Bounds of boxes for one number of swapped blocks are below all their plans."""
    source = random.Random(seed)
    problem = random_problem(seed, 4, 8)
    if seed % 2:
        problem = with_repeats(source, problem)
    if sends:
        problem = replace(problem, network=random_network(seed, problem))
    found = list(all_candidates(problem, Knobs()))
    problem = with_budgets(problem, *budgets(source, found))
    packing = Packing(problem, problem.chunk_bytes[0], None)
    over = space.Space(packing, Knobs())
    low, high = over.roots()
    for swap, root_low, root_high in zip(low[0], low.T, high.T, strict=True):
        axes = [np.arange(first, last + 1) for first, last in zip(root_low[1:], root_high[1:], strict=True)]
        points = np.stack([np.full((len(axes[0]), len(axes[1])), swap), *np.meshgrid(*axes, indexing="ij")]).reshape(
            3, -1
        )
        values = over.seconds(points, points)
        for _ in range(20):
            first = np.array([source.randint(*pair) for pair in zip(root_low, root_high, strict=True)])
            last = np.array([source.randint(*pair) for pair in zip(first, root_high, strict=True)])
            inside = ((points >= first[:, None]) & (points <= last[:, None])).all(axis=0)
            if (first < last).any():
                assert over.seconds(first[:, None], last[:, None])[0] <= values[inside].min()


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_below_all_their_plans(seed: int, sends: bool) -> None:
    check_bounds(seed, sends)


def sends_less_often(sums: Sums, persistent: Any, fewest: Any, loose: Any) -> Averages:
    return replace(of(sums, persistent, fewest, loose), sends=sums._latest >= persistent)


def lands_late(sums: Sums, persistent: Any, fewest: Any, loose: Any) -> Averages:
    exact = of(sums, persistent, fewest, np.zeros_like(loose))
    return replace(exact, least=of(sums, persistent, fewest, loose).least)


def sends_what_is_resident_twice(sums: Sums, persistent: Any, fewest: Any, loose: Any) -> Averages:
    return replace(of(sums, persistent, fewest, loose), resident=of(sums, persistent, persistent, loose).resident)


of = Sums.of


@pytest.mark.parametrize("planted", [sends_less_often, lands_late, sends_what_is_resident_twice])
def test_what_plans_send_is_no_bound_of_a_set(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "of", planted)
    failed = 0
    for seed in range(40, 160):
        try:
            check_bounds(seed, sends=True)
        except AssertionError:
            failed += 1
    assert failed


def check_boxes(seed: int) -> None:
    """Bounds over several numbers of swapped blocks are below all their plans, and what is cut off does not fit."""
    source = random.Random(seed)
    problem = random_problem(seed, 5, 8)
    if problem.training.overlap == "backward":  # It has a box for each number.
        problem = replace(problem, training=replace(problem.training, overlap="forward"))
    found = list(all_candidates(problem, Knobs()))
    problem = with_budgets(problem, *budgets(source, found))
    over = space.Space(Packing(problem, problem.chunk_bytes[0], None), Knobs())
    (low, high), (root_low, root_high) = over.whole(), over.roots()
    assert low.shape == (3, 1)
    axes = [np.arange(first, last + 1) for first, last in zip(low[:, 0], high[:, 0], strict=True)]
    points = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(3, -1)
    points = points[:, points[1] <= root_high[1][points[0]]]
    assert points.shape[1] == (root_high - root_low + 1).prod(axis=0).sum()
    values = over.seconds(points, points)
    corners = [[[source.randint(*pair[:, 0]) for pair in np.stack((low, high), 1)] for _ in range(20)] for _ in "ab"]
    first, last = np.sort(np.array(corners), axis=0).swapaxes(1, 2)
    for one, other in zip(first.T, last.T, strict=True):
        within = ((points >= one[:, None]) & (points <= other[:, None])).all(axis=0)
        small, large = over.cut(one[:, None], other[:, None])
        kept = within & ((points >= small) & (points <= large)).all(axis=0) if small.size else np.zeros_like(within)
        assert np.isinf(values[within & ~kept]).all()
        if small.size and (small <= large).all() and (small < large).any():
            assert (over.seconds(small, large)[0] <= values[kept]).all()


@pytest.mark.parametrize("seed", range(30))
def test_boxes_over_several_numbers_of_swapped_blocks(seed: int) -> None:
    check_boxes(seed)


@pytest.mark.parametrize("planted", ["_taken", "_simulate"])
def test_what_is_of_the_fewest_swapped_blocks_alone_is_no_bound(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(space.Space, planted)
    monkeypatch.setattr(
        space.Space, planted, lambda self, found, *rest: real(self, replace(found, swaps=found.swap), *rest)
    )
    failed = 0
    for seed in range(40, 100):
        try:
            check_boxes(seed)
        except AssertionError:
            failed += 1
    assert failed


def alone_behind_forward(seed: int) -> space.Space:
    """A search in which boxes are bounded by their backwards."""
    problem = random_problem(seed, 5, 8)
    training = replace(problem.training, overlap="forward", accumulate=1)
    hardware = replace(problem.hardware, asynchronous=True)
    problem = replace(problem, training=training, hardware=hardware)
    return space.Space(Packing(problem, problem.chunk_bytes[0], None), Knobs())


def points_of(over: space.Space) -> Any:
    """All candidates, (3, K)."""
    each = zip(*(corners.T for corners in over.roots()), strict=True)
    grids = [np.meshgrid(*map(np.arange, low, high + 1), indexing="ij") for low, high in each]
    return np.hstack([np.stack(grid).reshape(3, -1) for grid in grids])


def test_points_that_take_more_than_is_of_interest_may_be_left_out() -> None:
    left_out = 0
    for over in map(alone_behind_forward, range(20)):
        assert over._behind_last_step
        points = points_of(over)
        values = over.seconds(points, points)
        below = float(np.median(values))
        some = over.seconds(points, points, below)
        assert ((some == values) | ((some == np.inf) & (values > below))).all()
        left_out += bool((some != values).any())
    assert left_out > 10


def behind_too_much(_: Any, persistent: Any) -> Any:
    return np.full((1, len(persistent)), 1e3)


def test_what_is_more_than_the_last_upload_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Candidates, "last_tail", behind_too_much)
    failed = 0
    for seed in range(40, 100):
        try:
            check_boxes(seed)
        except AssertionError:
            failed += 1
    assert failed


@pytest.mark.parametrize("change", [{"overlap": "off"}, {"overlap": "backward", "clips": False}, {"accumulate": 2}])
def test_other_steps_are_bounded_as_a_whole(change: dict[str, Any]) -> None:
    problem = alone_behind_forward(0).packing.problem
    other = replace(problem, training=replace(problem.training, **change))
    assert not space.Space(Packing(other, problem.chunk_bytes[0], None), Knobs())._behind_last_step


def test_with_steps_behind_backward_each_number_of_swapped_blocks_has_a_box() -> None:
    problem = replace(random_problem(1, 5, 8), training=Training("backward"))
    apart = space.Space(Packing(problem, problem.chunk_bytes[0], None), Knobs())
    for found, expected in zip(apart.whole(), apart.roots(), strict=True):
        assert found.tolist() == expected.tolist()
    together = replace(problem, training=Training("forward"))
    assert space.Space(Packing(together, problem.chunk_bytes[0], None), Knobs()).whole()[0].shape == (3, 1)


def demanded(seed: int) -> tuple[int, int]:
    """How many plans are left out for their few buffers, and how many of them are fast enough to be of interest."""
    source = random.Random(seed)
    problem = random_problem(seed, 5, 8)
    if problem.training.overlap == "backward":  # There nothing is left out.
        problem = replace(problem, training=replace(problem.training, overlap="forward"))
    devices = sorted(candidate.device for candidate in all_candidates(problem, Knobs()))
    problem = with_budgets(problem, source.choice(devices[: len(devices) // 3 + 1]), None)
    over = space.Space(Packing(problem, problem.chunk_bytes[-1], None), Knobs())
    points = np.hstack([
        np.stack(np.meshgrid(*map(np.arange, low, high + 1), indexing="ij")).reshape(3, -1)
        for low, high in zip(*(corners.T for corners in over.roots()), strict=True)
    ])  # fmt: skip
    values = over.seconds(points, points)
    *_, below, tried = over.begin(np.inf)
    assert below == np.inf or (tried and values.min() < below)
    kept = over.cut(points, points)[0]
    left_out = np.isfinite(values) & ~(points[:, :, None] == kept[:, None]).all(axis=0).any(axis=1)
    return int(left_out.sum()), int((left_out & (values < below)).sum())


def test_plans_with_too_few_buffers_are_left_out() -> None:
    left_out, fast = zip(*map(demanded, range(60)), strict=True)
    assert sum(number > 0 for number in left_out) >= 5
    assert not any(fast)


def test_what_is_no_bound_leaves_out_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = space.Space._simulate

    def slow(self: space.Space, found: Any, *rest: Any) -> Any:
        return np.where(found.point, 1.0, 1.5) * simulated(self, found, *rest)

    monkeypatch.setattr(space.Space, "_simulate", slow)
    assert sum(demanded(seed)[1] for seed in range(30))


def test_with_steps_behind_backward_or_pinned_buffers_nothing_is_left_out() -> None:
    problem = with_budgets(large_problem(6, 4), 8 << 30, None)
    for training, knobs in ((Training("backward"), Knobs()), (Training("off"), Knobs(num_chunk_buffers=4))):
        changed = replace(problem, training=training)
        over = space.Space(Packing(changed, changed.chunk_bytes[0], None), knobs)
        assert over.begin(3.0)[2:] == (3.0, 0)
