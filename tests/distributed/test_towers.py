"""Ranks that have batches of text alone train models with towers beside ranks that have images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_protrain import ProTrainStrategy
from tests.support.network_batches import IMAGE_TOKEN, Batch
from tests.support.networks import NetworkModule, networks
from tests.support.ranks import run_ranks, trainer_on_rank, values

OF_TEXT = ("input_ids", "attention_mask", "labels", "token_type_ids")
# Whether the batches of each rank have images: together, one alone, none.
IMAGES = [(True, False, False, True), (True, True, False, False)]
STRATEGIES: dict[str, dict[str, Any]] = {
    "resident": {"plan": "resident", "adapter_grad_sync": "ddp"},
    "flat": {"plan": "resident", "adapter_grad_sync": "flat"},
    "replicate": {"plan": "offload", "sharding": "replicate"},
    "shard": {"plan": "offload", "sharding": "shard"},
}


def without_images(batch: Batch) -> Batch:
    """Return the same rows with words where images were."""
    ids = batch["input_ids"]
    words = {**batch, "input_ids": torch.where(ids >= IMAGE_TOKEN, 3, ids)}
    return {key: value for key, value in words.items() if key in OF_TEXT}


def train(rank: int, how: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    network = networks()["llava"]
    (first, *_) = network.batches()
    module = NetworkModule(network.build(), [first if has else without_images(first) for has in IMAGES[rank]])
    options = STRATEGIES.get(how)

    def strategy(**process: Any) -> Any:
        if options is None:
            return DDPStrategy(find_unused_parameters=True, **process)
        return ProTrainStrategy(monitor=False, **options, **process)

    trainer = trainer_on_rank(rank, 2, kind=strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module)
    assert trainer.global_step == len(IMAGES[rank])
    return {name: value.float().numpy() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = values(run_ranks(train, 2, tmp_path_factory.mktemp("ddp"), "ddp"))[0]
    return found


@pytest.mark.parametrize("how", STRATEGIES)
def test_towers_that_a_rank_does_not_use_are_trained_as_under_ddp(
    how: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    for found in values(run_ranks(train, 2, tmp_path, how)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
