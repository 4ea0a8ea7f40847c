"""The command line: its defaults, what it accepts, and a whole run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_protrain.callbacks.plan_monitor import PlanMonitor
from lightning_protrain.cli import ProTrainCLI, main
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.module import CausalLMModule
from tests.data.conftest import conversation

SMALL = "{model_type: llama, hidden_size: 16, num_hidden_layers: 1, intermediate_size: 16, num_attention_heads: 2}"
PLAIN = ["--trainer.strategy=auto", "--trainer.accelerator=cpu"]
# Seeding writes this variable, and a command line always seeds.
pytestmark = pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


class OtherModule(LightningModule):
    """A module of somebody else, with an argument."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OtherData(LightningDataModule):
    """Four vectors of ones."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(4, 3))


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-protrain"])


@pytest.fixture
def run_options(tmp_path: Path) -> list[str]:
    """Everything for a short run on twelve conversations."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(conversation(f"Question {i}?", f"Answer {i}.")) + "\n" for i in range(12)))
    return [
        *PLAIN,
        f"--model.config={SMALL}",
        f"--data.dataset={path}",
        "--data.vocab_size=280",
        f"--data.cache_dir={tmp_path / 'cache'}",
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    ]


def _made(*args: str) -> ProTrainCLI:
    return ProTrainCLI([*PLAIN, "--trainer.logger=false", *args], run=False)


def test_module_data_strategy_and_seed_have_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ProTrainCLI(["fit", "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["class_path"] == "lightning_protrain.CausalLMModule"
    assert config["data"]["class_path"] == "lightning_protrain.ChatDataModule"
    assert config["trainer"]["strategy"] == "protrain"
    assert config["seed_everything"] == 0
    assert "optimizer" not in config


def test_the_default_classes_take_their_arguments_directly() -> None:
    cli = _made(f"--model.config={SMALL}", "--model.learning_rate=1e-3", "--data.batch_size=3")
    assert isinstance(cli.model, CausalLMModule)
    assert cli.model.hparams["learning_rate"] == 1e-3
    assert isinstance(cli.datamodule, ChatDataModule)
    assert cli.datamodule.batch_size == 3


def test_other_classes_take_their_place() -> None:
    cli = _made(
        f"--model={OtherModule.__module__}.OtherModule", "--model.width=3", f"--data={OtherData.__module__}.OtherData"
    )
    assert isinstance(cli.model, OtherModule)
    assert cli.model.layer.in_features == 3
    assert isinstance(cli.datamodule, OtherData)


def test_callbacks_of_the_package_have_short_names() -> None:
    cli = _made(
        f"--model.config={SMALL}",
        "--trainer.callbacks+=PlanMonitor",
        "--trainer.callbacks+=SampleCompletion",
        "--trainer.callbacks.prompts=[Why?]",
        "--trainer.callbacks+=InitialValidation",
    )
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert names[:3] == ["PlanMonitor", "SampleCompletion", "InitialValidation"]
    assert isinstance(cli.trainer.callbacks[0], PlanMonitor)


def test_a_strategy_given_as_a_class_is_made() -> None:
    cli = ProTrainCLI(
        [
            f"--model.config={SMALL}",
            "--trainer.strategy=lightning.pytorch.strategies.SingleDeviceStrategy",
            "--trainer.strategy.device=cpu",
        ],
        run=False,
    )
    assert isinstance(cli.trainer.strategy, SingleDeviceStrategy)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model.lerning_rate=1", "lerning_rate"),
        ("--data.batch_size=many", "many"),
        ("--trainer.strategy.colour=red", "colour"),
    ],
)
def test_mistakes_end_with_a_message(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        _made(f"--model.config={SMALL}", option)
    assert stop.value.code
    assert message in capsys.readouterr().err


def test_what_a_class_refuses_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="batch_size=0: give at least 1"):
        _made(f"--model.config={SMALL}", "--data.batch_size=0")


def test_all_four_subcommands_run(run_options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, Any]] = []
    for name in ("fit", "validate", "test", "predict"):
        monkeypatch.setattr(
            Trainer, name, lambda self, model, name=name, datamodule=None, **_: called.append((name, model))
        )
        ProTrainCLI([name, *run_options])
    assert [name for name, _ in called] == ["fit", "validate", "test", "predict"]
    assert all(isinstance(model, CausalLMModule) for _, model in called)


def test_a_run_trains_and_saves_its_config_again_and_again(
    run_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path}", "--trainer.logger.version=0"]
    for steps in (1, 2):
        monkeypatch.setattr(
            sys, "argv", ["lightning-protrain", "fit", *run_options, *logger, f"--trainer.max_steps={steps}"]
        )
        main()
        saved = yaml.safe_load((tmp_path / "lightning_logs" / "version_0" / "config.yaml").read_text())
        assert saved["trainer"]["max_steps"] == steps
    checkpoints = list(tmp_path.rglob("*.ckpt"))
    assert checkpoints
    state = torch.load(checkpoints[0], weights_only=True)
    assert any(name.startswith("model.") for name in state["state_dict"])


def test_a_saved_checkpoint_can_be_validated(run_options: list[str], tmp_path: Path) -> None:
    ProTrainCLI(["fit", *run_options, "--trainer.max_steps=1", "--trainer.logger=false"])
    checkpoint = next(tmp_path.rglob("*.ckpt"))
    cli = ProTrainCLI(["validate", *run_options, "--trainer.logger=false", f"--ckpt_path={checkpoint}"])
    assert cli.trainer.callback_metrics["val_loss"] > 0
