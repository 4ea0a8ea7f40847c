"""A sample of the cases of a test has each value of each parameter, whatever it leaves out."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.support.sampling import sample


class _Case:
    """A collected case: its parameters and its mark."""

    def __init__(self, params: dict[str, Any], *number: int) -> None:
        self.callspec = self
        self.params = params
        self.mark = pytest.mark.sample(*number).mark if number != (-1,) else None

    def get_closest_marker(self, _: str) -> Any:
        return self.mark


def _sampled(cases: list[dict[str, Any]], *number: int) -> list[dict[str, Any]]:
    return [case.params for case in sample([_Case(params, *number) for params in cases])]  # type: ignore[misc]


ALL = [{"plan": plan, "dtype": dtype, "ranks": ranks} for plan, dtype, ranks in product("abcdefg", (16, 32), (1, 2, 4))]
HOLES = [case for case in ALL if case["plan"] != "c" or case["dtype"] == 32]


@pytest.mark.parametrize("cases", [ALL, HOLES], ids=["product", "product with holes"])
@pytest.mark.parametrize("number", [(), (7,), (12,)])
def test_each_value_is_in_it(cases: list[dict[str, Any]], number: tuple[int, ...]) -> None:
    found = _sampled(cases, *number)
    assert len(found) == (number or (7,))[0]
    for name in ALL[0]:
        assert {case[name] for case in found} == {case[name] for case in ALL}


def test_fewer_than_the_values_are_spread_over_them() -> None:
    assert [case["plan"] for case in _sampled([{"plan": plan} for plan in "abcdefgh"], 4)] == ["a", "c", "e", "g"]


def test_more_than_there_are_is_all_and_without_a_mark_too() -> None:
    assert _sampled(ALL, 100) == ALL
    assert _sampled(ALL, -1) == ALL
    assert _sampled(ALL, 0) == []
