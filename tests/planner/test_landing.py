"""What gradients hold up: by hand, against waiting gradient by gradient, and as bounds of sets of plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.landing import NEVER, Landings, Near, come_together, walk
from lightning_protrain.profiler.records import ModelLayout, ParameterInfo, Pass, Segment

COUNT = 4


@pytest.mark.parametrize(
    ("near", "room", "found"),
    [
        # 1. All fits: the last one lands behind the one before, or when it is there.
        (Near((3, 1), (1.0, 2.0), (), (1, 0), 0, 2.0), 9, (0.0, NEVER, 5.0, 4.0, 0.0)),
        (Near((1, 3), (1.0, 2.0), (), (3, 0), 0, 2.0), 9, (0.0, NEVER, 5.0, 4.0, 0.0)),
        # 2. Two of three, and then one of 3 at a time: the second waits for the first until 4, which is 2 late; the
        #    third until 7, which is 4 late. A link that is free at 0 is waited for just as long, till 6.
        (Near((3, 3, 3), (1.0, 2.0, 3.0), (), (3, 3, 3), 0, 3.0), 6, (4.0, 6.0, 10.0, 9.0, 0.0)),
        # 3. The same behind another one of 3: the first waits for that, too.
        (Near((3,), (1.0,), (3,), (3,), 0, 2.0), 6, (0.0, 1.0, 4.0, 3.0, 0.0)),
        # 4. Of those before, the latest may be under way: the link has carried the one before it 1 ago.
        (Near((3,), (1.0,), (1, 3), (2,), 0, 2.0), 6, (0.0, 0.0, 4.0, 3.0, 0.0)),
        # 5. The worker may begin when a chunk is there, 4 before the last gradient.
        (Near((3, 1), (1.0, 2.0), (), (1, 0), 4, 2.0), 9, (0.0, NEVER, 5.0, 4.0, -4.0)),
    ],
)
def test_cases_by_hand(near: Near, room: int, found: tuple[float, ...]) -> None:
    assert walk(near, room, 1.0) == found


def test_gradients_of_a_module_come_together() -> None:
    shapes = {"a.bias": (2,), "a.weight": (2, 3), "norm.weight": (2,)}
    infos = tuple(ParameterInfo(fqn, (fqn,), shape, "float32", 4, True) for fqn, shape in shapes.items())
    segment = Segment("a", Pass(0, 0), gradients=tuple(shapes))
    assert come_together(ModelLayout(infos, (), 0), segment) == [0.8, 0.8, 1.0]
    assert come_together(ModelLayout(infos, (), 0), Segment("a", Pass(0, 0))) == []


@st.composite
def models(draw: st.DrawFn, in_order: bool = False) -> tuple[list[int], list[int], list[int], list[float], list[float]]:
    """Positions, chunks, bytes and parts of gradients, and the computation of positions."""
    count = draw(st.integers(1, 12))
    positions = sorted(draw(st.lists(st.integers(0, COUNT - 1), min_size=count, max_size=count)), reverse=True)
    chunks = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    nbytes = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    parts = [draw(st.sampled_from((0.25, 0.5, 1.0))) for _ in range(count)]
    for at in range(1, count):
        if positions[at] == positions[at - 1]:
            parts[at] = max(parts[at], parts[at - 1])
    computes = [draw(st.sampled_from((0.0, 4.0, 8.0))) for _ in range(COUNT)]
    return positions, sorted(chunks, reverse=True) if in_order else chunks, nbytes, parts, computes


def landings(model: tuple[list[int], list[int], list[int], list[float], list[float]]) -> Landings:
    positions, chunks, nbytes = (np.array(values, dtype=np.int64) for values in model[:3])
    return Landings(positions, chunks, nbytes, np.array(model[3]), np.array(model[4]), 1.0)


def room_of(nbytes: list[int]) -> int:
    return sum(sorted(nbytes)[-2:])


@given(models(), st.integers(0, 6))
def test_resident_chunks_are_as_if_they_had_no_gradients(
    model: tuple[list[int], list[int], list[int], list[float], list[float]], persistent: int
) -> None:
    positions, chunks, nbytes, parts, computes = model
    left = [index for index, chunk in enumerate(chunks) if chunk >= persistent]
    kept = tuple([values[index] for index in left] for values in (positions, chunks, nbytes, parts))
    room = room_of(nbytes)
    alone = landings((*kept, computes)).of(0, room)  # type: ignore[arg-type]
    assert landings(model).of(persistent, room).tolist() == alone.tolist()


@given(models(in_order=True), st.integers(0, 6), st.integers(0, 6), st.integers(0, 9))
def test_sets_have_a_bound(
    model: tuple[list[int], list[int], list[int], list[float], list[float]], one: int, other: int, more: int
) -> None:
    """Of plans with fewer resident chunks, and less room: but for positions where the bound has nothing land."""
    found, room = landings(model), room_of(model[2])
    fewer, most = sorted((one, other))
    bound, plan = found.of(most, room + more, loose=True), found.of(fewer, room)
    lands = bound[2] > 0
    assert (bound[:, lands] <= plan[:, lands] + 1e-9).all()


def test_a_chunk_is_there_before_the_others() -> None:
    """Of chunks 1, 2 and 1, with 2, 3 and 5 bytes, chunk 2 is the first to be there."""
    model = ([0, 0, 0], [1, 2, 1], [2, 3, 5], [1.0, 1.0, 1.0], [4.0] * COUNT)
    assert landings(model).of(0, 8)[4].tolist() == [-5, 0, 0, 0]
    assert landings(model).of(2, 8)[4].tolist() == [0, 0, 0, 0]
    assert landings(model).of(2, 8, loose=True)[4].tolist() == [-10, 0, 0, 0]


@given(models())
def test_the_walk_is_what_a_device_does_that_waits(
    model: tuple[list[int], list[int], list[int], list[float], list[float]],
) -> None:
    """The first position, behind nothing, gradient by gradient."""
    positions, _, nbytes, parts, computes = model
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
    stall, _, landed, *_ = landings(model).of(0, room)[:, first]
    assert (stall, landed) == (pytest.approx(late), pytest.approx(link))
