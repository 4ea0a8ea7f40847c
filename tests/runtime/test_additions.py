from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

from lightning_protrain.runtime.apply import refuse_additions
from tests.runtime.applied import PLANS, Block, Net, applied, mean_square, train
from tests.support.models import _llama


def add_attribute(model: Net) -> None:
    model.extra = nn.Linear(2, 2)


def add_inside(model: Net) -> None:
    model.blocks[0].add_module("extra", nn.Linear(2, 2))


def append(model: Net) -> None:
    model.blocks.append(Block())


def replace_child(model: Net) -> None:
    model.blocks[1].up = nn.Linear(2, 2)


@pytest.mark.parametrize("add", [add_attribute, add_inside, append, replace_child])
def test_what_has_new_weights_is_refused_by_name_and_is_not_there(add: Callable[[Net], None]) -> None:
    model = Net()
    before = list(model.state_dict())
    handle = refuse_additions(model)
    with pytest.raises(ValueError, match=r"'(extra|blocks\.0\.extra|blocks\.4|blocks\.1\.up)' \((Linear|Block), with"):
        add(model)
    handle.remove()
    assert list(model.state_dict()) == before
    add(model)
    assert model.state_dict()


def test_anything_else_may_change() -> None:
    model, other = Net(), Net()
    handle = refuse_additions(model)
    model.activation = nn.Tanh()
    model.alias = model.blocks[0]
    model.holder = nn.ModuleList([model.head])
    other.extra = nn.Linear(2, 2)
    model.note = "text"
    model.blocks[0].up = None  # type: ignore[assignment]
    handle.remove()
    assert "extra.weight" in other.state_dict()


def test_an_adapter_is_added_before_or_after_a_run_but_not_within() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(_llama(2, tied=False), config)
    with applied(model, PLANS["kept"]) as state:
        with pytest.raises(ValueError, match=r"q_proj\.lora_A\.second.*is added while a plan is applied"):
            model.add_adapter("second", config)
        assert state.num_live == 0
    model = peft.get_peft_model(_llama(2, tied=False), config)
    with applied(model, PLANS["kept"]):
        pass
    model.add_adapter("second", config)
    assert any("second" in name for name, _ in model.named_parameters())


def test_training_adds_nothing() -> None:
    model = Net()
    with applied(model, PLANS["offload"]) as state:
        found = train(model, mean_square, state)
    assert all(torch.isfinite(value).all() for value in found.values())
    model.extra = nn.Linear(2, 2)
