"""Train models that do not fit the device, with Lightning: importing this package registers `strategy="protrain"`.

Public names are imported on first use. The strategies need PyTorch and Lightning, others more packages. Without
Lightning, the engine alone is there (`device`, `profiler`, `planner`, `runtime`): see docs/how/engine.md.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_protrain.config import __version__
from lightning_protrain.planner.plan import BlockPolicy, Plan

if TYPE_CHECKING:
    from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
    from lightning_protrain.callbacks.evaluator import Evaluator
    from lightning_protrain.callbacks.samples import InitialValidation, SampleCompletion
    from lightning_protrain.callbacks.save_pretrained import SavePretrained
    from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
    from lightning_protrain.data.datamodule import ChatDataModule
    from lightning_protrain.fsdp2.strategy import ProTrainFSDP2Strategy
    from lightning_protrain.models.module import CausalLMModule, PositionScores
    from lightning_protrain.models.preference import PreferenceModule
    from lightning_protrain.plans import plan
    from lightning_protrain.report.plan_monitor import PlanMonitor
    from lightning_protrain.runtime.optim.split_adamw import SplitAdamW
    from lightning_protrain.strategy.precision import ProTrainPrecision
    from lightning_protrain.strategy.protrain import ProTrainStrategy

__all__ = [
    "BlockPolicy",
    "CausalLMModule",
    "ChatDataModule",
    "Evaluator",
    "InitialValidation",
    "Plan",
    "PlanMonitor",
    "PositionScores",
    "PreferenceModule",
    "ProTrainCheckpoint",
    "ProTrainCheckpointIO",
    "ProTrainFSDP2Strategy",
    "ProTrainPrecision",
    "ProTrainStrategy",
    "SampleCompletion",
    "SavePretrained",
    "SplitAdamW",
    "__version__",
    "plan",
]

_LAZY = {
    "CausalLMModule": "lightning_protrain.models.module",
    "ChatDataModule": "lightning_protrain.data.datamodule",
    "Evaluator": "lightning_protrain.callbacks.evaluator",
    "InitialValidation": "lightning_protrain.callbacks.samples",
    "PlanMonitor": "lightning_protrain.report.plan_monitor",
    "PositionScores": "lightning_protrain.models.module",
    "PreferenceModule": "lightning_protrain.models.preference",
    "ProTrainCheckpoint": "lightning_protrain.callbacks.checkpoint.callback",
    "ProTrainCheckpointIO": "lightning_protrain.checkpoint.io",
    "ProTrainFSDP2Strategy": "lightning_protrain.fsdp2.strategy",
    "ProTrainPrecision": "lightning_protrain.strategy.precision",
    "ProTrainStrategy": "lightning_protrain.strategy.protrain",
    "SampleCompletion": "lightning_protrain.callbacks.samples",
    "SavePretrained": "lightning_protrain.callbacks.save_pretrained",
    "SplitAdamW": "lightning_protrain.runtime.optim.split_adamw",
    "plan": "lightning_protrain.plans",
}

if find_spec("lightning") is not None:
    import_module("lightning_protrain.registration")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
