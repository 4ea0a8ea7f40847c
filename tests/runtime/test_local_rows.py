"""Optimizers step plain rows in place of DTensors, with the gradients and states that their user sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_protrain.runtime.local_rows import LocalRows, refuse_optimizers, register_divided, replace_parameters
from lightning_protrain.runtime.rows import Rows
from lightning_protrain.runtime.slot import Slot


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of one machine: what is sent is tested elsewhere."""
    store = dist.FileStore(str(Path(tmp_path_factory.mktemp("meeting")) / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh.from_group(dist.new_group([0], backend="gloo"), "cpu", mesh_dim_names=("machine",))
    dist.destroy_process_group()


@pytest.fixture
def slot(mesh: Any) -> Slot:
    host = nn.Parameter(torch.arange(6.0).view(3, 2))
    made = Slot("weight", host, nn.Parameter(host.detach().clone()), 0, rows=Rows.of(host, mesh))
    made.divide()
    return made


def _step(optimizer: torch.optim.Optimizer, rows: LocalRows) -> None:
    with rows.stepping(optimizer):
        assert not any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"])
        optimizer.step()


def test_steps_are_those_of_plain_parameters(slot: Slot) -> None:
    rows, plain = LocalRows([slot]), nn.Parameter(slot.host.detach().clone())
    one = torch.optim.AdamW([slot.registered], lr=0.1)
    other = torch.optim.AdamW([plain], lr=0.1)
    for number in range(3):
        slot.host.grad = torch.full_like(plain, number + 1.0)
        plain.grad = slot.host.grad.clone()
        rows.show()
        _step(one, rows)
        other.step()
    assert torch.equal(slot.host, plain)
    assert one.param_groups[0]["params"] == [slot.registered]
    (state,) = one.state.values()
    assert list(one.state) == [slot.registered]
    assert isinstance(state["exp_avg"], DTensor)
    assert torch.equal(state["exp_avg"].to_local(), other.state[plain]["exp_avg"])
    assert type(state["step"]) is torch.Tensor


def test_what_the_user_does_to_a_gradient_counts(slot: Slot) -> None:
    rows = LocalRows([slot])
    slot.host.grad = torch.ones_like(slot.host)
    rows.show()
    assert isinstance(slot.registered.grad, DTensor)
    slot.registered.grad.mul_(2)
    assert rows.of([slot.registered])[0] is slot.host
    assert slot.host.grad.unique().tolist() == [2]
    slot.registered.grad = slot.registered.grad * 3
    rows.take()
    assert slot.host.grad.unique().tolist() == [6]
    slot.registered.grad = None
    rows.take()
    assert slot.host.grad is None


def test_what_is_collected_is_shown_as_a_part_and_dropped_with_it(slot: Slot) -> None:
    rows = LocalRows([slot])
    slot.collects.grad = torch.ones(3, 2)
    rows.show()
    assert slot.registered.grad is not None
    rows.take()
    assert slot.collects.grad is not None
    slot.registered.grad = None
    rows.take()
    assert slot.collects.grad is None


def test_a_gradient_of_another_kind_is_refused(slot: Slot) -> None:
    assert slot.rows is not None
    slot.registered.grad = slot.rows.shown_as_part(torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="is no DTensor of its rows"):
        LocalRows([slot]).take()


def test_hooks_on_gradients_are_refused(slot: Slot) -> None:
    slot.registered.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(RuntimeError, match="has a hook on its gradient, and machines divide it"):
        LocalRows([slot]).take()


def test_what_is_frozen_outside_is_frozen_inside(slot: Slot) -> None:
    slot.registered.requires_grad_(False)
    LocalRows([slot]).take()
    assert not slot.host.requires_grad


def test_a_write_outside_is_seen_inside(slot: Slot) -> None:
    before = slot.version
    with torch.no_grad():
        slot.registered.mul_(2)
    assert slot.version > before
    assert slot.host[2].tolist() == [8, 10]


def test_states_that_were_loaded_are_cut(slot: Slot) -> None:
    optimizer = torch.optim.AdamW([slot.registered])
    optimizer.state[slot.registered] = {"step": torch.ones(()), "exp_avg": torch.ones(3, 2)}
    LocalRows([slot]).divide_states(optimizer)
    state = optimizer.state[slot.registered]
    assert isinstance(state["exp_avg"], DTensor)
    assert type(state["step"]) is torch.Tensor


def test_places_and_optimizers_get_the_new_parameters(slot: Slot) -> None:
    model = nn.ModuleList([nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)])
    model[1].weight = model[0].weight
    old = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slot.fqn = "0.weight"
    replaced = register_divided(model, [slot], dict(model.named_parameters()))
    replace_parameters([optimizer], replaced)
    assert replaced == [(old, slot.registered)]
    assert model[0].weight is model[1].weight is slot.registered is optimizer.param_groups[0]["params"][0]


class Own(torch.optim.SGD):
    """Nobody knows what it does."""


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adafactor, Own])
def test_other_optimizers_are_refused_by_name(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} is not known to step each element alone"):
        refuse_optimizers([kind([nn.Parameter(torch.ones(2))], lr=0.1)])


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    refuse_optimizers([optimizer])
    parameter.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(ValueError, match="from an empty state"):
        refuse_optimizers([optimizer])
