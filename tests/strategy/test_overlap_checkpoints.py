"""A checkpoint that is saved while steps overlap is whole; partially stepped weights are not saved or trained."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_protrain import ProTrainStrategy
from lightning_protrain.strategy.sharded_states import (
    mark_partially_stepped,
    refuse_partially_stepped,
    why_partially_stepped,
)
from tests.support.failing_runs import Failing, failing, resumed
from tests.support.models import LanguageModel, Mlp, ParityModule, fit
from tests.support.overlapped_runs import MODELS, WAYS, network, run
from tests.support.parity import CLIPPING, Result, differences, snapshot
from tests.support.trainers import QUIET


def checkpoints(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_checkpoints_hold_whole_weights_and_states(overlap: str, tmp_path: Path) -> None:
    run(MODELS["frozen"](), callbacks=[checkpoints(tmp_path / "plain")], enable_checkpointing=True)
    run(MODELS["frozen"](), overlap, callbacks=[checkpoints(tmp_path / "ours")], enable_checkpointing=True)
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert len(files) > 10
    for name in files:
        expected, found = (torch.load(tmp_path / kind / name, weights_only=False) for kind in ("plain", "ours"))
        for key, value in expected["state_dict"].items():
            assert torch.equal(value, found["state_dict"][key]), (name, key)
        (one,), (other,) = expected["optimizer_states"], found["optimizer_states"]
        for index, state in one["state"].items():
            for key, value in state.items():
                assert torch.equal(value, other["state"][index][key]), (name, index, key)


def drawn_breaks(seed: int) -> Iterator[tuple[Any, ...]]:
    """Yield batches and blocks to break off at, drawn once for each way and pass."""
    draw = random.Random(seed)
    for way, where in itertools.product(WAYS, ("forward", "backward")):
        yield *way, draw.randint(1, 13), where, draw.randrange(4)


BREAKS = [(*way, at, where, 1) for way, at, where in itertools.product(WAYS, (1, 4, 9), ("forward", "backward"))]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("overlap", "clipping", "at", "where", "block"), [*BREAKS, *drawn_breaks(6)])
def test_a_run_that_broke_off_resumes_to_the_same_weights(
    overlap: str, clipping: str, at: int, where: str, block: int, tmp_path: Path
) -> None:
    expected = run(failing(), **CLIPPING[clipping])
    saving = {"callbacks": [checkpoints(tmp_path)], "enable_checkpointing": True, **CLIPPING[clipping]}
    with pytest.raises(KeyError, match="broken"):
        run(failing(at, where, block), overlap, **saving)
    found = resumed(tmp_path / f"step={at}.ckpt", at, overlap, **CLIPPING[clipping])
    assert [name for name, value in expected.weights.items() if not torch.equal(value, found[name])] == []


@pytest.mark.leaves("signal_handlers")
def test_partially_stepped_weights_are_neither_saved_nor_trained_on(tmp_path: Path) -> None:
    strategy = ProTrainStrategy(plan="offload", overlap_optimizer="backward")
    saved = OnExceptionCheckpoint(tmp_path)
    module = failing(3, "backward")
    with pytest.raises(RuntimeError, match=r"partially stepped.*can be neither saved nor trained on"):
        fit(module, strategy=strategy, callbacks=[saved], enable_checkpointing=True)
    assert not list(tmp_path.iterdir())
    # Lightning does not tear down when a callback raises over the exception.
    strategy.teardown()


@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_an_exception_in_backward_saves_whole_weights(overlap: str, tmp_path: Path) -> None:
    expected = run(failing(), max_steps=3)
    with pytest.raises(KeyError, match="broken"):
        run(failing(3, "backward"), overlap, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    (path,) = tmp_path.iterdir()
    found = torch.load(path, weights_only=False)["state_dict"]
    assert [name for name, value in expected.weights.items() if not torch.equal(value, found[name])] == []


def test_a_state_dict_of_the_optimizer_waits() -> None:
    class Peeking(ParityModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx:
                state = self.optimizers().optimizer.state_dict()["state"]
                self.losses.append(torch.stack([entry["exp_avg"].sum() for entry in state.values()]))
            return super().training_step(batch, batch_idx)

    def peeking() -> Peeking:
        return Peeking(network())

    assert differences(run(peeking()), run(peeking(), "forward")) == []


def trainer_of(**options: object) -> L.Trainer:
    strategy = ProTrainStrategy(plan="offload", overlap_optimizer="backward")
    return L.Trainer(accelerator="cpu", max_epochs=1, strategy=strategy, **{**QUIET, **options})  # type: ignore[arg-type]


def partially_stepped(trainer: L.Trainer) -> Failing:
    """A module whose run broke off in a backward in which weights had been stepped already."""
    module = failing(3, "backward")
    with pytest.raises(KeyError, match="broken"):
        trainer.fit(module)
    module.at = -1
    return module


def test_partially_stepped_weights_are_refused_after_its_run(tmp_path: Path) -> None:
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
def test_a_run_that_broke_off_between_steps_is_not_partially_stepped(where: str, overlap: str) -> None:
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
