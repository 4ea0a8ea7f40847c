"""Runs of ranks that step shared weights while others compute, and who reads these weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain import ProTrainStrategy
from lightning_protrain.runtime.optim.host_step import HostStep
from tests.support.plans import half
from tests.support.rank_models import VOCABULARY, Module
from tests.support.ranks import trainer_on_rank

STEPS = 4


class Case(NamedTuple):
    """Placement of weights, overlap of the step, and arguments of the Trainer.

    Attributes:
        overlap: None: DDP.
        placement: A sharding, and "half" where half of the weights are resident.
    """

    overlap: str | None
    placement: str = "shard"
    trainer: dict[str, Any] = {}


def strategy_of(case: Case, module: nn.Module, **process: Any) -> Any:
    if case.overlap is None:
        return DDPStrategy(**process)
    sharding, _, part = case.placement.partition(" ")
    plan: Any = half(module) if part else "offload"
    options: Any = {"sharding": sharding, "overlap_optimizer": case.overlap, "adapter_grad_sync": "ddp"}
    return ProTrainStrategy(plan=plan, monitor=False, **options, **process)


def fit(
    rank: int, world_size: int, module: L.LightningModule, case: Case, **options: Any
) -> tuple[dict[str, Tensor], L.Trainer]:
    """Trains, and gives the weights of this rank."""
    torch.set_num_threads(1)
    kind = partial(strategy_of, case, module)
    trainer = trainer_on_rank(rank, world_size, kind=kind, **{"max_steps": STEPS, **case.trainer, **options})
    trainer.fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, trainer


def module_of(kind: str = "full", cls: type[Module] = Module) -> Module:
    # What `torch.manual_seed` seeds beside this it has no device for, and formats the stack.
    torch.default_generator.manual_seed(0)
    return cls(kind)


def differing(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    assert list(expected) == list(found)
    return [name for name, value in expected.items() if not torch.equal(value, found[name])]


@contextmanager
def slow_steps(seconds: float) -> Iterator[None]:
    """In this context, this rank waits some seconds before it begins to write each chunk."""
    patch, step = pytest.MonkeyPatch(), HostStep.step

    def late(host: HostStep, *given: Any) -> None:
        time.sleep(seconds)
        step(host, *given)

    patch.setattr(HostStep, "step", late)
    try:
        yield
    finally:
        patch.undo()


class TwoMachines(LightningEnvironment):
    """Four processes that are there already, two on each machine."""

    creates_processes_externally = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.set_global_rank(rank)
        self.set_world_size(4)

    def local_rank(self) -> int:
        return self.global_rank() % 2

    def node_rank(self) -> int:
        return self.global_rank() // 2


class Validated(Module):
    """Looks at weights wherever a user may."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.seen: list[Any] = []

    def look(self) -> None:
        self.seen.append([parameter.norm().item() for parameter in self.parameters()])

    def validation_step(self, batch: list[Tensor]) -> None:
        self.seen.append(Module.training_step(self, batch).item())

    def val_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(4))
        return DataLoader(TensorDataset(tokens), batch_size=2)


class Norms(Validated):
    def on_train_batch_end(self, *_: Any) -> None:
        self.look()


class BeforeStep(Validated):
    """A module that reads weights for long between backward and the step, on one rank only."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        if torch.distributed.get_rank() == 0:
            self.on_before_optimizer_step = self._before  # type: ignore[method-assign]

    def _before(self, optimizer: Any) -> None:
        time.sleep(0.03)
        self.look()


class Average(L.Callback):
    """Keeps a running average of all weights."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            average = self.weights.setdefault(name, parameter.detach().clone())
            average.lerp_(parameter.detach(), 0.25)


EVERY_OTHER = {"val_check_interval": 2, "num_sanity_val_steps": 0}


def watched(rank: int, cls: type[Validated], case: Case) -> tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]:
    """Train; return what the module has seen, the averages of its weights, and the weights."""
    module, average = module_of(cls=cls), Average()
    weights, _ = fit(rank, 2, module, case, callbacks=[average] if cls is Norms else [], **EVERY_OTHER)
    return module.seen, average.weights, weights
