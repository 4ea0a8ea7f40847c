"""What gradients hold up: by hand, against waiting gradient by gradient, and as bounds of sets of plans."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_protrain.planner.landing import NEVER, Landings, Near, come_together, walk

COUNT = 4
NOTHING = (np.inf,) * 3
Model = tuple[list[int], list[int], list[int], list[float], list[float], list[float]]


@pytest.mark.parametrize(
    ("near", "room", "found"),
    [
        # 1. All fits: the last one lands behind the one before, or when it is there.
        (Near((3, 1), (1.0, 2.0), (), (1, 0), NOTHING[:2], 2.0), 9, (0.0, NEVER, 5.0, 4.0, NEVER, NEVER)),
        (Near((1, 3), (1.0, 2.0), (), (3, 0), NOTHING[:2], 2.0), 9, (0.0, NEVER, 5.0, 4.0, NEVER, NEVER)),
        # 2. Two of three, and then one of 3 at a time: the second waits for the first until 4, which is 2 late; the
        #    third until 7, which is 4 late. A link that is free at 0 is waited for just as long, till 6.
        (Near((3, 3, 3), (1.0, 2.0, 3.0), (), (3, 3, 3), NOTHING, 3.0), 6, (4.0, 6.0, 10.0, 9.0, NEVER, NEVER)),
        # 3. The same behind another one of 3: the first waits for that, too.
        (Near((3,), (1.0,), (3,), (3,), NOTHING[:1], 2.0), 6, (0.0, 1.0, 4.0, 3.0, NEVER, NEVER)),
        # 4. Of those before, the latest may be under way: the link has carried the one before it 1 ago.
        (Near((3,), (1.0,), (1, 3), (2,), NOTHING[:1], 2.0), 6, (0.0, 0.0, 4.0, 3.0, NEVER, NEVER)),
        # 5. The worker begins when the first of two is there, and works longer than the other one takes to come.
        (Near((3, 1), (1.0, 2.0), (), (1, 0), (0.0, 9.0), 2.0), 9, (0.0, NEVER, 5.0, 4.0, 4.0, 3.0)),
        # 6. It has done a first one of 1 when the second is there, and waits: as if it had begun 1 before that.
        (Near((3, 5), (1.0, 2.0), (), (5, 0), (0.0, 1.0), 2.0), 9, (0.0, NEVER, 9.0, 8.0, 8.0, 7.0)),
        # 7. Only the last one completes a chunk.
        (Near((3, 1), (1.0, 2.0), (), (1, 0), (np.inf, 0.0), 2.0), 9, (0.0, NEVER, 5.0, 4.0, 5.0, 4.0)),
    ],
)
def test_cases_by_hand(near: Near, room: int, found: tuple[float, ...]) -> None:
    assert walk(near, room, 1.0) == found


def test_gradients_of_a_module_come_together() -> None:
    shapes = {"a.bias": (2,), "a.weight": (2, 3), "norm.weight": (2,)}
    assert come_together(tuple(shapes), [math.prod(shape) for shape in shapes.values()]) == [0.8, 0.8, 1.0]
    assert come_together((), []) == []


@st.composite
def models(draw: st.DrawFn, in_order: bool = False) -> Model:
    """Positions, chunks, bytes, parts and works of gradients, and the computation of positions."""
    count = draw(st.integers(1, 12))
    positions = sorted(draw(st.lists(st.integers(0, COUNT - 1), min_size=count, max_size=count)), reverse=True)
    chunks = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    nbytes = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    parts = [draw(st.sampled_from((0.25, 0.5, 1.0))) for _ in range(count)]
    for at in range(1, count):
        if positions[at] == positions[at - 1]:
            parts[at] = max(parts[at], parts[at - 1])
    computes = [draw(st.sampled_from((0.0, 4.0, 8.0))) for _ in range(COUNT)]
    works = [draw(st.sampled_from((0.0, 1.0, 6.0))) for _ in range(count)]
    return positions, sorted(chunks, reverse=True) if in_order else chunks, nbytes, parts, works, computes


def landings(model: Model) -> Landings:
    positions, chunks, nbytes = (np.array(values, dtype=np.int64) for values in model[:3])
    parts, works, computes = (np.array(values) for values in model[3:])
    return Landings(positions, chunks, nbytes, parts, works, computes, (1.0, 0.5))


def durations(found: Landings, persistent: int, room: int, loose: bool = False) -> NDArray[np.float64]:
    """Those of one plan at the first rate, (6, P)."""
    return found.of(np.array([persistent]), np.array([room]), np.array([loose]))[0, ..., 0]


def room_of(nbytes: list[int]) -> int:
    return sum(sorted(nbytes)[-2:])


@given(models(), st.integers(0, 6))
def test_resident_chunks_are_as_if_they_had_no_gradients(model: Model, persistent: int) -> None:
    chunks, nbytes, computes = model[1], model[2], model[5]
    left = [index for index, chunk in enumerate(chunks) if chunk >= persistent]
    kept = tuple([values[index] for index in left] for values in model[:5])
    room = room_of(nbytes)
    alone = durations(landings((*kept, computes)), 0, room)
    assert durations(landings(model), persistent, room).tolist() == alone.tolist()


@given(models(in_order=True), st.integers(0, 6), st.integers(0, 6), st.integers(0, 9))
def test_sets_have_a_bound(model: Model, one: int, other: int, more: int) -> None:
    """Of plans with fewer resident chunks, and less room: but for positions where the bound has nothing land."""
    found, room = landings(model), room_of(model[2])
    fewer, most = sorted((one, other))
    bound, plan = durations(found, most, room + more, loose=True), durations(found, fewer, room)
    lands = bound[2] > 0
    assert (bound[:, lands] <= plan[:, lands] + 1e-9).all()


def test_a_set_counts_the_work_of_all_before() -> None:
    """Of chunks 2, 1 and 3 with 2, 3 and 5 bytes: the plan without the second one begins with the third sooner."""
    model = ([0, 0, 0], [2, 1, 3], [2, 3, 5], [1.0, 1.0, 1.0], [3.0, 4.0, 5.0], [4.0] * COUNT)
    assert [ready(model, persistent) for persistent in (0, 2, 3, 4)] == [7.0, 8.0, 9.0, 0.0]
    assert [ready(model, persistent, loose=True) for persistent in (0, 2, 3)] == [7.0, 6.0, 2.0]


def ready(model: Model, persistent: int, loose: bool = False) -> float:
    """When the worker could begin, from the beginning of the computation and behind the link."""
    _, _, landed, carry, begin, behind = durations(landings(model), persistent, 30, loose=loose)
    assert (carry - behind)[0] == pytest.approx((landed - begin)[0])
    return float(begin[0])


@given(models(), st.integers(0, 6))
def test_the_worker_waits_for_each(model: Model, persistent: int) -> None:
    """What it has done when all have landed, one by one and as if it began late and never waited."""
    positions, chunks, nbytes, parts, works, computes = model
    room, first = sum(nbytes) * 2, positions[0]
    now = link = 0.0
    for index, position in enumerate(positions):
        if position == first and chunks[index] >= persistent:
            link = max(link, parts[index] * computes[position]) + nbytes[index]
            now = max(now, link) + works[index] if works[index] else now
    total = sum(w for w, p, c in zip(works, positions, chunks, strict=True) if p == first and c >= persistent)
    begin = durations(landings(model), persistent, room)[4, first]
    assert now == (pytest.approx(begin + total) if total else 0.0)


@st.composite
def models_of_few_kinds(draw: st.DrawFn) -> Model:
    """The same with positions that are calls of one of two blocks, each parameter in a chunk of its own or not."""
    sizes = st.lists(st.integers(1, 3), min_size=1, max_size=4)
    block = draw(sizes)
    blocks = [block, draw(st.one_of(st.just(block), sizes))]
    calls = draw(st.lists(st.integers(0, 1), min_size=2, max_size=9))
    alone = draw(st.tuples(st.booleans(), st.booleans()))
    model: Model = ([], [], [], [], [], [4.0] * len(calls))
    for position in reversed(range(len(calls))):
        block = blocks[calls[position]]
        for place, nbytes in enumerate(block):
            chunk = position * 4 + (3 - place) * alone[calls[position]]
            entry = position, chunk, nbytes, (place + 1) / len(block), float(nbytes)
            for values, value in zip(model, entry, strict=False):
                values.append(value)  # type: ignore[arg-type]
    return model


@given(st.one_of(models(), models_of_few_kinds()), st.integers(0, 12))
def test_positions_of_a_kind_need_one_walk(model: Model, room: int) -> None:
    found = landings(model)
    table = durations(found, 0, room)
    for position in set(model[0]):
        near = found._near(position, 0, room, loose=False)
        assert table[:, position].tolist() == list(walk(near, room, 1.0))


def test_equal_blocks_are_walked_through_once() -> None:
    """Ten of them: the first, which nothing follows, the last, which is behind nothing, and one between."""
    positions = [position for position in reversed(range(10)) for _ in range(3)]
    chunks, count = list(range(30))[::-1], len(positions)
    found = landings((positions, chunks, [2] * count, [1.0] * count, [1.0] * count, [4.0] * 10))
    durations(found, 0, 4)
    assert len(found._walked) == 3


@given(models())
def test_the_walk_is_what_a_device_does_that_waits(
    model: Model,
) -> None:
    """The first position, behind nothing, gradient by gradient."""
    positions, _, nbytes, parts, _, computes = model
    room, first = room_of(nbytes), positions[0]
    ended: list[tuple[float, int]] = []
    late = link = 0.0
    for index, position in enumerate(positions):
        if position != first:
            break
        following = nbytes[index + 1] if index + 1 < len(nbytes) else 0
        now = parts[index] * computes[position] + late
        while ended and sum(size for _, size in ended) > max(room - following - nbytes[index], 0):
            waited, _ = ended.pop(0)
            late, now = late + max(waited - now, 0.0), max(now, waited)
        link = max(link, now) + nbytes[index]
        ended.append((link, nbytes[index]))
    stall, _, landed, *_ = durations(landings(model), 0, room)[:, first]
    assert (stall, landed) == (pytest.approx(late), pytest.approx(link))
