"""User mistakes end with one sentence that names the config key; other failures keep their traceback."""

from __future__ import annotations

import errno
import gc
import json
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from lightning_protrain.cli import ProTrainCLI, main
from lightning_protrain.commands.mistakes import is_refusal, key_in, refusal_in, sentence
from lightning_protrain.data import datamodule
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.trainer import PlanningTrainer
from tests.data.conftest import conversation

OURS, LIGHTNING, TORCH, OTHERS = "lightning_protrain.data", "lightning.pytorch", "torch.nn", "somebody.code"
SAYS = "def run(inner=None):\n    raise ValueError('so it is')"


def planted(package: str, text: str) -> Callable[..., Any]:
    """A function `run` of a package."""
    names: dict[str, Any] = {"__package__": package, "__name__": package, "misconfigured": MisconfigurationException}
    exec(text, names)
    return names["run"]


def calling(package: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    return partial(planted(package, "def run(inner):\n    inner()"), inner)


def raised(run: Callable[..., Any]) -> BaseException:
    """Return the exception that `run` raises, with the traceback entries of other files only."""
    try:
        run()
    except (ValueError, OSError, RuntimeError, MisconfigurationException) as error:
        while error.__traceback__ is not None and error.__traceback__.tb_frame.f_globals["__name__"] == __name__:
            error.__traceback__ = error.__traceback__.tb_next
        return error
    raise AssertionError("nothing is raised")


@pytest.mark.parametrize(
    ("package", "text", "is_one"),
    [
        (OURS, SAYS, True),
        (OURS, "class Own(ValueError): ...\ndef run():\n    raise Own('so it is')", True),
        (
            OURS,
            "def run():\n    try:\n        int('x')\n    except ValueError as e:\n        raise ValueError() from e",
            True,
        ),
        (OURS, "def run():\n    raise FileNotFoundError('no such file')", True),
        (OURS, "def run():\n    raise OSError('the model could not be written')", True),
        (OURS, "def run():\n    int('x')", False),
        (OURS, "def run():\n    open('nowhere')", False),
        (OURS, "def run():\n    a, b = ()", False),
        (OURS, "def run():\n    raise RuntimeError('a rank is gone')", False),
        (LIGHTNING, SAYS, True),
        (LIGHTNING, "def run():\n    raise misconfigured('no such device')", True),
        (LIGHTNING, "def run():\n    raise FileNotFoundError('no such file')", True),
        (TORCH, SAYS, False),
        (OTHERS, SAYS, False),
    ],
)
def test_a_refusal_is_raised_by_a_statement_of_this_package(package: str, text: str, is_one: bool) -> None:
    assert is_refusal(raised(planted(package, text))) is is_one


@pytest.mark.parametrize(
    ("packages", "is_one"),
    [
        ([LIGHTNING], True),
        ([TORCH, LIGHTNING, OURS, "contextlib", "datasets"], True),
        ([OTHERS], False),
        ([TORCH, OTHERS, LIGHTNING], False),
    ],
)
def test_with_code_of_others_in_between_it_may_be_their_mistake(packages: list[str], is_one: bool) -> None:
    run = planted(OURS, SAYS)
    for package in packages:
        run = calling(package, run)
    assert is_refusal(raised(run)) is is_one


@pytest.mark.parametrize(("package", "is_one"), [("lightning_protrain.cli", True), (OURS, False)])
def test_what_lightning_says_of_values_is_one_if_the_user_gave_them(package: str, is_one: bool) -> None:
    assert is_refusal(raised(calling(package, planted(LIGHTNING, SAYS)))) is is_one


@pytest.mark.parametrize(
    ("number", "is_one"), [(errno.ENOSPC, True), (errno.EACCES, True), (errno.EEXIST, True), (errno.ENOENT, False)]
)
def test_an_error_of_the_operating_system_is_a_refusal(number: int, is_one: bool) -> None:
    error = raised(planted("datasets", f"def run():\n    raise OSError({number}, 'so it is', 'file')"))
    assert is_refusal(error) is is_one
    assert sentence(error).startswith("so it is: 'file'. ")


def test_a_missing_tensorboard_is_one_sentence_with_the_extra() -> None:
    error = ModuleNotFoundError("Neither `tensorboard` nor `tensorboardX` is available. Try `pip install`ing either.\n")
    assert sentence(error).endswith('Run: pip install "lightning-protrain[tensorboard]".')
    assert "\n" not in sentence(error)


def test_an_error_that_was_not_raised_is_no_refusal() -> None:
    assert not is_refusal(ValueError("so it is"))


def test_the_refusal_below_an_error() -> None:
    refusal = raised(planted(OURS, SAYS))
    union = ValueError("none of the types")
    union.__cause__ = refusal
    outer = TypeError("no value")
    outer.__cause__ = union
    assert refusal_in(outer) is refusal
    assert refusal_in(refusal) is refusal
    assert refusal_in(ValueError("none of the types")) is None


# --- keys
SMALL_LLAMA = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}
CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "model": {
        "class_path": "lightning_protrain.CausalLMModule",
        "init_args": {"model": None, "config": SMALL_LLAMA, "learning_rate": -1.0, "vocab_size": None},
    },
    "data": {
        "class_path": "lightning_protrain.ChatDataModule",
        "init_args": {
            "dataset": [{"path": "chats.jsonl"}, {"path": "hub/others", "family": "nobody"}],
            "batch_size": 0,
            "vocab_size": 280,
            "tokenizer": "models/mine",
            "family": None,
            "cache_dir": "models",
            "on_untrainable": "drop",
        },
    },
    "trainer": {
        "precision": "64-true",
        "devices": "auto",
        "accelerator": "auto",
        "callbacks": [
            {"class_path": "PlanMonitor", "init_args": {}},
            {"class_path": "lightning_protrain.ProTrainCheckpoint", "init_args": {"run": "a/b"}},
        ],
    },
    "ckpt_path": "gone.ckpt",
}


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("No data set 'hub/others'. Give another.", "data.dataset[1].path"),
        ("chats.jsonl, line 1: no `messages` list", "data.dataset[0].path"),
        ("There is no chat family 'nobody'.", "data.dataset[1].family"),
        ("precision='64-true' is not supported. Set Trainer(precision=...)", "trainer.precision"),
        ("Checkpoint file not found: gone.ckpt", "ckpt_path"),
        ("Checkpoint file not found: gone.ckpt.", "ckpt_path"),
        ("Nothing is in gone.ckpt/other or not-gone.ckpt or gone.ckpt.bak", None),
        ("The tokenizer 'models/mine/x' has no template", None),
        ("devices='auto' is one of 'auto' and 1", "trainer.devices"),
        ("Give 'auto'.", None),  # two have this value
        ("The devices are gone", None),
        ("It is lost", None),
        ("", None),
    ],
)
def test_the_key_by_what_is_said(message: str, key: str | None) -> None:
    assert key_in(CONFIG, ValueError(message)) == key


class Taking:
    """A class whose `__init__` raises ValueError with the message that it gets."""

    def __init__(self, message: str) -> None:
        raise ValueError(message)


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("vocab_size=280 is too small", "data.vocab_size"),
        ("vocab_size must be larger", "data.vocab_size"),
        ("Nothing is trained. Name the `family`, or set `on_untrainable`.", "data.family"),
        ('Nothing is trained. Give on_untrainable="warn".', "data.on_untrainable"),
        ("'cache_dir' is no folder of 'models/mine'", "data.cache_dir"),
        ("learning_rate is -1.0; it must be above 0.", "model.learning_rate"),
        ("It is lost", "data"),
    ],
)
def test_the_key_is_first_looked_for_among_the_arguments_of_the_class_that_refuses(message: str, key: str) -> None:
    refusing = type("ChatDataModule", (Taking,), {})
    with pytest.raises(ValueError) as caught:
        refusing(message)
    assert key_in(CONFIG, caught.value) == key


@pytest.mark.parametrize(
    ("kind", "given", "key"),
    [
        (ChatDataModule, {"batch_size": 0}, "data.batch_size"),
        (CausalLMModule, {"config": SMALL_LLAMA, "learning_rate": -1.0}, "data.learning_rate"),
        (CausalLMModule, {"config": {**SMALL_LLAMA, "vocab_sise": 1}}, "data.config.vocab_sise"),
        (CausalLMModule, {"config": SMALL_LLAMA, "model": "x"}, "data.model"),
        (CausalLMModule, {"config": {"hidden_size": 1}}, "data.config"),
    ],
)
def test_refusals_of_our_classes_are_traced_to_their_key(
    kind: Callable[..., Any], given: dict[str, Any], key: str
) -> None:
    error = raised(lambda: kind(**given))
    assert is_refusal(error)
    assert key_in({"data": {"class_path": f"of.{kind.__name__}", "init_args": given}}, error) == key


LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}


class Own(LightningModule):
    """A module of somebody else."""

    def __init__(self, size: int = 0, calls: bool = False) -> None:
        super().__init__()
        if calls:
            ChatDataModule(batch_size=size)
        if size < 0:
            raise ValueError("size is too small")


def config(**changes: Any) -> dict[str, Any]:
    """Return the config of a run on six conversations, with changed settings by key."""
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


@pytest.mark.sample(5)
@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
@pytest.mark.parametrize(
    ("changes", "message", "key"),
    [
        ({"data__batch_size": 0}, 'batch_size=0: give at least 1, or "auto".', "data.batch_size"),
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
        ({"data__tokenizer": "nowhere"}, "The model 'nowhere' is not in the cache", "data.tokenizer"),
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


@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
@pytest.mark.parametrize(
    ("init_args", "message"),
    [({"size": -1}, "size is too small"), ({"calls": True}, 'batch_size=0: give at least 1, or "auto".')],
)
def test_what_fails_in_code_of_others_keeps_its_traceback(init_args: dict[str, Any], message: str, run: Any) -> None:
    with pytest.raises(ValueError, match=message) as failure:
        run(model={"class_path": f"{__name__}.Own", "init_args": init_args})
    shown = "".join(traceback.format_exception(failure.value))
    assert re.search(rf'"{re.escape(__file__)}", line \d+, in __init__', shown)


@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
def test_an_operation_that_fails_keeps_its_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datamodule, "Source", lambda *_: int("many"))
    with pytest.raises(ValueError, match="invalid literal for int"):
        run()


@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
def test_a_program_that_makes_the_command_line_gets_the_error_with_the_key() -> None:
    with pytest.raises(ValueError, match=r"^batch_size=0: give at least 1, or \"auto\"\.\n") as refusal:
        ProTrainCLI(config(data__batch_size=0), run=False)
    assert refusal.value.__notes__ == ["In the config: data.batch_size"]
    assert refusal.value.__cause__ is None
    assert refusal.value.__context__ is None


@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
def test_a_file_of_plans_that_cannot_be_written_is_refused_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)
    Path("no").write_text("a file")
    Path("mine.yaml").write_text(yaml.safe_dump(config()))
    monkeypatch.setattr(sys, "argv", ["lightning-protrain", "plan", "--config=mine.yaml", "--json=no/plans.json"])
    monkeypatch.setattr(PlanningTrainer, "fit", lambda *args, **kwargs: pytest.fail("it plans"))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == f"lightning-protrain: File exists: '{Path('no').absolute()}'. Correct the path."
