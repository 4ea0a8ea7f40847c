"""Whole state dicts and parts of them are the same values, on any number of ranks, for any shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_protrain.distributed.rank_sync import refuse_other_models
from lightning_protrain.fsdp2.state_dicts import (
    describe_tensors,
    load_optimizer_parts,
    load_parts,
    shard_of,
    spread,
    whole_optimizer_state,
    whole_states,
)
from tests.support.ranks import run_ranks, values

# Rows: fewer than ranks, not a multiple of them, none, and one that is.
SHAPES = ((1,), (5, 3), (0, 2), (6,), (7, 2, 2))


class Odd(nn.Module):
    """Parameters of all these shapes, one under two names, and buffers that backends do not know."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for index, shape in enumerate(SHAPES):
            self.register_parameter(f"weight_{index}", nn.Parameter(torch.randn(shape, generator=generator)))
        self.tied = self.weight_1
        self.frozen = nn.Parameter(torch.randn(3, generator=generator), requires_grad=False)
        self.register_buffer("flags", torch.tensor([bool(seed), True]))
        self.register_buffer("rotations", torch.randn(2, dtype=torch.complex64, generator=generator))
        self.register_buffer("count", torch.tensor(7 + seed))

    def forward(self) -> Tensor:
        return sum((p.square() * (index + 1)).sum() for index, p in enumerate(self.parameters()))


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    if isinstance(theirs, Tensor):
        return type(ours) is Tensor and ours.shape == theirs.shape and torch.equal(ours, theirs)
    return ours == theirs


def optimized(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    """Two groups, the later parameters first, after one step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[3:], "weight_decay": 0.1}, {"params": trained[:3]}]
    optimizer = kind(groups, lr=0.01, **options)
    if not any(isinstance(parameter, DTensor) for parameter in trained):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def there_and_back(rank: int) -> None:
    world = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (world,))
    reference = Odd()
    plain = optimized(reference)
    weights, states = reference.state_dict(), plain.state_dict()
    sharded = Odd(seed=1)
    fully_shard(sharded, mesh=mesh)
    optimizer = optimized(sharded)
    load_parts(sharded, weights, strict=True)
    load_optimizer_parts(optimizer, states)
    assert sharded.tied is sharded.weight_1
    for parameter, state in optimizer.state.items():
        held = state["exp_avg"].to_local().untyped_storage().nbytes()
        assert held <= 4 * (parameter.numel() // world + parameter[:1].numel())
    whole = whole_states(sharded.state_dict(keep_vars=True), keep=rank == 0)
    content = whole_optimizer_state(optimizer, keep=rank == 0)
    if rank:
        assert whole == content == {}
        return
    assert list(whole) == list(weights)
    assert equal(whole, dict(weights))
    assert whole["tied"].data_ptr() == whole["weight_1"].data_ptr()
    assert equal(content["state"], states["state"])
    assert equal(content["param_groups"], states["param_groups"])
    fresh = Odd(seed=2)
    again = optimized(fresh)
    again.load_state_dict(content)
    fresh.load_state_dict(whole)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whole_and_parts_are_the_same(world_size: int, tmp_path: Path) -> None:
    values(run_ranks(there_and_back, world_size, tmp_path))


def rank_dependent(rank: int) -> Any:
    model = Odd(seed=rank)
    tensors = [*model.parameters(), *model.buffers()]
    strided = nn.Parameter(torch.full((3, 2), float(rank)).t())
    spread([*tensors, strided, torch.empty(2, device="meta")], torch.device("cpu"))
    expected = Odd(seed=0)
    same = equal(dict(model.state_dict()), dict(expected.state_dict())) and not strided.any()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    # Of another shape: whoever loads it says so. No tensor at all: not ours.
    other = torch.ones(4, 4)
    return (
        same,
        shard_of(other, model.weight_1) is other,
        shard_of("text", model.weight_1),
        shard_of(other, None) is other,
    )


def test_all_ranks_get_the_values_of_the_first(tmp_path: Path) -> None:
    assert values(run_ranks(rank_dependent, 2, tmp_path)) == [(True, True, "text", True)] * 2


class Rows(torch.optim.Optimizer):
    """Keeps one number for each row of a weight."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            row = self.state[parameter].setdefault("row", torch.zeros_like(parameter[:, 0]))
            row.add_(parameter.grad.square().mean(1))
            parameter.sub_(parameter.grad / (1 + row).unsqueeze(1))


def rows(rank: int) -> list[bool]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    content: dict[str, Any] = {}
    found = []
    for sharded in (False, True, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 5, bias=False)
        if sharded:
            fully_shard(model, mesh=mesh)
        optimizer = Rows(model.parameters())
        if sharded:
            load_optimizer_parts(optimizer, content)
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        if not sharded:
            content, state = optimizer.state_dict(), optimizer.state[model.weight]["row"]
            expected = 2 * state
        else:
            (saved,) = whole_optimizer_state(optimizer, keep=True)["state"].values()
            found.append(torch.allclose(saved["row"], expected) and type(saved["row"]) is Tensor)
    return found


def test_states_of_other_shapes_are_held_whole(tmp_path: Path) -> None:
    assert values(run_ranks(rows, 2, tmp_path)) == [[True, True]] * 2


DIFFERENT = {
    "same": None,
    "more": "Rank 0: 10 tensors, not this one; rank 1: 'extra' is torch.float32[2], trained",
    "dtype": "Rank 0: 'count' is torch.int64[], frozen; rank 1: 'count' is torch.float32[], frozen",
    "fewer": "Rank 0: 'frozen' is torch.float32[3], trained; rank 1: 'frozen' is torch.float32[3], frozen",
}


def build_by_rank(rank: int) -> dict[str, str | None]:
    """Return by kind what is said of models that differ so."""
    said: dict[str, str | None] = {}
    for kind in DIFFERENT:
        model = Odd()
        if rank == 1 and kind == "more":
            model.extra = nn.Parameter(torch.zeros(2))
        if rank == 1 and kind == "dtype":
            model.count = model.count.float()
        if rank == 0 and kind == "fewer":
            model.frozen.requires_grad_(True)
            del model.tied
        try:
            said[kind] = refuse_other_models(describe_tensors(model))
        except ValueError as error:
            said[kind] = str(error)
    return said


def test_a_different_model_is_named_on_all_ranks(tmp_path: Path) -> None:
    for said in values(run_ranks(build_by_rank, 2, tmp_path)):
        for kind, message in DIFFERENT.items():
            assert (said[kind] is None) == (message is None), kind
            assert (said[kind] or "").startswith("The ranks have different models" if message else ""), kind
            assert (message or "") in (said[kind] or ""), kind
