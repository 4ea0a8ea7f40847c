"""The places of a parameter, and what its unit is shown of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_protrain.runtime.param import OffloadedParam, ParamLocation


def test_a_site_keeps_what_the_user_has_put_there() -> None:
    module = nn.Linear(2, 2)
    mine, twin, other = module.weight, nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    site = ParamLocation(module, "weight")
    site.exchange(mine, twin)
    assert module.weight is twin
    module.weight = other
    site.exchange(twin, mine)
    assert module.weight is other


def test_a_class_with_its_own_setattr_is_told() -> None:
    lstm = nn.LSTM(2, 2)
    mine, twin = lstm.weight_ih_l0, nn.Parameter(torch.zeros(8, 2))
    ParamLocation(lstm, "weight_ih_l0").exchange(mine, twin)
    assert lstm._flat_weights[0] is twin
    assert not lstm._weights_have_changed()  # Else its next forward moves the twin out of its chunk, on a GPU.
    ParamLocation(lstm, "weight_ih_l0").exchange(twin, mine)
    assert lstm._flat_weights[0] is mine
    assert not lstm._weights_have_changed()


def slot_of(host: nn.Parameter) -> OffloadedParam:
    return OffloadedParam("weight", host, nn.Parameter(host.detach().clone()), 0)


def test_a_slot_in_full_precision_shows_its_twin() -> None:
    slot = slot_of(nn.Parameter(torch.ones(2)))
    assert slot.show() is slot.twin
    assert slot.owned


def test_only_hooks_of_others_are_the_users() -> None:
    slot = slot_of(nn.Parameter(torch.ones(2)))
    own = slot.host.register_hook(lambda gradient: gradient)
    slot.own_hook = own.id
    assert not slot.has_user_hooks
    slot.host.register_hook(lambda gradient: gradient)
    assert slot.has_user_hooks


def test_the_twin_follows_flags_and_hooks() -> None:
    slot, seen = slot_of(nn.Parameter(torch.ones(2))), []
    slot.host.register_hook(seen.append)
    slot.follow()
    (3 * slot.twin).sum().backward()
    assert [gradient.tolist() for gradient in seen] == [[3.0, 3.0]]
    slot.host.requires_grad_(False)
    slot.follow()
    assert not slot.twin.requires_grad


def test_a_step_of_another_rank_is_no_change_of_this_one() -> None:
    slot = slot_of(nn.Parameter(torch.ones(2)))
    slot.pointer, slot.seen_version = slot.host.data_ptr(), slot.host._version
    slot.step_elsewhere()
    slot.step_elsewhere()
    assert slot.host._version == slot.seen_version + 2
    assert not slot.changed_here
    with torch.no_grad():
        slot.host.mul_(2)
    assert slot.changed_here
    slot.seen_version, slot.steps_elsewhere = slot.host._version, 0
    assert not slot.changed_here
    slot.host.data = torch.zeros(2)
    assert slot.changed_here


def test_a_graph_that_has_saved_a_weight_notices_a_step_of_another_rank() -> None:
    slot = slot_of(nn.Parameter(torch.ones(2)))
    factor = torch.ones(2, requires_grad=True)
    loss = (slot.host.detach() * factor).sum()
    slot.step_elsewhere()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
