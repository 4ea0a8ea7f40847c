"""A machine that fails or is gone in the middle of a step that it shares with another one: both end soon."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.test_exchange import Case, fit, module_of
from tests.distributed.test_overlap import differing, slow_steps
from tests.distributed.test_overlap_faults import AT, FAILED, Faulty, Saving, _fail_in_step
from tests.distributed.test_parity import Module
from tests.ranks import BOUND, run_ranks, values

REFUSED = "refused"


class BeforeStep(Faulty):
    """Fails between backward and the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.rank == 1 and self.global_step == AT:
            raise ValueError("boom")


class AfterStep(Faulty):
    """Fails when steps have been launched, before anybody has waited for them."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.rank == 1 and self.global_step == AT:
            optimizer.register_step_post_hook(self._raise_behind)

    def _raise_behind(self, *_: Any) -> None:
        raise ValueError("boom")


Ends = list[dict[str, Tensor]]


def _end(rank: int, local_size: int) -> list[dict[str, Any]]:
    cases = [Case(False, local_size, trainer={"max_steps": AT + more}) for more in range(2)]
    found = [fit(rank, module_of(), case)[0] for case in cases]
    return [{name: value.numpy() for name, value in weights.items()} for weights in found]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ends]:
    """Weights before and behind the step in which something happens, with so many ranks on each machine."""

    @functools.cache
    def find(local_size: int) -> Ends:
        first, *_ = values(run_ranks(_end, 2 * local_size, tmp_path_factory.mktemp("ends"), local_size))
        return [{name: torch.from_numpy(value) for name, value in weights.items()} for weights in first]

    return find


def _train(rank: int, overlap: str, fault: str, local_size: int, ends: Ends) -> Any:
    """What this rank raises, the step that its weights belong to when they are saved, and how long it takes."""
    cls = {"raise before step": BeforeStep, "raise after step": AfterStep}.get(fault, Faulty)
    module, saving = module_of(cls=cls), Saving()
    assert isinstance(module, Faulty)
    module.fault, module.rank = fault, rank
    _fail_in_step(module)
    begin = time.monotonic()
    try:
        with slow_steps(0.01 if fault == "raise in forward" else 0.0):
            fit(rank, module, Case(True, local_size, overlap), callbacks=[saving])
    except (RuntimeError, ValueError) as error:
        found = saving.found
        steps = [AT + at for at, end in enumerate(ends) if isinstance(found, dict) and not differing(end, found)]
        saved = REFUSED if isinstance(found, str) else next(iter(steps), "none")
        return f"{type(error).__name__}: {error}", saved, time.monotonic() - begin
    return "", "", 0.0


# The steps that weights which are saved may belong to, where those that have been launched are made.
FAULTS: dict[str, list[Any]] = {
    "raise in forward": [AT],
    "raise in backward": [AT],
    "raise before step": [AT],
    "raise in step": [],
    "raise after step": [AT + 1],
}
CASES = [
    pytest.param(fault, overlap, marks=[] if overlap == "forward" else pytest.mark.slow)
    for fault in FAULTS
    for overlap in ("off", "forward", "backward")
    if (fault, overlap) not in (("raise before step", "backward"), ("raise in step", "off"))
]


@pytest.mark.parametrize("local_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("fault", "overlap"), CASES)
def test_a_rank_that_raises_ends_all_machines(
    fault: str, overlap: str, local_size: int, ends: Callable[[int], Ends], tmp_path: Path
) -> None:
    found = values(run_ranks(_train, 2 * local_size, tmp_path, overlap, fault, local_size, ends(local_size)))
    for rank, (error, saved, seconds) in enumerate(found):
        assert seconds < BOUND
        assert saved in (REFUSED, *FAULTS[fault])
        if rank == 1:
            assert "ValueError: boom" in error, error
        else:
            assert f"ends on rank {rank}: " in error, error
            assert local_size > 1 or FAILED in error, error
    if fault == "raise in forward" and overlap != "backward":
        assert [saved for _, saved, _ in found] == [AT] * len(found)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_a_machine_that_is_gone_is_named(overlap: str, ends: Callable[[int], Ends], tmp_path: Path) -> None:
    alone, killed = run_ranks(_train, 2, tmp_path, overlap, "kill in step", 1, ends(1))
    assert killed.error == "killed"
    assert alone.seconds < BOUND
    error, saved, _ = alone.value
    assert "ends on rank 0: rank 1 is gone without a word" in error
    assert saved == REFUSED


class Writing(Module):
    """Writes to weights behind a step, each rank to those that it steps."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.trainer.optimizers[0].state:
                parameter.mul_(0.5)


def _write(rank: int, overlap: str) -> str:
    try:
        fit(rank, module_of(cls=Writing), Case(True, overlap=overlap))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_what_other_machines_would_not_get_is_refused(overlap: str, tmp_path: Path) -> None:
    for error in values(run_ranks(_write, 2, tmp_path, overlap)):
        assert "was changed between steps on the rank that steps it for all machines" in error
