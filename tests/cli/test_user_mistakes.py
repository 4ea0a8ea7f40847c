"""A user's mistake, on the command line or in a file, ends with one sentence and status 1, and no traceback."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.demos.boring_classes import BoringModel
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_protrain.cli import ProTrainCLI, main
from lightning_protrain.commands.mistakes import explain, mistake_in, refuse_absent_gpu
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.distributed.failures import FirstRankRefused
from lightning_protrain.models.module import CausalLMModule
from tests.data.conftest import conversation
from tests.support.trainers import SILENT

# Seeding writes this variable, and a command line always seeds.
pytestmark = pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
ROWS = [conversation(f"Question {i}?", f"Answer {i}.") for i in range(6)]
SIZES: dict[str, Any] = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
OURS = "lightning_protrain.ProTrainStrategy"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)


def write_config(**changes: Any) -> None:
    """Write `mine.yaml` for a run on `chats.jsonl`, with values changed by keys such as `data__batch_size`."""
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    config: dict[str, Any] = {
        "model": {"class_path": "CausalLMModule", "init_args": {"config": {"model_type": "llama", **SIZES}}},
        "data": {
            "class_path": "ChatDataModule",
            "init_args": {"dataset": "chats.jsonl", "vocab_size": 280, "cache_dir": "cache"},
        },
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 1, **dict.fromkeys(quiet, False)},
    }
    for key, value in changes.items():
        first, _, name = key.partition("__")
        if not name:
            config[first] = value
        elif first == "trainer":
            config[first][name] = value
        else:
            config[first]["init_args"][name] = value
    Path("mine.yaml").write_text(yaml.safe_dump(config))


def said(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the command line, and return what it ends with."""
    monkeypatch.setattr(sys, "argv", ["lightning-protrain", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert isinstance(stop.value.code, str), f"status {stop.value.code}"  # a text is written to stderr, with status 1
    assert stop.value.code.startswith("lightning-protrain: ")
    assert "Traceback" not in stop.value.code
    return stop.value.code.removeprefix("lightning-protrain: ")


@pytest.fixture(scope="module")
def parser() -> LightningArgumentParser:
    """The parser of all settings; making it takes a second."""
    quiet = ["--trainer.logger=false", "--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"]
    return ProTrainCLI([*quiet, "--model.config={model_type: llama}"], run=False).parser


def explained(parser: LightningArgumentParser, *arguments: str) -> str:
    """Return what is said of arguments that do not parse."""
    with pytest.raises(ArgumentError) as failure:
        parser.parse_args(list(arguments))
    return explain(parser, arguments, failure.value)


def callbacks(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"class_path": "PlanMonitor"}, {"class_path": name, "init_args": arguments}]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model__lerning_rate": 1},
            "`model.lerning_rate: 1` is not known to CausalLMModule; did you mean `learning_rate`?",
        ),
        ({"data__batchsize": 3}, "`data.batchsize: 3` is not known to ChatDataModule; did you mean `batch_size`?"),
        (
            {"trainer__acelerator": "cpu"},
            "`trainer.acelerator: cpu` is not known to `trainer`; did you mean `accelerator`?",
        ),
        ({"modle": {"x": 1}}, "`modle: {'x': 1}` is not known to the config; did you mean `model`?"),
        (
            {"trainer__callbacks": [{"class_path": "PlanMonitr"}]},
            "`trainer.callbacks[0]: PlanMonitr` is not a Callback that can be imported; did you mean `PlanMonitor`?",
        ),
        (
            {"trainer__callbacks": callbacks("ProTrainCheckpoint", dirpth="x")},
            "`trainer.callbacks[1].dirpth: x` is not known to ProTrainCheckpoint; did you mean `dirpath`?",
        ),
        (
            {
                "trainer__callbacks": callbacks(
                    "Evaluator", data={"m": {"class_path": "ChatDataModule", "init_args": {"datset": "x"}}}
                )
            },
            "`trainer.callbacks[1].data.m.datset: x` is not known to ChatDataModule; did you mean `dataset`?",
        ),
        (
            {"trainer__strategy": {"class_path": OURS, "init_args": {"device_memry": "auto"}}},
            "`trainer.strategy.device_memry: auto` is not known to ProTrainStrategy; did you mean `device_memory`?",
        ),
        (
            {"trainer__strategy": {"class_path": f"{OURS}s"}},
            f"`trainer.strategy: {OURS}s` is not a Strategy that can be imported; did you mean `ProTrainStrategy`?",
        ),
        (
            {"data__dataset": {"pth": "chats.jsonl"}},
            "`data.dataset.pth: chats.jsonl` is not known to DatasetSpec; did you mean `path`?",
        ),
        (
            {"data__dataset": [{"path": "chats.jsonl", "famly": "x"}]},
            "`data.dataset[0].famly: x` is not known to DatasetSpec; did you mean `family`?",
        ),
        ({"data__dataset": {"path": "chats.jsonl", "repeat": "x"}}, "`data.dataset.repeat: x` must be a whole number."),
        ({"data__batch_size": "many"}, "`data.batch_size: many` must be a whole number or auto."),
        ({"data__packing": "yess"}, "`data.packing: yess` must be true or false or null."),
        ({"model__betas": [0.9]}, "`model.betas: [0.9]` must be a list of 2."),
        ({"model__learning_rate": "fast"}, "`model.learning_rate: fast` must be a number or null."),
        ({"trainer__max_steps": "two"}, "`trainer.max_steps: two` must be a whole number."),
        (
            {"data__train_on_eos": "turns"},
            "`data.train_on_eos: turns` must be turn, all, last or none; did you mean `turn`?",
        ),
        (
            {"model__dtype": "bf16"},
            "`model.dtype: bf16` must be float32, bfloat16, float16 or auto; did you mean `bfloat16`?",
        ),
        (
            {"model": {"class_path": "CausalLMModule", "init_arg": {}}},
            "`model.init_arg: {}` is beside `class_path`; did you mean `init_args`?",
        ),
        (
            {"model": {"class_path": "CausalLMModule", "learning_rate": 1}},
            "`model.learning_rate: 1` is beside `class_path`: move it to `init_args`.",
        ),
        (
            {"data": {"class_path": "lightning_protran.ChatDataModule"}},
            (
                "`data: lightning_protran.ChatDataModule` is not a LightningDataModule that can be imported; did you "
                "mean `ChatDataModule`?"
            ),
        ),
    ],
)
def test_a_wrong_key_or_type_is_named_with_the_file_and_the_nearest_right_one(
    changes: dict[str, Any], sentence: str, parser: LightningArgumentParser
) -> None:
    write_config(**changes)
    assert explained(parser, "--config", "mine.yaml") == f"mine.yaml: {sentence}"


def test_a_misspelt_key_ends_the_command_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(data__batchsize=3)
    found = said("fit", "--config", "mine.yaml", monkeypatch=monkeypatch)
    assert found == "mine.yaml: `data.batchsize: 3` is not known to ChatDataModule; did you mean `batch_size`?"


BATCHSIZE = "`data.batchsize: 3` is not known to ChatDataModule; did you mean `batch_size`?"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--model.lerning_rate", "3"],
            "`model.lerning_rate: 3` is not known to CausalLMModule; did you mean `learning_rate`?",
        ),
        (["--trainer.max_stps=3"], "`trainer.max_stps: 3` is not known to `trainer`; did you mean `max_steps`?"),
        (["--data.dataset.famly=x"], "`data.dataset.famly: x` is not known to DatasetSpec; did you mean `family`?"),
        (["--trainer.max_steps=x"], "`trainer.max_steps: x` must be a whole number."),
        (
            ["--trainer.callbacks+=ProTrainCheckpoint", "--trainer.callbacks.dirpth=x"],
            "`trainer.callbacks[0].dirpth: x` is not known to ProTrainCheckpoint; did you mean `dirpath`?",
        ),
        (["--model=torch.nn.KLDivLoss"], "`model: torch.nn.KLDivLoss` is not a LightningModule that can be imported."),
        (
            ["--data.dataset", "{path: x, fileds: {a: b}}"],
            "`data.dataset.fileds: {'a': 'b'}` is not known to DatasetSpec; did you mean `fields`?",
        ),
        (
            ["--data.dataset=[{path: x}, {path: y, repeat: z}]"],
            "`data.dataset[1].repeat: z` must be a whole number.",
        ),
        (["--data={class_path: ChatDataModule, init_args: {batchsize: 3}}"], BATCHSIZE),
        (
            ["--trainer.callbacks+={class_path: ProTrainCheckpoint, init_args: {dirpth: x}}"],
            "`trainer.callbacks[0].dirpth: x` is not known to ProTrainCheckpoint; did you mean `dirpath`?",
        ),
        (["--trainer={max_stps: 3}"], "`trainer.max_stps: 3` is not known to `trainer`; did you mean `max_steps`?"),
        (["--model.lora={r: 8"], "`model.lora: {r: 8` must be a mapping or null."),
        (["--model.betas=[0.9"], "`model.betas: [0.9` must be a list of 2."),
        (["--data.roles_to_train=assistant"], "`data.roles_to_train: assistant` must be a list or null."),
    ],
)
def test_a_wrong_option_is_said_to_be_of_the_command_line(
    options: list[str], sentence: str, parser: LightningArgumentParser
) -> None:
    write_config()
    assert explained(parser, "--config=mine.yaml", *options) == f"command line: {sentence}"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--trainer.strategy", "{class_path: ProTrainStrategy, init_args: {pln: offload}}"],
            "command line: `trainer.strategy.pln: offload` is not known to ProTrainStrategy; did you mean `plan`?",
        ),
        (
            ["--model.lora={rr: 8}"],
            "`lora` has the key 'rr', which peft.LoraConfig does not know. Try: r.\nOn the command line: model.lora.rr",
        ),
        (
            ["--data.roles_to_train=[asistant]"],
            (
                "roles_to_train: 'asistant' is unknown. Did you mean 'assistant'? There are system, developer, user, "
                "assistant, tool.\nOn the command line: data.roles_to_train[0]"
            ),
        ),
    ],
)
def test_a_mistake_in_the_text_of_an_option_ends_the_command(
    options: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config()
    assert said("fit", "--config=mine.yaml", *options, monkeypatch=monkeypatch) == sentence


@pytest.mark.parametrize(
    "options",
    [
        ["--data.dataset={path: chats.jsonl, fields: {messages: messages}}"],
        ["--data.chat_template={% for message in messages %}{{ message.content }}{% endfor %}"],
        ["--trainer.strategy={class_path: ProTrainStrategy, init_args: {plan: offload}}"],
        ["--trainer.callbacks+=ProTrainCheckpoint", "--trainer.callbacks.dirpath=x"],
    ],
)
def test_right_text_of_an_option_is_taken(options: list[str], parser: LightningArgumentParser) -> None:
    write_config()
    assert mistake_in(parser, ["--config=mine.yaml", *options]) is None
    parser.parse_args(["--config=mine.yaml", *options])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a: [1\nb: 2", "mine.yaml, line 2: not YAML: expected ',' or ']', but got ':'."),
        ("- 1\n", "The config 'mine.yaml' is not a mapping of keys to values."),
        ("", "The config 'mine.yaml' is not a mapping of keys to values."),
        (None, "The config 'mine.yaml' cannot be read: No such file or directory."),
    ],
)
def test_a_file_that_is_no_config(content: str | None, sentence: str, parser: LightningArgumentParser) -> None:
    if content is not None:
        Path("mine.yaml").write_text(content)
    assert explained(parser, "--config=mine.yaml") == sentence


def test_a_file_of_bytes_is_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.yaml").write_bytes(b"\xf9")
    assert said("fit", "--config=mine.yaml", monkeypatch=monkeypatch) == "The config 'mine.yaml' is not a text file."


def test_a_config_without_its_option_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = said("fit", "mine.yaml", monkeypatch=monkeypatch)
    assert found == "unrecognized arguments: mine.yaml; did you mean `--config mine.yaml`?"
    found = said("fit", "--confg=mine.yaml", monkeypatch=monkeypatch)
    assert found == "command line: `confg: mine.yaml` is not known to the config; did you mean `config`?"


@pytest.mark.parametrize("text", ["failed (setting up) with ValueError: no data", "is gone without a word"])
def test_a_rank_says_in_one_sentence_that_another_one_was_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError(f"Setting up ends on rank 1: rank 0 {text}")

    def fail() -> None:
        raise error

    monkeypatch.setattr("lightning_protrain.cli.ProTrainCLI", fail)
    if text.startswith("failed"):
        assert said("fit", monkeypatch=monkeypatch) == str(error)
    else:
        with pytest.raises(RuntimeError, match="is gone without a word"):
            main()


def test_a_rank_is_silent_about_what_rank_0_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("No plan fits.") from FirstRankRefused()

    monkeypatch.setattr("lightning_protrain.cli.ProTrainCLI", fail)
    monkeypatch.setattr(sys, "argv", ["lightning-protrain", "fit"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1


def test_a_misspelt_command_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("fti", monkeypatch=monkeypatch).endswith("merge, chat, env; did you mean `fit`?")
    assert said("fitss", monkeypatch=monkeypatch).endswith("did you mean `fits`?")
    assert said("exprot", "a", "b", monkeypatch=monkeypatch).endswith("did you mean `export`?")
    assert said(monkeypatch=monkeypatch).startswith("lightning-protrain needs a command, one of fit,")
    assert said("inspect", monkeypatch=monkeypatch) == "the following arguments are required: path"


@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
@pytest.mark.parametrize(
    ("built_for", "reason"),
    [
        (None, rf"torch {re.escape(torch.__version__)} is built for CPUs only. Install a build of torch for the GPU."),
        (
            "13.0",
            "torch, built for CUDA 13.0, finds none: Found no NVIDIA driver on your system. Check with `nvidia-smi`",
        ),
    ],
)
def test_a_gpu_that_is_not_there_is_said_with_its_reason(
    accelerator: str, built_for: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. \nPlease check.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ValueError, match=f"^`trainer.accelerator: {accelerator}` needs a GPU, but {reason}"):
        refuse_absent_gpu({"accelerator": accelerator, "devices": 1})


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"trainer__accelerator": "gpuu"}, "`trainer.accelerator: gpuu` is not known: there are auto, cpu,"),
        ({"trainer__strategy": "protrian"}, "`trainer.strategy: protrian` is not known; did you mean `protrain`?"),
        (
            {"trainer__strategy": "lightning_protrain.ProTrainStrategy"},
            "ProTrainStrategy` is not known; give a class as `trainer.strategy.class_path`",
        ),
        ({"trainer__devices": -3}, "`trainer.devices: -3` must be a positive number"),
        ({"trainer__devices": "x"}, "`trainer.devices: x` must be a positive number"),
        (
            {"trainer__num_nodes": 0},
            "`num_nodes` must be a positive integer, but got 0.",
        ),
        ({"trainer__logger": {"class_path": "CometLogger"}}, "Requirement 'comet-ml"),
        ({"ckpt_path": "best"}, "`ckpt_path: best` requires a callback with a `monitor`"),
        ({"ckpt_path": "hpc"}, '`.fit(ckpt_path="hpc")` is set but no HPC checkpoint was found.'),
        ({"data__num_workers": -1}, "num_workers=-1: give at least 0.\nIn mine.yaml: data.num_workers"),
        ({"data__seed": -1}, "seed=-1: give at least 0.\nIn mine.yaml: data.seed"),
        ({"data__seed": None}, "seed=None: give at least 0.\nIn mine.yaml: data.seed"),
        ({"data__val_fraction": None}, "mine.yaml: `data.val_fraction: null` must be a number."),
        ({"model__warmup_steps": None}, "warmup_steps is None; it must be a number of steps"),
        ({"trainer__max_steps": None}, "mine.yaml: `trainer.max_steps: null` must be a whole number."),
        ({"model__betas": [1, 2]}, "betas is [1.0, 2.0]; it must be two numbers from 0 to below 1."),
        ({"trainer__default_root_dir": "chats.jsonl"}, "File exists: '"),
        ({"model__dtype": None}, "dtype=None is not a dtype of torch."),
        ({"trainer__accumulate_grad_batches": 0}, "accumulate_grad_batches=0: give at least 1.\nIn mine.yaml: trainer"),
        ({"data__dataset": {}}, "`data.dataset` has a value of a wrong type."),
        ({"model__config": {"hidden_size": 16}}, "`config` has no `model_type`."),
        ({"model__attn_implementation": "x"}, "The model 'llama' cannot be built: Specified `attn_implementation="),
        ({"model__attn_implementation": "flash_attention_3"}, "The model 'llama' cannot be built: FlashAttention3"),
        ({"trainer__val_check_interval": 99}, " `val_check_interval` (99) must be less than or equal to"),
        (
            {"model__config": {"model_type": "llama", "hidden_size": 16}},
            "The config of the 'llama' model is invalid: ValueError: The hidden size (16) is not a multiple of",
        ),
        ({"model__config": {"model_type": "bart"}}, "'bart' is an encoder-decoder, but CausalLMModule trains"),
        ({"model__config": {"model_type": "bert"}}, "'bert' reads text in both directions."),
    ],
)
def test_what_cannot_run_is_a_sentence(changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(**changes)
    assert said("fit", "--config=mine.yaml", monkeypatch=monkeypatch).startswith(sentence)


def test_a_negative_value_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    write_config()
    options = ["--trainer.strategy", OURS, "--trainer.strategy.device_memory", "-5GiB"]
    found = said("fit", "--config=mine.yaml", *options, monkeypatch=monkeypatch)
    assert found.startswith("device_memory='-5GiB' is not an amount of memory.")
    assert found.endswith("On the command line: trainer.strategy.device_memory")


# Files that are damaged


def model_folder() -> Path:
    LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=16)).save_pretrained("m")
    return Path("m")


def cut(file: Path, size: int) -> None:
    os.truncate(file, size)


MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (lambda m: cut(m / "model.safetensors", 500), "m/model.safetensors (500 bytes) is damaged"),
    "empty": (lambda m: cut(m / "model.safetensors", 0), "m/model.safetensors (0 bytes) is damaged"),
    "overwritten": (
        lambda m: (m / "model.safetensors").write_text("<html>Not found</html>"),
        "m/model.safetensors (22 bytes) is damaged",
    ),
    "without weights": (lambda m: (m / "model.safetensors").unlink(), "There are no weights in 'm'"),
    "with a broken index": (
        lambda m: ((m / "model.safetensors").unlink(), (m / "model.safetensors.index.json").write_text("{}")),
        "m/model.safetensors.index.json is damaged",
    ),
    "without a config": (lambda m: (m / "config.json").unlink(), "There is no config.json in 'm'."),
    "with a broken config": (lambda m: (m / "config.json").write_text("{"), "No model could be loaded from 'm': It"),
    "of no known type": (
        lambda m: (m / "config.json").write_text('{"model_type": "lama"}'),
        "No model could be loaded from 'm': The checkpoint you are trying to load has model type `lama`",
    ),
    "with code of its own": (
        lambda m: (m / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}'),
        "No model could be loaded from 'm'",
    ),
    "of an encoder and a decoder": (
        lambda m: (m / "config.json").write_text('{"model_type": "t5"}'),
        "'t5' is an encoder-decoder",
    ),
    "of images": (lambda m: (m / "config.json").write_text('{"model_type": "vit"}'), "model_type 'vit' is not a ca"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_without_a_model_is_named(name: str) -> None:
    damage, sentence = MODELS[name]
    damage(model_folder())
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        CausalLMModule("m").configure_model()


@pytest.mark.parametrize(("name", "devices"), [("cut short", 1), ("without weights", 2), ("without a config", 2)])
def test_a_damaged_model_ends_the_command_before_data_or_ranks_are_prepared(
    name: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, sentence = MODELS[name]
    damage(model_folder())
    write_config(model={"class_path": "CausalLMModule", "init_args": {"model": "m"}}, trainer__devices=devices)
    monkeypatch.setattr(ChatDataModule, "prepare_data", lambda _: pytest.fail("data is prepared"))
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a rank is started"))
    assert said("fit", "--config=mine.yaml", monkeypatch=monkeypatch).startswith(sentence)
    trainer = Trainer(accelerator="cpu", devices=1, **SILENT)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        trainer.fit(CausalLMModule("m"), datamodule=ChatDataModule("chats.jsonl"))


CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (lambda path: cut(path, 1000), "x.ckpt (1000 bytes) is truncated, or not a checkpoint."),
    "empty": (lambda path: cut(path, 0), "x.ckpt (0 bytes) is truncated, or not a checkpoint."),
    "a list": (lambda path: torch.save([1], path), "x.ckpt is not a checkpoint of Lightning."),
}


@pytest.mark.parametrize(
    ("name", "command"), [("cut short", "fit"), ("a list", "fit"), ("cut short", "validate"), ("empty", "export")]
)
def test_a_damaged_stock_checkpoint_is_named(name: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    damage, sentence = CHECKPOINTS[name]
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, limit_val_batches=0, **SILENT)  # type: ignore[arg-type]
    trainer.fit(BoringModel())
    trainer.save_checkpoint("x.ckpt")
    damage(Path("x.ckpt"))
    write_config()
    arguments = ["x.ckpt", "out"] if command == "export" else ["--config=mine.yaml", "--ckpt_path=x.ckpt"]
    assert said(command, *arguments, monkeypatch=monkeypatch).startswith(sentence)


OTHERS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "data": (
        lambda path: path.with_name("data.jsonl").write_text('{"messages": []}\n'),
        "data.jsonl",
        " is not a check",
    ),
    "an empty folder": (
        lambda path: path.mkdir(),
        "runs",
        "without manifest.json: .* Give the folder of a run, or one",
    ),
    "a model": (lambda path: _folder(path, "config.json"), "runs", "is a model, not a checkpoint .* as the `model`"),
    "adapters": (lambda path: _folder(path, "adapter_config.json", "config.json"), "runs", "has adapters in PEFT's"),
    "half of a checkpoint": (
        lambda path: _folder(path, "state.pt"),
        "runs",
        'json: it is missing. .* ckpt_path="last"',
    ),
    "a folder of checkpoints": (lambda path: _folder(path / "a.ckpt", "manifest.json"), "runs", "such as runs/a.ckpt"),
    "a typo": (lambda path: path.mkdir(), "rums", "Checkpoint file not found: rums; did you mean runs\\?"),
    "a typo before": (lambda path: _folder(path / "x", "a"), "rums/x", "not found: rums/x; did you mean runs/x\\?"),
}


def _folder(path: Path, *names: str) -> None:
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text("{}")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_checkpoint_is_named_with_the_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, path, sentence = OTHERS[name]
    make(Path("runs"))
    write_config()
    found = said("fit", "--config=mine.yaml", f"--ckpt_path={path}", monkeypatch=monkeypatch)
    assert re.search(sentence, found), found
    assert "export" not in found


def test_weights_alone_are_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"weight": torch.zeros(1)}, "x.ckpt")
    write_config()
    found = said("fit", "--config=mine.yaml", "--ckpt_path=x.ckpt", monkeypatch=monkeypatch)
    assert found.startswith("x.ckpt is not a checkpoint of Lightning: it has the keys weight.")


# The disk


def test_a_log_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(trainer__logger={"class_path": "CSVLogger", "init_args": {"save_dir": "chats.jsonl"}})
    found = said("fit", "--config=mine.yaml", monkeypatch=monkeypatch)
    assert found.startswith("Not a directory: '")
    assert "chats.jsonl/lightning_logs'. Correct the path." in found


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", [["preview", "--html=/dev/full"], ["plan", "--gpu=RTX 4090", "--json=/dev/full"]])
def test_a_full_disk_is_a_sentence(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_config()
    found = said(*command, "--config=mine.yaml", monkeypatch=monkeypatch)
    assert found == f"{os.strerror(errno.ENOSPC)}. Free some space, or give a folder on another disk."


MOMENTS = {
    "config": "lightning_protrain.cli.ProTrainCLI.parse_arguments",
    "model": "lightning_protrain.models.module.CausalLMModule.configure_model",
    "data": "lightning_protrain.data.datamodule.ChatDataModule.prepare_data",
    "planning": "lightning_protrain.strategy.plan_session.PlanSession.describe",
    "training": "lightning_protrain.models.module.CausalLMModule.training_step",
    "validation": "lightning_protrain.models.module.CausalLMModule.validation_step",
    "saving": "lightning_protrain.checkpoint.io.ProTrainCheckpointIO.save_checkpoint",
}
FILES = {
    "inspect": "lightning_protrain.checkpoint.inspection.inspect",
    "export": "lightning_protrain.models.export.export",
    "merge": "lightning_protrain.models.export.merge",
}


def _interrupted(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["lightning-protrain", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.sample(4)
@pytest.mark.leaves("signal_handlers")  # Lightning ignores further interrupts while it tears down
@pytest.mark.parametrize(
    ("command", "moment"), [*(("fit", moment) for moment in MOMENTS), ("preview", "data"), ("plan", "planning")]
)
def test_an_interrupt_ends_with_status_130_and_no_traceback(
    command: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = {"class_path": "ProTrainCheckpoint", "init_args": {"dirpath": "runs"}}
    write_config(trainer__callbacks=[saver], trainer__enable_checkpointing=True)
    monkeypatch.setattr(MOMENTS[moment], _interrupt)
    assert _interrupted(command, "--config=mine.yaml", monkeypatch=monkeypatch) == 130


@pytest.mark.leaves("signal_handlers")
def test_an_error_while_an_interrupted_run_is_torn_down_does_not_change_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the teardown fails, too")

    write_config()
    monkeypatch.setattr(MOMENTS["training"], _interrupt)
    monkeypatch.setattr(ChatDataModule, "on_exception", fail, raising=False)
    assert _interrupted("fit", "--config=mine.yaml", monkeypatch=monkeypatch) == 130


@pytest.mark.parametrize("command", FILES)
def test_an_interrupted_command_on_files_ends_with_status_130(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FILES[command], _interrupt)
    out = [] if command == "inspect" else ["out"]
    assert _interrupted(command, "runs", *out, monkeypatch=monkeypatch) == 130


def test_a_run_says_nothing_of_what_no_user_can_act_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(model={"class_path": "CausalLMModule", "init_args": {"model": str(model_folder())}})
    summary = "--trainer.enable_model_summary=true"
    monkeypatch.setattr(sys, "argv", ["lightning-protrain", "fit", "--config=mine.yaml", summary])
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            main()
    finally:
        logger.removeHandler(handler)
    said = [*records, *(str(each.message) for each in caught)]
    assert not [each for each in said if "Tip" in each or "LeafSpec" in each or "`IterableDataset` has" in each]
    assert "FLOPs" not in capsys.readouterr().out
    assert any(re.match(r"Parameters of the model: [\d.]+ K, all of them trained", each) for each in records)
    (chat,) = [each for each in said if each.startswith("Chat format")]
    assert len(chat) < 200
    assert len(records) == len(set(records)), "a sentence is said twice"
