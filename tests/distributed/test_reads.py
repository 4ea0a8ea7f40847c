"""A weight that is read anywhere in a step of ranks that share it: nobody hangs, and nobody sees an old value."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.overlapped_ranks import Case, fit, slow_steps
from tests.support.rank_models import Module
from tests.support.ranks import run_ranks, values

STEPS = 3
# Where hooks may be: all of them run in between two forwards.
HOOKS = ("on_before_zero_grad", "on_before_backward", "on_train_batch_end")


def total(weights: Iterable[Tensor]) -> float:
    """A sum in which every weight counts, one after the other."""
    return sum(float(value.detach().double().sum()) for value in weights)


class Reading(Module):
    """Reads all weights, on some ranks only, in hooks of its own and in one behind the optimizer's step.

    Where ranks share nothing, what that one should see is read when the step is over.
    """

    rank, ranks, hooks, late, shared = 0, range(2), (), False, True

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.seen: list[tuple[str, int, float]] = []

    def note(self, where: str) -> None:
        if self.rank in self.ranks:
            self.seen.append((where, self.trainer.fit_loop.total_batch_idx, total(self.model.parameters())))

    def read_behind(self, *_: Any) -> None:
        if self.shared:
            self.note("behind the step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if "on_before_zero_grad" in self.hooks:
            self.note("on_before_zero_grad")
        if self.late:  # When it is known already how this step is made.
            self.handle = optimizer.register_step_post_hook(self.read_behind)

    def on_before_backward(self, loss: Tensor) -> None:
        if "on_before_backward" in self.hooks:
            self.note("on_before_backward")

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.shared and (self.late or isinstance(self, Hooked)):  # It is over, everywhere.
            self.note("behind the step")
        if self.late:
            self.handle.remove()
        if "on_train_batch_end" in self.hooks:
            self.note("on_train_batch_end")
            self.seen.append(("saved", 0, total(self.trainer.strategy.lightning_module_state_dict().values())))

    def validation_step(self, batch: list[Tensor]) -> None:
        self.note("validation")

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


class Early(Reading):
    """Reads them between backward and the step, too."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step")


class Hooked(Reading):
    """Has the hook behind the step from the start: no step is overlapped then."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.read_behind)
        return optimizer


def _read(rank: int, cls: type[Reading], kind: str, overlap: str, how: dict[str, Any]) -> Any:
    """What is seen on ranks that hold everything themselves, and on those that share it."""
    found = []
    for shared in (False, True):
        torch.manual_seed(0)
        module = cls(kind)
        module.rank, module.shared = rank, shared
        for name, value in how.items():
            setattr(module, name, value)
        validation = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
        case = Case(overlap, "shard") if shared else Case("off", "replicate")
        with slow_steps(0.02 if rank == 1 and shared else 0.0):
            fit(rank, 2, module, case, max_steps=STEPS, **validation)
        found.append(module.seen)
    return found


def check(folder: Path, *args: Any, num_reads: int) -> None:
    for rank, (expected, found) in enumerate(values(run_ranks(_read, 2, folder, *args))):
        assert found == expected
        assert len(found) >= (num_reads if rank in args[-1].get("ranks", range(2)) else 0)


@pytest.mark.parametrize("kind", ["full", "half frozen", "lora"])
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_hooks_of_a_module_see_what_one_rank_has(overlap: str, kind: str, tmp_path: Path) -> None:
    check(tmp_path, Early, kind, overlap, {"hooks": HOOKS}, num_reads=STEPS * len(HOOKS))


@pytest.mark.parametrize("kind", ["full", "half frozen"])
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
def test_so_does_one_behind_a_step_that_is_under_way(overlap: str, kind: str, tmp_path: Path) -> None:
    check(tmp_path, Reading, kind, overlap, {"late": True, "ranks": [0]}, num_reads=STEPS)


def test_so_does_one_of_an_optimizer(tmp_path: Path) -> None:
    check(tmp_path, Hooked, "half frozen", "off", {}, num_reads=STEPS)
