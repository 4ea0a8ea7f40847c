"""What a model whose weights machines divide refuses, and how it says so; what it saves is tested with ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.divided import WholeWeights, refuse_combinations


def _refuse(
    automatic: bool = True, scaler: object = None, overlap: Any = "auto", hook: bool = False, callbacks: Any = ()
) -> None:
    module: Any = nn.Linear(2, 2)
    module.automatic_optimization = automatic
    if hook:
        module.weight.register_hook(lambda gradient: gradient)
    plugin = SimpleNamespace(scaler=scaler)
    trainer: Any = SimpleNamespace(precision="16-mixed", precision_plugin=plugin, callbacks=callbacks)
    refuse_combinations(module, trainer, [torch.optim.SGD(module.parameters(), lr=0.1)], overlap)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"automatic": False}, "under manual optimization"),
        ({"scaler": object()}, "precision='16-mixed' scales gradients"),
        ({"overlap": "backward"}, "overlap_optimizer='backward' is not built"),
        ({"hook": True}, "'weight' has a hook on its gradient"),
        ({"callbacks": [SavePretrained("somewhere")]}, "SavePretrained writes weights that are whole"),
    ],
)
def test_what_is_not_built_is_named(given: dict[str, Any], match: str) -> None:
    _refuse()
    with pytest.raises(ValueError, match=match):
        _refuse(**given)


def test_a_model_without_divided_weights_saves_and_loads_as_ever() -> None:
    module = nn.Linear(2, 2)
    before = module.state_dict()
    ranks: Any = SimpleNamespace(meet=lambda what: False)
    WholeWeights(module, ranks)
    whole = WholeWeights(module, ranks)  # Of the next run: what is left on the model is taken off.
    assert [len(module._state_dict_hooks), len(module._load_state_dict_pre_hooks)] == [1, 1]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module.load_state_dict({name: value + 1 for name, value in before.items()})
    whole.remove()
    whole.remove()
    assert not module._state_dict_hooks
    assert not module._load_state_dict_pre_hooks
