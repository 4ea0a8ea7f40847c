"""Checkpoints as folders go through Lightning's own Trainer: saved, kept, removed, resumed, by any strategy."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_protrain.checkpoint.io import Layout, ProTrainCheckpointIO
from lightning_protrain.checkpoint.manifest import MANIFEST, reserved_name
from lightning_protrain.checkpoint.serialize import WEIGHTS
from lightning_protrain.checkpoint.verification import read_manifest, verify
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.checkpoint.contents import content, flip, same
from tests.support.models import ParityModule, fit, zoo
from tests.support.plans import plans
from tests.support.trainers import QUIET

PLANS = {"plain": None, **plans()}
MODELS = ("tied", "frozen")


def _strategy(plan: str, module: ParityModule) -> Any:
    make = PLANS[plan]
    return "auto" if make is None else ProTrainStrategy(plan=make(module))


def _train(model: str, plan: str, plugins: Any = None, **options: Any) -> tuple[ParityModule, L.Trainer]:
    module = zoo()[model]()
    resumed = options.pop("ckpt_path", None)
    if resumed is None:
        return module, fit(module, strategy=_strategy(plan, module), plugins=plugins, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    options = {"accelerator": "cpu", "devices": 1, **QUIET, **options}
    trainer = L.Trainer(strategy=_strategy(plan, module), plugins=plugins, **options)
    trainer.fit(module, ckpt_path=resumed)
    return module, trainer


@functools.cache
def _uninterrupted(model: str) -> dict[str, Tensor]:
    return _train(model, "plain", max_epochs=2)[0].state_dict()


def _assert_same(module: ParityModule, model: str) -> None:
    expected = _uninterrupted(model)
    assert list(module.state_dict()) == list(expected)
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name]), name


# What saves, how; what resumes, with which plugin.
DIRECTIONS = [
    ("offload", "folder", "plain", True),
    ("plain", "folder", "offload", True),
    ("half", "folder", "offload", True),
    ("offload", "file", "plain", False),  # A stock file in a Trainer that knows nothing of us.
    ("offload", "file", "half", True),
    ("plain", None, "offload", True),  # A file that Lightning has saved.
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("saved_by", "layout", "resumed_by", "with_io"), DIRECTIONS)
def test_a_run_resumes_to_the_bit(
    model: str, saved_by: str, layout: Layout | None, resumed_by: str, with_io: bool, tmp_path: Path
) -> None:
    plugins = ProTrainCheckpointIO(layout=layout) if layout is not None else None
    _, trainer = _train(model, saved_by, plugins, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").is_dir() is (layout == "folder")
    plugins = ProTrainCheckpointIO() if with_io else None
    module, trainer = _train(model, resumed_by, plugins, max_epochs=2, ckpt_path=tmp_path / "x.ckpt")
    assert trainer.current_epoch == 2
    _assert_same(module, model)


def test_the_folder_has_what_lightning_would_have_saved(tmp_path: Path) -> None:
    _, trainer = _train("tied", "offload", ProTrainCheckpointIO("my-run"), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x")
    dumped = trainer._checkpoint_connector.dump_checkpoint()
    assert same(ProTrainCheckpointIO().load_checkpoint(tmp_path / "x"), dumped)
    manifest = read_manifest(tmp_path / "x")
    assert (manifest.run, manifest.step) == ("my-run", trainer.global_step)
    assert manifest.record["epoch"] == dumped["epoch"]
    # Tied weights are stored once, and each optimizer moment is a tensor of its own.
    size = sum(value.nbytes for value in {id(v): v for v in trainer.model.parameters()}.values())
    assert manifest.files[WEIGHTS].size < size + 4000


def test_the_stock_callback_keeps_its_best_and_removes_the_others(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", monitor="loss", save_top_k=2, every_n_train_steps=2, save_last="link")

    class Logged(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            module.log("loss", float((trainer.global_step - 6) ** 2))

    options = {"callbacks": [Logged(), saver], "enable_checkpointing": True, "max_steps": 12}
    _train("tied", "offload", ProTrainCheckpointIO(), **options)
    assert saver.best_model_path == str(tmp_path / "step=6.ckpt")
    folders = sorted(each.name for each in tmp_path.iterdir() if each.is_dir() and not each.is_symlink())
    assert "step=6.ckpt" in folders
    assert 2 <= len(folders) <= 3
    assert (tmp_path / "last.ckpt").is_symlink()
    assert all(verify(tmp_path / name) == [] for name in folders)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_saves_are_numbered_in_their_order_and_nothing_is_set_aside(tmp_path: Path) -> None:
    checkpoints = ProTrainCheckpointIO()
    for step in (1, 2, 3):
        checkpoints.save_checkpoint(content(step), tmp_path / f"{step}")
    resumed = ProTrainCheckpointIO()
    resumed.load_checkpoint(tmp_path / "1")
    resumed.save_checkpoint(content(2), tmp_path / "again")
    assert [read_manifest(tmp_path / name).sequence for name in ("1", "2", "3", "again")] == [0, 1, 2, 3]


def test_an_interrupted_save_is_found_by_its_name_and_put_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = ProTrainCheckpointIO()
    checkpoints.save_checkpoint(content(1), tmp_path / "last")
    (tmp_path / "last").rename(tmp_path / reserved_name("last", "run", "old"))
    (tmp_path / reserved_name("x", "run", "staged")).mkdir()
    assert same(checkpoints.load_checkpoint(tmp_path / "last"), content(1))
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        checkpoints.save_checkpoint(content(2), tmp_path / "other")
    assert "Removed files of an interrupted save" in caplog.text
    assert sorted(os.listdir(tmp_path)) == ["last", "other"]


def test_one_that_is_not_good_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    checkpoints = ProTrainCheckpointIO()
    checkpoints.save_checkpoint(content(1), tmp_path / "x")
    flip(tmp_path / "x" / WEIGHTS, 200)
    with pytest.raises(ValueError, match=rf"x is a damaged checkpoint: {WEIGHTS}: its content was changed"):
        _train("tied", "plain", checkpoints, max_epochs=1, ckpt_path=tmp_path / "x")


def test_the_folder_of_a_run_is_refused_with_the_name_of_its_newest_checkpoint(tmp_path: Path) -> None:
    checkpoints = ProTrainCheckpointIO()
    for name in ("x", "a"):
        checkpoints.save_checkpoint(content(1), tmp_path / name)
    os.utime(tmp_path / "x" / MANIFEST, (0, 0))
    for load in (checkpoints.load_checkpoint, CausalLMModule.load_from_checkpoint):
        with pytest.raises(ValueError, match=r"Give one of the checkpoints in it, such as .*/a\.$"):
            load(tmp_path)
    with pytest.raises(ValueError, match=r"Give one of the checkpoints in it, such as .*/a\.$"):
        fit(zoo()["reused"](), strategy="protrain", ckpt_path=str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "stock.ckpt").touch()
    with pytest.raises(ValueError, match=r"such as .*/checkpoints/stock\.ckpt\.$"):
        CausalLMModule.load_from_checkpoint(tmp_path)


def test_a_folder_of_something_else_is_neither_loaded_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "meta.pt").touch()
    checkpoints = ProTrainCheckpointIO()
    with pytest.raises(ValueError, match=r"is a folder without manifest\.json"):
        checkpoints.load_checkpoint(tmp_path / "x")
    with pytest.raises(ValueError, match="is a folder with files, but not a checkpoint"):
        checkpoints.remove_checkpoint(tmp_path / "x")
    assert os.listdir(tmp_path / "x") == ["meta.pt"]


@pytest.mark.parametrize("kind", ["folder", "file", "link", "none"])
def test_what_is_removed_is_gone(tmp_path: Path, kind: str) -> None:
    target, checkpoints = (
        tmp_path / "new" / "root" / "x",
        ProTrainCheckpointIO(layout="file" if kind == "file" else "folder"),
    )
    checkpoints.save_checkpoint(content(1), target)
    if kind == "link":
        (tmp_path / "link").symlink_to("new/root/x")
        checkpoints.remove_checkpoint(tmp_path / "link")
        assert target.is_dir()
        return
    checkpoints.remove_checkpoint(target)
    if kind == "none":
        checkpoints.remove_checkpoint(target)
    assert os.listdir(target.parent) == []
    with pytest.raises(FileNotFoundError):
        checkpoints.load_checkpoint(target)


@pytest.mark.parametrize("path", ["s3://bucket/x.ckpt", "file://host/x.ckpt"])
def test_what_is_no_file_system_is_refused(path: str) -> None:
    for act in (
        lambda: ProTrainCheckpointIO().save_checkpoint({}, path),
        lambda: ProTrainCheckpointIO().load_checkpoint(path),
    ):
        with pytest.raises(ValueError, match="is not a path on a mounted file system"):
            act()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"run": "../x"}, "run='../x'"), ({"layout": "zip"}, "layout='zip'"), ({"digest": "md5"}, "digest='md5'")],
)
def test_what_there_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProTrainCheckpointIO(**options)
    with pytest.raises(ValueError, match="storage_options"):
        ProTrainCheckpointIO().save_checkpoint({}, "x", storage_options=5)


def test_what_a_spawned_process_leaves_for_its_parent_is_read_by_any(tmp_path: Path) -> None:
    message, weights = tmp_path / ".temp.ckpt", {"weight": torch.arange(3.0)}
    ProTrainCheckpointIO().save_checkpoint(weights, message)
    parent = TorchCheckpointIO()
    assert torch.equal(parent.load_checkpoint(message)["weight"], weights["weight"])
    parent.remove_checkpoint(message)
    assert not message.exists()
