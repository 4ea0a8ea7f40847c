"""What a config has wrong ends the command line with a sentence and its key; what is a failure, with its traceback."""

from __future__ import annotations

import gc
import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import LightningModule

from lightning_protrain.cli import ProTrainCLI, main
from lightning_protrain.data import datamodule
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.trainer import PlanningTrainer
from tests.data.conftest import conversation

LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
# Seeding writes this variable, and a command line always seeds.
pytestmark = pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


class Own(LightningModule):
    """A module of somebody else."""

    def __init__(self, size: int = 0, calls: bool = False) -> None:
        super().__init__()
        if calls:
            ChatDataModule(batch_size=size)
        if size < 0:
            raise ValueError("size is too small")


def config(**changes: Any) -> dict[str, Any]:
    """For a run on six conversations, with settings changed by their keys."""
    rows = [conversation(f"Question {i}?", f"Answer {i}.") for i in range(6)]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("texts.jsonl").write_text('{"text": "No chat."}\n' * 6)
    model = {"config": {**LLAMA, "num_attention_heads": 2}}
    data = {"dataset": "chats.jsonl", "vocab_size": 280, "cache_dir": "cache"}
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    made: dict[str, Any] = {
        "model": {"class_path": "CausalLMModule", "init_args": model},
        "data": {"class_path": "ChatDataModule", "init_args": data},
        "trainer": {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **dict.fromkeys(quiet, False)},
    }
    for key, value in changes.items():
        first, _, name = key.partition("__")
        (made if not name else made[first] if first == "trainer" else made[first]["init_args"])[name or first] = value
    return made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command line on a YAML file."""
    monkeypatch.setattr(gc, "freeze", lambda: None)

    def run(**changes: Any) -> None:
        Path("mine.yaml").write_text(yaml.safe_dump(config(**changes)))
        monkeypatch.setattr(sys, "argv", ["lightning-protrain", "fit", "--config=mine.yaml"])
        main()

    return run


@pytest.mark.parametrize(
    ("changes", "message", "key"),
    [
        ({"data__batch_size": 0}, "batch_size=0: give at least 1.", "data.batch_size"),
        ({"model__learning_rate": -1.0}, "learning_rate is -1.0; it must be above 0.", "model.learning_rate"),
        ({"model__model": "x"}, "Give exactly one of model and config", "model.model"),
        ({"data__family": "nobody"}, "There is no chat family 'nobody'.", "data.family"),
        (
            {"trainer__strategy": {"class_path": "lightning_protrain.ProTrainStrategy", "init_args": {"plan": "x"}}},
            "No plan at x.",
            "trainer.strategy.plan",
        ),
        (
            {"trainer__callbacks": [{"class_path": "ProTrainCheckpoint", "init_args": {"run": "a/b"}}]},
            "run='a/b': give 1 to 64 letters",
            "trainer.callbacks[0].run",
        ),
        ({"data__dataset": "nowhere.jsonl"}, "No data set 'nowhere.jsonl'.", "data.dataset"),
        ({"data__dataset": [{"path": "nowhere.jsonl"}]}, "No data set 'nowhere.jsonl'.", "data.dataset[0].path"),
        ({"data__dataset": "texts.jsonl"}, "texts.jsonl, line 1: no `messages` list", "data.dataset"),
        ({"data__tokenizer": "nowhere"}, "No tokenizer could be loaded from 'nowhere'", "data.tokenizer"),
        (
            {"data__chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
            "The chat format of the tokenizer 'cache/",
            "data.role_boundaries",
        ),
        ({"ckpt_path": "gone.ckpt"}, "Checkpoint file not found: gone.ckpt", "ckpt_path"),
    ],
)
def test_a_mistake_in_a_config_is_a_sentence_and_its_key(
    changes: dict[str, Any], message: str, key: str, run: Any
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(**changes)
    said = str(stop.value.code)
    assert said.startswith(f"lightning-protrain: {message}")
    # A key that is named as the remedy is in no file.
    assert re.search(rf"\nIn (mine\.yaml|the config): {re.escape(key)}$", said)
    assert "Traceback" not in said
    assert "Namespace" not in said


@pytest.mark.parametrize(
    ("init_args", "message"),
    [({"size": -1}, "size is too small"), ({"calls": True}, "batch_size=0: give at least 1.")],
)
def test_what_fails_in_code_of_others_keeps_its_traceback(init_args: dict[str, Any], message: str, run: Any) -> None:
    with pytest.raises(ValueError, match=message) as failure:
        run(model={"class_path": f"{__name__}.Own", "init_args": init_args})
    shown = "".join(traceback.format_exception(failure.value))
    assert re.search(rf'"{re.escape(__file__)}", line \d+, in __init__', shown)


def test_an_operation_that_fails_keeps_its_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datamodule, "Source", lambda *_: int("many"))
    with pytest.raises(ValueError, match="invalid literal for int"):
        run()


def test_a_program_that_makes_the_command_line_gets_the_error_with_the_key() -> None:
    with pytest.raises(ValueError, match=r"^batch_size=0: give at least 1\.\n") as refusal:
        ProTrainCLI(config(data__batch_size=0), run=False)
    assert refusal.value.__notes__ == ["In the config: data.batch_size"]
    assert refusal.value.__cause__ is None
    assert refusal.value.__context__ is None


def test_a_file_of_plans_without_a_folder_is_refused_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)
    Path("mine.yaml").write_text(yaml.safe_dump(config()))
    monkeypatch.setattr(sys, "argv", ["lightning-protrain", "plan", "--config=mine.yaml", "--json=no/plans.json"])
    monkeypatch.setattr(PlanningTrainer, "fit", lambda *args, **kwargs: pytest.fail("it plans"))
    with pytest.raises(SystemExit) as stop:
        main()
    said = "lightning-protrain: json='no/plans.json': there is no such folder. Make it, or correct the path."
    assert stop.value.code == f"{said}\nOn the command line: json"
