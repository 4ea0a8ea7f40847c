"""Registers the strategies with Lightning and connects the parts of the package, when the package is imported."""

from __future__ import annotations

from lightning_protrain.torchvision_build import FAULT  # Lightning would import a torchvision that does not load.

# isort: split
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_protrain.checkpoint.io import folder_reader
from lightning_protrain.connections import CONVERTERS, READERS
from lightning_protrain.fsdp2.strategy import ProTrainFSDP2Strategy
from lightning_protrain.runtime.optim.split_states import adapt
from lightning_protrain.strategy.protrain import ProTrainStrategy

if FAULT:
    rank_zero_warn(f"Only text can be trained: {FAULT}")
ProTrainStrategy.register_strategies(StrategyRegistry)
ProTrainFSDP2Strategy.register_strategies(StrategyRegistry)
READERS.append(folder_reader)
CONVERTERS.append(adapt)
