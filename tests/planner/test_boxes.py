"""Sets of candidates."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.boxes import Boxes, Each


def boxes(count: int) -> Boxes:
    """So many, of numbers that are all different."""
    numbers = np.arange(6 * count).reshape(6, count)
    return Boxes(*numbers, np.arange(count) % 2 == 0)


def test_some_of_them_beside_others() -> None:
    found = boxes(3).only(np.array([2, 0])).beside(boxes(2))
    assert found.swap.tolist() == [2, 0, 0, 1]
    assert found.persistent.tolist() == [17, 15, 10, 11]
    assert found.point.tolist() == [True, True, True, False]
    assert boxes(3).only(np.array([False, True, False])).most.tolist() == [10]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1))
def test_every_number_of_every_box(given_boxes: list[tuple[int, int]]) -> None:
    least = np.array([first for first, _ in given_boxes])
    most = least + [more for _, more in given_boxes]
    each = Each.of(least, most)
    pairs = [
        (box, swap) for box, (low, high) in enumerate(zip(least, most, strict=True)) for swap in range(low, high + 1)
    ]
    assert list(zip(each.box.tolist(), each.swap.tolist(), strict=True)) == pairs
    values = (each.swap * 7 + each.box * 3) % 5
    expected = [
        min(value for (box, _), value in zip(pairs, values, strict=True) if box == k) for k in range(len(least))
    ]
    assert each.least(values).tolist() == expected
