"""Runs of modules, and their bitwise comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import ParityModule, fit
from tests.support.plans import PlanChoice

# Options of the Trainer that clip gradients, by name.
CLIPPING: dict[str, dict[str, Any]] = {
    "unclipped": {},
    "norm": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


@dataclass(frozen=True)
class Result:
    """The result of one run.

    Attributes:
        losses: Loss of every micro-batch.
        weights: The state dict afterwards, cloned.
        norms: Gradient norms by name, as Lightning logs them, of every optimizer step: as computed, then as clipped.
    """

    losses: tuple[Tensor, ...]
    weights: Mapping[str, Tensor]
    norms: tuple[Mapping[str, float], ...] = ()


class GradientNorms(L.Callback):
    """Records the norms of all gradients before clipping and, when they are about to be zeroed, after it."""

    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.norms.append(grad_norm(pl_module, norm_type=2))

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.norms.append(grad_norm(pl_module, norm_type=2))


def snapshot(module: L.LightningModule) -> dict[str, Tensor]:
    """The state dict, cloned."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def run(module: ParityModule, plan: PlanChoice | None = None, overlap: str = "off", **options: Any) -> Result:
    """Trains `module`: plainly without a plan, else under the strategy with that plan; `options` go to the Trainer.

    The norms of gradients are recorded unless steps are overlapped: then nobody may look at gradients.
    """
    norms = GradientNorms()
    if plan is not None:
        options["strategy"] = ProTrainStrategy(plan=plan, overlap_optimizer=overlap)
    callbacks = [*options.pop("callbacks", []), *([norms] if overlap == "off" else [])]
    fit(module, callbacks=callbacks, **options)
    return Result(tuple(module.losses), snapshot(module), tuple(norms.norms))


def differences(expected: Result, found: Result) -> list[str]:
    """Return the names of values that are not bitwise equal."""
    changed = []
    if len(expected.losses) != len(found.losses):
        changed.append(f"{len(expected.losses)} losses expected, {len(found.losses)} found")
    pairs = zip(expected.losses, found.losses, strict=False)
    changed += [f"losses[{index}]" for index, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
    if list(expected.weights) != list(found.weights):
        changed.append(f"names: {sorted(expected.weights.keys() ^ found.weights.keys())}")
    changed += [name for name, value in expected.weights.items() if not torch.equal(value, found.weights[name])]
    if len(expected.norms) != len(found.norms):
        changed.append(f"{len(expected.norms)} norms expected, {len(found.norms)} found")
    changed += [f"norms[{i}]" for i, (a, b) in enumerate(zip(expected.norms, found.norms, strict=False)) if a != b]
    return changed
