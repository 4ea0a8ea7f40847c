"""Checkpoints of a Trainer as folders: when they are saved, and how a run resumes from them."""

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint

__all__ = ["ProTrainCheckpoint"]
