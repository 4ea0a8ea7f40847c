"""The part of the strategy that saves and loads, where no machine divides anything; with ranks in tests/distributed."""

from __future__ import annotations

import pytest

from lightning_protrain import ProTrainStrategy
from lightning_protrain.states import StatesStrategy


@pytest.mark.parametrize("choice", ["auto", "off", "backward"])
def test_a_choice_of_overlap_stays_where_nothing_is_divided(choice: str) -> None:
    strategy = ProTrainStrategy(sharding="shard", shard_weights="world")
    assert isinstance(strategy, StatesStrategy)
    assert strategy.allowed_overlap(choice) == choice  # type: ignore[arg-type]
