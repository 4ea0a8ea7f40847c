"""What is saved while steps are overlapped is whole, and a run that breaks off resumes to the same weights."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_protrain import ProTrainStrategy
from tests.support.failing_runs import failing
from tests.support.models import ParityModule, fit, token_batches
from tests.support.overlapped_runs import MODELS, WAYS, network, run
from tests.support.parity import CLIPPING, differences, snapshot


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


def drawn_breaks(seed: int) -> list[Any]:
    """Batches and blocks to break off at, drawn once for each way and pass."""
    draw = random.Random(seed)
    chosen = itertools.product(WAYS, ("forward", "backward"))
    points = [(*way, draw.randint(1, 13), where, draw.randrange(4)) for way, where in chosen]
    return [pytest.param(*point, id="-".join(map(str, point))) for point in points]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("at", [1, 4, 9])
@pytest.mark.parametrize(("overlap", "clipping"), WAYS)
def test_a_run_that_broke_off_resumes_to_the_same_weights(
    overlap: str, clipping: str, at: int, where: str, tmp_path: Path
) -> None:
    resumes_to_the_same_weights(overlap, clipping, at, where, 1, tmp_path)


@pytest.mark.parametrize(("overlap", "clipping", "at", "where", "block"), drawn_breaks(6))
def test_a_run_that_broke_off_anywhere_resumes_to_the_same_weights(
    overlap: str, clipping: str, at: int, where: str, block: int, tmp_path: Path
) -> None:
    resumes_to_the_same_weights(overlap, clipping, at, where, block, tmp_path)


def resumes_to_the_same_weights(overlap: str, clipping: str, at: int, where: str, block: int, folder: Path) -> None:
    expected = run(failing(), **CLIPPING[clipping])
    saving = {"callbacks": [checkpoints(folder)], "enable_checkpointing": True, **CLIPPING[clipping]}
    with pytest.raises(KeyError, match="broken"):
        run(failing(at, where, block), overlap, **saving)
    module = failing()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        strategy=ProTrainStrategy(plan="offload", overlap_optimizer=overlap),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_train_batches=14 - at,
        **CLIPPING[clipping],
    )
    # Lightning does not restore the position in the data: the batches that are left are given.
    batches = DataLoader(list(token_batches())[at:], batch_size=None)
    state = torch.load(folder / f"step={at}.ckpt", weights_only=False)
    module.load_state_dict(state["state_dict"])
    module.on_fit_start = lambda: trainer.strategy.load_optimizer_state_dict(state)
    trainer.fit(module, batches)
    found = snapshot(module)
    assert [name for name, value in expected.weights.items() if not torch.equal(value, found[name])] == []


@pytest.mark.leaves("signal_handlers")
def test_torn_weights_are_neither_saved_nor_trained_on(tmp_path: Path) -> None:
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
