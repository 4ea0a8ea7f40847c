"""Shared weights are stepped while other ranks compute: bits of DDP, planted bugs, and failing ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.runtime.comm.step_sync import StepSync
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.runtime.optim.host_step import HostStep
from lightning_protrain.runtime.shadow import ShadowWeight
from tests.support.overlap_faults import AT, Faulty, Saving
from tests.support.overlapped_ranks import (
    STEPS,
    BeforeStep,
    Case,
    Norms,
    Validated,
    differing,
    fit,
    module_of,
    slow_steps,
    watched,
)
from tests.support.rank_models import KINDS, Module
from tests.support.ranks import kill_this_rank, run_ranks, values

CLIP = {"gradient_clip_val": 0.1}
# --- parity -----------------------------------------------------------------------------------------------------------
WAYS: list[tuple[str, dict[str, Any]]] = [("backward", {}), ("forward", {}), ("forward", CLIP)]


def accumulating(micro_batches: int) -> dict[str, int]:
    """Return Trainer options for steps of `micro_batches`; there are fewer steps if they are long."""
    return {"accumulate_grad_batches": micro_batches, "max_steps": STEPS if micro_batches == 1 else 3}


def _compare(
    rank: int,
    world_size: int,
    kind: str,
    placements: list[str],
    accumulations: list[int],
    ways: list[tuple[str, dict[str, Any]]],
) -> list[str]:
    """Return the differences from DDP; with more than two ranks, from steps that are not overlapped."""
    wrong, wanted = [], {}
    plain = None if world_size == 2 else "off"
    for accumulate, placement, (overlap, clipping) in product(accumulations, placements, ways):
        given = {**accumulating(accumulate), **clipping}
        known = f"{given} {plain and placement}"
        if known not in wanted:
            wanted[known], _ = fit(rank, world_size, module_of(kind), Case(plain, placement, given))
        # Every rank is late in turn, so that others wait for it.
        with slow_steps(0.002 if rank == accumulate % world_size else 0.0):
            found, _ = fit(rank, world_size, module_of(kind), Case(overlap, placement, given))
        wrong += [f"{placement} {overlap} {given}: {name}" for name in differing(wanted[known], found)[:1]]
    return wrong


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_weights_of_ddp(kind: str, tmp_path: Path) -> None:
    assert values(run_ranks(_compare, 2, tmp_path, 2, kind, ["shard"], [1, 3], WAYS)) == [[], []]


@pytest.mark.parametrize("kind", ["full", pytest.param("tied", marks=pytest.mark.slow)])
def test_four_ranks_give_what_they_give_without_overlap(kind: str, tmp_path: Path) -> None:
    assert values(run_ranks(_compare, 4, tmp_path, 4, kind, ["shard"], [1], WAYS)) == [[]] * 4


def _low_precision(rank: int, overlap: str, accumulate: int) -> tuple[list[str], float]:
    """Return the differences from DDP, and how often the main thread has cast a weight, averaged over the weights."""
    case = Case(overlap, trainer={"precision": "bf16-mixed", "accumulate_grad_batches": accumulate})
    expected, _ = fit(rank, 2, module_of(), case._replace(overlap=None))
    patch, renew, casts = pytest.MonkeyPatch(), ShadowWeight.renew, []
    patch.setattr(ShadowWeight, "renew", lambda shadow: (casts.append(shadow.uses.fqn), renew(shadow))[1])
    with slow_steps(0.002 * rank):
        found, trainer = fit(rank, 2, module_of(), case)
    patch.undo()
    low = sum(len(chunk.parameters) for chunk in trainer.strategy.plan.chunks if chunk.streamed_dtype)
    return differing(expected, found), len(casts) / low


@pytest.mark.sample(4)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("overlap", "casts"), [("off", 2 + STEPS), ("backward", 2 + 1), ("forward", 2 + 1)])
def test_copies_in_low_precision_are_those_of_the_step(
    overlap: str, casts: int, accumulate: int, tmp_path: Path
) -> None:
    """The owner casts a weight for the plan, the first fetch and each step, and uses its worker if it can."""
    found = values(run_ranks(_low_precision, 2, tmp_path, overlap, accumulate))
    assert [wrong for wrong, _ in found] == [[], []]
    assert sum(share for _, share in found) == pytest.approx(casts)


def _count(rank: int, overlap: str) -> tuple[int, int]:
    """Return the number of chunk steps that run during backward, and of all chunk steps."""
    patch, submit, counts = pytest.MonkeyPatch(), AsyncStep._submit, [0, 0]

    def counted(updates: AsyncStep, index: int, pending: Any, land: Any) -> None:
        counts[0] += land is not None
        counts[1] += 1
        submit(updates, index, pending, land)

    patch.setattr(AsyncStep, "_submit", counted)
    fit(rank, 2, module_of(), Case(overlap))
    patch.undo()
    return counts[0], counts[1]


# Five chunks; the first step of a run is never overlapped. A rank that owns nothing of a chunk gets no gradients of it.
@pytest.mark.parametrize(("overlap", "behind"), [("backward", True), ("forward", False)])
def test_chunks_are_stepped_where_they_are_told(overlap: str, behind: bool, tmp_path: Path) -> None:
    for early, every in values(run_ranks(_count, 2, tmp_path, overlap)):
        assert every == 5 * (STEPS - 1)
        assert (3 * (STEPS - 1) <= early < every) if behind else early == 0


# --- who looks --------------------------------------------------------------------------------------------------------
class InStep(Validated):
    """A module that looks at its weights in the middle of a step, when no rank waits for it."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.look()
        return super().training_step(batch)


class Saved(Validated):
    """The state dict, after every second step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            state = self.trainer.strategy.lightning_module_state_dict()
            self.seen.append([value.double().sum().item() for value in state.values()])


LOOKS: tuple[type[Validated], ...] = (Norms, InStep, Saved, BeforeStep)


def _look(rank: int, overlap: str) -> list[str]:
    wrong = []
    for cls in LOOKS:
        # By name it is refused there, on the rank that has the hook.
        mine = "forward" if cls is BeforeStep and rank == 0 else overlap
        seen, averages, weights = watched(rank, cls, Case(None))
        with slow_steps(0.005 if rank == 1 else 0.0):
            others, other_averages, other_weights = watched(rank, cls, Case(mine))
        assert seen
        if seen != others:
            wrong.append(f"{cls.__name__}: {next(at for at in range(len(seen)) if seen[at] != others[at])}")
        wrong += differing(averages, other_averages) + differing(weights, other_weights)
    return wrong


@pytest.mark.sample(2)
@pytest.mark.parametrize("overlap", ["backward", "forward", "off"])
def test_code_that_reads_shared_weights_sees_whole_weights(overlap: str, tmp_path: Path) -> None:
    assert values(run_ranks(_look, 2, tmp_path, overlap)) == [[], []]


def _save(rank: int, folder: Path) -> list[str]:
    """Checkpoints of every step, weights and states, with and without overlap."""
    for overlap in ("off", "backward", "forward"):
        saving = L.pytorch.callbacks.ModelCheckpoint(
            folder / overlap, filename="{step}", every_n_train_steps=1, save_top_k=-1
        )
        with slow_steps(0.002 * rank):
            fit(rank, 2, module_of(), Case(overlap), callbacks=[saving], enable_checkpointing=True)
    return []


def test_checkpoints_hold_whole_weights_and_states(tmp_path: Path) -> None:
    values(run_ranks(_save, 2, tmp_path, tmp_path / "saved"))
    names = sorted(path.name for path in (tmp_path / "saved" / "off").iterdir())
    assert len(names) == STEPS
    for name in names:
        expected, *others = (
            torch.load(tmp_path / "saved" / overlap / name, weights_only=False)
            for overlap in ("off", "backward", "forward")
        )
        for found in others:
            assert differing(expected["state_dict"], found["state_dict"]) == []
            (one,), (other,) = expected["optimizer_states"], found["optimizer_states"]
            assert one["state"].keys() == other["state"].keys()
            for index, state in one["state"].items():
                assert differing(state, other["state"][index]) == []


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
    """A module whose graph saves a weight, which backward reads after it has left the weight's block."""

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
    [(ReadsInBackward, "read in backward after it was stepped"), (SavesWeights, "modified by an inplace")],
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
def announce_before_writing(updates: AsyncStep, index: int, pending: Any, land: Any) -> None:
    assert updates._step_sync is not None
    updates._step_sync.announce([index], updates._step_sync.number)
    SUBMIT(updates, index, pending, land)


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
    """Return whether a rank sees what DDP sees, without the bug and with it."""
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


def _fail_in_step(module: Faulty) -> None:
    """Fail on the worker of rank 1, after some chunks of step `AT` have been stepped and before others are."""
    step, calls = HostStep.step, 0

    def failing(host: HostStep, *given: Any) -> None:
        nonlocal calls
        calls += module.trainer.global_step >= AT
        if calls == 2 and module.fault == "raise in step":
            raise ValueError("boom")
        if calls == 2 and module.fault == "kill in step":
            time.sleep(0.5)  # Everybody waits for it.
            kill_this_rank()
        step(host, *given)

    if module.rank == 1:
        HostStep.step = failing  # type: ignore[method-assign]  # This process ends with the test.


def _train(rank: int, overlap: str, fault: str) -> Any:
    expected, _ = fit(rank, 2, module_of(), Case(None), max_steps=AT)
    module, saving = module_of(cls=Faulty), Saving()
    module.fault, module.rank = fault, rank
    _fail_in_step(module)
    try:
        with slow_steps(0.01 if fault == "raise in forward" else 0.0):
            fit(rank, 2, module, Case(overlap), callbacks=[saving])
    except (RuntimeError, ValueError) as error:
        found = saving.found if isinstance(saving.found, str) else differing(expected, saving.found)
        return f"{type(error).__name__}: {error}", found
    return "", []


FAILED = "rank 1 failed (training at step "


def is_refused(found: Any) -> bool:
    """Return whether weights that belong to no step were not saved."""
    return isinstance(found, str) and ("The weights are partially stepped" in found or "is missing" in found)


@pytest.mark.sample(4)
@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("fault", ["raise in forward", "raise in backward", "raise in step"])
def test_a_rank_that_raises_ends_all(fault: str, overlap: str, tmp_path: Path) -> None:
    (other, saved_there), (error, saved) = values(run_ranks(_train, 2, tmp_path, overlap, fault))
    assert error.startswith("ValueError: boom")
    assert f"ends on rank 0: {FAILED}" in other
    assert "with ValueError: boom" in other
    if fault == "raise in step" or (fault, overlap) == ("raise in backward", "backward"):
        assert is_refused(saved_there)
        assert is_refused(saved)
    else:  # Steps that have been launched are made.
        assert saved == []
        # Behind backward nobody knows of a step that others may have begun.
        assert saved_there == [] or (overlap == "backward" and is_refused(saved_there))


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_an_owner_that_is_killed_is_named_with_what_it_leaves_undone(overlap: str, tmp_path: Path) -> None:
    alone, killed = run_ranks(_train, 2, tmp_path, overlap, "kill in step")
    assert killed.error == "killed"
    assert alone.error != "hangs"
    error, saved = alone.value
    assert re.match(r"FailedElsewhere: Training at step \d ends on rank 0: rank 1 is gone without a word", error), error
    assert is_refused(saved)
    # Behind backward rank 0 may have been waiting for averages.
    assert overlap == "backward" or re.search(r"its part of step \d of 'model\.", error), error
