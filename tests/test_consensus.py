"""Ranks that differ are named on all of them, and rank 0 decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_protrain import consensus
from lightning_protrain.consensus import (
    decide,
    describe_rank,
    refuse_differences,
    refuse_uneven,
    say_if_weights_differ,
)
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.blocks import describe_model
from tests.plans import preset
from tests.ranks import run_ranks, values


def facts(model: nn.Module, device_type: str = "cpu", precision: str = "32-true") -> dict[str, str]:
    return describe_rank(describe_model(model), device_type, precision)


def _frozen() -> nn.Module:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    return model


# What differs from `nn.Linear(3, 2)`, and under which names.
MODELS: list[tuple[Callable[[], nn.Module], set[str]]] = [
    (lambda: nn.Linear(3, 2), set()),
    (lambda: nn.Linear(2, 3), {"models"}),
    (lambda: nn.Linear(3, 2, bias=False), {"models", "numbers of parameters"}),
    (lambda: nn.Linear(3, 2).bfloat16(), {"models"}),
    (_frozen, {"models"}),
    (lambda: nn.Sequential(nn.Linear(3, 2)), {"models"}),
]


@pytest.mark.parametrize(("make", "different"), MODELS)
def test_a_rank_is_described_by_what_must_be_equal(make: Callable[[], nn.Module], different: set[str]) -> None:
    first, second = facts(nn.Linear(3, 2)), facts(make())
    assert list(first) == list(second)
    assert {what for what in first if first[what] != second[what]} == different


def test_a_rank_is_described_by_its_device_precision_and_packages() -> None:
    found = facts(nn.Linear(3, 2), "cuda", "bf16-mixed")
    assert (found["device types"], found["precisions"]) == ("cuda", "bf16-mixed")
    assert f"torch {torch.__version__.partition('+')[0]}" in found["versions"]


def _attempt(action: Callable[[], Any]) -> str:
    try:
        return str(action())
    except ValueError as error:
        return str(error)


def _agree(rank: int) -> list[str]:
    """What refusals and decisions say on this rank."""
    said: list[str] = []
    consensus.rank_zero_info = said.append
    same = {"versions": "torch 2", "models": "abc"}
    torch.manual_seed(rank)
    equal, different = nn.Linear(3, 2), nn.Linear(3, 2)
    nn.init.ones_(equal.weight)
    nn.init.ones_(equal.bias)
    found = [
        _attempt(lambda: refuse_differences(same)),
        _attempt(lambda: refuse_differences({**same, "models": f"abc{rank == 2}"})),
        _attempt(lambda: say_if_weights_differ(equal)),
        _attempt(lambda: say_if_weights_differ(different)),
        _attempt(lambda: say_if_weights_differ(nn.Linear(3, 2, device="meta"))),
        _attempt(lambda: refuse_uneven(5)),
        _attempt(lambda: refuse_uneven(float("inf"))),
        _attempt(lambda: refuse_uneven(5 + (rank == 1))),
        _attempt(lambda: refuse_uneven([5, 2], "validation")),
        _attempt(lambda: refuse_uneven([5, 2][: 1 + (rank != 1)], "validation")),
    ]
    return [*found, *said]


def test_three_ranks_agree_or_all_of_them_say_who_differs(tmp_path: Path) -> None:
    found = values(run_ranks(_agree, 3, tmp_path))
    assert found[0] == found[1] == found[2]
    assert "".join(found[0]).count("None") == 7
    models, batches, loaders, weights = (text for text in found[0] if text != "None")
    assert "validation batches (rank 0: 5 + 2, rank 1: 5, rank 2: 5 + 2)" in loaders
    assert "Trainer(limit_val_batches=...)" in loaders
    assert models == (
        "The ranks have different models: rank 0 has abcFalse, rank 2 has abcTrue. All ranks must build the same "
        "model, with the same settings and packages, on the same kind of device."
    )
    assert batches == (
        "The ranks have different numbers of training batches (rank 0: 5, rank 1: 6, rank 2: 5), and the step after "
        "the shortest epoch would wait for ranks that have none. Give every rank as many (`drop_last=True`, a "
        "DistributedSampler), or set Trainer(limit_train_batches=...)."
    )
    assert weights == (
        "The weights of rank 1, 2 differ from those of rank 0, which all ranks take. Call `seed_everything` with the "
        "same seed before the model is made to begin equal."
    )


def _decide(rank: int) -> tuple[list[str], bool]:
    """The names of the plan on this rank, why there is none, and whether it had to make one itself."""
    made = []

    def make() -> Plan:
        made.append(dist.get_rank())
        return preset(nn.Linear(3, 2), "offload")

    def fail() -> Plan:
        raise ValueError("no plan fits")

    plan = decide(make)
    return [*plan.chunks[0].parameters, _attempt(lambda: decide(fail)), plan.to_json()], made == [0]


def test_rank_0_decides_or_fails_for_all(tmp_path: Path) -> None:
    (first, makes), (second, second_makes) = values(run_ranks(_decide, 2, tmp_path))
    assert first == second
    assert first[:3] == ["weight", "bias", "no plan fits"]
    assert (makes, second_makes) == (True, False)


def test_one_process_agrees_with_itself() -> None:
    refuse_uneven(5)
    refuse_differences({"models": "abc"})
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    say_if_weights_differ(model)
    assert torch.equal(model.weight, before)
