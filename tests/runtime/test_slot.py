"""The places of a parameter, and what its unit is shown of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_protrain.runtime.param import OffloadedParam, Ownership, ParamLocation


def test_a_site_keeps_what_the_user_has_put_there() -> None:
    module = nn.Linear(2, 2)
    mine, device_param, other = module.weight, nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    site = ParamLocation(module, "weight")
    site.exchange(mine, device_param)
    assert module.weight is device_param
    module.weight = other
    site.exchange(device_param, mine)
    assert module.weight is other


def test_a_class_with_its_own_setattr_is_told() -> None:
    lstm = nn.LSTM(2, 2)
    mine, device_param = lstm.weight_ih_l0, nn.Parameter(torch.zeros(8, 2))
    ParamLocation(lstm, "weight_ih_l0").exchange(mine, device_param)
    assert lstm._flat_weights[0] is device_param
    assert not lstm._weights_have_changed()  # Else its next forward moves the twin out of its chunk, on a GPU.
    ParamLocation(lstm, "weight_ih_l0").exchange(device_param, mine)
    assert lstm._flat_weights[0] is mine
    assert not lstm._weights_have_changed()


def param_of(host: nn.Parameter, ownership: Ownership | None = None) -> OffloadedParam:
    return OffloadedParam("weight", host, nn.Parameter(host.detach().clone()), 0, ownership=ownership)


def test_a_slot_in_full_precision_shows_its_twin() -> None:
    param = param_of(nn.Parameter(torch.ones(2)))
    assert param.show() is param.device_param
    assert param.owned


def test_only_hooks_of_others_are_the_users() -> None:
    param = param_of(nn.Parameter(torch.ones(2)))
    own = param.host.register_hook(lambda gradient: gradient)
    param.own_hook = own.id
    assert not param.has_user_hooks
    param.host.register_hook(lambda gradient: gradient)
    assert param.has_user_hooks


def test_the_twin_follows_flags_and_hooks() -> None:
    param, seen = param_of(nn.Parameter(torch.ones(2))), []
    param.host.register_hook(seen.append)
    param.follow()
    (3 * param.device_param).sum().backward()
    assert [gradient.tolist() for gradient in seen] == [[3.0, 3.0]]
    param.host.requires_grad_(False)
    param.follow()
    assert not param.device_param.requires_grad


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
