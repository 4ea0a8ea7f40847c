"""Offloaded parameters and their blocks: what is registered while they compute, and what may change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_protrain.device.host import in_block
from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.runtime.block import Block
from lightning_protrain.runtime.low_precision import ParamUses
from lightning_protrain.runtime.param import (
    OffloadedParam,
    Ownership,
    ParamLocation,
    changed_before_backward,
    dense_like,
    in_storage,
    refuse_changed_by_others,
)
from lightning_protrain.runtime.shadow import ShadowWeight


def test_a_class_with_its_own_setattr_is_told() -> None:
    lstm = nn.LSTM(2, 2)
    mine, device_param = lstm.weight_ih_l0, nn.Parameter(torch.zeros(8, 2))
    ParamLocation(lstm, "weight_ih_l0").exchange(mine, device_param)
    assert lstm._flat_weights[0] is device_param
    assert not lstm._weights_have_changed()  # Else its next forward moves it out of its chunk, on a GPU.
    ParamLocation(lstm, "weight_ih_l0").exchange(device_param, mine)
    assert lstm._flat_weights[0] is mine
    assert not lstm._weights_have_changed()


def param_of(host: nn.Parameter, ownership: Ownership | None = None) -> OffloadedParam:
    return OffloadedParam("weight", host, nn.Parameter(host.detach().clone()), 0, ownership=ownership)


def test_a_step_of_another_rank_is_no_change_of_this_one() -> None:
    param = param_of(nn.Parameter(torch.ones(2)), Ownership(here=False))
    param.pointer, param.seen_version = param.host.data_ptr(), param.host._version
    param.step_elsewhere()
    param.step_elsewhere()
    assert param.host._version == param.seen_version + 2
    assert not param.changed_here
    with torch.no_grad():
        param.host.mul_(2)
    assert param.changed_here
    param.note_seen()
    assert not param.changed_here
    param.host.data = torch.zeros(2)
    assert param.changed_here


def test_a_graph_that_has_saved_a_weight_notices_a_step_of_another_rank() -> None:
    param = param_of(nn.Parameter(torch.ones(2)), Ownership(here=False))
    factor = torch.ones(2, requires_grad=True)
    loss = (param.host.detach() * factor).sum()
    param.step_elsewhere()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def zeroed_param(parameter: nn.Parameter, fqn: str = "weight") -> OffloadedParam:
    return OffloadedParam(fqn, parameter, nn.Parameter(torch.zeros_like(parameter)), 0)


def shadow_of(param: OffloadedParam) -> ShadowWeight:
    values = param.host.detach().bfloat16()
    return ShadowWeight(param.host, values, ParamUses(param.fqn, param.host, values.device, values.dtype))


def unit_of(module: nn.Module, *locations: tuple[ParamLocation, OffloadedParam]) -> Block:
    return Block("unit", module, (0,), locations, BlockPolicy.KEEP)


def test_what_the_user_puts_at_a_location_stays() -> None:
    module = nn.Linear(2, 2, bias=False)
    unit = unit_of(module, (ParamLocation(module, "weight"), zeroed_param(module.weight)))
    other = nn.Parameter(torch.ones(2, 2))
    unit.register_device_params()
    module.weight = other
    unit.register_hosts()
    assert module.weight is other


def test_a_tied_weight_that_is_shown_whole_goes_from_both_locations() -> None:
    """Outside of autocast every location gets a parameter of its own; each must go again."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    host = module[0].weight
    param = OffloadedParam("weight", host, nn.Parameter(host.detach().bfloat16(), requires_grad=False), 0)
    param.shadow = shadow_of(param)
    unit = unit_of(module, (ParamLocation(module[0], "weight"), param), (ParamLocation(module[1], "weight"), param))
    unit.register_device_params()
    assert all(layer.weight is not host and torch.equal(layer.weight, host) for layer in module)
    unit.register_hosts()
    assert all(layer.weight is host for layer in module)


def test_nothing_is_registered_where_one_weight_cannot_be_shown() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    hosts = [layer.weight for layer in module]
    params = [zeroed_param(host, f"{index}.weight") for index, host in enumerate(hosts)]
    params[1].shadow = shadow_of(params[1])
    unit = unit_of(
        module, *((ParamLocation(layer, "weight"), param) for layer, param in zip(module, params, strict=True))
    )
    with pytest.raises(RuntimeError, match=r"'1\.weight' is streamed in"):
        unit.register_device_params()
    assert all(layer.weight is host for layer, host in zip(module, hosts, strict=True))


def test_to_register_hosts_again_is_safe() -> None:
    module = nn.Linear(2, 2, bias=False)
    param = zeroed_param(module.weight)
    unit = unit_of(module, (ParamLocation(module, "weight"), param))
    unit.register_hosts()
    unit.register_device_params()
    unit.register_hosts()
    unit.register_hosts()
    assert module.weight is param.host


@pytest.mark.parametrize("own", [True, False])
def test_flags_and_hooks_are_followed(own: bool) -> None:
    module = nn.Linear(2, 2, bias=False)
    param = zeroed_param(module.weight)
    if own:
        param.own_hook = param.host.register_hook(lambda gradient: None).id
    unit = unit_of(module, (ParamLocation(module, "weight"), param))
    unit.follow()
    assert not param.mirrored
    param.host.requires_grad_(False)
    unit.follow()
    assert not param.device_param.requires_grad
    param.host.requires_grad_(True)
    seen: list[int] = []
    first = param.host.register_hook(lambda gradient: seen.append(1))
    second = param.host.register_hook(lambda gradient: seen.append(2))
    unit.follow()
    param.device_param.sum().backward()
    assert seen == [1, 2]
    first.remove()
    unit.follow()
    param.device_param.sum().backward()
    assert seen == [1, 2, 2]
    second.remove()
    unit.follow()
    param.device_param.sum().backward()
    assert seen == [1, 2, 2]


def test_a_flag_that_a_forward_has_set_on_the_device_parameter_is_set_back() -> None:
    module = nn.Linear(2, 2, bias=False)
    param = zeroed_param(module.weight)
    unit = unit_of(module, (ParamLocation(module, "weight"), param))
    param.device_param.requires_grad_(False)
    unit.follow()
    assert param.device_param.requires_grad


def test_a_hook_in_place_of_the_own_one_is_followed() -> None:
    """The number of hooks is the same, but the hook is another one."""
    module = nn.Linear(2, 2, bias=False)
    param = zeroed_param(module.weight)
    handle = param.host.register_hook(lambda gradient: None)
    param.own_hook = handle.id
    handle.remove()
    seen: list[int] = []
    param.host.register_hook(lambda gradient: seen.append(1))
    unit_of(module, (ParamLocation(module, "weight"), param)).follow()
    param.device_param.sum().backward()
    assert seen == [1]


def stand_in(**given: Any) -> Any:
    known = {"owned": False, "changed_here": False, "seen_version": 0}
    return SimpleNamespace(fqn="a.weight", host=torch.ones(2), **{**known, **given})


def test_a_graph_names_the_versions_that_it_knows() -> None:
    changed = stand_in()
    changed.host.mul_(2).mul_(2)
    assert "version 2, the forward used 0" in str(changed_before_backward(changed))
    assert "`data` is other memory now" in str(changed_before_backward(stand_in(seen_version=-1)))


@pytest.mark.parametrize(
    ("owned", "changed", "refused"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_what_ranks_share_is_changed_by_its_owner(owned: bool, changed: bool, refused: bool) -> None:
    params = [stand_in(owned=True), stand_in(owned=owned, changed_here=changed)]
    if not refused:
        refuse_changed_by_others(params)
        return
    with pytest.raises(RuntimeError, match=r"'a.weight' was changed between steps on a rank that does not own it"):
        refuse_changed_by_others(params)


SHAPES = [(), (3,), (2, 3), (0, 4), (2, 1, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_memories_hold_the_same_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.arange(max(1, torch.Size(shape).numel())).to(dtype)[: torch.Size(shape).numel()].view(shape)
    block = memoryview(bytearray(256))
    storage = torch.UntypedStorage(256).fill_(0)
    host, device = in_block(block, 64, like), in_storage(storage, 64, like)
    for view in (host, device):
        assert (view.shape, view.dtype, view.stride()) == (like.shape, dtype, like.stride())
        view.copy_(like)
    assert torch.equal(host, device)
    assert bytes(storage.tolist()) == bytes(block)
    assert host.untyped_storage().nbytes() <= max(host.nbytes, 8)


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(2, 3), (3, 1)),
        (torch.empty(2, 3).t(), (1, 3)),
        (torch.empty(2, 3, 4).permute(2, 0, 1), (1, 12, 4)),
        (torch.empty(2, 6)[:, ::2], (3, 1)),
        (torch.empty(3).expand(2, 3), (3, 1)),
        (torch.empty(2, 1, 3), (3, 3, 1)),
    ],
)
def test_strides_are_kept_where_nothing_lies_between(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    found = dense_like(tensor)
    assert found.is_meta
    assert (found.shape, found.stride(), found.dtype) == (tensor.shape, stride, tensor.dtype)
