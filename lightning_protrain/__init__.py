"""Train models that do not fit the device, with Lightning: importing this package registers `strategy="protrain"`."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_protrain.callbacks.checkpoint import ProTrainCheckpoint
from lightning_protrain.checkpoint_io import ProTrainCheckpointIO
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.fsdp2 import ProTrainFSDP2Strategy
from lightning_protrain.module import CausalLMModule
from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.precision import ProTrainPrecision
from lightning_protrain.strategy import ProTrainStrategy

__version__ = "0.1.0"

__all__ = [
    "BlockPolicy",
    "CausalLMModule",
    "ChatDataModule",
    "Plan",
    "ProTrainCheckpoint",
    "ProTrainCheckpointIO",
    "ProTrainFSDP2Strategy",
    "ProTrainPrecision",
    "ProTrainStrategy",
    "__version__",
]

ProTrainStrategy.register_strategies(StrategyRegistry)
ProTrainFSDP2Strategy.register_strategies(StrategyRegistry)
