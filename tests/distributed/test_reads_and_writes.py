"""Weights that ranks share may be read and written anywhere: nobody hangs, and nobody sees an old value."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_protrain import ProTrainStrategy
from tests.support.overlapped_ranks import Case, fit, slow_steps
from tests.support.rank_models import Module
from tests.support.ranks import run_ranks, trainer_on_rank, values

STEPS = 3
# Where hooks may be: all of them run in between two forwards.
HOOKS = ("on_before_zero_grad", "on_before_backward", "on_train_batch_end")


def total(weights: Iterable[Tensor]) -> float:
    """A sum in which every weight counts, one after the other."""
    return sum(float(value.detach().double().sum()) for value in weights)


class Reading(Module):
    """Reads all weights, on some ranks only, in hooks of its own and in one behind the optimizer's step."""

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
    """Return what the module reads on ranks with weights of their own, and on ranks that share weights."""
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


@pytest.mark.parametrize(
    ("kind", "overlap"), [("full", "off"), ("full", "forward"), ("half frozen", "forward"), ("lora", "off")]
)
def test_hooks_of_a_module_see_what_one_rank_has(overlap: str, kind: str, tmp_path: Path) -> None:
    check(tmp_path, Early, kind, overlap, {"hooks": HOOKS}, num_reads=STEPS * len(HOOKS))


@pytest.mark.parametrize(
    ("kind", "overlap"),
    [("full", "off"), ("full", "backward"), ("half frozen", "forward"), ("half frozen", "backward")],
)
def test_so_does_one_behind_a_step_that_is_under_way(overlap: str, kind: str, tmp_path: Path) -> None:
    check(tmp_path, Reading, kind, overlap, {"late": True, "ranks": [0]}, num_reads=STEPS)


def test_so_does_one_of_an_optimizer(tmp_path: Path) -> None:
    check(tmp_path, Hooked, "half frozen", "off", {}, num_reads=STEPS)


class Decaying(Module):
    """Writes to its weights after every step."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


class Validated(Module):
    """Is validated once in two steps."""

    def validation_step(self, batch: list[Tensor]) -> None:
        self.training_step(batch)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


AVERAGES = {
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.5),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.1, swa_epoch_start=1),
}


def _average(rank: int, name: str, validates: bool) -> list[Any]:
    """Compare weight averaging with DDP; return the differences, the owners of weights, and the refusal."""
    options = {"limit_train_batches": 4, "limit_val_batches": 2 if validates else 0, "max_steps": -1, "max_epochs": 3}

    def averaged(sharding: Any) -> tuple[nn.Module, Any]:
        return train(rank, sharding, Validated, callbacks=[AVERAGES[name]()], num_sanity_val_steps=0, **options)

    expected, (found, trainer) = averaged(None)[0].state_dict(), averaged("auto")
    wrong = [key for key, value in found.state_dict().items() if not torch.equal(expected[key], value)]
    with pytest.raises(ValueError, match=rf'sharding="shard": {name} .* Set sharding="replicate"'):
        averaged("shard")
    return [wrong, str(trainer.strategy.plan.sharding)]


@pytest.mark.parametrize(("name", "validates"), [("EMAWeightAveraging", True), ("StochasticWeightAveraging", False)])
def test_weights_that_averages_are_written_over_are_not_shared(name: str, validates: bool, tmp_path: Path) -> None:
    assert values(run_ranks(_average, 2, tmp_path, name, validates)) == [[[], "replicate"]] * 2


class Counting(Module):
    """Scales its loss by a buffer in which every rank counts what it has seen itself."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.register_buffer("seen", torch.ones(()))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.seen += batch[0].float().mean() / 100
        return super().training_step(batch) * self.seen


def train(rank: int, sharding: Any, kind: type[Module], accumulate: int = 1, **more: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = kind("full")
    options: dict[str, Any] = {"max_steps": 4, "accumulate_grad_batches": accumulate, **more}
    if sharding is not None:
        options["kind"] = lambda **process: ProTrainStrategy(sharding=sharding, plan="offload", **process)
    trainer = trainer_on_rank(rank, 2, **options)
    trainer.fit(module)
    return module, trainer


def _write_between_steps(rank: int) -> list[str]:
    expected, found = (train(rank, sharding, Decaying)[0].state_dict() for sharding in (None, "replicate"))
    wrong = [name for name in expected if not torch.equal(expected[name], found[name])]
    with pytest.raises(RuntimeError, match=r"does not own it. The ranks of this node share") as raised:
        train(rank, "shard", Decaying)
    assert 'sharding="replicate"' in str(raised.value)
    return wrong


def test_weights_written_between_steps_are_those_of_ddp_or_refused(tmp_path: Path) -> None:
    outcomes = run_ranks(_write_between_steps, 2, tmp_path)
    assert any(each.value == [] for each in outcomes)
    # The rank that owns what the other one has complained of ends because that one has gone.
    assert all(each.error is None or "ends on rank" in each.error for each in outcomes)


def _count(rank: int, accumulate: int) -> list[str]:
    wrong = []
    expected = train(rank, None, Counting, accumulate)[0].state_dict()
    for sharding in ("replicate", "shard"):
        found = train(rank, sharding, Counting, accumulate)[0].state_dict()
        wrong += [f"{sharding} {name}" for name in expected if not torch.equal(expected[name], found[name])]
    return wrong


@pytest.mark.parametrize("accumulate", [1, 3])
def test_buffers_are_those_of_ddp(accumulate: int, tmp_path: Path) -> None:
    assert values(run_ranks(_count, 2, tmp_path, accumulate)) == [[], []]


def _write_afterwards(rank: int) -> list[bool]:
    module, trainer = train(rank, "shard", Module)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    trainer.strategy.barrier()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(rank + 1)
    trainer.strategy.barrier()
    return [torch.equal(old + (rank + 1), new) for old, new in zip(before, module.parameters(), strict=True)]


def test_after_the_run_every_rank_has_weights_of_its_own(tmp_path: Path) -> None:
    for own in values(run_ranks(_write_afterwards, 2, tmp_path)):
        assert own
        assert all(own)


class Zeroing(Module):
    """A module that keeps its gradients and fills them with zeros, not None."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Mixing(Module):
    """A backward that averages, then one that does not, and no `zero_grad` between them."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch))
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(super().training_step(batch))


def _zero(rank: int) -> list[str]:
    expected, found = (train(rank, sharding, Zeroing, accumulate=3)[0].state_dict() for sharding in (None, "shard"))
    return [name for name in expected if not torch.equal(expected[name], found[name])]


def test_gradients_filled_with_zeros_are_begun_anew(tmp_path: Path) -> None:
    assert values(run_ranks(_zero, 2, tmp_path)) == [[], []]


def _mix(rank: int) -> None:
    train(rank, "shard", Mixing)


def test_averages_and_gradients_of_one_rank_are_not_added_up(tmp_path: Path) -> None:
    outcomes = run_ranks(_mix, 2, tmp_path)
    assert any("has been averaged over the ranks" in str(each.error) for each in outcomes)
    assert all(each.error is not None for each in outcomes)
