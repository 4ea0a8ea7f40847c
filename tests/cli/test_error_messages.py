"""What is a sentence to the user, what is a failure, and which key of a config a sentence speaks of."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.mistakes import is_refusal, key_in, refusal_in, sentence
from lightning_protrain.models.module import CausalLMModule

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
    """What it raises, with the calls that are not of this file."""
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


@pytest.mark.parametrize(("number", "is_one"), [(errno.ENOSPC, True), (errno.EACCES, True), (errno.ENOENT, False)])
def test_what_the_system_refuses_is_one_whoever_asked_it(number: int, is_one: bool) -> None:
    error = raised(planted("datasets", f"def run():\n    raise OSError({number}, 'so it is', 'file')"))
    assert is_refusal(error) is is_one
    assert sentence(error).startswith("so it is: 'file'. ")


def test_what_was_not_raised_is_none() -> None:
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

LLAMA = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}
CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "model": {
        "class_path": "lightning_protrain.CausalLMModule",
        "init_args": {"model": None, "config": LLAMA, "learning_rate": -1.0, "vocab_size": None},
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
    """Says what it is told to."""

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
def test_the_arguments_of_who_refuses_come_first(message: str, key: str) -> None:
    refusing = type("ChatDataModule", (Taking,), {})
    with pytest.raises(ValueError) as caught:
        refusing(message)
    assert key_in(CONFIG, caught.value) == key


@pytest.mark.parametrize(
    ("kind", "given", "key"),
    [
        (ChatDataModule, {"batch_size": 0}, "data.batch_size"),
        (CausalLMModule, {"config": LLAMA, "learning_rate": -1.0}, "data.learning_rate"),
        (CausalLMModule, {"config": {**LLAMA, "vocab_sise": 1}}, "data.config.vocab_sise"),
        (CausalLMModule, {"config": LLAMA, "model": "x"}, "data.model"),
        (CausalLMModule, {"config": {"hidden_size": 1}}, "data"),
    ],
)
def test_what_the_classes_say_is_found(kind: Callable[..., Any], given: dict[str, Any], key: str) -> None:
    error = raised(lambda: kind(**given))
    assert is_refusal(error)
    assert key_in({"data": {"class_path": f"of.{kind.__name__}", "init_args": given}}, error) == key
