"""Ranks rehearse a plan together: they agree on what was measured, and train the same bits as without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_protrain import ProTrainStrategy
from lightning_protrain.runtime.apply import Runtime
from lightning_protrain.strategy import plan_session
from tests.support.machines import CPU
from tests.support.rank_models import Module
from tests.support.ranks import run_ranks, trainer_on_rank, values


class Case(NamedTuple):
    """A way to train on two ranks."""

    kind: str
    sharding: str
    sync: str
    share: float
    options: dict[str, Any]


CASES = [
    Case("full", "replicate", "ddp", 3.0, {}),
    Case("tied", "shard", "flat", 2.5, {"gradient_clip_val": 0.1}),
    Case("full", "auto", "ddp", 3.0, {"accumulate_grad_batches": 3}),
    Case("lora", "shard", "ddp", 1.5, {}),
    Case("lora", "replicate", "flat", 1.5, {"accumulate_grad_batches": 2}),
]


class Found(NamedTuple):
    weights: dict[str, Tensor]
    decisions: Any
    budget: int
    told: list[str]


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(rank: int, case: Case, rehearse: bool, make: Callable[[str], Module] = Module) -> Found:
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)
    module = make(case.kind)
    budget = int(case.share * sum(weight.nbytes for weight in module.parameters()))

    def strategy(**process: Any) -> ProTrainStrategy:
        options: dict[str, Any] = {"device_memory": budget, "hardware": CPU, "monitor": False, "rehearse": rehearse}
        return ProTrainStrategy(sharding=case.sharding, adapter_grad_sync=case.sync, **options, **process)

    told, log = _Told(), logging.getLogger("lightning.pytorch")
    log.addHandler(told)
    trainer = trainer_on_rank(rank, 2, kind=strategy, max_steps=4, **case.options)
    trainer.fit(module)
    log.removeHandler(told)
    plan = trainer.strategy.plan
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    lines = [line for line in told.lines if "rehears" in line]
    return Found(weights, (plan.chunks, plan.blocks, plan.prediction), trainer.strategy.budget, lines)


def train_both(rank: int, folder: Path) -> list[str]:
    """Return what differs with a rehearsal and without, or on the ranks."""
    plan_session.user_folder = lambda: folder
    wrong = []
    for case in CASES:
        without, found = train(rank, case, False), train(rank, case, True)
        wrong += [f"{case}: {name}" for name, value in without.weights.items() if not found.weights[name].equal(value)]
        everywhere: list[Any] = [None, None]
        dist.all_gather_object(everywhere, (found.decisions, found.budget))
        if everywhere[0] != everywhere[1]:
            wrong.append(f"{case}: the ranks differ")
        if without.told or bool(found.told) is bool(rank) or not all("was rehearsed" in line for line in found.told):
            wrong.append(f"{case}: {found.told}")
    return wrong


@pytest.mark.slow
def test_two_ranks_train_the_same_bits_with_a_rehearsal_and_take_one_plan(tmp_path: Path) -> None:
    assert values(run_ranks(train_both, 2, tmp_path, tmp_path / "cache")) == [[], []]


def fail_on_one(rank: int, folder: Path, error: Exception) -> tuple[Any, int, list[str]]:
    plan_session.user_folder = lambda: folder
    run_step, calls = Runtime.run_step, []

    def once(runtime: Runtime, *args: Any, **kwargs: Any) -> Any:
        calls.append(runtime)
        if rank == 1 and len(calls) == 2:
            raise error
        return run_step(runtime, *args, **kwargs)

    Runtime.run_step = once  # type: ignore[method-assign]
    found = train(rank, CASES[0], True)
    return found.decisions, found.budget, found.told


BUDGET = int(CASES[0].share * sum(weight.nbytes for weight in Module("full").parameters()))


@pytest.mark.parametrize(
    ("error", "budget", "told"),
    [
        (ValueError("no image"), BUDGET, "not rehearsed: the step raises ValueError (no image)"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has a total of"),
            BUDGET - 2048,
            "ran out of memory as the plan was rehearsed",
        ),
    ],
    ids=["a step that raises", "out of memory"],
)
def test_what_fails_on_one_rank_counts_on_all(error: Exception, budget: int, told: str, tmp_path: Path) -> None:
    found = values(run_ranks(fail_on_one, 2, tmp_path, tmp_path / "cache", error))
    assert found[0][:2] == found[1][:2]
    assert found[0][1] == budget
    assert told in found[0][2][0]


class Telling(Module):
    """Talks to the other ranks in its step: what is gathered takes part in the loss."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = super().training_step(batch)
        everywhere = [torch.zeros(()), torch.zeros(())]
        dist.all_gather(everywhere, loss.detach())
        return loss * torch.stack(everywhere).mean()


def talk(rank: int, folder: Path) -> list[str]:
    plan_session.user_folder = lambda: folder
    without, found = (train(rank, CASES[0], rehearse, Telling) for rehearse in (False, True))
    assert bool(found.told) is (rank == 0)
    return [name for name, value in without.weights.items() if not found.weights[name].equal(value)]


def test_a_step_that_talks_to_other_ranks_is_rehearsed_without_them(tmp_path: Path) -> None:
    assert values(run_ranks(talk, 2, tmp_path, tmp_path / "cache")) == [[], []]
