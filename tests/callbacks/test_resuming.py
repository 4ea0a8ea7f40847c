"""A fit is held to its contract and goes on with its random numbers; whole runs are in test_checkpoint_contract.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_protrain.callbacks.checkpoint.rendezvous import Rendezvous
from lightning_protrain.callbacks.checkpoint.resume import ResumedFit
from tests.support.ranks import run_ranks, values


def _trainer(rank: int = 0, world_size: int = 1, path: str | None = "x", module: Any = None) -> Any:
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        world_size=world_size,
        global_rank=rank,
        ckpt_path=path,
        lightning_module=module,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        precision="32-true",
        accumulate_grad_batches=1,
        fit_loop=SimpleNamespace(_data_source=SimpleNamespace(instance=None, name="train_dataloader")),
    )


def _module() -> Any:
    module = L.LightningModule()
    module.layer = nn.Linear(1, 1)
    return module


def _resumed(saved: dict[str, Any], trainer: Any) -> ResumedFit:
    resumption = ResumedFit()
    resumption.begin(trainer, Rendezvous.open("x"))
    resumption.accept(trainer, {"state_dict": trainer.lightning_module.state_dict(), **saved}, "x")
    return resumption


def test_random_numbers_go_on_when_training_starts_and_not_before() -> None:
    saved: dict[str, Any] = {}
    trainer = _trainer(module=_module())
    ResumedFit().save(trainer, saved)
    expected = torch.rand(3)
    resumption = _resumed(saved, trainer)
    assert not torch.equal(torch.rand(3), expected)
    resumption.restore(trainer)
    assert torch.equal(torch.rand(3), expected)
    resumption.restore(_trainer(path=None))  # Once only.
    assert not torch.equal(torch.rand(3), expected)


def test_a_checkpoint_without_them_is_said() -> None:
    with pytest.warns(UserWarning, match="has no random states"):
        ResumedFit().restore(_trainer())


def _saves_and_restores(rank: int) -> bool:
    torch.manual_seed(rank)
    saved: dict[str, Any] = {}
    resumption, trainer = ResumedFit(), _trainer(rank, 2, module=_module())
    resumption.begin(trainer, Rendezvous.open("y"))
    resumption.save(trainer, saved)
    resumption.gather(saved, "Saving")
    expected = torch.rand(3)
    _resumed(saved, trainer).restore(trainer)
    return torch.equal(torch.rand(3), expected)


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    assert values(run_ranks(_saves_and_restores, 2, tmp_path)) == [True, True]


def test_another_model_is_refused_before_anything_is_loaded() -> None:
    trainer = _trainer(module=_module())
    with pytest.raises(ValueError, match=r"model layer\.weight\[0\]: saved 2, now 1"):
        _resumed({"state_dict": nn.ModuleDict({"layer": nn.Linear(1, 2)}).state_dict()}, trainer)
    # Where names may be missing, those that both have are compared.
    trainer.lightning_module.strict_loading = False
    _resumed({"state_dict": {"layer.bias": torch.zeros(1)}}, trainer)
