"""A run that was interrupted after any step ends with the very bits of one that was not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.resume import ResumedFit
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.noisy_runs import EPOCHS, Data, Noisy, _differences, _unexplained


def _run(
    folder: Path,
    accumulate: int,
    plan: str | None,
    path: Path | str | None = None,
    every: int = 1,
    saves: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Noisy, dict[str, Any]]:
    """Trains to the end, saves every step or every so many; what the end of it is, as Lightning saves it."""
    module = Noisy()
    seed = 1 if path is None else 12345
    saver = ProTrainCheckpoint(folder, **(saves or {"every_n_train_steps": every}), save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
        callbacks=[saver],
        strategy="auto" if plan is None else ProTrainStrategy(plan=plan, blocks=[nn.Linear]),
        **{"max_epochs": EPOCHS, **options},
    )
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    trainer.fit(module, datamodule=Data(), ckpt_path=path)
    last = ProTrainCheckpointIO().load_checkpoint(saver.last_model_path)
    return module, last


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 20), (4, 6)])
@pytest.mark.parametrize("plan", [None, "offload"])
def test_from_every_step_of_two_epochs_it_ends_with_the_same_bits(
    tmp_path: Path, accumulate: int, steps: int, plan: str | None
) -> None:
    module, expected = _run(tmp_path / "whole", accumulate, plan)
    found = find_checkpoints(tmp_path / "whole").found
    assert [each.manifest.step for each in found] == list(range(steps, 0, -1))
    for each in found[1:]:
        step = each.manifest.step
        resumed, last = _run(tmp_path / str(step), accumulate, plan, each.path, every=steps)
        assert resumed.losses == module.losses[-len(resumed.losses) :], step
        # Everything that Lightning and we save: weights, moments, schedules, counters, random numbers, position.
        assert _unexplained(last, expected) == [], step


def test_without_the_random_numbers_it_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = _run(tmp_path / "whole", 1, None)
    monkeypatch.setattr(ResumedFit, "restore", lambda self, trainer: None)
    _, last = _run(tmp_path / "resumed", 1, None, find_checkpoints(tmp_path / "whole").found[5].path)
    assert _differences(last["state_dict"], expected["state_dict"])


def test_ten_interruptions_in_a_row_change_nothing(tmp_path: Path) -> None:
    _, expected = _run(tmp_path / "whole", 1, None)
    chance = random.Random(3)
    stops = sorted(chance.sample(range(1, 20), 10))
    path: str | None = None
    for stop in stops:
        _run(tmp_path / "chain", 1, None, path, max_steps=stop)
        path = "last"
    _, last = _run(tmp_path / "chain", 1, None, "last")
    assert _unexplained(last, expected) == []
    assert {each.manifest.branch for each in find_checkpoints(tmp_path / "chain").found} == {0}


@pytest.mark.parametrize("saves", [{"every_n_train_steps": 100, "save_last": True}, {"every_n_epochs": 1}], ids=str)
@pytest.mark.parametrize(("stop", "name"), [(3, "epoch=0-step=3.ckpt"), (13, "epoch=1-step=13.ckpt")])
def test_an_epoch_that_max_steps_has_ended_goes_on_in_its_middle(
    tmp_path: Path, saves: dict[str, Any], stop: int, name: str
) -> None:
    module, expected = _run(tmp_path / "whole", 1, None)
    _run(tmp_path / "two", 1, None, saves=saves, max_steps=stop)
    assert find_checkpoints(tmp_path / "two").found[0].path.name == name
    resumed, last = _run(tmp_path / "two", 1, None, "last", saves=saves)
    assert resumed.losses == module.losses[stop:]
    assert last["global_step"] == 20
    assert _differences(last["state_dict"], expected["state_dict"]) == []


def test_a_checkpoint_without_random_numbers_is_said(tmp_path: Path) -> None:
    _, last = _run(tmp_path, 1, None, max_steps=3)
    del last["rank_states"]
    checkpoints = ProTrainCheckpointIO("other")
    checkpoints.save_checkpoint(last, tmp_path / "without")
    with pytest.warns(UserWarning, match="has no random states"):
        _run(tmp_path, 1, None, tmp_path / "without", max_steps=4)
    last["rank_states"] = []
    checkpoints.save_checkpoint(last, tmp_path / "two")
    with pytest.warns(UserWarning, match="has no random states"):
        _run(tmp_path, 1, None, tmp_path / "two", max_steps=4)
