"""Folders of runs: prepared or refused before training, one writer each, failed and killed runs."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.setup import install_io, installed_io
from lightning_protrain.checkpoint.atomic import Files, free_bytes
from lightning_protrain.checkpoint.discover import pointed
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.verification import read_manifest
from lightning_protrain.rank_store import RankStore
from tests.checkpoint.contents import save
from tests.checkpoint.disks import Stuck
from tests.support.counter_runs import LOSSES, Counter, _fit, _names, _steps, _weight


def _trainer(*plugins: object) -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, plugins=list(plugins))


@pytest.mark.parametrize("given", [None, "run", "a"])
def test_folders_of_the_run_are_saved(given: str | None) -> None:
    trainer = _trainer(*([] if given is None else [ProTrainCheckpointIO(given)]))
    checkpoints = install_io(trainer, "a", exchange := RankStore(None))
    assert installed_io(trainer) is trainer.strategy.checkpoint_io is checkpoints
    assert (checkpoints.run, checkpoints.rank, checkpoints.together) == ("a", 0, exchange.together)


def test_runs_in_one_folder_do_not_touch_each_other(tmp_path: Path) -> None:
    _, first = _fit(tmp_path, LOSSES, run="a")
    _, second = _fit(tmp_path, (1.0, 9.0, 9.0, 9.0), run="b")
    assert _names(tmp_path) == [
        "a-epoch=0-step=4.ckpt",
        "a-epoch=1-step=8.ckpt",
        "b-epoch=0-step=2.ckpt",
        "b-epoch=1-step=8.ckpt",
    ]
    assert (_steps(tmp_path, "a"), _steps(tmp_path, "b")) == ([4, 8], [2, 8])
    assert (_weight(first.best_model_path), _weight(second.best_model_path)) == (4, 2)


class _Linkless(Files):
    """A file system without symbolic links."""

    def link(self, name: str, path: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))


def _links(folder: Path) -> dict[str, int]:
    """Return the steps that the links of a folder lead to; no link is dangling."""
    links = {path.name: pointed(path) for path in folder.iterdir() if path.name.endswith(("last", "best"))}
    return {name: read_manifest(path).step for name, path in links.items() if path is not None}


@pytest.mark.parametrize("files", [Files, _Linkless])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_links_name_the_newest_and_the_best(tmp_path: Path, files: type[Files], asynchronous: bool) -> None:
    checkpoints, seen = ProTrainCheckpointIO(), []
    checkpoints.files = files()

    class Looks(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(_links(tmp_path))

    options = {"asynchronous": asynchronous, "every_n_train_steps": 1, "callbacks": [Looks()], "plugins": [checkpoints]}
    trainer, _ = _fit(tmp_path, LOSSES, max_steps=6, **options)
    assert asynchronous or seen[-1] == {"last": 5, "best": 4}
    assert _links(tmp_path) == {"last": 6, "best": 4}
    assert (tmp_path / "best").is_symlink() == (files is Files)
    assert not os.path.isabs(os.readlink(tmp_path / "best") if files is Files else (tmp_path / "best").read_text())
    # They are no checkpoints of their own.
    assert _steps(tmp_path) == [4, 6]
    shutil.move(tmp_path, moved := tmp_path.with_name("moved"))
    module = Counter(LOSSES)
    trainer.validate(module, ckpt_path=moved / "best", verbose=False)
    assert module.layer.weight.item() == _weight(moved / "best") == 4
    # A resumed run goes on with them.
    trainer, _ = _fit(moved, (9.0,) * 4, ckpt_path=moved / "last", plugins=[ProTrainCheckpointIO()])
    assert trainer.global_step == 8
    assert _links(moved) == {"last": 8, "best": 4}


def test_links_of_runs_have_their_prefix_and_only_a_metric_makes_a_best(tmp_path: Path) -> None:
    _fit(tmp_path, LOSSES, run="a")
    _fit(tmp_path, run="b")
    assert _links(tmp_path) == {"a-last": 8, "a-best": 4, "b-last": 8}


@pytest.mark.filterwarnings("ignore:val_loss was not logged")
def test_a_best_that_is_set_aside_has_no_link(tmp_path: Path) -> None:
    _fit(tmp_path, LOSSES, every_n_train_steps=1, save_top_k=-1)
    back, module = tmp_path / "epoch=0-step=1.ckpt", Counter(())
    _fit(tmp_path, module=module, monitor="val_loss", max_steps=2, ckpt_path=back)
    assert _links(tmp_path) == {"last": 2}
    assert not (tmp_path / "best").is_symlink()


@pytest.mark.parametrize("kind", ["checkpoint", "folder", "file", "link"])
def test_what_the_user_has_called_last_stays_and_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    last = tmp_path / "run" / "last"
    last.parent.mkdir()
    if kind == "checkpoint":
        save(last.parent, 1, name="last")
    elif kind == "folder":
        last.mkdir()
    elif kind == "file":
        last.write_text("a note of mine\n")
    else:
        last.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="run/last is not updated, because it is not a link of a run"):
        _fit(last.parent, LOSSES)
    assert last.is_symlink() == (kind == "link")
    assert last.is_dir() == (kind != "file")
    assert {"best": 4}.items() <= _links(last.parent).items()


def test_a_link_that_cannot_be_made_ends_no_run(tmp_path: Path) -> None:
    class Full(_Linkless):
        def create(self, path: Path) -> int:
            if "last" in path.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return super().create(path)

    checkpoints = ProTrainCheckpointIO()
    checkpoints.files = Full()
    with pytest.warns(UserWarning, match="last is not updated: .*No space left on device"):
        _fit(tmp_path, plugins=[checkpoints])
    assert _steps(tmp_path) == [8]


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_checkpoint_may_be_called_like_a_link(tmp_path: Path, name: str) -> None:
    _, saver = _fit(tmp_path, LOSSES, filename=name, save_top_k=-1)
    assert _links(tmp_path) == {"last": 8, "best": 4}
    assert _weight(saver.best_model_path) == 4


def test_what_the_user_has_saved_is_the_users(tmp_path: Path) -> None:
    class Own(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "mine")

    _fit(tmp_path, callbacks=[Own()])
    assert _steps(tmp_path) == [1, 8]


def test_one_process_writes_a_run(tmp_path: Path) -> None:
    class Second(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            with pytest.raises(ValueError, match=rf"is being written by process {os.getpid()}"):
                _fit(tmp_path)
            _fit(tmp_path, run="another")

    _fit(tmp_path, callbacks=[Second()])
    assert (_steps(tmp_path), _steps(tmp_path, "another")) == ([8], [8])


@pytest.mark.parametrize(
    ("error", "kind", "asynchronous"),
    [
        (errno.EBUSY, "rename", False),
        (errno.EACCES, "remove", False),
        (errno.EIO, "rename", True),
        (errno.EBUSY, "remove", True),
    ],
)
def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(
    tmp_path: Path, error: int, kind: str, asynchronous: bool
) -> None:
    checkpoints = ProTrainCheckpointIO()
    checkpoints.files = Stuck("step=2.ckpt", error, (kind,))

    class LetGo(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 6:
                assert any("step=2.ckpt" in path.name for path in tmp_path.iterdir())
                checkpoints.files = Files()

    with pytest.warns(UserWarning, match=rf"epoch=0-step=2\.ckpt.* could not be removed: \[Errno {error}\]"):
        _, saver = _fit(
            tmp_path,
            every_n_train_steps=2,
            asynchronous=asynchronous,
            plugins=[checkpoints],
            callbacks=[LetGo()],
        )
    # The next save that can removes it.
    assert _steps(tmp_path) == [8]
    assert _weight(saver.last_model_path) == 8


def test_a_run_that_fails_in_the_first_batch_of_an_epoch_is_saved_in_that_epoch(tmp_path: Path) -> None:
    class Fails(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        _fit(tmp_path, every_n_train_steps=100, save_on_exception=True, callbacks=[Fails()])
    content = ProTrainCheckpointIO().load_checkpoint(tmp_path / "epoch=1-step=4.ckpt")
    assert content["epoch"] == content["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] == 1


class _Fails(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("of the user")


@pytest.mark.parametrize("save", [True, False])
def test_a_run_that_fails_gives_its_lock_back_and_saves_if_asked_to(tmp_path: Path, save: bool) -> None:
    with pytest.raises(RuntimeError, match="of the user"):
        _fit(tmp_path, callbacks=[_Fails()], save_on_exception=save)
    assert _steps(tmp_path) == ([3] if save else [])


def test_a_save_that_fails_ends_the_run_and_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fit(tmp_path, max_steps=4)
    checkpoints = ProTrainCheckpointIO()

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoints.files, "sync", fail)
    with pytest.raises(OSError, match="Input/output"):
        _fit(tmp_path, plugins=[checkpoints], ckpt_path="last")
    assert _steps(tmp_path) == [4]


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    module = Counter()
    with pytest.raises(ValueError, match="Checkpoints cannot be written to"):
        _fit(tmp_path / "file", module=module)
    assert module.layer.weight.item() == 0


def test_a_disk_without_room_for_the_weights_is_refused_before_training(tmp_path: Path) -> None:
    module = Counter()
    module.large = nn.Parameter(torch.empty(1).expand(free_bytes(tmp_path)), requires_grad=False)
    with pytest.raises(OSError, match=r"needs .* GiB .* but the disk has"):
        _fit(tmp_path, module=module)
    assert module.layer.weight.item() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run": "../x"}, "run="),
        ({"mode": "up"}, "mode"),
        ({"min_delta": -1.0}, "min_delta"),
        (
            {"plugins": [AsyncCheckpointIO()]},
            "saves through ProTrainCheckpointIO, and the Trainer has AsyncCheckpointIO",
        ),
        ({"plugins": [ProTrainCheckpointIO(layout="file")]}, r"ProTrainCheckpointIO\(layout='file'\) writes files"),
        ({"run": "a", "plugins": [ProTrainCheckpointIO("b")]}, "one Trainer writes one run"),
    ],
    ids=range(6),
)
def test_what_there_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, L.pytorch.utilities.exceptions.MisconfigurationException), match=message):
        _fit(tmp_path, **options)


def test_a_metric_with_a_separator_makes_no_folder(tmp_path: Path) -> None:
    module = Counter((1.0,))
    module.validation_step = lambda batch, batch_idx: module.log("val/loss", 1.0)
    _fit(tmp_path, module=module, monitor="val/loss", filename="{step}-{val/loss:.1f}", epochs=1)
    assert _names(tmp_path) == ["step=2-val_loss=1.0.ckpt", "step=4-val_loss=1.0.ckpt"]


def test_a_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    saver = ProTrainCheckpoint(tmp_path / "x", monitor="val_loss")
    L.Trainer(accelerator="cpu", fast_dev_run=True, callbacks=[saver], enable_progress_bar=False).fit(Counter(LOSSES))
    assert not (tmp_path / "x").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
import lightning as L
from tests.support.counter_runs import Counter, LOSSES, _fit

class Kill(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

_fit(Path(sys.argv[1]), LOSSES, every_n_train_steps=3, callbacks=[Kill()])
"""


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=root, check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert (tmp_path / ".run.lock").exists()
    trainer, saver = _fit(tmp_path, LOSSES, every_n_train_steps=3, ckpt_path="last")
    assert (trainer.global_step, _weight(saver.best_model_path)) == (8, 4)
    assert not (tmp_path / ".run.lock").exists()
