"""What the user tells DDP to ignore is each rank's own, and is still told so after the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain import ProTrainStrategy
from tests.support.ranks import run_ranks, trainer_on_rank, values

NAMES = ["own.weight", "place"]


class Expert(L.LightningModule):
    """Has an expert and a buffer of its own on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.own = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.own.weight, 0.1 * (rank + 1))
        self.register_buffer("place", torch.tensor([float(rank)]))
        self.register_buffer("common", torch.tensor([float(rank)]))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, list(NAMES))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return (self.own(self.shared(batch[0])) + self.place).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(64.0).view(16, 4) / 64), batch_size=2)


def train(rank: int, options: dict[str, Any] | None) -> dict[str, Any]:
    module = Expert(rank)

    def strategy(**process: Any) -> Any:
        if options is None:
            return DDPStrategy(**process)
        return ProTrainStrategy(monitor=False, **options, **process)

    trainer_on_rank(rank, 2, kind=strategy, max_epochs=1).fit(module)
    assert module._ddp_params_and_buffers_to_ignore == NAMES
    marked = [name for name, each in module.named_parameters() if getattr(each, "_ddp_ignored", False)]
    assert marked == NAMES[:1]
    return {name: value.numpy() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(train, 2, tmp_path_factory.mktemp("ddp"), None))


@pytest.mark.parametrize("sync", ["ddp", "flat"])
def test_what_ddp_ignores_is_neither_sent_nor_averaged(
    sync: str, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    found = values(run_ranks(train, 2, tmp_path, {"plan": "resident", "adapter_grad_sync": sync}))
    assert not np.array_equal(expected[0]["own.weight"], expected[1]["own.weight"])
    for mine, ddp in zip(found, expected, strict=True):
        for name, value in ddp.items():
            np.testing.assert_allclose(mine[name], value, rtol=1e-6, err_msg=name)


def test_a_plan_that_offloads_what_ddp_ignores_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for outcome in run_ranks(train, 2, tmp_path, {"plan": "offload"}):
        assert outcome.error is not None
        assert outcome.error.startswith(
            "ValueError: 'own.weight' is in _ddp_params_and_buffers_to_ignore, and the plan"
        )
