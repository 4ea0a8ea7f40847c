"""Readers that come behind a step are refused, and planted bugs of ranks that take turns are caught."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_protrain.runtime.comm.step_sync import StepSync
from lightning_protrain.runtime.optim.async_step import AsyncStep
from tests.support.overlapped_ranks import BeforeStep, Case, Validated, differing, fit, module_of, slow_steps, watched
from tests.support.rank_models import Module
from tests.support.ranks import run_ranks, values

# --- who looks too late -----------------------------------------------------------------------------------------------


class ReadsInBackward(Module):
    """Reads a weight in backward when its block is long behind."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        hidden = self.model.embedding(tokens[:, :-1])
        hidden.register_hook(lambda _: self.read())
        for layer in self.model.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.model.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())

    def read(self) -> None:
        self.model.head.weight.sum()


class SavesWeights(ReadsInBackward):
    """A graph keeps a weight itself, which its backward reads when the weight's block is long behind."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        hidden = self.model.embedding(tokens[:, :-1])
        hidden = hidden * self.model.head.weight.detach()[0]
        for layer in self.model.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.model.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def _look_late(rank: int, cls: type[Module], overlap: str, who: int) -> list[str]:
    """One rank does so; it owns the weight or does not."""
    mine = cls if rank == who else Module
    expected, _ = fit(rank, 2, module_of(cls=mine), Case(None))
    return differing(expected, fit(rank, 2, module_of(cls=mine), Case(overlap))[0])


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("cls", "message"),
    [(ReadsInBackward, "read in a backward in which it has been stepped"), (SavesWeights, "modified by an inplace")],
)
def test_a_weight_that_is_read_behind_its_step_is_refused_on_every_rank(
    cls: type[Module], message: str, who: int, tmp_path: Path
) -> None:
    outcomes = run_ranks(_look_late, 2, tmp_path, cls, "backward", who)
    assert message in str(outcomes[who].error), outcomes
    assert "ends on rank" in str(outcomes[1 - who].error), outcomes


@pytest.mark.parametrize("cls", [ReadsInBackward, SavesWeights])
def test_behind_forward_it_is_read_in_time(cls: type[Module], tmp_path: Path) -> None:
    assert values(run_ranks(_look_late, 2, tmp_path, cls, "forward", 0)) == [[], []]


# --- planted bugs -----------------------------------------------------------------------------------------------------


def announce_before_writing(updates: AsyncStep, index: int, armed: Any, land: Any) -> None:
    assert updates._step_sync is not None
    updates._step_sync.announce([index], updates._step_sync.number)
    SUBMIT(updates, index, armed, land)


SUBMIT = AsyncStep._submit
BUGS: dict[str, tuple[type, str, Callable[..., Any], str, type[Validated]]] = {
    "an owner that announces before it writes, behind backward": (
        AsyncStep, "_submit", announce_before_writing, "backward", Validated,
    ),
    "an owner that announces before it writes, behind forward": (
        AsyncStep, "_submit", announce_before_writing, "forward", Validated,
    ),
    "a reader that does not wait, behind backward": (
        StepSync, "wait_until_stepped", lambda turns, index, number: None, "backward", Validated,
    ),
    "a reader that does not wait, behind forward": (
        StepSync, "wait_until_stepped", lambda turns, index, number: None, "forward", Validated,
    ),
    "an owner that does not wait for readers": (
        StepSync, "wait_until_left", lambda turns, number: None, "forward", BeforeStep,
    ),
    "ranks that do not agree": (StepSync, "all_behind_backward", lambda turns: True, "backward", BeforeStep),
}  # fmt: skip


def _plant(rank: int, bug: str) -> tuple[bool, bool]:
    """Whether a rank sees what DDP sees, without the bug and with it."""
    owner, name, replacement, overlap, cls = BUGS[bug]
    mine = "forward" if cls is BeforeStep and rank == 0 else overlap
    expected = watched(rank, cls, Case(None))
    found = []
    patch = pytest.MonkeyPatch()
    for planted in (False, True):
        if planted:
            patch.setattr(owner, name, replacement)
        # Rank 1 is late with what it writes, unless rank 0 is late with what it reads.
        with slow_steps(0.02 if rank == 1 and cls is Validated else 0.0):
            seen, _, weights = watched(rank, cls, Case(mine))
        found.append(seen == expected[0] and not differing(expected[2], weights))
    patch.undo()
    return found[0], found[1]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    found = values(run_ranks(_plant, 2, tmp_path, bug))
    assert [right for right, _ in found] == [True, True]
    assert not all(right for _, right in found)
