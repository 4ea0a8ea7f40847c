"""The part of the strategy that saves and loads, where no machine divides anything; with ranks in tests/distributed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning import LightningModule

from lightning_protrain import ProTrainStrategy
from lightning_protrain.divided import WholeWeights
from lightning_protrain.states import StatesStrategy


@pytest.mark.parametrize("choice", ["auto", "off", "backward"])
def test_a_choice_of_overlap_stays_where_nothing_is_divided(choice: str) -> None:
    strategy = ProTrainStrategy(sharding="shard", shard_weights="world")
    assert isinstance(strategy, StatesStrategy)
    assert strategy.allowed_overlap(choice) == choice  # type: ignore[arg-type]


def test_a_run_that_divides_nothing_saves_as_ever_behind_one_that_did() -> None:
    strategy: Any = ProTrainStrategy(sharding="shard", shard_weights="world")
    module: Any = LightningModule()
    ranks: Any = SimpleNamespace(meet=lambda what: False)
    strategy._whole = WholeWeights(module, ranks)
    strategy.replace_divided(module, SimpleNamespace(replaced=()))
    assert strategy._whole is None
    assert not module._state_dict_hooks
