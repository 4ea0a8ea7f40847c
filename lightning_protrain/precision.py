"""Precision as the strategy runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_protrain.runtime.optimizer import fused_host_step
from lightning_protrain.runtime.updates import Updates


class ProTrainPrecision(Precision):
    """32-bit training: parameters, gradients and optimizer states in float32, computed as they are stored."""

    precision = "32-true"
    _updates: Updates | None = None
    _device_type = "cpu"

    def attach(self, updates: Updates | None, device_type: str) -> None:
        """Clipping and steps go through `updates` from now on; `device_type` is that of the accelerator."""
        self._updates = updates
        self._device_type = device_type

    def optimizer_step(self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """One step; what the host steps by itself is taken out of it after clipping, see [Note: Overlap]."""
        if self._updates is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        prepared = partial(self._wrap_closure, model, optimizer, closure)
        with fused_host_step(optimizer, prepared, self._device_type, self._updates.launch) as final:
            return optimizer.step(closure=final, **kwargs)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Bounds the values of all gradients."""
        if self._updates is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            self._updates.clip_value(self.main_params(optimizer), clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Bounds the norm of all gradients together."""
        if self._updates is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self._updates.clip_norm(self.main_params(optimizer), clip_val)


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
