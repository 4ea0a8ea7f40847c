"""Callbacks are copied and pickled at any hook of a run, without the model and without disturbing the run."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.evaluator import Evaluator
from lightning_protrain.callbacks.samples import InitialValidation, SampleCompletion
from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.report.plan_monitor import PlanMonitor
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.callbacks.evaluated import Data, fit
from tests.support.ranks import run_ranks, trainer_on_rank, values
from tests.support.signalled_runs import Both, Validated

HOOKS = [name for name in dir(L.Callback) if name.startswith(("on_", "setup", "teardown"))]


class Copies(L.Callback):
    """Copies and pickles the callbacks of this package at every hook."""

    def __init__(self) -> None:
        self.at: set[str] = set()
        self.last: dict[str, L.Callback] = {}

    def copy(self, hook: str, trainer: L.Trainer) -> None:
        self.at.add(hook)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if type(callback).__module__.startswith("lightning_protrain."):
                copied = pickle.loads(pickle.dumps(copy.deepcopy(callback)))
                assert type(copied) is type(callback)
                assert not any(isinstance(value, nn.Module) for value in vars(copied).values())
                self.last[type(copied).__name__] = copied


def _hook(name: str) -> Any:
    return lambda self, trainer, *args, **kwargs: self.copy(name, trainer)


for name in HOOKS:
    setattr(Copies, name, _hook(name))


@pytest.mark.sample(3)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_callbacks_are_copied_at_every_hook(tmp_path: Path, streams: bool, asynchronous: bool) -> None:
    strategy = ProTrainStrategy(plan="offload") if streams else "auto"
    saver = ProTrainCheckpoint(tmp_path / "saved", monitor="val_loss", every_n_train_steps=1, asynchronous=asynchronous)
    callbacks = [saver, PlanMonitor(timeline=True), Evaluator({"python": Data(1)}, 2), InitialValidation()]
    copies, options = Copies(), {"limit_val_batches": 2, "val_check_interval": 1, "max_steps": 4}
    fit(copies, *callbacks, strategy=strategy, enable_checkpointing=True, default_root_dir=tmp_path, **options)
    missing = set(HOOKS) - copies.at
    assert missing == {name for name in missing if "test" in name or "predict" in name or "load" in name} | {
        "on_exception"
    }
    assert len(copies.last) == 5  # SharedFailure, too
    assert copies.last["ProTrainCheckpoint"].best_model_path == saver.best_model_path != ""  # type: ignore[attr-defined]
    # A copy serves in a run of its own.
    again = pickle.loads(pickle.dumps(copies.last["ProTrainCheckpoint"]))
    fit(again, enable_checkpointing=True, **{**options, "max_steps": 5})
    assert find_checkpoints(tmp_path / "saved").found[0].manifest.step == 5


def test_all_callbacks_are_copied_before_training_as_without_a_plan(tmp_path: Path) -> None:
    class Copies(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            assert len(copy.deepcopy(trainer.callbacks)) == 5  # type: ignore[attr-defined]

    callbacks = [TQDMProgressBar(), PlanMonitor(), Copies()]
    strategy = ProTrainStrategy(plan="offload")
    fit(*callbacks, strategy=strategy, enable_checkpointing=True, enable_progress_bar=True, default_root_dir=tmp_path)


@pytest.mark.parametrize("callback", [SampleCompletion(["Hello"]), SavePretrained("out")], ids=lambda each: type(each))
def test_what_lightning_binds_to_the_module_is_not_copied(callback: L.Callback) -> None:
    callback.log = Validated().log  # type: ignore[attr-defined]
    assert "log" not in vars(copy.deepcopy(callback))


def _train_and_copy(rank: int, root: Path) -> list[str]:
    copies = Copies()
    saver = ProTrainCheckpoint(root / "saved", every_n_train_steps=1, asynchronous=True)
    trainer = trainer_on_rank(rank, 2, max_steps=2, enable_checkpointing=True, callbacks=[copies, saver, PlanMonitor()])
    trainer.fit(Validated(), datamodule=Both())
    return sorted(copies.at)


def test_callbacks_of_several_ranks_are_copied(tmp_path: Path) -> None:
    one, other = values(run_ranks(_train_and_copy, 2, tmp_path, tmp_path))
    assert one == other
    assert "on_train_batch_end" in one
