"""What a strategy of several ranks says when one of them fails or is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_protrain import ProTrainStrategy
from lightning_protrain.fsdp2.strategy import ProTrainFSDP2Strategy

SAID = RuntimeError("Training at step 3 ends on rank 0: rank 1 is gone")
KINDS = pytest.mark.parametrize("kind", [ProTrainStrategy, ProTrainFSDP2Strategy])


def strategy_of_two(kind: type[ProTrainStrategy], notes: list[str]) -> ProTrainStrategy:
    """One that has met another rank, which is gone; `notes` becomes what it leaves for others."""
    strategy = kind()
    rank_health = SimpleNamespace(
        doing="Training at step 3",
        leave=notes.append,
        explain=lambda: SAID,
        has_explained=lambda error: "ends on rank 0" in str(error),
    )
    strategy._sync.mesh = SimpleNamespace(rank_health=rank_health)  # type: ignore[assignment]
    return strategy


@KINDS
@pytest.mark.parametrize(
    ("error", "is_of_collective"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (RuntimeError("Timed out waiting 10000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_errors_of_collectives_are_explained(kind: type[ProTrainStrategy], error: Any, is_of_collective: bool) -> None:
    strategy = strategy_of_two(kind, [])
    assert strategy._sync.explain(error) is (SAID if is_of_collective else error)
    with pytest.raises((RuntimeError, ValueError)) as raised, strategy._sync.explaining():
        raise error
    assert (raised.value, raised.value.__cause__) == ((SAID, error) if is_of_collective else (error, None))
    strategy._sync.mesh = None
    assert strategy._sync.explain(error) is error
    with pytest.raises((RuntimeError, ValueError)) as raised, strategy._sync.explaining():
        raise error
    assert raised.value is error


@KINDS
def test_errors_are_explained_once(kind: type[ProTrainStrategy]) -> None:
    strategy = strategy_of_two(kind, [])
    first = RuntimeError(
        "Training at step 3 ends on rank 0: rank 1 failed with RuntimeError: Connection closed by peer"
    )
    with pytest.raises(RuntimeError) as raised, strategy._sync.explaining():
        raise first
    assert raised.value is first


@KINDS
def test_a_rank_that_fails_says_where(kind: type[ProTrainStrategy]) -> None:
    notes: list[str] = []
    strategy = strategy_of_two(kind, notes)
    strategy.on_exception(KeyError("x"))
    assert notes == ["failed (training at step 3) with KeyError: 'x'"]
    for error, explained in (
        (RuntimeError("Connection closed by peer"), [str(SAID)]),
        (RuntimeError("Training at step 3 ends on rank 0: Connection closed by peer"), []),
        (RuntimeError("shapes"), []),
    ):
        strategy.on_exception(error)
        assert getattr(error, "__notes__", []) == explained


@KINDS
def test_one_rank_meets_nobody(kind: type[ProTrainStrategy]) -> None:
    strategy = kind()
    assert strategy._sync.mesh is None
    assert strategy.broadcast("x") == "x"
    assert strategy._sync.meet("anywhere", flag=True)
    assert not strategy._sync.meet("anywhere")
    strategy.barrier()
    strategy.on_exception(KeyError("x"))
