"""Precision as the strategy runs it."""

from __future__ import annotations

from lightning.pytorch.plugins import Precision


class ProTrainPrecision(Precision):
    """32-bit training: parameters, gradients and optimizer states in float32, computed as they are stored."""

    precision = "32-true"


def as_protrain_precision(plugin: Precision | None) -> ProTrainPrecision:
    """The precision of the strategy that stands for Lightning's.

    Args:
        plugin: What the Trainer made of its `precision` flag, or what the user gave.

    Raises:
        ValueError: A precision that the strategy does not run.
    """
    if isinstance(plugin, ProTrainPrecision):
        return plugin
    if plugin is None or type(plugin) is Precision:
        return ProTrainPrecision()
    raise ValueError(
        f'precision={plugin.precision!r} ({type(plugin).__name__}) is not supported by strategy="protrain": this '
        'version runs "32-true". Set Trainer(precision="32-true") or use another strategy.'
    )
