"""On a GPU, every architecture and every family with images or sound trains streamed as it does plainly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.cuda.marks import needs_gpu
from tests.support import vision_runs
from tests.support.gpus import DEVICE
from tests.support.models import fit
from tests.support.networks import module, networks
from tests.support.vision_families import VISION_FAMILIES

pytestmark = [pytest.mark.cuda, needs_gpu]  # Elsewhere the same runs are compared bit for bit.
# What kernels that sum in another order differ by, in weights that Adam has moved by whole steps.
CLOSE = {"rtol": 2e-2, "atol": 2e-3}


def strategies() -> list[Any]:
    """A plain run, and one that streams all weights; their random numbers are the same."""
    return ["auto", ProTrainStrategy(plan="offload", monitor=False)]


@pytest.mark.parametrize("name", networks())
def test_an_architecture(name: str) -> None:
    losses = []
    for strategy in strategies():
        one = module(name)
        torch.cuda.manual_seed_all(0)
        fit(one, accelerator=DEVICE, strategy=strategy)
        losses.append(one.losses)
    torch.testing.assert_close(losses[1], losses[0], **CLOSE)


# Packages that processors import.
NEEDED = {"SmolVLM2": "num2words", "Voxtral": "mistral_common"}


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_a_family(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDED.get(name, "torch"))
    folder = vision_runs.saved(name, tmp_path, weights=True)
    losses = []
    for strategy in strategies():
        made = vision_runs.module(model=folder)
        torch.cuda.manual_seed_all(0)
        found, _ = vision_runs.fit(made, vision_runs.data(folder), accelerator=DEVICE, strategy=strategy)
        losses.append(found)
    torch.testing.assert_close(losses[1], losses[0], **CLOSE)
