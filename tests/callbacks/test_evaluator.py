"""Metrics of further data sets beside training, and the training not changed by them."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MetricCollection

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.evaluator import Evaluator
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.callbacks.evaluated import LLAMA, Data, Sums, fit, rows, rows_in_batches, weights
from tests.support.trainers import QUIET, SILENT


class RandomRows(Dataset[dict[str, Tensor]]):
    """Draws from every generator that a user might: the training must not notice."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random.random()
        np.random.rand()  # noqa: NPY002 (the generator that Lightning seeds)
        return {name: value.roll(int(torch.randint(3, ()))) for name, value in rows(5)[index].items()}


class Note(Callback):
    """A callback that records the metrics that were logged after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        extra = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("extra")}
        self.seen.append((trainer.global_step, extra))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "auto": lambda: "auto",
    "protrain": lambda: "protrain",
    "streamed": lambda: ProTrainStrategy(plan="offload", overlap_optimizer="forward"),
}


@pytest.mark.parametrize(("every", "strategy"), [(1, "auto"), (2, "protrain"), (1, "streamed"), (5, "streamed")])
def test_training_is_bitwise_the_training_without(every: int, strategy: str) -> None:
    loader = DataLoader(RandomRows(), batch_size=2, shuffle=True)
    with_it = weights(fit(Evaluator({"extra": loader}, every, at_start=True), strategy=STRATEGIES[strategy]()))
    without = weights(fit(strategy=STRATEGIES[strategy]()))
    assert with_it.keys() == without.keys()
    assert all(torch.equal(with_it[name], without[name]) for name in without)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_runs_at_its_own_cadence(accumulation: int) -> None:
    note = Note()
    evaluator = Evaluator({"extra": Data(3)}, every_n_steps=2, at_end=False)
    fit(evaluator, note, max_steps=5, accumulate_grad_batches=accumulation)
    steps = [step for (step, now), (_, before) in zip(note.seen[1:], note.seen, strict=False) if now != before]
    assert steps == [2, 4]
    assert set(note.seen[-1][1]) == {"extra_loss", "extra_perplexity", "extra_accuracy"}


@pytest.mark.parametrize(
    ("at_start", "at_end", "expected"), [(True, False, [0]), (False, True, [3]), (True, True, [0, 3])]
)
def test_at_start_and_at_end(at_start: bool, at_end: bool, expected: list[int], tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = fit(Evaluator({"extra": Data(3)}, at_start=at_start, at_end=at_end), max_steps=3, logger=logger)
    logger.save()
    header, *lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column, step = header.split(",").index("extra_loss"), header.split(",").index("step")
    assert [int(line.split(",")[step]) for line in lines if line.split(",")[column]] == expected
    assert "extra_loss" in trainer.callback_metrics


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_value_is_that_of_the_weights_after_the_step(strategy: str, tmp_path: Path) -> None:
    """No callback but ours reads weights here, so that an optimizer step may still be under way."""

    def logged(name: str) -> list[str]:
        logger = CSVLogger(tmp_path, name=name)
        fit(Evaluator({"extra": Data(3)}, every_n_steps=1), strategy=STRATEGIES[name](), logger=logger)
        return (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()

    assert logged(strategy) == logged("auto")


@pytest.mark.parametrize(("num_optimizers", "every", "expected"), [(1, 4, [4, 8, 12]), (3, 4, [6, 9, 12]), (3, 1, [3])])
def test_no_evaluation_is_missed_where_a_batch_takes_several_steps(
    num_optimizers: int, every: int, expected: list[int]
) -> None:
    class Manual(Sums):
        def __init__(self) -> None:
            super().__init__(fails=False)
            self.automatic_optimization = False
            self.evaluated_at: list[int] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.trainer.strategy._lightning_optimizers:
                self.manual_backward(self.layer(batch).sum())
                optimizer.step()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.evaluated_at.append(self.global_step)
            super().validation_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(num_optimizers)]

    module = Manual()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    evaluator = Evaluator({"extra": [torch.ones(1, 1)]}, every_n_steps=every, at_end=False)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=expected[-1], callbacks=[evaluator], **quiet)
    trainer.fit(module, DataLoader(torch.ones(20, 1)))  # type: ignore[arg-type]
    assert module.evaluated_at == expected


def test_a_resumed_run_evaluates_what_the_first_one_did_not(tmp_path: Path) -> None:
    steps: list[int] = []

    class Counting(Evaluator):
        def _evaluate(self, name: str, loader: Any, trainer: Trainer, pl_module: LightningModule) -> Any:
            steps.append(trainer.global_step)
            return super()._evaluate(name, loader, trainer, pl_module)

    def evaluator() -> Evaluator:
        return Counting({"extra": Data(3)}, every_n_steps=2, at_end=False)

    first = fit(evaluator(), max_steps=4, accumulate_grad_batches=2, limit_train_batches=5, max_epochs=9)
    first.save_checkpoint(tmp_path / "last.ckpt")
    again = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=8,
        accumulate_grad_batches=2,
        limit_train_batches=5,
        max_epochs=9,
        callbacks=[evaluator()],
        limit_val_batches=0,
        **QUIET,
    )
    again.fit(CausalLMModule(config=LLAMA, warmup_steps=0), Data(0), ckpt_path=tmp_path / "last.ckpt")
    assert steps == [2, 4, 6, 8]


def test_what_the_step_logs_of_its_own_is_not_logged() -> None:
    class LogsToo(CausalLMModule):
        def validation_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)
            self.log("val_own", 7.0)

    trainer = fit(Evaluator({"extra": Data(3)}, 2, at_start=True), kind=LogsToo)
    assert set(trainer.callback_metrics) == {"train_loss", "extra_loss", "extra_perplexity", "extra_accuracy"}
    assert "log" not in vars(trainer.lightning_module)


@pytest.mark.filterwarnings("ignore:.*not finite", "ignore:Evaluator")
def test_a_value_of_older_weights_is_not_monitored(tmp_path: Path) -> None:
    class Breaks(CausalLMModule):
        def _evaluate(self, batch: Any, metrics: MetricCollection) -> None:
            super()._evaluate(batch, metrics)
            if self.global_step >= 3:
                metrics.reset()
                metrics.update(loss_sum=float("nan"), num_correct=float("nan"), num_tokens=1)

    checkpoint = ModelCheckpoint(tmp_path, monitor="extra_loss", every_n_train_steps=1, save_top_k=9)
    trainer = fit(Evaluator({"extra": Data(3)}, 1), checkpoint, kind=Breaks, enable_checkpointing=True)
    assert not any(name.startswith("extra") for name in trainer.callback_metrics)
    assert len(checkpoint.best_k_models) == 2  # of steps 1 and 2


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_batches_are_converted_and_pass_the_hooks_of_the_module(precision: Any) -> None:
    seen: list[torch.dtype] = []

    class Hooked(Sums):
        def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            return batch + 1

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            seen.append(self.layer(batch).dtype)
            super().validation_step(batch, batch_idx)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    evaluator = Evaluator({"extra": [torch.ones(1, 1)]})
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, precision=precision, callbacks=[evaluator], **quiet)
    trainer.fit(Hooked(fails=False), DataLoader(torch.ones(2, 1)))  # type: ignore[arg-type]
    assert trainer.callback_metrics["extra_loss"] == 2.0
    assert seen == [{"bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]]


class Endless(IterableDataset[dict[str, Tensor]]):
    """Batches without end or length."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in itertools.cycle(rows_in_batches(3)):
            self.given += 1
            yield batch


@pytest.mark.parametrize("bar", [None, TQDMProgressBar, RichProgressBar])
def test_of_batches_without_length_it_takes_no_more_than_it_evaluates(bar: Any) -> None:
    data = Endless()
    shown = {} if bar is None else {"enable_progress_bar": True}
    loader = DataLoader(data, batch_size=None)
    fit(Evaluator({"extra": loader}, every_n_steps=1, max_batches=2), *([bar()] if bar else []), max_steps=3, **shown)
    assert data.given == 2 * 3


def test_it_is_shown_within_the_display_of_rich(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[list[str]] = []

    class Look(CausalLMModule):
        def validation_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)
            bar: Any = self.trainer.progress_bar_callback
            shown.append([task.description for task in bar.progress.tasks])

    bar = RichProgressBar()
    fit(Evaluator({"extra": Data(3)}, 6), bar, kind=Look, enable_progress_bar=True)
    assert all("Evaluating extra" in descriptions for descriptions in shown)
    assert "Evaluating" not in capsys.readouterr().err
    assert bar.progress is not None
    assert not any("Evaluating" in task.description for task in bar.progress.tasks)


def test_no_process_of_a_loader_is_left() -> None:
    class InProcesses(Data):
        def val_dataloader(self) -> Any:
            return DataLoader(rows(3), batch_size=2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]

    before = set(multiprocessing.active_children())
    trainer = fit(Evaluator({"extra": InProcesses(3)}, 3))
    assert "extra_loss" in trainer.callback_metrics
    gc.collect()
    assert set(multiprocessing.active_children()) == before


def test_the_end_is_not_evaluated_twice() -> None:
    runs: list[int] = []

    class Counting(Evaluator):
        def _evaluate(self, name: str, loader: Any, trainer: Trainer, pl_module: LightningModule) -> Any:
            runs.append(trainer.global_step)
            return super()._evaluate(name, loader, trainer, pl_module)

    fit(Counting({"extra": Data(3)}, every_n_steps=3), max_steps=6)
    assert runs == [3, 6]


def test_a_failure_after_the_last_step_does_not_end_the_run() -> None:
    class Broken(Data):
        def val_dataloader(self) -> Any:
            return [{"no": torch.ones(1)}]

    with pytest.warns(UserWarning, match="The evaluation after 2 steps failed; the run goes on without. ValueError"):
        trainer = fit(Evaluator({"extra": Broken(3)}), max_steps=2)
    assert trainer.state.finished


def test_it_gives_what_validation_gives() -> None:
    trainer = fit(Evaluator({"extra": Data(3)}))
    result = Trainer(accelerator="cpu", devices=1, **SILENT).validate(
        trainer.lightning_module, Data(3, batch_size=3), verbose=False
    )
    for name in ("loss", "perplexity", "accuracy"):
        assert float(trainer.callback_metrics[f"extra_{name}"]) == pytest.approx(result[0][f"val_{name}"], rel=1e-6)


def test_modes_and_the_modules_own_metrics_are_as_before() -> None:
    class Look(Callback):
        def __init__(self) -> None:
            self.modes: list[list[bool]] = []
            self.metrics: list[MetricCollection] = []

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            self.modes.append([module.training for module in pl_module.modules()])
            self.metrics.append(pl_module.val_metrics)

    before, after = Look(), Look()
    fit(before, Evaluator({"extra": Data(3)}, every_n_steps=1), after)
    assert before.modes == after.modes
    assert all(one is other for one, other in zip(before.metrics, after.metrics, strict=True))
    assert not after.metrics[-1]["loss"].count  # nothing was added to the validation's own


def test_at_most_as_many_batches() -> None:
    alone = fit(Evaluator({"extra": rows_in_batches(3)[:1]})).callback_metrics["extra_loss"]
    assert fit(Evaluator({"extra": rows_in_batches(3)}, max_batches=1)).callback_metrics["extra_loss"] == alone


@pytest.mark.parametrize("kind", [ModelCheckpoint, ProTrainCheckpoint])
def test_it_can_be_monitored(kind: type[ModelCheckpoint], tmp_path: Path) -> None:
    checkpoint = kind(tmp_path, monitor="extra_loss", every_n_train_steps=2, save_top_k=1)
    stopping = EarlyStopping("extra_loss", check_on_train_epoch_end=True, mode="max", patience=1)
    trainer = fit(
        Evaluator({"extra": Data(0)}, every_n_steps=2), checkpoint, stopping, enable_checkpointing=True, max_steps=12
    )
    assert trainer.callback_metrics["extra_loss"] <= checkpoint.best_model_score
    assert checkpoint.best_model_score.isfinite()
    assert stopping.best_score.isfinite()
    assert trainer.global_step < 12  # the loss falls, which is no gain under mode="max"


def test_the_best_of_a_metric_beside_the_validation_is_of_the_weights_it_was_measured_on(tmp_path: Path) -> None:
    """A validation in between does not save the next weights under the score of the former ones."""
    note = Note()
    checkpoint = ProTrainCheckpoint(tmp_path, monitor="extra_loss", save_top_k=-1, every_n_train_steps=1)
    options = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    fit(Evaluator({"extra": Data(0)}, every_n_steps=2, at_end=False), checkpoint, note, max_steps=5, **options)
    scores = {path: float(score) for path, score in checkpoint.best_k_models.items()}
    measured = {step: values["extra_loss"] for step, values in note.seen if step in (2, 4)}
    saved = {torch.load(Path(path) / "state.pt", weights_only=True)["global_step"]: scores[path] for path in scores}
    assert saved == pytest.approx(measured)


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": {}}, "has no data"),
        ({"data": {"a": []}, "at_end": False}, "never evaluates"),
        ({"data": {"a": []}, "every_n_steps": 0}, "every_n_steps=0"),
        ({"data": {"a": []}, "max_batches": -1}, "max_batches=-1"),
        ({"data": {"a b": []}}, "'a b'"),
        ({"data": {"train": []}}, "name 'train' collides with the training metrics"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Evaluator(**arguments)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "'extra' has no batch"),
        (iter(rows_in_batches(1)), "only once"),
        ({"a": 1}, "gives dict"),
        (3, "gives int"),
    ],
)
def test_bad_data_is_refused_before_training(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(Evaluator({"extra": data}))


def test_names_that_collide() -> None:
    with pytest.raises(ValueError, match="the module's val_metrics would both be logged as 'val_"):
        fit(Evaluator({"val": Data(1)}))
    with pytest.raises(ValueError, match="Evaluator 1 would both be logged as 'extra_"):
        fit(Evaluator({"extra": Data(1)}), Evaluator({"extra": Data(2)}))


def test_a_name_that_the_module_logs_without_a_metric() -> None:
    class LogsToo(CausalLMModule):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            self.log("extra_loss", 1.0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="Data set 'extra' and the module are both logged as 'extra_loss'"):
        fit(Evaluator({"extra": Data(1)}, every_n_steps=2), kind=LogsToo)


def test_a_module_without_such_metrics() -> None:
    with pytest.raises(ValueError, match="'other' is NoneType"):
        fit(Evaluator({"extra": Data(1)}, metrics="other"))


def test_data_without_a_trained_token_have_no_metric() -> None:
    batches = [{name: value.unsqueeze(0) for name, value in row.items()} for row in rows(3, labelled=False)]
    with pytest.warns(UserWarning, match="'extra' has no trained token"):
        trainer = fit(Evaluator({"extra": batches}, every_n_steps=2))
    assert not any(name.startswith("extra") for name in trainer.callback_metrics)


@pytest.mark.parametrize("option", [{"fast_dev_run": True}, {"overfit_batches": 1}])
def test_it_says_that_it_does_nothing(option: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        trainer = fit(Evaluator({"extra": Data(1)}, every_n_steps=1), **option)
    assert "Evaluator does nothing" in caplog.text
    assert not any(name.startswith("extra") for name in trainer.callback_metrics)
