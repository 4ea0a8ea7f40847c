"""Runs under every overlap of the optimizer step."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from lightning_protrain import ProTrainStrategy
from tests.support.models import LanguageModel, Mlp, ParityModule, fit, zoo
from tests.support.parity import CLIPPING, Result, snapshot

MODELS = zoo()


WAYS = [
    (overlap, clipping)
    for overlap, clipping in itertools.product(("backward", "forward"), CLIPPING)
    if (overlap, clipping) != ("backward", "norm")
]


def run(module: ParityModule, overlap: str | None = None, plan: Any = "offload", **options: Any) -> Result:
    """Trains plainly without `overlap`, else under the strategy."""
    if overlap is not None:
        options["strategy"] = ProTrainStrategy(plan=plan, overlap_optimizer=overlap)
    fit(module, **options)
    return Result(tuple(module.losses), snapshot(module))


def network() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel([Mlp() for _ in range(4)])
