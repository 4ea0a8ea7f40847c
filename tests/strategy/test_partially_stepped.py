"""Weights that an earlier run has left partially stepped are known as such until they are loaded."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from lightning_protrain import ProTrainStrategy
from lightning_protrain.strategy.sharded_states import (
    mark_partially_stepped,
    refuse_partially_stepped,
    why_partially_stepped,
)
from tests.support.failing_runs import Failing, failing
from tests.support.models import fit


def trainer_of(**options: object) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = ProTrainStrategy(plan="offload", overlap_optimizer="backward")
    return L.Trainer(
        accelerator="cpu", max_epochs=1, strategy=strategy, enable_model_summary=False, **{**quiet, **options}
    )  # type: ignore[arg-type]


def partially_stepped(trainer: L.Trainer) -> Failing:
    """A module whose run broke off in a backward in which weights had been stepped already."""
    module = failing(3, "backward")
    with pytest.raises(KeyError, match="broken"):
        trainer.fit(module)
    module.at = -1
    return module


def test_what_is_torn_is_refused_after_its_run(tmp_path: Path) -> None:
    trainer = trainer_of()
    module = partially_stepped(trainer)
    with pytest.raises(
        RuntimeError, match=r"Failing are partially stepped.*neither saved nor trained.*load_state_dict"
    ):
        trainer.save_checkpoint(tmp_path / "torn.ckpt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="are partially stepped"):
        trainer.fit(module)
    with pytest.raises(RuntimeError, match="are partially stepped"):
        trainer_of().fit(module)


@pytest.mark.parametrize("way", ["ckpt_path", "load_state_dict"])
def test_loaded_weights_are_whole(way: str, tmp_path: Path) -> None:
    whole = failing()
    before = trainer_of(limit_train_batches=2)
    before.fit(whole)
    before.save_checkpoint(tmp_path / "whole.ckpt")
    module = partially_stepped(trainer_of())
    path = tmp_path / "whole.ckpt"
    if way == "load_state_dict":
        module.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    trainer = trainer_of(max_steps=4)
    trainer.fit(module, ckpt_path=str(path) if way == "ckpt_path" else None)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    assert why_partially_stepped(module) is None


@pytest.mark.parametrize(("where", "overlap"), [("forward", "backward"), ("backward", "forward"), ("backward", "off")])
def test_a_run_that_broke_off_between_steps_is_not_torn(where: str, overlap: str) -> None:
    module = failing(3, where)
    with pytest.raises(KeyError, match="broken"):
        fit(module, strategy=ProTrainStrategy(plan="offload", overlap_optimizer=overlap))
    refuse_partially_stepped(module)


def test_only_all_trained_weights_make_it_whole() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].requires_grad_(False)
    mark_partially_stepped(module, "the power went")
    state = module.state_dict()
    module.load_state_dict({name: value for name, value in state.items() if name != "0.bias"}, strict=False)
    with pytest.raises(RuntimeError, match="this Sequential are partially stepped by an earlier run: the power went,"):
        refuse_partially_stepped(module)
    module.load_state_dict({name: value for name, value in state.items() if name.startswith("0.")}, strict=False)
    refuse_partially_stepped(module)
    mark_partially_stepped(module, "again")
    assert why_partially_stepped(module) == "again"
    module.load_state_dict(state)
    refuse_partially_stepped(module)


def test_the_first_reason_stays_and_goes_with_copies() -> None:
    module = nn.Linear(2, 2)
    mark_partially_stepped(module, "one")
    mark_partially_stepped(module, "two")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert why_partially_stepped(other) == "one"
        other.load_state_dict(module.state_dict())
        assert why_partially_stepped(other) is None
    assert why_partially_stepped(module) == "one"
