"""Plans whose evaluation fits the device, as their training does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain.planner import candidates, search
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.machines import CPU, GIB
from tests.support.models import ParityModule, fit
from tests.support.plan_cases import case


def _with_evaluation(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """Evaluation takes `more` bytes than what the plan is expected to take at most."""
    expected = search.memory_timeline

    def larger(*given: Any, **options: Any) -> Any:
        timeline = expected(*given, **options)
        last = replace(timeline.phases[-1], device={"activations": timeline.device_peak + more})
        return replace(timeline, phases=(*timeline.phases[:-1], last))

    monkeypatch.setattr(search, "memory_timeline", larger)
    monkeypatch.setattr(candidates, "memory_timeline", larger)


@pytest.mark.parametrize("more", [6_500, 10_000, 20_000])
def test_evaluation_fits_too(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    whole = case(GIB).plan().prediction.device_bytes
    free = case(device_memory=whole - 1).plan()
    _with_evaluation(monkeypatch, more)
    found = case(device_memory=whole - 1).plan()
    assert free.prediction.device_bytes + more > whole - 1
    assert found.prediction.device_bytes + more <= whole - 1


def test_evaluation_that_fits_nowhere_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = case(GIB).plan().prediction.device_bytes
    free = case(device_memory=whole - 1).plan()
    _with_evaluation(monkeypatch, GIB)
    with caplog.at_level("INFO"):
        assert case(device_memory=whole - 1).plan().chunks == free.chunks
    assert "Evaluation may take 1.00 GiB" in caplog.text


class CheckpointedConvolutions(nn.Module):
    """A residual block that recomputes its activations by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(8)

    def body(self, images: Tensor) -> Tensor:
        return images + self.second(torch.relu(self.norm(self.first(images))))

    def forward(self, images: Tensor) -> Tensor:
        return checkpoint(self.body, images, use_reentrant=False)


class Classifier(ParityModule):
    """Six such blocks between a stem and a head."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(), nn.Flatten(), nn.LazyLinear(10)))
        self.network[1] = nn.ModuleList(CheckpointedConvolutions() for _ in range(6))
        self.logits(self.train_dataloader().dataset.tensors[0], 0)

    def logits(self, images: Tensor, batch_idx: int) -> Tensor:
        stem, blocks, *head = self.network
        images = stem(images)
        for block in blocks:
            images = block(images)
        return nn.Sequential(*head)(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.logits(batch[0], batch_idx), batch[1])

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        images = torch.rand(8, 3, 10, 10, generator=generator)
        return DataLoader(TensorDataset(images, torch.arange(8)), 4)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_blocks_that_recompute_by_themselves_are_planned_under_any_budget(share: float) -> None:
    """Checkpointing them again costs no time, so the search cannot order plans by it."""
    with pytest.raises(ValueError, match="at least") as refused:
        fit(Classifier(), strategy=ProTrainStrategy(device_memory=1, hardware=CPU, monitor=False))
    least = int(str(refused.value).partition("(")[2].partition(" bytes")[0])
    whole = ProTrainStrategy(device_memory=GIB, hardware=CPU, monitor=False)
    fit(Classifier(), max_steps=1, strategy=whole)
    budget = int(least + share * (whole.plan.prediction.device_bytes - least))
    strategy = ProTrainStrategy(device_memory=budget, hardware=CPU, monitor=False)
    fit(Classifier(), max_steps=1, strategy=strategy)
    assert strategy.plan.num_offloaded_chunks
    assert strategy.plan.prediction.device_bytes <= budget
