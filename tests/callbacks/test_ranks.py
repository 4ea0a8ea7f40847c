"""What ranks tell each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_protrain.distributed.ranks import gather, refuse_unequal
from tests.support.ranks import run_ranks, values


def test_alone_it_is_nothing() -> None:
    assert gather(5) == [5]
    refuse_unequal(["a"], "x")


def test_values_come_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    assert values(run_ranks(gather, 3, tmp_path)) == [[0, 1, 2]] * 3


def _means(rank: int, names: tuple[str | None, ...]) -> None:
    refuse_unequal(gather(names[rank]), "They differ")


@pytest.mark.parametrize(("names", "differ"), [(("a", "a"), False), ((None, None), False), (("a", None), True)])
def test_what_ranks_mean_is_compared(tmp_path: Path, names: tuple[str | None, ...], differ: bool) -> None:
    errors = {outcome.error for outcome in run_ranks(_means, 2, tmp_path, names)}
    assert errors == {"ValueError: They differ: rank 0: a, rank 1: None." if differ else None}
