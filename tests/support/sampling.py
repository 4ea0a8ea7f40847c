"""Some of the many cases of a test, such that each value of each parameter is among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def sample(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of one test that its mark `sample` keeps; all if it has none.

    `sample(0)` keeps none, `sample(8)` eight, `sample` as many as the longest parameter has values. Parameters step
    together: the first value of each, then the second of each, and so on, and a short one begins anew.
    """
    mark = cases[0].get_closest_marker("sample")
    if mark is None or mark.args == (0,):
        return [] if mark else list(cases)
    places = _places([case.callspec.params for case in cases])  # type: ignore[attr-defined]
    sizes = [max(place) + 1 for place in zip(*places, strict=True)]
    (number,) = mark.args or (max(sizes),)
    kept: list[int] = []
    for step in range(min(number, len(cases))):
        wanted = [step % size if number >= size else step * size // number for size in sizes]
        seen = [{places[at][name] for at in kept} for name in range(len(sizes))]

        def gain(at: int, wanted: list[int] = wanted, seen: list[set[int]] = seen) -> tuple[int, int]:
            is_new = sum(place not in before for place, before in zip(places[at], seen, strict=True))
            return is_new, sum(map(int.__eq__, places[at], wanted))

        kept.append(max((at for at in range(len(cases)) if at not in kept), key=gain))
    return [cases[at] for at in sorted(kept)]


def _places(params: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Return for each case the place of its value among the values of each parameter."""
    known: dict[str, list[Any]] = {name: [] for name in params[0]}
    for case in params:
        for name, value in case.items():
            if not any(value is other for other in known[name]):
                known[name].append(value)
    return [
        tuple(next(at for at, other in enumerate(known[name]) if other is value) for name, value in case.items())
        for case in params
    ]
