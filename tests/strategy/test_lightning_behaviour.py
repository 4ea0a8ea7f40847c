"""Lightning, loggers, callbacks and the user see the same under the strategy as in a plain run."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_info

from lightning_protrain import (
    CausalLMModule,
    ChatDataModule,
    ProTrainCheckpoint,
    ProTrainFSDP2Strategy,
    ProTrainStrategy,
)
from lightning_protrain.callbacks.evaluator import Evaluator
from lightning_protrain.callbacks.samples import InitialValidation, SampleCompletion
from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.report.plan_monitor import PREFIX, PlanMonitor
from tests.callbacks.stand_ins import chat_data, fit
from tests.support.models import zoo
from tests.support.ranks import run_ranks, trainer_on_rank, values

PLANS = ("offload", "resident")


class Recording(DummyLogger):
    """Keeps the step and the names of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, tuple[str, ...]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, tuple(sorted(metrics))))


class Logging(BoringModel):
    """Logs in every way: on steps, on epochs, on the progress bar, in evaluation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("bar", loss, prog_bar=True, logger=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", 1.0, batch_size=1)

    def on_train_epoch_end(self) -> None:
        self.log("end", 2.0)


class Manual(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.step(batch))
        optimizer.step()


class Fetching(BoringModel):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss, batch_size=1)
        return loss


def run(model: L.LightningModule, plan: str | None, function: str = "fit", **options: Any) -> L.Trainer:
    """A trainer after `function`; a plan of None is Lightning's own strategy."""
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "limit_train_batches": 5,
        "limit_val_batches": 2,
        "limit_test_batches": 2,
        "limit_predict_batches": 2,
        "log_every_n_steps": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if plan is not None:
        defaults["strategy"] = ProTrainStrategy(plan=plan)
    torch.manual_seed(0)
    trainer = L.Trainer(accelerator="cpu", devices=1, **{**defaults, **options})
    getattr(trainer, function)(model)
    return trainer


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", [BoringModel, Manual, Fetching, Logging])
def test_loggers_get_what_they_get_from_a_plain_run(model: type[L.LightningModule], plan: str) -> None:
    plain, planned = Recording(), Recording()
    expected, found = (run(model(), which, logger=one) for which, one in ((None, plain), (plan, planned)))
    assert planned.calls == plain.calls
    assert set(found.logged_metrics) == set(expected.logged_metrics)
    assert set(found.callback_metrics) == set(expected.callback_metrics)
    assert set(found.progress_bar_metrics) == set(expected.progress_bar_metrics)


@pytest.mark.parametrize("model", [BoringModel, Manual, Fetching, Logging])
def test_a_monitor_of_the_user_logs_beside_the_run(model: type[L.LightningModule]) -> None:
    """The figures of the plan come in calls of their own, at steps at which the run logs."""
    plain, planned = Recording(), Recording()
    expected, found = (
        run(model(), plan, logger=one, callbacks=[PlanMonitor()]) for plan, one in ((None, plain), ("offload", planned))
    )
    own = [(step, names) for step, names in planned.calls if not names[0].startswith(PREFIX)]
    assert own == plain.calls
    steps = {step for step, names in plain.calls if any(name in ("both_step", "loss") for name in names)}
    assert {step for step, names in planned.calls if names[0].startswith(PREFIX)} == steps
    assert set(found.logged_metrics) == set(expected.logged_metrics)
    assert set(found.callback_metrics) == set(expected.callback_metrics)
    assert set(found.progress_bar_metrics) == set(expected.progress_bar_metrics)


@pytest.mark.parametrize("plan", PLANS)
def test_nothing_is_printed_through_the_progress_bar(plan: str) -> None:
    with patch.object(L.Trainer, "print") as trainer, patch.object(L.LightningModule, "print") as module:
        run(BoringModel(), plan)
    assert not trainer.called
    assert not module.called


class Hooks:
    """The names of all hooks that are called, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def watch(self, kind: type, prefix: str) -> Any:
        """An instance of a class derived from `kind` all of whose hooks are noted."""

        def noted(name: str) -> Callable[..., Any]:
            plain = getattr(kind, name)

            def call(this: Any, *args: Any, **kwargs: Any) -> Any:
                self.names.append(f"{prefix}.{name}")
                return plain(this, *args, **kwargs)

            call.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
            return call

        named = "setup teardown backward configure_optimizers configure_gradient_clipping prepare_data train_dataloader"
        hooks = [
            *named.split(),
            *(name for name in dir(kind) if name.startswith(("on_", "optimizer_", "lr_scheduler"))),
        ]
        found = {name: noted(name) for name in hooks if inspect.isfunction(getattr(kind, name, None))}
        return type(kind.__name__, (kind,), found)()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("model", "function", "options"),
    [
        (Logging, "fit", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Logging, "fit", {"val_check_interval": 2, "enable_checkpointing": True, "num_sanity_val_steps": 0}),
        (Manual, "fit", {}),
        (Logging, "validate", {}),
        (Logging, "test", {}),
        (Logging, "predict", {}),
    ],
    ids=["accumulating", "saving", "manual", "validate", "test", "predict"],
)
def test_hooks_are_called_in_the_order_of_a_plain_run(
    model: type, function: str, options: dict[str, Any], plan: str, tmp_path: Path
) -> None:
    called = []
    for index, which in enumerate((None, plan)):
        hooks = Hooks()
        callback, module = hooks.watch(L.Callback, "callback"), hooks.watch(model, "module")
        run(module, which, function, callbacks=[callback], default_root_dir=tmp_path / str(index), **options)
        called.append(hooks.names)
    assert called[0] == called[1]
    assert len(called[0]) > 10


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("there_and_back", [_pickled, _saved])
def test_trainer_and_module_are_pickled_after_a_fit(
    there_and_back: Callable[[Any], Any], plan: str, tmp_path: Path
) -> None:
    module = BoringModel()
    trainer = run(module, plan, enable_checkpointing=True, default_root_dir=tmp_path)
    (copied,) = there_and_back([trainer])
    assert copied.strategy.plan == trainer.strategy.plan
    assert copied.strategy.counters == trainer.strategy.counters
    loaded = there_and_back(module)
    assert torch.equal(loaded.layer.weight, module.layer.weight)
    assert copied.validate(loaded, verbose=False) == trainer.validate(module, verbose=False)


def test_what_the_recipes_use_is_pickled_after_a_fit(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 2}
    module = CausalLMModule(config={"model_type": "llama", "max_position_embeddings": 512, **sizes})

    def data() -> ChatDataModule:
        return chat_data(tmp_path)

    callbacks = [
        PlanMonitor(),
        SampleCompletion(["Question?"], max_new_tokens=1),
        InitialValidation(),
        Evaluator({"more": data()}, max_batches=1),
        SavePretrained(str(tmp_path / "model")),
        ProTrainCheckpoint(dirpath=tmp_path / "checkpoints", monitor="val_loss"),
    ]
    trainer = fit(module, data(), *callbacks, strategy=ProTrainStrategy(plan="offload"), enable_checkpointing=True)
    for one in (trainer, trainer.datamodule, module, *callbacks):
        assert type(_pickled(one)) is type(one)


def _fit_and_pickle(rank: int) -> bool:
    trainer = trainer_on_rank(rank, 2, partial(ProTrainStrategy, plan="offload"), max_steps=2)
    trainer.fit(zoo()["tied"]())
    return isinstance(_pickled(trainer).strategy, ProTrainStrategy)


def test_trainers_of_several_ranks_are_pickled_after_a_fit(tmp_path: Path) -> None:
    assert values(run_ranks(_fit_and_pickle, 2, tmp_path)) == [True, True]


class Average(L.Callback):
    """Keeps a copy of the module, and has it predict."""

    def __init__(self) -> None:
        self.copied: Any = None
        self.seen: list[tuple[Any, Any]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.copied = copy.deepcopy(pl_module)
        batch = torch.ones(2, 32)
        with torch.no_grad():
            self.seen.append((self.copied(batch), pl_module(batch)))


@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_module_is_copied_in_a_fit(plan: str, overlap: Any) -> None:
    """The copy has the weights of its step, belongs to nobody, and trains by itself."""
    average, module = Average(), BoringModel()
    strategy = ProTrainStrategy(plan=plan, overlap_optimizer=overlap)
    trainer = run(module, None, strategy=strategy, callbacks=[average])
    assert trainer.strategy.num_hooks == 0
    assert all(torch.equal(copied, original) for copied, original in average.seen)
    assert average.copied._trainer is None
    assert not {"forward", "__deepcopy__"} & {name for each in average.copied.modules() for name in vars(each)}
    assert torch.equal(average.copied.layer.weight, module.layer.weight)
    run(average.copied, plan, max_epochs=1)
    assert not torch.equal(average.copied.layer.weight, module.layer.weight)


SLURM = {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "run", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize("variables", [{}, SLURM, {"LOCAL_RANK": "1"}], ids=["plain", "slurm", "stray"])
def test_one_process_has_the_numbers_that_it_has_in_a_plain_run(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says, or leaves out."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plain, planned = (run(BoringModel(), plan, max_epochs=1) for plan in (None, "offload"))
    for name in ("world_size", "global_rank", "local_rank", "node_rank", "num_nodes", "num_devices", "is_global_zero"):
        assert getattr(planned, name) == getattr(plain, name), name
    assert planned.strategy.root_device == plain.strategy.root_device
    assert planned.strategy.process_group_backend is None


def test_the_numbers_of_one_process_can_be_set() -> None:
    """`SingleDeviceStrategy` has them as plain attributes."""
    strategy = ProTrainStrategy()
    strategy.world_size, strategy.global_rank = 4, 3
    assert (strategy.world_size, strategy.global_rank, strategy.local_rank) == (4, 3, 0)
    assert not strategy.is_global_zero


class Scripted(BoringModel):
    """A part of it is of TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 2)))


def test_a_part_of_torchscript_trains_where_it_is_resident_and_is_refused_where_it_would_be_streamed() -> None:
    torch.manual_seed(1)
    plain, planned = Scripted(), Scripted()
    planned.load_state_dict(plain.state_dict())
    for module, plan in ((plain, None), (planned, "resident")):
        run(module, plan)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in planned.state_dict().items())
    with pytest.raises(ValueError, match=r"'layer' is a module of TorchScript.*plan=\"resident\""):
        run(Scripted(), "offload")


def test_lightnings_own_strategy_hears_of_exceptions() -> None:
    class Failing(BoringModel):
        def on_fit_start(self) -> None:
            raise ArithmeticError("no")

    with patch("lightning.pytorch.strategies.Strategy.on_exception") as heard, pytest.raises(ArithmeticError):
        run(Failing(), "offload")
    heard.assert_called_once()


# What libraries say


@pytest.mark.parametrize("kind", [ProTrainStrategy, ProTrainFSDP2Strategy])
def test_noise_of_libraries_is_hidden_and_nothing_else(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    deprecated = "`isinstance(treespec, LeafSpec)` is deprecated"
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        L.Trainer(accelerator="cpu", devices=1, strategy=kind(), enable_checkpointing=False, logger=False)
        rank_zero_info("`Trainer.fit` stopped: `max_steps=3` reached.")
        rank_zero_info("Tips are mine.")
        for text in (deprecated, "Mine."):
            warnings.warn(text, FutureWarning, stacklevel=1)
        warnings.simplefilter("always")  # the filters of the user come first
        warnings.warn(deprecated, FutureWarning, stacklevel=1)
    # Commands that have run in this process hide the line about the GPU, too.
    assert [text for text in caplog.messages if not text.startswith("GPU available")] == ["Tips are mine."]
    assert [str(each.message) for each in caught] == ["Mine.", deprecated]
