"""Units: what is registered while they compute, and that it is taken back whatever happens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.runtime.block import Block
from lightning_protrain.runtime.low_precision import ParamUses
from lightning_protrain.runtime.param import OffloadedParam, ParamLocation
from lightning_protrain.runtime.shadow import ShadowWeight


def param_of(parameter: nn.Parameter, fqn: str = "weight") -> OffloadedParam:
    return OffloadedParam(fqn, parameter, nn.Parameter(torch.zeros_like(parameter)), 0)


def shadow_of(param: OffloadedParam) -> ShadowWeight:
    values = param.host.detach().bfloat16()
    return ShadowWeight(param.host, values, ParamUses(param.fqn, param.host, values.device, values.dtype))


def unit_of(module: nn.Module, *sites: tuple[ParamLocation, OffloadedParam]) -> Block:
    return Block("unit", module, (0,), sites, BlockPolicy.KEEP)


def test_a_tied_parameter_is_one_slot_at_two_sites() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    param = param_of(module[0].weight)
    unit = unit_of(module, (ParamLocation(module[0], "weight"), param), (ParamLocation(module[1], "weight"), param))
    assert unit.params == (param,)
    unit.register_device_params()
    assert module[0].weight is module[1].weight is param.device_param
    unit.register_hosts()
    assert module[0].weight is module[1].weight is param.host


def test_what_the_user_puts_at_a_site_stays() -> None:
    module = nn.Linear(2, 2, bias=False)
    unit = unit_of(module, (ParamLocation(module, "weight"), param_of(module.weight)))
    other = nn.Parameter(torch.ones(2, 2))
    unit.register_device_params()
    module.weight = other
    unit.register_hosts()
    assert module.weight is other


def test_a_tied_weight_that_is_shown_whole_goes_from_both_sites() -> None:
    """Outside of autocast every site gets a parameter of its own; each must go again."""
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
    params = [param_of(host, f"{index}.weight") for index, host in enumerate(hosts)]
    params[1].shadow = shadow_of(params[1])
    unit = unit_of(
        module, *((ParamLocation(layer, "weight"), param) for layer, param in zip(module, params, strict=True))
    )
    with pytest.raises(RuntimeError, match=r"'1\.weight' is streamed in"):
        unit.register_device_params()
    assert all(layer.weight is host for layer, host in zip(module, hosts, strict=True))


def test_to_register_hosts_again_is_safe() -> None:
    module = nn.Linear(2, 2, bias=False)
    param = param_of(module.weight)
    unit = unit_of(module, (ParamLocation(module, "weight"), param))
    unit.register_hosts()
    unit.register_device_params()
    unit.register_hosts()
    unit.register_hosts()
    assert module.weight is param.host


@pytest.mark.parametrize("own", [True, False])
def test_flags_and_hooks_are_followed(own: bool) -> None:
    module = nn.Linear(2, 2, bias=False)
    param = param_of(module.weight)
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


def test_a_flag_that_a_forward_has_set_on_the_twin_is_set_back() -> None:
    module = nn.Linear(2, 2, bias=False)
    param = param_of(module.weight)
    unit = unit_of(module, (ParamLocation(module, "weight"), param))
    param.device_param.requires_grad_(False)
    unit.follow()
    assert param.device_param.requires_grad


def test_a_hook_in_place_of_the_own_one_is_followed() -> None:
    """As many hooks as before, but another one."""
    module = nn.Linear(2, 2, bias=False)
    param = param_of(module.weight)
    handle = param.host.register_hook(lambda gradient: None)
    param.own_hook = handle.id
    handle.remove()
    seen: list[int] = []
    param.host.register_hook(lambda gradient: seen.append(1))
    unit_of(module, (ParamLocation(module, "weight"), param)).follow()
    param.device_param.sum().backward()
    assert seen == [1]
