"""How many gradients leave while the next one is computed."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_protrain.runtime.grad_offload import DownloadBudget


@pytest.mark.parametrize(
    ("order", "allowed"),
    [
        ("abcd", [30, 30, 35, 40]),  # As expected: the two largest, less what comes next.
        ("abdc", [30, 30, 10, 10]),  # Another order: the largest may come.
        ("b", [10]),
        ("abcda", [30, 30, 35, 40, 10]),
    ],
)
def test_room_is_left_for_what_is_computed_next(order: str, allowed: list[int]) -> None:
    sizes = {"a": 30, "b": 10, "c": 10, "d": 5}
    params: dict[str, Any] = {name: object() for name in sizes}
    flight = DownloadBudget(list(sizes.values()))
    assert flight.hold_bytes == 10
    assert [flight.land(params[name], sizes[name]) for name in "abcd"] == [10] * 4
    flight.end()
    assert [flight.land(params[name], sizes[name]) for name in order] == allowed
    flight.forget()
    assert [flight.land(params[name], sizes[name]) for name in "ab"] == [30, 30]
