"""Callbacks: what the plan is and moves, what the model has learned, and checkpoints of it."""

from lightning_protrain.callbacks.checkpoint import ProTrainCheckpoint
from lightning_protrain.callbacks.evaluator import Evaluator
from lightning_protrain.callbacks.plan_monitor import PlanMonitor
from lightning_protrain.callbacks.samples import InitialValidation, SampleCompletion
from lightning_protrain.models.export import SavePretrained

__all__ = [
    "Evaluator",
    "InitialValidation",
    "PlanMonitor",
    "ProTrainCheckpoint",
    "SampleCompletion",
    "SavePretrained",
]
