"""A gradient that anomaly detection stops at: the weights stay what the steps before it made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_protrain import ProTrainStrategy
from tests.support.models import LanguageModel, Mlp, ParityModule, fit
from tests.support.parity import CLIPPING, Result, differences, snapshot


class Spoiled(Mlp):
    """An MLP through which no finite gradient comes once it is `spoiled`; what it returns stays finite."""

    spoiled = False

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        return hidden + (hidden * 0).sqrt() if self.spoiled else hidden


class SpoiledModule(ParityModule):
    """Its second block of four is spoiled in the fourth step, so that the gradients of two blocks are there already."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(LanguageModel([Mlp(), Spoiled(), Mlp(), Mlp()]))

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        self.network.blocks[1].spoiled = batch_idx == 3
        return super().logits(tokens, batch_idx)


def run_into_nan(**options: Any) -> Result:
    """Three steps, and one that ends in the middle of its backward."""
    module = SpoiledModule()
    with pytest.raises(RuntimeError, match=r"returned nan values in its 0th output"):
        fit(module, detect_anomaly=True, **options)
    return Result(tuple(module.losses), snapshot(module))


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
@pytest.mark.parametrize(
    ("overlap", "clipping"),
    [("off", "unclipped"), ("forward", "unclipped"), ("auto", "unclipped"), ("forward", "norm")],
)
def test_a_detected_nan_leaves_the_weights_of_the_step_before(overlap: Any, clipping: str) -> None:
    expected = run_into_nan(**CLIPPING[clipping])
    assert len(expected.losses) == 4
    assert all(value.isfinite().all() for value in expected.weights.values())
    strategy = ProTrainStrategy(plan="offload", overlap_optimizer=overlap)
    assert differences(expected, run_into_nan(strategy=strategy, **CLIPPING[clipping])) == []
