"""All placements give the weights that DDP gives on the same data, on two and four gloo ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.support.rank_models import KINDS, STEPS, Module, strategy_of
from tests.support.ranks import run_ranks, trainer_on_rank, values


class Case(NamedTuple):
    kind: str
    placement: str
    accumulate: int
    clip: float | None

    def __str__(self) -> str:
        return "-".join(map(str, self))


PLACEMENTS = ("resident", "replicate", "shard", "shard half", "auto half", "ddp flat")
# Every pair of values of two factors.
CASES = [
    Case(kind, placement, (1, 3)[(k + p) % 2], (None, 0.1)[(k // 2 + p // 2 + p // 4) % 2])
    for (k, kind), (p, placement) in itertools.product(enumerate(KINDS), enumerate(PLACEMENTS))
]


class Found(NamedTuple):
    weights: dict[str, Tensor]
    states: dict[Any, Any]
    collectives: int
    sent: int


def train(rank: int, world_size: int, case: Case, seed: int = 0) -> tuple[dict[str, Tensor], L.Trainer]:
    # What `torch.manual_seed` seeds beside this it has no device for, and formats the stack.
    torch.default_generator.manual_seed(seed)
    module = Module(case.kind)
    options: dict[str, Any] = {"accumulate_grad_batches": case.accumulate, "max_steps": STEPS}
    if case.clip is not None:
        options["gradient_clip_val"] = case.clip
    if case.placement != "ddp":
        options["kind"] = lambda **process: strategy_of(case.placement, module, **process)
    trainer = trainer_on_rank(rank, world_size, **options)
    trainer.fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, trainer


def train_all(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    torch.set_num_threads(1)
    wrong, expected = [], {}
    for case in cases:
        plain = case._replace(placement="ddp")
        if plain not in expected:
            expected[plain], _ = train(rank, world_size, plain)
        found, trainer = train(rank, world_size, case)
        assert trainer.global_step == STEPS
        if list(found) != list(expected[plain]):
            wrong.append(f"{case}: names")
        for name, value in expected[plain].items():
            if not torch.equal(value, found[name]):
                wrong.append(f"{case}: {name} {float((value - found[name]).abs().max()):.1e}")
                break
    return wrong


def test_every_pair_of_two_factors_is_trained() -> None:
    factors = (KINDS, PLACEMENTS, (1, 3), (None, 0.1))
    for one, two in itertools.combinations(range(len(factors)), 2):
        assert {(case[one], case[two]) for case in CASES} == set(itertools.product(factors[one], factors[two]))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_weights_of_ddp(kind: str, tmp_path: Path) -> None:
    found = values(run_ranks(train_all, 2, tmp_path, 2, [case for case in CASES if case.kind == kind]))
    assert found == [[], []]
