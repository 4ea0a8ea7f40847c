"""Loggers of other libraries get what the module and the monitor log; no network is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.report.plan_monitor import PlanMonitor
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.callbacks.stand_ins import chat_data, fit

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 2}
LOGGED = ("train_loss", "val_loss", "protrain/streamed_bytes", "protrain/device_bytes")


def _train(folder: Path, logger: Logger) -> CausalLMModule:
    module = CausalLMModule(config={"model_type": "llama", **SIZES}, warmup_steps=0)
    options: dict[str, Any] = {"log_every_n_steps": 1, "max_steps": 2}
    fit(module, chat_data(folder), PlanMonitor(), logger=logger, strategy=ProTrainStrategy(plan="offload"), **options)
    return module


def test_tensorboard_has_every_figure(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path)
    module = _train(tmp_path, logger)
    found = events.EventAccumulator(logger.log_dir)
    found.Reload()
    assert set(LOGGED) <= set(found.Tags()["scalars"])
    assert [each.step for each in found.Scalars("train_loss")] == [0, 1]
    assert found.Scalars("protrain/streamed_bytes")[-1].value > 0
    assert float(module.trainer.callback_metrics["val_loss"]) == pytest.approx(found.Scalars("val_loss")[-1].value)


@pytest.mark.leaves("WANDB_MODE")
def test_weights_and_biases_keeps_every_figure_while_offline(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="not installed")
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="chats", settings=wandb.Settings(silent=True))
    try:
        _train(tmp_path, logger)
    finally:
        wandb.finish()
        wandb.teardown()  # ends its process
    (run,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = run.read_bytes()
    assert all(name.encode() in written for name in LOGGED)
