"""A run is saved when it should be, keeps its best, goes on from its newest good one, and removes only its own."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.resume import ACCUMULATING, usable
from lightning_protrain.checkpoint.atomic import free_path
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.serialize import WEIGHTS
from lightning_protrain.checkpoint.verification import read_manifest
from lightning_protrain.report.plan_monitor import PlanMonitor
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.checkpoint.contents import flip, save
from tests.support.counter_runs import LOSSES, Counter, Steps, _fit, _names, _steps, _weight
from tests.support.trainers import SILENT


def test_it_is_the_checkpoint_callback_of_the_trainer(tmp_path: Path) -> None:
    trainer, saver = _fit(tmp_path)
    assert trainer.checkpoint_callback is saver
    assert isinstance(saver, ModelCheckpoint)
    assert _names(tmp_path) == ["epoch=1-step=8.ckpt"]
    assert saver.best_model_path == saver.last_model_path == str(tmp_path / "epoch=1-step=8.ckpt")
    assert _weight(saver.last_model_path) == 8


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every_n_train_steps": 3, "save_top_k": -1}, [3, 6, 8]),
        ({"every_n_train_steps": 3, "save_top_k": -1, "save_last": False}, [3, 6]),
        ({"every_n_train_steps": 3}, [8]),
        ({"every_n_epochs": 1, "save_top_k": -1}, [4, 8]),
        ({"every_n_epochs": 2, "save_top_k": -1}, [8]),
        ({"train_time_interval": timedelta(0), "save_top_k": -1}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"every_n_train_steps": 100}, [8]),
        ({"save_top_k": 0, "save_last": True}, [8]),
        ({"every_n_epochs": 0, "save_last": True}, [8]),
        ({"every_n_train_steps": 2, "save_top_k": -1, "accumulate_grad_batches": 2}, [2, 4]),
        ({"every_n_train_steps": 1, "save_top_k": -1, "accumulate_grad_batches": 3}, [1, 2, 3, 4]),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The last step of this run")
def test_saves_when_it_was_asked_to(tmp_path: Path, options: dict[str, Any], steps: list[int]) -> None:
    _fit(tmp_path, **options)
    assert _steps(tmp_path) == steps


class _Stops(L.Callback):
    """Asks the trainer to stop after a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.fit_loop.total_batch_idx + 1 == self.batch


ENDS: dict[str, Callable[[], dict[str, Any]]] = {
    "steps": lambda: {"max_steps": 3},
    "epochs": lambda: {"max_epochs": 3},
    "time": lambda: {"max_time": timedelta(milliseconds=1)},
    "early stop": lambda: {"callbacks": [EarlyStopping("val_loss", patience=1, strict=False)]},
    "asked in an epoch": lambda: {"callbacks": [_Stops(7)]},
    "asked within an accumulation": lambda: {"callbacks": [_Stops(5)], "accumulate_grad_batches": 2},
    "within an accumulation before the first step": lambda: {"callbacks": [_Stops(1)], "accumulate_grad_batches": 2},
}
EVALUATIONS: dict[str, dict[str, Any]] = {
    "no evaluation": {"limit_val_batches": 0},
    "at the end of an epoch": {},
    "every second batch": {"val_check_interval": 2},
    "every second epoch": {"check_val_every_n_epoch": 2},
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"monitor": "val_loss"},
    {"save_last": True},
    {"save_last": False},
    {"save_last": False, "monitor": "val_loss"},
    {"save_top_k": 0},
    {"save_top_k": 0, "save_last": True},
    {"every_n_epochs": 0},
    {"every_n_epochs": 2},
    {"every_n_train_steps": 2, "save_last": False},
    {"save_on_train_epoch_end": True},
    {"save_on_train_epoch_end": False},
]


FAST = [("steps", "at the end of an epoch"), ("asked within an accumulation", "no evaluation")]


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("end", "evaluation"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in itertools.product(ENDS, EVALUATIONS)
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_end_of_a_run_is_saved_where_a_model_checkpoint_saves_it_and_else_it_is_said(
    tmp_path: Path, end: str, evaluation: str
) -> None:
    def fit(saver: ModelCheckpoint) -> int:
        given = {"max_epochs": 4, **SILENT, **ENDS[end](), **EVALUATIONS[evaluation]}
        trainer = L.Trainer(accelerator="cpu", **{**given, "callbacks": [*given.get("callbacks", []), saver]})
        trainer.fit(Counter((5.0, 6.0, 7.0, 8.0)))
        return trainer.global_step

    for number, settings in enumerate(SETTINGS):
        theirs, ours = tmp_path / f"{number}-theirs", tmp_path / f"{number}"
        fit(ModelCheckpoint(theirs, **settings))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            step = fit(ProTrainCheckpoint(ours, **settings))
        is_saved, case = step in [0, *_steps(ours)], (settings, step, _steps(ours))
        excluded = settings.get("save_top_k") == 0 or settings.get("every_n_epochs") == 0
        assert is_saved or not list(theirs.glob(f"*-step={step}.ckpt")), case
        assert is_saved or not settings.get("save_last", not excluded), case
        assert is_saved != any("is not saved, because" in str(each.message) for each in warned), case


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"save_top_k": 0}, "because save_top_k=0; there is no checkpoint. To save it, set save_last=True"),
        ({"every_n_epochs": 0}, "because every_n_epochs=0 and no other trigger is set; there is no checkpoint."),
        ({"every_n_train_steps": 3, "save_last": False}, r"because save_last=False; the newest is .*step=6\.ckpt"),
    ],
)
def test_a_last_step_that_a_setting_excludes_is_named_with_the_setting(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.warns(UserWarning, match=f"The last step of this run, 8, is not saved, {reason}"):
        _fit(tmp_path, **settings)
    assert 8 not in _steps(tmp_path)


def test_a_run_that_is_stopped_within_an_accumulation_can_be_resumed(tmp_path: Path) -> None:
    _fit(tmp_path, callbacks=[_Stops(5)], accumulate_grad_batches=2)
    assert _steps(tmp_path) == [2]
    trainer, _ = _fit(tmp_path, accumulate_grad_batches=2, ckpt_path="last")
    assert trainer.global_step == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 1}, "'val_loss' was never logged, .* has ended before an evaluation: lower val_check_interval"),
        ({"epochs": 1, "val_check_interval": 1.0, "monitor": "val_los"}, r"Logged are \['val_loss'\]: monitor one of"),
        ({"losses": (), "monitor": "val_los"}, "val_los was not logged in the epoch up to step 4"),
    ],
)
def test_a_run_without_a_score_is_saved_and_says_that_it_has_no_best(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.warns(UserWarning, match=message) as warned:
        trainer, saver = _fit(tmp_path, **{"losses": LOSSES, **options})
    assert sum("val_los" in str(each.message) for each in warned) == 1
    assert _weight(saver.last_model_path) == trainer.global_step
    assert saver.best_model_path == ""


@pytest.mark.parametrize(
    ("losses", "mode", "min_delta", "best"),
    [
        (LOSSES, "min", 0.0, 4),
        (LOSSES, "max", 0.0, 2),
        ((5.0, 4.9, 4.8, 4.0), "min", 0.5, 8),
        ((5.0, 4.9, 4.8, 4.7), "min", 0.5, 2),
        ((math.nan, 7.0, math.inf, 8.0), "min", 0.0, 4),
        ((math.nan, 7.0, math.inf, 6.0), "max", 0.0, 4),
        ((3.0, 3.0, 3.0, 3.0), "min", 0.0, 2),
    ],
)
@pytest.mark.filterwarnings("ignore:.*a value that is not finite is never the best")
def test_the_best_of_all_evaluations_is_kept_with_its_own_weights(
    tmp_path: Path, losses: Sequence[float], mode: str, min_delta: float, best: int
) -> None:
    # No trigger falls on an evaluation.
    _, saver = _fit(tmp_path, losses, mode=mode, min_delta=min_delta, every_n_train_steps=3)
    assert _weight(saver.best_model_path) == best
    record = read_manifest(Path(saver.best_model_path)).record
    assert record["score"] == losses[best // 2 - 1] == float(saver.best_model_score)
    assert best in _steps(tmp_path)
    assert max(_steps(tmp_path)) >= 6


def test_a_score_that_is_not_finite_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="val_loss is nan at step 2: a value that is not finite is never the best"):
        _fit(tmp_path, (math.nan, 1.0), epochs=1)


def test_no_stale_metric_names_or_ranks_a_checkpoint(tmp_path: Path) -> None:
    _fit(tmp_path, LOSSES, every_n_train_steps=1, save_top_k=-1, filename="{step}-{val_loss:.1f}")
    assert _names(tmp_path) == sorted(
        [f"step={step}-val_loss={loss}.ckpt" for step, loss in zip((2, 4, 6, 8), LOSSES, strict=True)]
        + [f"epoch={(step - 1) // 4}-step={step}.ckpt" for step in (1, 3, 5, 7)]
    )
    scores = {each.manifest.step: each.manifest.record.get("score") for each in find_checkpoints(tmp_path).found}
    assert scores == {1: None, 2: 5.0, 3: None, 4: 2.0, 5: None, 6: 3.0, 7: None, 8: 4.0}


def test_the_highest_ranks_are_kept(tmp_path: Path) -> None:
    _, saver = _fit(tmp_path, LOSSES, every_n_train_steps=1, save_top_k=2)
    assert _steps(tmp_path) == [4, 6, 8]
    assert {Path(path).name: float(score) for path, score in saver.best_k_models.items()} == {
        "epoch=0-step=4.ckpt": 2.0,
        "epoch=1-step=6.ckpt": 3.0,
        "epoch=1-step=8.ckpt": 4.0,
    }


def test_a_metric_of_training_ranks_without_validation(tmp_path: Path) -> None:
    options = {"monitor": "train_loss", "every_n_train_steps": 2, "module": Counter(train=True)}
    _, saver = _fit(tmp_path, filename="{step}-{train_loss:.0f}", **options)
    # What is logged in the step to 6 is that of the weights after 5.
    assert Path(saver.best_model_path).name == "step=6-train_loss=0.ckpt"
    assert _steps(tmp_path) == [6, 8]


def test_a_metric_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"monitor='val_los': no metric of that name was logged; logged are \['val_loss'\]"
    ):
        _fit(tmp_path, LOSSES, monitor="val_los")
    assert _steps(tmp_path) == [2]  # What was trained before the evaluation is not lost.


@pytest.mark.parametrize(
    ("losses", "best"), [((2.0, None, 3.0, None), 2), ((None, 2.0, None, None), 4), ((2.0, None, 1.0, None), 6)]
)
def test_an_evaluation_that_logs_no_score_is_not_better_and_is_named_once(
    tmp_path: Path, losses: Sequence[float | None], best: int
) -> None:
    with pytest.warns(UserWarning, match="val_loss was not logged in the evaluation at step") as warned:
        _, saver = _fit(tmp_path, losses, every_n_train_steps=1, save_top_k=-1, filename="{step}-{val_loss:.1f}")
    assert sum("was not logged" in str(each.message) for each in warned) == 1
    assert _weight(saver.best_model_path) == best
    scores = {each.manifest.step: each.manifest.record.get("score") for each in find_checkpoints(tmp_path).found}
    assert scores == {step: losses[step // 2 - 1] if step % 2 == 0 else None for step in range(1, 9)}
    # No name holds the loss of an earlier evaluation.
    assert {path.name for path in tmp_path.iterdir() if "val_loss" in path.name} == {
        f"step={step}-val_loss={score:.1f}.ckpt" for step, score in scores.items() if score is not None
    }


def test_save_on_train_epoch_end_takes_the_score_of_the_same_step(tmp_path: Path) -> None:
    _fit(tmp_path, LOSSES, save_on_train_epoch_end=True, save_top_k=-1)
    assert {each.manifest.step: each.manifest.record.get("score") for each in find_checkpoints(tmp_path).found} == {
        2: 5.0,
        4: 2.0,
        8: 4.0,
    }


# --- going on --------------------------------------------------------------------------------------------------------
def test_last_goes_on_from_the_newest_and_keeps_the_best(tmp_path: Path) -> None:
    _fit(tmp_path, LOSSES, max_steps=6)
    module = Counter((9.0, 9.0, 9.0, 9.0))
    trainer, saver = _fit(tmp_path, module=module, monitor="val_loss", ckpt_path="last")
    assert trainer.global_step == _weight(saver.last_model_path) == 8
    assert module.evaluated == [8]
    assert (_weight(saver.best_model_path), float(saver.best_model_score)) == (4, 2.0)
    # The one it was resumed from stays, and belongs to the same line.
    assert _steps(tmp_path) == [4, 6, 8]
    assert not list(tmp_path.glob("*.aside"))


def test_another_process_finds_the_best_and_the_last(tmp_path: Path) -> None:
    _fit(tmp_path, LOSSES)
    shutil.move(tmp_path, moved := tmp_path.with_name("moved"))
    tmp_path.mkdir()
    saver = ProTrainCheckpoint(moved, monitor="val_loss")
    trainer = L.Trainer(accelerator="cpu", callbacks=[saver], **SILENT)
    module = Counter(LOSSES)
    trainer.validate(module, ckpt_path="best", verbose=False)
    assert module.layer.weight.item() == 4
    trainer.validate(module, ckpt_path="last", verbose=False)
    assert module.layer.weight.item() == 8


@pytest.mark.parametrize("torn", [1, 2])
def test_a_newest_that_is_not_good_is_skipped_and_said(tmp_path: Path, torn: int) -> None:
    _fit(tmp_path, every_n_train_steps=2, save_top_k=-1, max_steps=6)
    for step in (6, 4)[:torn]:
        flip(tmp_path / f"epoch={(step - 1) // 4}-step={step}.ckpt" / WEIGHTS, 500)
    good = 6 - 2 * torn
    with pytest.warns(
        UserWarning, match=rf"(?s)step={good}\.ckpt \(step {good}\) is the newest undamaged.*step=6\.ckpt: {WEIGHTS}"
    ):
        trainer, saver = _fit(tmp_path, every_n_train_steps=2, save_top_k=-1, max_steps=7, ckpt_path="last")
    assert trainer.global_step == 7
    assert saver._resumed_from == read_manifest(tmp_path / f"epoch={(good - 1) // 4}-step={good}.ckpt").identity


def test_if_all_checkpoints_are_damaged_the_run_does_not_start_from_scratch(tmp_path: Path) -> None:
    _fit(tmp_path)
    flip(tmp_path / "epoch=1-step=8.ckpt" / WEIGHTS, 500)
    before = sorted(os.listdir(tmp_path / "epoch=1-step=8.ckpt"))
    with pytest.raises(ValueError, match="All checkpoints of run 'run' in"):
        _fit(tmp_path, ckpt_path="last")
    with pytest.raises(ValueError, match="is a damaged checkpoint"):
        _fit(tmp_path, ckpt_path=tmp_path / "epoch=1-step=8.ckpt")
    assert sorted(os.listdir(tmp_path / "epoch=1-step=8.ckpt")) == before


def test_without_any_checkpoint_last_starts_from_scratch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        trainer, _ = _fit(tmp_path, ckpt_path="last")
    assert f"There is no checkpoint of this run in {tmp_path}: the run starts from its first step." in caplog.text
    assert trainer.global_step == 8


@pytest.mark.filterwarnings("ignore:The checkpoint has no random states")
def test_a_stock_last_file_is_gone_on_from(tmp_path: Path) -> None:
    stock = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0, every_n_train_steps=3)
    L.Trainer(accelerator="cpu", max_steps=3, callbacks=[stock], **SILENT).fit(Counter())
    trainer, saver = _fit(tmp_path, ckpt_path="last")
    assert (trainer.global_step, _weight(saver.last_model_path)) == (8, 8)
    assert (tmp_path / "last.ckpt").is_file()


def test_going_back_sets_aside_what_came_after(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _fit(tmp_path, LOSSES, every_n_train_steps=2, save_top_k=-1)
    back = tmp_path / "epoch=0-step=2.ckpt"
    module, options = Counter((7.0, 6.0, 8.0, 9.0)), {"monitor": "val_loss", "every_n_train_steps": 2, "max_steps": 6}
    with caplog.at_level("INFO"):
        _, saver = _fit(tmp_path, module=module, ckpt_path=back, save_top_k=-1, **options)
    names = "epoch=1-step=8.aside, epoch=1-step=6.aside, epoch=0-step=4.aside"
    assert f"goes on from step 2, so its later checkpoints were renamed: {names}. Remove" in caplog.text
    assert module.evaluated == [4, 6]
    # 4 with a loss of 2 was set aside; 2 with 5 was not.
    assert (_weight(saver.best_model_path), float(saver.best_model_score)) == (2, 5.0)
    assert _steps(tmp_path) == [2, 4, 6]
    assert [path.name for path in sorted(tmp_path.glob("*.aside"))] == [
        f"epoch={(step - 1) // 4}-step={step}.aside" for step in (4, 6, 8)
    ]
    fresh = ProTrainCheckpoint(tmp_path, monitor="val_loss")
    assert fresh.best_model_path == str(back)
    assert fresh._find_last_checkpoints(L.Trainer(accelerator="cpu", logger=False)) == {saver.last_model_path}
    # It loads by its path.
    assert _fit(tmp_path / "new", ckpt_path=tmp_path / "epoch=1-step=6.aside")[0].global_step == 8


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_starts_again_sets_aside_the_former_one_at_its_first_save(
    tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _fit(tmp_path, LOSSES)
    with pytest.raises(RuntimeError, match="of the user"):
        _fit(tmp_path, LOSSES, callbacks=[Steps(1, _raise)])
    assert _steps(tmp_path) == [4, 8]
    with caplog.at_level("INFO"):
        _, saver = _fit(tmp_path, (9.0, 8.0, 7.0, 9.0), asynchronous=asynchronous)
    assert "starts again, so its later checkpoints were renamed" in caplog.text
    assert (_weight(saver.best_model_path), float(saver.best_model_score)) == (6, 7.0)
    assert _steps(tmp_path) == [6, 8]
    assert len(list(tmp_path.glob("*.aside"))) == 2


def _raise() -> None:
    raise RuntimeError("of the user")


def test_a_second_fit_goes_on_in_the_same_line(tmp_path: Path) -> None:
    trainer, saver = _fit(tmp_path, LOSSES, max_steps=4)
    trainer.validate(trainer.model, ckpt_path="best", verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(trainer.model)
    assert (trainer.global_step, float(saver.best_model_score)) == (6, 2.0)
    assert not list(tmp_path.glob("*.aside"))


@pytest.mark.parametrize("limit", [{"max_steps": 6}, {"epochs": 1}])
def test_a_finished_run_that_is_resumed_says_that_nothing_is_left(
    tmp_path: Path, limit: dict[str, Any], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    _fit(tmp_path, save_last=True, **limit)
    with caplog.at_level("INFO"):
        assert "nothing was left" not in caplog.text
        again = {"strategy": ProTrainStrategy(plan="resident"), "callbacks": [PlanMonitor()]}
        _fit(tmp_path, save_last=True, **limit, ckpt_path="last", **again)
    step = 6 if "max_steps" in limit else 4
    assert f"step={step}.ckpt is the end of its run, at step {step}" in caplog.text
    name, most = ("max_steps", 6) if "max_steps" in limit else ("max_epochs", 1)
    assert f"To continue, raise {name} above {most}.\n" in caplog.text
    assert "ProTrain streamed" not in capsys.readouterr().out


def test_resumed_at_its_end_it_rewrites_nothing(tmp_path: Path) -> None:
    _fit(tmp_path, LOSSES, save_last=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    trainer, _ = _fit(tmp_path, LOSSES, save_last=True, ckpt_path="last")
    assert trainer.global_step == 8
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_checkpoint_within_an_accumulation_is_marked(tmp_path: Path) -> None:
    # Two batches for a step, an evaluation after every batch: the best one is found in the middle of a step.
    module = Counter((1.0,))
    module.validation_step = lambda batch, batch_idx: module.log("val_loss", float(module.trainer.fit_loop.batch_idx))
    _fit(tmp_path, module=module, monitor="val_loss", accumulate_grad_batches=2, val_check_interval=1, epochs=1)
    marked = {
        each.manifest.step: each.manifest.record.get("accumulating", False) for each in find_checkpoints(tmp_path).found
    }
    assert marked == {0: True, 2: False}


def test_it_can_be_sent_to_a_process_that_is_spawned(tmp_path: Path) -> None:
    sent = pickle.loads(pickle.dumps(ProTrainCheckpoint(tmp_path, monitor="loss", save_top_k=2)))
    assert (sent.dirpath, sent.monitor, sent.save_top_k) == (str(tmp_path), "loss", 2)


@pytest.mark.filterwarnings("ignore:The last step of this run")
def test_what_another_callback_has_saved_stays(tmp_path: Path) -> None:
    other = ProTrainCheckpoint(tmp_path, monitor="val_loss", mode="max", every_n_epochs=0)
    _fit(tmp_path, LOSSES, every_n_train_steps=3, callbacks=[other])
    assert _steps(tmp_path) == [2, 4, 8]


def test_a_name_that_is_taken_gets_a_version(tmp_path: Path) -> None:
    path = tmp_path / "step=1.5.ckpt"
    assert free_path(path, "-", 1) == path
    path.touch()
    assert free_path(path, "-", 1).name == "step=1.5-v1.ckpt"
    (tmp_path / "step=1.5-v1.ckpt").symlink_to("nowhere")
    assert free_path(path, "-", 1).name == "step=1.5-v2.ckpt"


def test_torn_checkpoints_and_those_within_an_accumulation_are_not_usable(tmp_path: Path) -> None:
    save(tmp_path, 1, record={ACCUMULATING: True})
    save(tmp_path, 2)
    two, one = find_checkpoints(tmp_path, "run").found
    assert "between two steps" in str(usable(one)[0])
    assert usable(two) == []
    flip(two.path / "weights.safetensors", 900)
    assert "weights.safetensors" in str(usable(two)[0])
