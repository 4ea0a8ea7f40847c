"""What every rank has free at least, by hand."""

from __future__ import annotations

import pytest

from lightning_protrain.planner.free_memory import FreeMemory, least, shortages

GIB = 1 << 30


@pytest.mark.parametrize(
    ("host", "weights", "copies", "share"),
    [
        (100, 30, 1, 130),  # One rank, whose weights are there.
        (100, 60, 1, 130),  # Two ranks that have loaded each, and will share one copy.
        (100, 60, 2, 80),  # ... and will have one each.
        (100, 30, 2, 65),  # One of the two has loaded, and the other one will have a copy, too.
        (0, 0, 4, 0),
    ],
)
def test_what_the_weights_take_is_counted_once_for_each_copy(host: int, weights: int, copies: int, share: int) -> None:
    assert FreeMemory(None, host, weights).share(copies, 30) == share


@pytest.mark.parametrize(
    ("found", "local_size", "expected"),
    [
        ([(10, 100, 5)], 1, (10, 100, 5)),
        ([(10, 100, 5), (8, 90, 0)], 2, (8, 90, 5)),  # One machine: its host is looked at twice.
        ([(10, 100, 5), (12, 90, 5)], 1, (10, 90, 5)),  # Two machines.
        ([(10, 100, 5), (10, 99, 0), (9, 98, 0), (9, 97, 5)], 2, (9, 97, 5)),
        # What weights take of a host is there for the plan as well.
        ([(10, 100, 5), (10, 96, 20)], 1, (10, 100, 5)),
        ([(None, 100, 5), (None, 90, 5)], 2, (None, 90, 10)),
        ([(7, None, 5), (6, None, 5)], 2, (6, None, 10)),
    ],
)
def test_the_least_of_all_ranks(
    found: list[tuple[int | None, int | None, int]], local_size: int, expected: tuple[int | None, int | None, int]
) -> None:
    assert least([FreeMemory(*each) for each in found], local_size) == FreeMemory(*expected)


@pytest.mark.parametrize(
    ("shared", "local_size", "expected"),
    [
        ([100, 100], 2, (100, 0)),
        ([100, 100, 64, 64], 2, (64, 2)),  # The second machine has less.
        ([100, 64], 2, (64, 1)),  # Ranks of one machine in containers of their own.
        ([0, 0], 2, (0, 0)),
        ([None, None], 1, (None, 0)),
    ],
)
def test_the_least_that_can_be_shared_is_that_of_a_rank(
    shared: list[int | None], local_size: int, expected: tuple[int | None, int]
) -> None:
    found = least([FreeMemory(None, 10, 5, nbytes) for nbytes in shared], local_size)
    assert (found.shared, found.shared_at) == expected


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([(10, 10), (10, 10)], []),
        ([(10, 10), (9.6, 9.6)], []),
        ([(10, 10), (20, 20)], []),
        (
            [(10, 10), (9, 10), (8, 10)],
            ["Rank 2 has 8.0 GiB of its device free, rank 0 10.0 GiB: the plan of all ranks is made for 8.0 GiB."],
        ),
        (
            [(10, 10), (10, 5)],
            ["Rank 1 has 5.0 GiB of its host free, rank 0 10.0 GiB: the plan of all ranks is made for 5.0 GiB."],
        ),
        ([(None, None), (None, None)], []),
    ],
    ids=str,
)
def test_who_has_much_less_than_rank_0_is_named(
    found: list[tuple[float | None, float | None]], said: list[str]
) -> None:
    told = [FreeMemory(*(None if value is None else int(value * GIB) for value in each), 0) for each in found]
    assert shortages(told) == said
