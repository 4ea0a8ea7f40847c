"""What one rank fails in, all fail in; what they mean is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_protrain.callbacks.ranks import gather, refuse_different, together
from tests.ranks import run_ranks, values


def test_alone_it_is_nothing() -> None:
    with together("Trying"):
        assert gather(5) == [5]
    refuse_different("a", "x")
    with pytest.raises(KeyError), together("Trying"):
        raise KeyError


def _together(rank: int, failing: int) -> list[int]:
    with together("Trying"):
        if rank == failing:
            raise KeyError("of this rank")
    return gather(rank)


def test_several_come_and_go_together(tmp_path: Path) -> None:
    assert values(run_ranks(_together, 3, tmp_path, -1)) == [[0, 1, 2]] * 3


def test_one_fails_and_all_do(tmp_path: Path) -> None:
    errors = [outcome.error for outcome in run_ranks(_together, 3, tmp_path, 1)]
    assert errors[1] == "KeyError: 'of this rank'"
    for rank in (0, 2):
        assert errors[rank] == (
            f"RuntimeError: Trying failed on rank 1 (KeyError: 'of this rank'); rank {rank} stops with it."
        )


def _means(rank: int, names: tuple[str | None, ...]) -> None:
    refuse_different(names[rank], "They differ")


@pytest.mark.parametrize(("names", "differ"), [(("a", "a"), False), ((None, None), False), (("a", None), True)])
def test_what_ranks_mean_is_compared(tmp_path: Path, names: tuple[str | None, ...], differ: bool) -> None:
    errors = {outcome.error for outcome in run_ranks(_means, 2, tmp_path, names)}
    assert errors == {"ValueError: They differ: rank 0: a, rank 1: None." if differ else None}
