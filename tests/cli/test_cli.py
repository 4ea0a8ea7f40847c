"""The command line: its defaults, what it accepts, a whole run, and what would be trained."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

import lightning_protrain
import lightning_protrain_command
from lightning_protrain import cli
from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.evaluator import Evaluator
from lightning_protrain.checkpoint.consolidation import load_stock
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.cli import ProTrainCLI, main
from lightning_protrain.commands.file_commands import FILE_COMMANDS, file_command
from lightning_protrain.commands.plan_command import COMMANDS as BY_NAME
from lightning_protrain.data.batches.tokenizer import train_tokenizer
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.report.plan_monitor import PlanMonitor
from tests.data.conftest import conversation
from tests.support.trainers import SILENT

SMALL = "{model_type: llama, hidden_size: 16, num_hidden_layers: 1, intermediate_size: 16, num_attention_heads: 2}"
CONFIGS = Path(__file__).parents[2] / "configs"
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


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.csv", "rows.parquet"])
@pytest.mark.parametrize("as_item", [False, True])
def test_a_data_set_is_a_path_and_never_a_config(name: str, as_item: bool) -> None:
    rows = [conversation(f"Question {i}?", f"Answer {i}.") for i in range(5)]
    if name.endswith(".parquet"):
        Dataset.from_list(rows).to_parquet(name)
    else:
        text = json.dumps(rows) if name == "rows.json" else "\n".join(map(json.dumps, rows))
        Path(name).write_text("prompt,response\nHow?,So.\n" if name == "rows.csv" else text)
    cli = _made(f"--model.config={SMALL}", f"--data.dataset={f'[{name}, {{path: {name}}}]' if as_item else name}")
    assert [spec.path for spec in cli.datamodule.specs] == [name] * (1 + as_item)


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


def test_an_evaluator_takes_datamodules_by_name() -> None:
    data = "{python: {class_path: ChatDataModule, init_args: {batch_size: 3}}, manners: {class_path: ChatDataModule}}"
    arguments = ["--trainer.callbacks+=Evaluator", f"--trainer.callbacks.data={data}"]
    evaluator = _made(f"--model.config={SMALL}", *arguments).trainer.callbacks[0]
    assert isinstance(evaluator, Evaluator)
    assert [type(each) for each in evaluator.data.values()] == [ChatDataModule] * 2
    assert evaluator.data["python"].batch_size == 3


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
def test_mistakes_are_raised_with_a_message(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _made(f"--model.config={SMALL}", option)


def test_what_a_class_refuses_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="batch_size=0: give at least 1"):
        _made(f"--model.config={SMALL}", "--data.batch_size=0")


def test_all_four_subcommands_run(run_options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, Any]] = []
    for name in ("fit", "validate", "test", "predict"):
        monkeypatch.setattr(
            Trainer, name, lambda self, model, name=name, datamodule=None, **_: called.append((name, model))
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ProTrainCLI([name, *run_options])
        lost = [each for each in caught if "The predictions will be lost" in str(each.message)]
        assert len(lost) == (name == "predict")
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
        assert gc.get_freeze_count(), "what the imports made is left out of garbage collection"
        gc.unfreeze()
        saved = yaml.safe_load((tmp_path / "lightning_logs" / "version_0" / "config.yaml").read_text())
        assert saved["trainer"]["max_steps"] == steps
    checkpoints = list(tmp_path.rglob("*.ckpt"))
    assert checkpoints
    state = torch.load(checkpoints[0], weights_only=True)
    assert any(name.startswith("model.") for name in state["state_dict"])


def test_a_read_only_folder_gets_no_config(
    run_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **_: Path(path) != tmp_path and real(path, mode))
    quiet = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.max_steps=1"]
    assert ProTrainCLI(["fit", *run_options, *quiet]).trainer.global_step == 1
    assert f"is not written, because this process may not write to {tmp_path}." in caplog.text
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize("given", [True, False])
def test_a_run_does_not_replace_a_config_of_the_user(
    given: bool, run_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = tmp_path / "config.yaml", tmp_path / "other.yaml"
    text = "# lightning.pytorch==2\n" if given else "# Written by hand.\n"
    for path in (mine, other):
        path.write_text(f"{text}trainer: {{logger: false, max_steps: 1}}\n")
    ProTrainCLI(["fit", f"--config={mine if given else other}", *run_options])
    assert mine.read_text() == other.read_text()
    mine.unlink()
    ProTrainCLI(["fit", f"--config={other}", *run_options])
    ProTrainCLI(["fit", f"--config={other}", *run_options, "--trainer.max_steps=2"])
    assert yaml.safe_load(mine.read_text())["trainer"]["max_steps"] == 2


def test_a_saved_checkpoint_can_be_validated(run_options: list[str], tmp_path: Path) -> None:
    ProTrainCLI(["fit", *run_options, "--trainer.max_steps=1", "--trainer.logger=false"])
    checkpoint = next(tmp_path.rglob("*.ckpt"))
    cli = ProTrainCLI(["validate", *run_options, "--trainer.logger=false", f"--ckpt_path={checkpoint}"])
    assert cli.trainer.callback_metrics["val_loss"] > 0


def _files() -> set[str]:
    return {path.name for path in Path().rglob("*") if "cache" not in path.parts}


def test_a_preview_shows_what_is_trained_and_keeps_no_logs(
    run_options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    # The trainer of the config may be one for machines that are not here.
    elsewhere = ["--trainer.accelerator=cuda", "--trainer.devices=4", "--trainer.num_nodes=2"]
    cli = ProTrainCLI(["preview", *run_options, *elsewhere, "--num=2", "--html=page.html"])
    shown = capsys.readouterr().out
    assert len(re.findall(r"conversation \d", shown)) == 2
    assert re.search(r"<\|im_start\|>assistant<\|im_sep\|>\[\[Answer \d+\.<\|im_end\|>\]\]", shown)
    assert '<span class="trained">Answer ' in Path("page.html").read_text(encoding="utf-8")
    assert _files() == {"chats.jsonl", "page.html"}
    assert cli.model.model is None, "no weights are made"
    assert cli.trainer.global_step == 0


def test_a_preview_refuses_what_it_cannot_show(run_options: list[str]) -> None:
    with pytest.raises(ValueError, match="num=0: give a positive number"):
        ProTrainCLI(["preview", *run_options, "--num=0"])
    with pytest.raises(ValueError, match="`preview` needs a ChatDataModule, but the data module is a OtherData"):
        ProTrainCLI(["preview", *PLAIN, f"--model.config={SMALL}", f"--data={OtherData.__module__}.OtherData"])


def test_the_quickstart_can_be_previewed(run_options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = [option for option in run_options if option.startswith("--data.cache_dir")]
    config = f"--config={CONFIGS / 'quickstart.yaml'}"
    ProTrainCLI(["preview", config, *options, "--data.dataset=chats.jsonl", "--num=1", "--html=page.html"])
    assert "chats.jsonl, conversation 1" in capsys.readouterr().out
    assert _files() == {"chats.jsonl", "page.html"}


def test_the_chat_config_can_be_previewed_where_its_files_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of its data sets has knobs of its own."""
    rows = [conversation(f"Question {i}?", f"First {i}.", f"Last {i}.") for i in range(6)]
    train_tokenizer(rows, 280).save_pretrained("Qwen/Qwen3-4B")
    others = [
        {
            "conversations": [
                {"from": {"user": "human"}.get(m["role"], "bot"), "value": m["content"]} for m in row["messages"]
            ]
        }
        for row in rows
    ]
    Path("data").mkdir()
    broken = '{"messages": null}\n'
    Path("data/chats.jsonl").write_text(broken + "".join(json.dumps(row) + "\n" for row in rows))
    Path("data/agent.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    own = ["--data.cache_dir=cache", "--num=1", "--html=page.html"]  # Rows that are cached are not read again.
    with pytest.warns(
        UserWarning, match="Left out 1 of 7 rows of 'data/chats.jsonl', split train, which are malformed"
    ):
        ProTrainCLI(["preview", f"--config={CONFIGS / 'chat.yaml'}", *own])
    assert "data/agent.jsonl, conversation 1" in capsys.readouterr().out
    chats, agent = Path("page.html").read_text(encoding="utf-8").split("<article>")[1:]
    trained = [re.findall(r'<span class="trained">(\w+) \d\.</span>', part) for part in (chats, agent)]
    assert trained == [["First", "Last"], ["Last"]]


def test_a_plan_saves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = f"--trainer.callbacks=[{{class_path: ProTrainCheckpoint, init_args: {{dirpath: {tmp_path / 'saved'}}}}}]"
    given = [f"--model.config={SMALL}", "--model.vocab_size=64", "--data=null", "--length=16", callback]
    ProTrainCLI(["plan", "--gpu=RTX 4090", *given])
    assert "RTX 4090" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [f"--model.config={SMALL}", "--model.vocab_size=64", "--data=null", "--length=16"]
    tight = ["--trainer.strategy=lightning_protrain.ProTrainStrategy", "--trainer.strategy.device_memory=1KiB"]
    monkeypatch.setattr(sys, "argv", ["lightning-protrain", "plan", "--gpu=RTX 4090", *given, *tight])
    monkeypatch.setattr(gc, "freeze", lambda: None)
    with pytest.raises(SystemExit, match=r"^lightning-protrain: No plan fits: .* Raise device_memory to"):
        main()


def test_the_help_lists_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-protrain", "--help"])
    lightning_protrain_command.main()
    shown = capsys.readouterr().out
    assert lightning_protrain_command.COMMANDS.keys() == {*ProTrainCLI.subcommands(), *FILE_COMMANDS, *BY_NAME}
    for command in lightning_protrain_command.COMMANDS:
        assert re.search(rf"^ +{command}$|^ +{command}  ", shown, re.MULTILINE), command


def test_the_version_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-protrain", "--version"])
    lightning_protrain_command.main()
    assert capsys.readouterr().out == f"lightning-protrain {lightning_protrain.__version__}\n"


def test_arguments_that_a_checkpoint_replaces_are_named(run_options: list[str], tmp_path: Path) -> None:
    ProTrainCLI(["fit", *run_options, "--trainer.max_epochs=1", "--trainer.max_steps=1"])
    (saved,) = tmp_path.glob("lightning_logs/version_*/checkpoints/*.ckpt")
    again = ["validate", *run_options, f"--ckpt_path={saved}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ProTrainCLI(again)
        ProTrainCLI([*again, "--model.learning_rate=0.5"])
    (said,) = [str(each.message) for each in caught if "instead of" in str(each.message)]
    assert said.endswith("command line: model.learning_rate=0.0003 instead of 0.5.")


def _bytes_read() -> int:
    """Return the bytes that this process has read with read calls, which memory-mapped files do not count in."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process reads")
@pytest.mark.parametrize("archive", [True, False])
def test_no_weights_are_read_for_the_arguments_in_a_checkpoint(
    archive: bool, run_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {f"{index}": torch.zeros(1 << 22) for index in range(4)}
    content = {"state_dict": weights, "hyper_parameters": {"learning_rate": 0.5, "config": yaml.safe_load(SMALL)}}
    torch.save(content, "large.ckpt", _use_new_zipfile_serialization=archive)
    monkeypatch.setattr(ProTrainCLI, "_run_subcommand", lambda *_: None)
    read: list[int] = []
    load = torch.load

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = _bytes_read()
        content = load(*args, **kwargs)
        read.append(_bytes_read() - before)
        return content

    monkeypatch.setattr(torch, "load", counted)
    with pytest.warns(UserWarning, match=r"model\.learning_rate=0\.5 instead of 0\.1"):
        cli = ProTrainCLI(["validate", *run_options, "--model.learning_rate=0.1", "--ckpt_path=large.ckpt"])
    assert cli.model.hparams["learning_rate"] == 0.5
    (nbytes,) = read
    assert (nbytes < 1 << 20) is archive


# --- commands on files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        callbacks=[ProTrainCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)],
        **SILENT,
    )
    trainer.fit(BoringModel())
    return tmp_path / "saved"


def test_checkpoints_are_inspected(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert file_command(["inspect", str(saved), "--verify"]) == 0
    assert len(list(saved.iterdir())) >= 2
    shown = capsys.readouterr().out
    assert all(each.name in shown for each in saved.glob("*.ckpt"))
    damaged = next(saved.glob("*/weights.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert file_command(["inspect", str(saved)]) == 0  # nothing was read
    assert file_command(["inspect", str(saved), "--verify"]) == 1
    assert "weights.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("is_text", [False, True])
def test_a_link_is_as_good_as_its_checkpoint(saved: Path, is_text: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if is_text:  # As on a file system without symbolic links.
        name = os.readlink(saved / "last")
        (saved / "last").unlink()
        (saved / "last").write_text(f"{name}\n")
    assert file_command(["inspect", str(saved / "last")]) == 0
    assert "step 2" in capsys.readouterr().out
    assert file_command(["consolidate", str(saved / "last"), "x.ckpt"]) == 0
    assert load_stock(Path("x.ckpt"))["global_step"] == 2
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=3, plugins=[ProTrainCheckpointIO()], **SILENT)
    trainer.fit(BoringModel(), ckpt_path=saved / "last")
    assert trainer.global_step == 3


def test_a_checkpoint_becomes_a_stock_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = max(saved.glob("*.ckpt"), key=lambda path: path.name)
    monkeypatch.setattr(sys, "argv", ["lightning-protrain", "consolidate", str(newest), "plain.ckpt"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert torch.load("plain.ckpt", weights_only=True)["state_dict"].keys() == BoringModel().state_dict().keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nothing"], "nothing is not a checkpoint"),
        (["inspect"], "required: path"),
        (["consolidate", "nothing", "x.ckpt"], "No such file or directory: 'nothing'. Correct the path."),
        (["inspect", __file__], "is a file, but `inspect` reads folders of ProTrainCheckpoint"),
        (["consolidate", __file__, "x.ckpt"], "Any Trainer can resume from a .ckpt file"),
    ],
)
def test_bad_files(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        file_command(arguments)


@pytest.mark.parametrize(
    ("place", "begins"),
    [
        ("report/plan_monitor.py", "Warning: A step"),
        ("/usr/lib/site-packages/lightning/other.py", "Warning: A step"),
        ("/elsewhere/mine.py", "/elsewhere/mine.py:7: UserWarning: A step"),
    ],
)
def test_warnings_are_lines_of_80_columns_and_name_only_files_of_the_user(place: str, begins: str) -> None:
    said = "A step takes 1.62 s, the median of 20. " * 4
    shown = cli._format_warning(said, UserWarning, str(Path(cli.__file__).parent / place), 7)
    words = " ".join(shown.split())
    assert words.startswith(begins)
    assert words.count("the median of 20.") == 4
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(("max_epochs", "shown"), [(3, "Epoch 1/2"), (-1, "Epoch 1"), (None, "Epoch 1")])
def test_the_bar_counts_epochs_up_to_the_last_if_there_is_one(max_epochs: int | None, shown: str) -> None:
    bar = cli.ShortProgress()
    bar._trainer = Trainer(max_steps=4, max_epochs=max_epochs, accelerator="cpu", **SILENT)
    assert bar._get_train_description(1).rstrip() == shown
