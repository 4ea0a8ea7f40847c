"""What gradients hold up: by hand, against walking through it gradient by gradient, and as bounds of sets of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_protrain.planner.landing import NEVER, Landings

COUNT = 4
Model = tuple[list[int], list[int], list[int], list[float], list[float], list[float]]
Plan = tuple[int, int, bool]
Durations = tuple[float, float, float, float, float, float]


@dataclass(frozen=True)
class Near:
    """What counts for the gradients of a position.

    Attributes:
        nbytes: Of its own gradients that land, in order.
        ends: Seconds from the beginning of its backward until each is there.
        before: Bytes of those that land before its own, the latest first: as many as may be waited for.
        following: Bytes of the one that lands after each of its own; 0: there is none.
        worked: Seconds that the worker has worked for the position before each of its own; infinite: it does nothing
            for that one.
        compute: Seconds of its backward.
    """

    nbytes: list[int]
    ends: list[float]
    before: list[int]
    following: list[int]
    worked: list[float]
    compute: float


def near_of(model: Model, position: int, persistent: int, room: int, loose: bool) -> Near:
    positions, chunks, nbytes, parts, works, computes = model
    every = [index for index, place in enumerate(positions) if place == position]
    own = [index for index in every if chunks[index] >= persistent]
    before: list[int] = []
    for index in reversed(range(every[0])):
        if sum(before) > room:
            break
        if chunks[index] >= persistent:
            before.append(nbytes[index])
        elif loose:
            before.clear()
            break
    after = [index for index in range(every[-1] + 1, len(chunks)) if chunks[index] >= persistent][:1]
    following = [min(nbytes[index + 1 if loose else last : last + 1]) for index, last in pairwise(own + after)]
    counted = every if loose else own
    done = dict(zip(counted, accumulate((works[index] for index in counted), initial=0.0), strict=False))
    return Near(
        [nbytes[index] for index in own],
        [parts[index] * computes[position] for index in own],
        before,
        following if after else [*following, 0],
        [done[index] if works[index] > 0 else np.inf for index in own],
        computes[position],
    )


def waits_of(near: Near, room: int) -> list[int]:
    """Which gradient each one of a position waits for, of those before it and its own, in order; -1: none."""
    under_way = near.before[::-1]
    found = []
    for nbytes, following in zip(near.nbytes, near.following, strict=True):
        most = max(room - following - nbytes, 0)
        later = [index for index in range(len(under_way)) if sum(under_way[index:]) > most]
        found.append(max(later, default=-1))
        under_way.append(nbytes)
    return found


def walk(near: Near, waits: Sequence[int], rate: float) -> Durations:
    """The durations of a position, as `Landings.of` has them."""
    # How much later than without waiting: behind the beginning, and behind the link. When each has landed: the same.
    late, late_link = 0.0, NEVER
    landed, carried = NEVER, 0.0
    ready, ready_behind = NEVER, NEVER
    ends = [(NEVER, -nbytes / rate) for nbytes in accumulate((0, *near.before[:-1]))][::-1] if near.before else []
    for nbytes, end, waited, worked in zip(near.nbytes, near.ends, waits, near.worked, strict=True):
        if waited >= 0:
            behind_begin, behind_link = ends[waited]
            late, late_link = max(late, behind_begin - end), max(late_link, behind_link - end)
        seconds = nbytes / rate
        landed, carried = max(end + late, landed) + seconds, max(end + late_link, carried) + seconds
        ready, ready_behind = max(ready, landed - worked), max(ready_behind, carried - worked)
        ends.append((landed, carried))
    return late, near.compute + late_link, landed, carried, ready, ready_behind


def walked(model: Model, plans: Sequence[Plan], rates: Sequence[float]) -> NDArray[np.float64]:
    """What `Landings.of` says, one position of one plan after another, (R, 6, P, K)."""
    positions, chunks, *_, computes = model
    found = np.zeros((len(rates), 6, len(computes), len(plans)))
    for plan, (persistent, room, loose) in enumerate(plans):
        for position in {place for place, chunk in zip(positions, chunks, strict=True) if chunk >= persistent}:
            near = near_of(model, position, persistent, room, loose)
            for index, rate in enumerate(rates):
                found[index, :, position, plan] = walk(near, waits_of(near, room), rate)
    return found


@pytest.mark.parametrize(
    ("before", "nbytes", "after", "works", "room", "found"),
    [
        # 1. All fits: the last one lands behind the one before, or when it is there.
        ([], [3, 1], [], [0.0, 0.0], 9, (0.0, NEVER, 5.0, 4.0, NEVER, NEVER)),
        ([], [1, 3], [], [0.0, 0.0], 9, (0.0, NEVER, 5.0, 4.0, NEVER, NEVER)),
        # 2. Two of three, and then one of 3 at a time: the second waits for the first until 4, which is 2 late; the
        #    third until 7, which is 4 late. A link that is free at 0 is waited for just as long, till 6.
        ([], [3, 3, 3], [3], [0.0] * 3, 6, (4.0, 6.0, 10.0, 9.0, NEVER, NEVER)),
        # 3. The same behind another one of 3: the first waits for that, too.
        ([3], [3], [3], [0.0], 6, (0.0, 0.0, 4.0, 3.0, NEVER, NEVER)),
        # 4. Of those before, the latest may be under way: the link has carried the one before it 1 ago.
        ([3, 1], [3], [2], [0.0], 6, (0.0, -1.0, 4.0, 3.0, NEVER, NEVER)),
        # 5. The worker begins when the first of two is there, and works longer than the other one takes to come.
        ([], [3, 1], [], [9.0, 1.0], 9, (0.0, NEVER, 5.0, 4.0, 4.0, 3.0)),
        # 6. It has done a first one of 1 when the second is there, and waits: as if it had begun 1 before that.
        ([], [3, 5], [], [1.0, 1.0], 9, (0.0, NEVER, 9.0, 8.0, 8.0, 7.0)),
        # 7. Only the last one completes a chunk.
        ([], [3, 1], [], [0.0, 1.0], 9, (0.0, NEVER, 5.0, 4.0, 5.0, 4.0)),
    ],
)
def test_cases_by_hand(
    before: list[int], nbytes: list[int], after: list[int], works: list[float], room: int, found: Durations
) -> None:
    """A position with a gradient each second, behind another one and before a third one."""
    positions = [2] * len(before) + [1] * len(nbytes) + [0] * len(after)
    count, seconds = len(positions), float(len(nbytes))
    parts = [1.0] * len(before) + [(place + 1) / seconds for place in range(len(nbytes))] + [1.0] * len(after)
    every = [0.0] * len(before) + works + [0.0] * len(after)
    model = (positions, [0] * count, before + nbytes + after, parts, every, [seconds] * 3)
    assert tuple(durations(landings(model), 0, room)[:, 1].tolist()) == found


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


def landings(model: Model, rates: tuple[float, ...] = (1.0, 0.5)) -> Landings:
    positions, chunks, nbytes = (np.array(values, dtype=np.int64) for values in model[:3])
    parts, works, computes = (np.array(values) for values in model[3:])
    return Landings(positions, chunks, nbytes, parts, works, computes, rates)


def of(found: Landings, plans: Sequence[Plan]) -> NDArray[np.float64]:
    persistent, room, loose = zip(*plans, strict=True)
    return found.of(np.array(persistent), np.array(room), np.array(loose))


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


@st.composite
def uneven(draw: st.DrawFn) -> Model:
    """Models with some parameters of no elements, and with durations whose sums depend on the order of addition."""
    positions, chunks, nbytes, parts, works, computes = draw(st.one_of(models(), models(True), models_of_few_kinds()))
    scale = st.sampled_from((0.1, 0.3, 0.7, 1.0))
    return (
        positions,
        chunks,
        [0 if number == 9 else number for number in nbytes],
        [part * 0.7 for part in parts],
        [work * draw(scale) for work in works],
        [compute * 0.9 for compute in computes],
    )


PLANS = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from((0, 3, 7, 12, 30)), st.booleans()), min_size=1, max_size=6
)


@given(uneven(), PLANS, PLANS)
def test_side_by_side_is_one_after_another(model: Model, plans: list[Plan], more: list[Plan]) -> None:
    """To the last bit, whatever else is walked through; and again when rooms are known."""
    rates = (0.7, 3.0)
    found = landings(model, rates)
    for some in (plans, more, plans):
        assert of(found, some).tobytes() == walked(model, some, rates).tobytes()
    (alone,) = of(landings(model, rates[1:]), more[:1])
    assert alone.tobytes() == walked(model, more[:1], rates[1:]).tobytes()


def test_no_gradients_hold_up_nothing() -> None:
    found = of(landings(([], [], [], [], [], [4.0] * COUNT)), [(0, 0, False), (2, 9, True)])
    assert found.shape == (2, 6, COUNT, 2)
    assert not found.any()


def test_equal_blocks_are_walked_through_once() -> None:
    """Ten of them: the first, which nothing follows, the last, which is behind nothing, and one between."""
    positions = [position for position in reversed(range(10)) for _ in range(3)]
    chunks, count = list(range(30))[::-1], len(positions)
    found = landings((positions, chunks, [2] * count, [1.0] * count, [1.0] * count, [4.0] * 10))
    assert len(found._neighbourhoods(4)[0].positions) == 3


def test_computation_that_goes_on_makes_another_kind() -> None:
    """Six positions whose gradients are alike, 1 after each begins: one of them computes for 4 more."""
    positions, parts, computes = [5, 4, 3, 2, 1, 0], [1.0, 1.0, 1.0, 1.0, 0.2, 1.0], [1.0, 5.0, 1.0, 1.0, 1.0, 1.0]
    found = durations(landings((positions, positions, [2] * 6, parts, [0.0] * 6, computes)), 0, 4)
    # Each waits for the one before; the last one, which nothing follows, for the one before that.
    assert found[1].tolist() == [-2.0, 4.0, 0.0, 0.0, 0.0, NEVER]
    assert found[2].tolist() == [3.0] * 6


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
