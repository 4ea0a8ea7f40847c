"""Whole runs of the installed command: which combinations, their command lines, and processes that outlive no test.

A run starts from one of `configs/`, whose model is made small. The command line says what the run has of each factor.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_protrain import CausalLMModule, ProTrainCheckpoint
from lightning_protrain.data.batches.tokenizer import train_tokenizer
from lightning_protrain_command import main
from tests.support.gpus import DEVICE, STAND_IN, STAND_IN_PATH
from tests.support.trainers import SILENT

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
# `vision` needs a processor and images: tests/cli/test_shipped_configs.py runs it. Those of SmolLM2 bring their own
# model: test_smollm2.py runs them. `preferences` has another loss and is not packed: test_preferences.py runs it.
ELSEWHERE = {"vision", "smollm2-lora", "smollm2-preferences", "preferences"}
CONFIGS = {name: path for name, path in SHIPPED.items() if name not in ELSEWHERE}
COMMAND = str(Path(sys.executable).parent / "lightning-protrain")
# Seconds of one command. An idle machine needs 6 to 15.
LIMIT = 120.0
# By tuning: less than model states take with the fewest activations, and more than the least that any run of the cover
# needs.
BUDGETS = {"full": "1MiB", "lora": "1MiB", "lora-4bit": "768KiB", "adamw-8bit": "1MiB"}
# Optimizer steps of a run; it saves and validates after the second and the last one.
STEPS = 4

FACTORS: dict[str, tuple[str, ...]] = {
    "ranks": ("1", "2"),
    "plan": ("budget", "auto", "offload", "resident", "fsdp2"),
    "precision": ("32-true", "bf16-mixed", "bf16-true"),
    "tuning": ("full", "lora", "lora-4bit", "adamw-8bit"),
    "packing": ("packed", "padded"),
    "accumulation": ("1", "2"),
    "clipping": ("clipped", "unclipped"),
    "then": ("finish", "resume", "validate", "test", "predict"),
}
# Two factors, in the order of FACTORS, and a value of each.
Pair = tuple[tuple[str, str], tuple[str, str]]
# Pairs that are refused by design, and the sentence of the refusal.
REFUSED: dict[Pair, str] = {
    (("plan", "fsdp2"), ("tuning", "lora-4bit")): "has quantised values",
    (("plan", "fsdp2"), ("tuning", "adamw-8bit")): "is an optimizer of bitsandbytes, which cannot step",
}
# Pages and configs that say how the package is called.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *SHIPPED.values()]
# Where a run starts that is none of a config itself.
BASES = {"full": "full-7b", "lora": "lora-8b", "lora-4bit": "qlora-27b", "adamw-8bit": "full-7b"}


class Run(NamedTuple):
    """One run, by its value of each of FACTORS, and the config that it starts from."""

    config: str
    ranks: str
    plan: str
    precision: str
    tuning: str
    packing: str
    accumulation: str
    clipping: str
    then: str

    @property
    def pairs(self) -> set[Pair]:
        """Return the pairs of values that this run covers."""
        return set(pairs(self._asdict()))

    @property
    def rounding(self) -> float:
        """Return by how much two evaluations of the same weights may differ, relative to the largest value.

        FSDP2 rounds weights of norms too under `bf16-mixed`. On some CPUs bitsandbytes rounds scales of weights each
        time that a layer is evaluated.
        """
        if self.tuning == "lora-4bit":
            return 0.05
        return 0.02 if (self.plan, self.precision) == ("fsdp2", "bf16-mixed") else 0.0

    @property
    def rounding_elsewhere(self) -> float:
        """Return `rounding` for an evaluation on the CPU: a GPU computes with other kernels."""
        return self.rounding if DEVICE == "cpu" else max(self.rounding, 0.02)


def pairs(row: Mapping[str, str]) -> Iterator[Pair]:
    """Yield the pairs of values of a row, which may lack some of FACTORS."""
    yield from combinations([(name, row[name]) for name in FACTORS if name in row], 2)


def read(config: str) -> dict[str, Any]:
    """Return the content of one of `configs/`."""
    return yaml.safe_load(CONFIGS[config].read_text(encoding="utf-8"))


def row_of(config: str) -> dict[str, str]:
    """Return what a config itself says of each of FACTORS but `then`."""
    content = read(config)
    model, data, trainer = content["model"]["init_args"], content["data"]["init_args"], content["trainer"]
    strategy = trainer["strategy"]
    has_budget = strategy["init_args"].get("device_memory", "auto") != "auto"
    return {
        "ranks": "2" if trainer["devices"] != 1 else "1",
        "plan": "fsdp2" if "FSDP2" in strategy["class_path"] else "budget" if has_budget else "auto",
        "precision": trainer.get("precision", "32-true"),
        "tuning": "lora-4bit" if "quantization" in model else "lora" if "lora" in model else "full",
        "packing": "packed" if data.get("packing") else "padded",
        "accumulation": "2" if trainer.get("accumulate_grad_batches", 1) > 1 else "1",
        "clipping": "clipped" if "gradient_clip_val" in trainer else "unclipped",
    }


def every_pair() -> set[Pair]:
    """Return all pairs of values of two factors, those that are refused as well."""
    return {
        ((one, first), (other, second))
        for one, other in combinations(FACTORS, 2)
        for first in FACTORS[one]
        for second in FACTORS[other]
    }


def cover() -> list[Run]:
    """Return a run for each config, and further ones until every pair that is not refused is covered."""
    missing = every_pair() - set(REFUSED)
    runs = []
    begun = [(row_of(config), config) for config in CONFIGS]
    while begun or missing:
        row, config = begun.pop(0) if begun else (dict(min(missing)), "")
        used = Counter(item for each in runs for item in each._asdict().items())
        tried = [_completed(row, names, missing, used) for names in _orders()]
        row = max(tried, key=lambda each: len(missing & set(pairs(each))))
        runs.append(Run(config or BASES[row["tuning"]], **row))
        missing -= runs[-1].pairs
    return runs


def refused(pair: Pair) -> Run:
    """Return a run of a pair that is refused."""
    row = {name: values[0] for name, values in FACTORS.items()} | dict(pair)
    return Run(BASES[row["tuning"]], **row)


def _orders() -> Iterator[list[str]]:
    names = list(FACTORS)
    for begin in range(len(names)):
        yield names[begin:] + names[:begin]
        yield (names[begin:] + names[:begin])[::-1]


def _completed(row: Mapping[str, str], names: Sequence[str], missing: set[Pair], used: Counter[Any]) -> dict[str, str]:
    """Choose for each factor that is open the value that covers most; of several, the one that is used least."""
    row = dict(row)
    for name in names:
        if name not in row:
            allowed = [value for value in FACTORS[name] if not set(pairs({**row, name: value})) & set(REFUSED)]
            new = {value: len(missing & set(pairs({**row, name: value}))) for value in allowed}
            row[name] = max(allowed, key=lambda value: (new[value], -used[name, value]))
    return row


def documented() -> list[str]:
    """Return every command line of the package that pages and comments of configs have, each once."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = re.sub(r"^# ?", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        text = re.sub(r"\\\n\s*", "", text)  # a line that goes on
        found |= dict.fromkeys(re.findall(r"^(?: *|.*&& |srun )(lightning-protrain [a-z].*)$", text, re.MULTILINE))
    return list(found)


# Processes


class Ended(NamedTuple):
    """A command that has ended: its status, negative for a signal, and all that it has written."""

    status: int
    output: str


def run(*words: str, limit: float = LIMIT, columns: int = 200) -> Ended:
    """Run a command in processes of its own; none of them is left when this returns.

    Raises:
        TimeoutError: If it takes longer than `limit` seconds; with the stacks of its Python processes.
    """
    with Path("output.txt").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=_environment(columns), start_new_session=True
        )

    def wait() -> int | None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit)
        return process.poll()

    return _ended(words, process.pid, wait, limit)


FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["lightning_protrain.cli"])


def run_forked(*words: str, limit: float = LIMIT) -> Ended:
    """Run the installed command like `run`, but fork it from a process that has imported everything.

    Further ranks, which the command starts itself, are new processes.
    """
    process = FORKED.Process(target=_main, args=(words, Path.cwd(), _environment(200)))
    process.start()
    assert process.pid is not None

    def wait() -> int | None:
        process.join(limit)
        return process.exitcode

    return _ended(words, process.pid, wait, limit)


def _main(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Be the installed command."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with Path("output.txt").open("w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    sys.argv[:] = words
    main()


def _environment(columns: int) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*([str(STAND_IN_PATH)] if STAND_IN else ()), str(ROOT)]),
        "PYTHONFAULTHANDLER": "1",  # SIGABRT writes the stacks of all threads
        "OMP_NUM_THREADS": "1",
        "COLUMNS": str(columns),
    }


def _ended(words: Sequence[str], group: int, wait: Callable[[], int | None], limit: float) -> Ended:
    """Wait for a command, end what it has left behind, and return what it has written."""
    status = None
    try:
        status = wait()
        if status is None:
            os.killpg(group, signal.SIGABRT)
            time.sleep(1.0)  # for their stacks
    finally:
        # Whatever the command has started and left behind: the process of another rank, workers of a loader.
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        wait()
    output = Path("output.txt").read_text(encoding="utf-8")
    if status is None:
        raise TimeoutError(f"{shlex.join(words)} takes longer than {limit} s:\n{output}")
    return Ended(status, output)


def make_model(folder: Path) -> None:
    """Write a tiny Llama with random weights, and its tokenizer with a chat template."""
    train_tokenizer(conversations(), vocab_size=300).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def conversations() -> list[dict[str, Any]]:
    """Return 210 short conversations: 11 of them are for validation, which two ranks cannot share evenly."""
    sums = [(f"What is {number} plus {number}?", f"The sum is {2 * number}.") for number in range(210)]
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in sums
    ]


def train_adapters(model: Path, folder: Path) -> Path:
    """Train adapters of a model for one step, and return the checkpoint, which has a score."""
    rows = [{"input_ids": each, "labels": each} for each in TOKENS]
    saver = ProTrainCheckpoint(folder, monitor="val_loss")
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[saver], **SILENT)
    loader = DataLoader(rows, batch_size=2)
    trainer.fit(CausalLMModule(str(model), lora={"r": 4}), loader, loader)
    return next(folder.glob("*.ckpt"))


def furnish(model: Path) -> None:
    """Put the files that configs and pages name into the working directory; each model there is `model`."""
    for name in ("configs", "examples"):
        Path(name).symlink_to(ROOT / name)
    for name in ("models/my-model", "models/my-7b", "models/my-8b", "models/my-27b", "Qwen/Qwen3-4B"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(model)
    Path("data").mkdir()
    for name in ("chats", "manners"):
        Path("data", f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    texts = [{"text": " ".join(each["content"] for each in row["messages"])} for row in conversations()]
    Path("data", "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    pairs = [
        {"chosen": row["messages"], "rejected": [row["messages"][0], {"role": "assistant", "content": f"{number}."}]}
        for number, row in enumerate(conversations())
    ]
    Path("data", "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    roles = {"user": "human", "assistant": "bot"}
    shared = [
        {"conversations": [{"from": roles[each["role"]], "value": each["content"]} for each in row["messages"]]}
        for row in conversations()
    ]
    Path("data", "agent.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shared))


def arguments(one: Run) -> list[str]:
    """Return the arguments of a run behind its subcommand."""
    content = read(one.config)
    model, data = content["model"]["init_args"], content["data"]["init_args"]
    given = [f"--config=configs/{one.config}.yaml"]
    if one.tuning == "adamw-8bit":
        given.append(f"--model={__name__}.AdamW8bitModule")
    if "tokenizer" not in data:  # the quickstart makes its own model and data
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        given += [f"--model.config.{name}={size}" for name, size in (sizes | {"num_key_value_heads": 2}).items()]
        given += ["--data.dataset={path: stdlib, max_rows: 210}", "--data.cache_dir=cache", "--trainer.max_steps=-1"]
    elif "config" in model:
        given += ["--model.config=null", f"--model.model={data['tokenizer']}"]
    if one.tuning in ("full", "adamw-8bit") and one.precision != "bf16-true":
        given.append("--model.dtype=float32")
    if one.plan == "budget":
        given.append(f"--trainer.strategy.device_memory={BUDGETS[one.tuning]}")
    elif one.plan in ("offload", "resident"):
        given.append(f"--trainer.strategy.plan={one.plan}")
    elif one.plan == "fsdp2" and one.config != "fsdp2":
        given.append("--trainer.strategy=protrain_fsdp2")
    given += [
        "--model.learning_rate=0.01",
        "--data.max_length=64",
        "--data.batch_size=1",
        f"--data.packing={json.dumps(one.packing == 'packed')}",
        "--data.val_fraction=0.05",
        f"--trainer.accelerator={DEVICE}",
        f"--trainer.devices={one.ranks}",
        "--trainer.num_nodes=1",
        f"--trainer.precision={one.precision}",
        f"--trainer.accumulate_grad_batches={one.accumulation}",
        f"--trainer.gradient_clip_val={'1.0' if one.clipping == 'clipped' else 'null'}",
        f"--trainer.limit_train_batches={STEPS * int(one.accumulation)}",
        "--trainer.max_epochs=1",
        "--trainer.enable_checkpointing=true",
        "--trainer.val_check_interval=0.5",
        "--trainer.log_every_n_steps=1",
        "--trainer.logger.flush_logs_every_n_steps=1",
    ]
    if not saves(one):
        given.append("--trainer.callbacks+=ProTrainCheckpoint")
        given += [f"--trainer.callbacks.dirpath=checkpoints/{one.config}", "--trainer.callbacks.monitor=val_loss"]
    return given


def command(one: Run) -> list[str]:
    """Return the program of a run: the installed one, or torchrun for the config that names it."""
    if "torchrun" not in CONFIGS[one.config].read_text(encoding="utf-8"):
        return [COMMAND]
    launched = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={one.ranks}"]
    return [sys.executable, *launched, "-m", "lightning_protrain.cli"]


def saves(one: Run) -> bool:
    """Return whether the config of a run saves checkpoints by itself."""
    callbacks = read(one.config)["trainer"].get("callbacks", [])
    return any(each["class_path"] == "ProTrainCheckpoint" for each in callbacks)


# What runs name by its class path


class AdamW8bitModule(CausalLMModule):
    """Steps its parameters with the 8-bit AdamW of bitsandbytes."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        import bitsandbytes  # takes seconds

        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return bitsandbytes.optim.AdamW8bit(trained, lr=self.hparams["learning_rate"])


class Witness(Callback):
    """Writes down what the model says when training ends, and how it scores rows in `predict`.

    Args:
        kill_at_step: Kills all processes of the run at the end of this optimizer step, before its checkpoint.
    """

    def __init__(self, kill_at_step: int | None = None) -> None:
        self.kill_at_step = kill_at_step
        self.scores = torch.zeros(2, dtype=torch.float64)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.kill_at_step:
            os.killpg(os.getpgrp(), signal.SIGKILL)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.eval()
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            logits = pl_module(input_ids=TOKENS.to(pl_module.device)).logits
        if trainer.is_global_zero:
            torch.save(logits.cpu(), "logits.pt")

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.scores += torch.stack([outputs["loss_sum"].sum().double(), outputs["num_tokens"].sum().double()]).cpu()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(self.scores, f"scores{trainer.global_rank}.pt")


TOKENS: Tensor = torch.arange(4, 44).view(2, 20)
