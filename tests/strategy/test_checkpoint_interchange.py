"""A checkpoint of one strategy resumes under the other, as if the run had never been interrupted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.commands.file_commands import file_command
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import OPTIMIZERS, ParityModule, fit, token_batches, zoo
from tests.support.plans import plans
from tests.support.trainers import QUIET

PLANS = {"plain": None, **plans()}
# Without random numbers in the step: their state is in no checkpoint.
MODELS = ("tied", "frozen", "lstm", "moe")
EPOCHS = 2
STEPS_PER_EPOCH = len(token_batches())


class ResumableBatches:
    """The batches of the parity tests, as a loader that goes on where a checkpoint was taken."""

    def __init__(self) -> None:
        self.batches = list(token_batches())
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Tensor]]:
        self.position %= len(self.batches)
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Scheduled:
    """Adds a learning rate that changes every third step, and the resumable loader."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> ResumableBatches:
        return ResumableBatches()


def _module(model: str, optimizer: str) -> ParityModule:
    module = zoo()[model](optimizer=optimizer)
    module.__class__ = type("Scheduled", (Scheduled, type(module)), {})
    return module


def _strategy(plan: str, module: ParityModule) -> Any:
    make = PLANS[plan]
    return "auto" if make is None else ProTrainStrategy(plan=make(module))


def _save(
    model: str, optimizer: str, plan: str, step: int, folder: Path, kind: type[ModelCheckpoint] = ModelCheckpoint
) -> Path:
    """Trains until `step`, saves, and goes on a little, so that nothing of the run can be in the file by accident."""
    module = _module(model, optimizer)
    saver = kind(folder, filename="saved-{step}", every_n_train_steps=step, save_top_k=-1)
    strategy = _strategy(plan, module)
    fit(module, strategy=strategy, max_steps=step + 2, enable_checkpointing=True, callbacks=[saver])
    return folder / f"saved-step={step}.ckpt"


def _resume(model: str, optimizer: str, plan: str, path: Path | None, epochs: int = EPOCHS) -> L.LightningModule:
    """Trains to the end, from other weights and with other random numbers than the saved run began with."""
    module = _module(model, optimizer)
    if path is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.5)
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=epochs, strategy=_strategy(plan, module), **QUIET)
    trainer.fit(module, ckpt_path=path)
    assert trainer.global_step == epochs * STEPS_PER_EPOCH
    return module


@functools.cache
def _uninterrupted(model: str, optimizer: str) -> dict[str, Tensor]:
    return _resume(model, optimizer, "plain", None).state_dict()


def _cases() -> list[tuple[str, str, str, str, int]]:
    """Both directions and within the strategy; mid-epoch and at its end; every optimizer with every model."""
    pairs = [
        ("offload", "plain"),
        ("plain", "offload"),
        ("offload", "alternating"),
        ("half", "kept"),
        ("kept", "plain"),
    ]
    pairs += [("plain", "half"), ("resident", "offload"), ("offload", "resident")]
    turns = itertools.product(MODELS, OPTIMIZERS, (5, STEPS_PER_EPOCH))
    return [(*turn[:2], *pairs[(index + index // 8) % 8], turn[2]) for index, turn in enumerate(turns)]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("model", "optimizer", "saved_by", "resumed_by", "step"), _cases())
def test_a_resumed_run_ends_as_one_without_a_break(
    model: str, optimizer: str, saved_by: str, resumed_by: str, step: int, tmp_path: Path
) -> None:
    path = _save(model, optimizer, saved_by, step, tmp_path)
    weights = _resume(model, optimizer, resumed_by, path).state_dict()
    expected = _uninterrupted(model, optimizer)
    assert list(weights) == list(expected)
    for name, value in weights.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("resumed_by", ["plain", "offload"])
def test_a_folder_is_resumed_without_the_callback_that_saved_it(resumed_by: str, tmp_path: Path) -> None:
    path = _save("tied", "adamw", "half", 5, tmp_path / "saved", ProTrainCheckpoint)
    if resumed_by == "plain":  # Which reads files alone.
        path = tmp_path / "stock.ckpt"
        assert file_command(["consolidate", str(tmp_path / "saved"), str(path)]) == 0
    weights, expected = _resume("tied", "adamw", resumed_by, path).state_dict(), _uninterrupted("tied", "adamw")
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key!r}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield path, value


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("model", "optimizer", "plan"),
    [
        (*pair, plan)
        for (m, pair), (p, plan) in itertools.product(
            enumerate(zip(MODELS, [*OPTIMIZERS, "adamw"], strict=True)), enumerate(plans())
        )
        if (m + p) % 2 == 0
    ],
)
def test_the_files_hold_the_same(model: str, optimizer: str, plan: str, tmp_path: Path) -> None:
    files = [_save(model, optimizer, who, 5, tmp_path / "same") for who in ("plain", plan)]
    assert files[0] == files[1], "the path is part of the checkpoint"
    (tmp_path / "same").rename(tmp_path / "second")
    _save(model, optimizer, "plain", 5, tmp_path / "same")
    plain_file, file = tmp_path / "same" / files[0].name, tmp_path / "second" / files[0].name
    plain, found = (dict(_leaves(torch.load(path, weights_only=False))) for path in (plain_file, file))
    assert list(found) == list(plain)
    for name, value in plain.items():
        if isinstance(value, Tensor):
            other = found[name]
            assert (other.dtype, other.device, other.stride()) == (value.dtype, value.device, value.stride()), name
            assert torch.equal(other, value), name
            assert type(other) is type(value), name
        else:
            assert found[name] == value, name
    assert file.stat().st_size == pytest.approx(plain_file.stat().st_size, rel=0.01)


@pytest.mark.parametrize("plan", ["offload", "half"])
def test_weights_in_a_wrong_shape_are_refused_before_training(plan: str, tmp_path: Path) -> None:
    path = _save("lstm", "adamw", "plain", 5, tmp_path)
    content = torch.load(path, weights_only=False)
    content["state_dict"]["network.head.weight"] = torch.zeros(3, 3)
    torch.save(content, path)
    with pytest.raises(RuntimeError, match=r"size mismatch for network\.head\.weight"):
        _resume("lstm", "adamw", plan, path)
