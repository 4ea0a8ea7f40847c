"""One process on one device; everything else is refused by name."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_protrain import ProTrainStrategy
from lightning_protrain.processes import ProcessStrategy


def trainer_with(strategy: Any, **options: Any) -> L.Trainer:
    return L.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, **options)


def test_one_process_is_not_distributed() -> None:
    strategy = trainer_with("protrain", devices=1).strategy
    assert isinstance(strategy, ProcessStrategy)
    assert not strategy.is_distributed
    assert (strategy.num_processes, strategy.num_nodes, strategy.world_size) == (1, 1, 1)
    assert strategy.root_device == torch.device("cpu")
    assert strategy.launcher is None


@pytest.mark.parametrize(("options", "number"), [({"devices": 2}, 2), ({"devices": 1, "num_nodes": 3}, 3)])
def test_more_processes_are_refused(options: dict[str, int], number: int) -> None:
    with pytest.raises(ValueError, match=rf"runs on one device in this version, {number} were asked for"):
        trainer_with("protrain", **options)


def test_mps_is_refused() -> None:
    with pytest.raises(ValueError, match='does not run on accelerator="mps"'):
        ProTrainStrategy(accelerator=MPSAccelerator.__new__(MPSAccelerator))


def test_a_strategy_belongs_to_one_trainer() -> None:
    strategy = ProTrainStrategy()
    trainer_with(strategy, devices=1)
    with pytest.raises(ValueError, match="belongs to another Trainer"):
        trainer_with(strategy, devices=1)


def test_spawn_launches_a_process() -> None:
    assert isinstance(trainer_with("protrain_spawn", devices=1).strategy.launcher, _MultiProcessingLauncher)


def test_collectives_of_one_process() -> None:
    strategy = trainer_with("protrain", devices=1).strategy
    tensor = torch.ones(2)
    assert strategy.reduce(tensor) is tensor
    assert strategy.broadcast("anything") == "anything"
    assert strategy.barrier() is None
