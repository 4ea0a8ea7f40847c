"""The command `fit MODEL DATA`: chooses a config for a model, its data and this machine, prints it, and trains it.

[Note: One command]
The choices are numbers in a config file, and the run is `fit --config` of that file in this process. So the file trains
the same, and so do the ranks that Lightning starts with the command line of this process, which then names the file.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from rich import get_console

from lightning_protrain.cli import ProTrainCLI
from lightning_protrain.cli import main as run_cli
from lightning_protrain.commands.fit_choices import (
    LONG_EPOCH,
    THREE_EPOCHS,
    TWO_EPOCHS,
    Corpus,
    Machine,
    ModelSize,
    choose_method,
    find_machine,
    learning_rate,
    longest_length,
    model_size,
    num_epochs,
    packed_rows,
    packs,
    total_batch,
    unlimited_batch,
    val_fraction,
)
from lightning_protrain.commands.mistakes import holds, is_option, nearest, option_values, put_option
from lightning_protrain.config import RaisingParser, parse_bytes
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.data.sources.dataset import read_rows
from lightning_protrain.data.sources.load import Source
from lightning_protrain.data.sources.tables import SUFFIXES
from lightning_protrain.models.repeated_blocks import METHODS, Method, method_options, silent
from lightning_protrain.plans import TrainingOptions
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware
from lightning_protrain.strategy.joint_plan import DryRun

# Prompts to answer before and after training, the most characters of one, and those of the beginning of a plain text.
PROMPTS, PROMPT_CHARACTERS, TEXT_PREFIX = 3, 300, 60
# What a dry run for the sizes does without.
BARE = {"devices": 1, "num_nodes": 1, "callbacks": "null"} | dict.fromkeys(
    ("logger", "enable_progress_bar", "enable_checkpointing"), "false"
)
CALLBACKS = "trainer.callbacks"
# Keys whose values are added last, to what the command itself writes there.
ADDED_LAST = (CALLBACKS, "trainer.logger")
MACHINE_KEYS = ("trainer.accelerator", "trainer.devices", "trainer.strategy.device_memory")
COUNTS = ("data.max_length", "data.batch_size", "trainer.accumulate_grad_batches", "trainer.num_nodes")
SHORT_OPTIONS = ("--method", "--device-memory", "--length", "--batch-size", "--epochs", "--output", "--dry-run")

Config = dict[str, Any]
# Reasons by key, such as `model.learning_rate`.
Reasons = dict[str, str]


@dataclass(frozen=True)
class Choice:
    """A config and the reasons of its values.

    Attributes:
        config: The config, as `fit --config` reads it.
        reasons: Reason of each chosen value, by key.
        given: Values that the user has given, which nothing replaces; without those of ADDED_LAST.
        overrides: Options that gave the values, as keys and texts.
    """

    config: Config
    reasons: Reasons = field(default_factory=dict)
    given: Config = field(default_factory=dict)
    overrides: Sequence[tuple[str, str]] = ()

    def set(self, key: str, value: Any, reason: str = "") -> None:
        """Set a value such as `trainer.precision`, unless the user has given it."""
        if not self.has(key):
            put_option(self.config, key, value)
            self.reasons[key] = reason
        elif isinstance(value, dict) and isinstance(known := self.get(key), dict):
            put_option(self.config, key, {**value, **known})

    def has(self, key: str) -> bool:
        """Return True if the user has given the value."""
        return holds(self.given, key.split("."))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the config, or the default."""
        node: Any = self.config
        for name in key.split("."):
            node = node.get("init_args", node).get(name, default) if isinstance(node, dict) else default
        return node

    def yaml(self) -> str:
        """Return the config as YAML, with the reasons as comments."""
        return "\n".join(self._lines(self.config, "", ""))

    def _lines(self, node: Config, key: str, indent: str) -> Iterator[str]:
        for name, value in node.items():
            inner = key if name == "init_args" else f"{key}.{name}" if key else name
            reason = self.reasons.get(inner, "")
            comment = f" # {reason}" if reason else ""
            if isinstance(value, dict) and value and not inner.startswith(CALLBACKS):
                yield f"{indent}{name}:{comment}"
                yield from self._lines(value, inner, f"{indent}  ")
                continue
            first, *rest = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=110).splitlines()
            yield f"{indent}{first}{comment}"
            yield from (f"{indent}{line}" for line in rest)


def fit_command(arguments: Sequence[str]) -> None:
    """Run `fit MODEL DATA`.

    Args:
        arguments: Command line behind `fit`: two names, short options, and keys of the config with values.

    Raises:
        ValueError: If a name, an option or the data is wrong, or no plan fits.
    """
    options, overrides = parse(arguments)
    name, dataset = options.names
    folder = _new_folder(options.output, name, dataset)
    choice = _begun(options, overrides)
    nodes = choice.get("trainer.num_nodes")
    _refuse_launched(nodes if isinstance(nodes, int) and not options.dry_run else 1)
    model = model_size(name, choice.get("model.allow_pickle", False))
    machine = find_machine(*(choice.get(key, "auto") for key in MACHINE_KEYS))
    ways = _set_method(choice, options.method, model, machine)
    _choose(choice, model, machine, ways)
    _set_outputs(choice, folder)
    for key, value in overrides:
        if key.startswith(ADDED_LAST):
            put_option(choice.config, key, _typed(value))
    text = choice.yaml() + "\n"
    get_console().print(text, highlight=False, markup=False, soft_wrap=True)
    if options.dry_run:
        with TemporaryDirectory() as place:
            path = Path(place, "config.yaml")
            path.write_text(text, encoding="utf-8")
            ProTrainCLI(["plan", "--config", str(path)])
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    _launch(path)


def _launch(path: Path) -> None:
    """Train the config in a file, see [Note: One command], and say where the model is."""
    sys.argv[1:] = ["fit", "--config", str(path)]
    cli = ProTrainCLI()
    if cli.trainer.is_global_zero:
        model = path.with_name("model")
        text = f'The model is in {model}. Talk to it: lightning-protrain chat {model} "..."'
        get_console().print(text, highlight=False, markup=False, soft_wrap=True)


def parse(arguments: Sequence[str]) -> tuple[Namespace, list[tuple[str, str]]]:
    """Return the names and short options, and the other options as pairs of a key and a value.

    Args:
        arguments: As in `fit_command`.

    Raises:
        ValueError: If there are not two names, they are swapped, or an option is unknown.
    """
    count = next((at for at, text in enumerate(arguments) if text.startswith("-")), len(arguments))
    options, rest = _parser().parse_known_args(list(arguments[count:]))
    options.names = list(arguments[:count])
    if count != 2:
        raise ValueError(
            f"`fit` needs two names, a model and its data, and there {'is' if count == 1 else 'are'} {count}: "
            f"{', '.join(options.names)}. Write `lightning-protrain fit MODEL DATA`, then the options."
        )
    model, data = options.names
    if model.lower().endswith(SUFFIXES) or (_is_model(data) and not _is_model(model)):
        raise ValueError(f"The model comes first: write `lightning-protrain fit {data} {model}`.")
    for name in filter(is_option, rest):
        key = name.partition("=")[0]
        if key.partition(".")[0] not in ("--model", "--data", "--trainer", "--seed_everything"):
            hint = " A config is trained without names: `fit --config FILE`." if key in ("--config", "-c") else ""
            raise ValueError(f"`{key}` is not an option of `fit MODEL DATA`{nearest(key, SHORT_OPTIONS)}{hint}")
    return options, list(option_values(rest))


def _is_model(name: str) -> bool:
    return name.lower().endswith(".gguf") or Path(name, "config.json").is_file()


def _parser() -> ArgumentParser:
    parser = RaisingParser(
        prog="lightning-protrain fit",
        usage="lightning-protrain fit MODEL DATA [options] [--trainer.KEY VALUE] [--model.KEY VALUE] ...",
        description="Train MODEL (name on the Hub, folder, GGUF file or package://NAME/FILE) on DATA (file, folder or "
        "name on the Hub). What is not given is chosen for model, data and machine, printed as a config with reasons, "
        "and saved with the run. Every key of the config can be given.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--method", choices=METHODS, help="default: lora, or qlora if frozen weights fit neither device nor host")
    add("--device-memory", "--device_memory", help="device memory that may be used, e.g. 22GiB; default: what is free")
    add("--length", type=int, help="tokens of a row; default: no conversation is cut, or the longest that fits")
    add("--batch-size", "--batch_size", type=int, help="rows of a micro-batch; default: the fastest that fits")
    add("--epochs", type=int, help=f"default: 3 up to {THREE_EPOCHS:,} rows, 2 up to {TWO_EPOCHS:,}, else 1")
    add("--output", help="folder of the run; default: runs/MODEL-DATA")
    add("--dry-run", "--dry_run", action="store_true", help="print config and plan; train and write nothing")
    return parser


def _typed(value: str) -> Any:
    """Return the number, truth value, null or list that a text contains; any other text as it is."""
    try:
        content = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    if isinstance(content, int | float) and ":" in value:  # YAML 1.1 would read a time such as 1:30 as 90.
        return value
    return content if isinstance(content, int | float | list | None) and value else value


def _refuse_launched(num_nodes: int) -> None:
    """Refuse several processes that would each choose for themselves."""
    kinds = (TorchElasticEnvironment, SLURMEnvironment)
    if num_nodes > 1 or any(kind.detect() and kind().world_size() > 1 for kind in kinds):
        raise ValueError(
            "`fit MODEL DATA` starts a process for each GPU of one node itself, so neither torchrun, srun nor another "
            "node may start more. Save the config that `--dry-run` prints, and launch `fit --config FILE`."
        )


def _run_name(model: str, data: str) -> str:
    paths = (Path(name) for name in (model, data))
    names = (path.stem if path.suffix.lower() in (".gguf", *SUFFIXES) else path.name for path in paths)
    return "-".join(names).replace("*", "")


def _new_folder(output: str | None, model: str, data: str) -> Path:
    """Return a folder for the run that does not exist, or is empty; make nothing."""
    if output is not None:
        folder = Path(output).expanduser()
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            raise ValueError(f"--output {output} exists already. Give another folder, or remove it.")
        return folder
    first = Path("runs", _run_name(model, data))
    folder, number = first, 1
    while folder.exists():
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder


def _begun(options: Namespace, overrides: Sequence[tuple[str, str]]) -> Choice:
    """Return the config with the names, and with what the user has given."""
    name, dataset = options.names
    nested = any(key.startswith("data.dataset.") for key, _ in overrides)
    config: Config = {
        "seed_everything": 0,
        "model": {"class_path": "lightning_protrain.CausalLMModule", "init_args": {"model": name}},
        "data": {
            "class_path": "lightning_protrain.ChatDataModule",
            "init_args": {"dataset": {"path": dataset} if nested else dataset, "tokenizer": name},
        },
        "trainer": {},
    }
    if options.device_memory is not None or any(key.startswith("trainer.strategy.") for key, _ in overrides):
        config["trainer"]["strategy"] = {"class_path": "lightning_protrain.ProTrainStrategy", "init_args": {}}
    short = {
        "trainer.strategy.device_memory": options.device_memory,
        "data.max_length": options.length,
        "data.batch_size": options.batch_size,
        "trainer.max_epochs": options.epochs,
    }
    if options.device_memory is not None:
        parse_bytes(options.device_memory, "--device-memory")
    given: Config = {}
    first = [(key, value) for key, value in overrides if not key.startswith(ADDED_LAST)]
    named = [(key, value) for key, value in short.items() if value is not None]
    for key, value in [*named, *((key, _typed(value)) for key, value in first)]:
        if value != "auto" or key not in ("data.max_length", "data.batch_size"):
            put_option(given, key, value)
            put_option(config, key, value)
        if key in COUNTS and isinstance(value, int) and value < 1:
            raise ValueError(f"{key} is {value}: give at least 1.")
    return Choice(config, given=given, overrides=first)


def _set_method(choice: Choice, asked: Method | None, model: ModelSize, machine: Machine) -> list[TrainingOptions]:
    """Set precision, dtype, adapters and quantisation; return the ways to try in turn, with different optimizers."""
    method, reason = choose_method(asked, model, machine)
    precision, optimizer = choice.get("trainer.precision"), choice.get("model.optimizer")
    if precision is None and not (machine.on_gpu or machine.bfloat16):
        precision = "32-true"
    if isinstance(precision, int):
        precision = str(precision)
    first = TrainingOptions(method, precision, optimizer=optimizer)
    ways = [first, *(first.others if machine.bfloat16 else ())]
    _set_way(choice, first, machine)
    choice.set("model.weight_decay", 0.0)
    for key, value in method_options(method, first.precision_with(machine.bfloat16)).items():
        shown = {"lora": reason, "dtype": "of the frozen weights", "quantization": ""}[key]
        if value != "float32":  # the default
            choice.set(f"model.{key}", value, shown)
    return ways


def _set_way(choice: Choice, way: TrainingOptions, machine: Machine) -> None:
    """Set the precision and the optimizer of one of the ways to train."""
    precision = way.precision_with(machine.bfloat16)
    device = "GPU" if machine.on_gpu else "CPU"
    reason = f"the {device} computes in bfloat16" if machine.bfloat16 else f"the {device} has no units for bfloat16"
    choice.set("trainer.precision", precision, reason)
    if way.optimizer is not None:
        choice.set("model.optimizer", way.optimizer, "keeps float32 masters; float32 weights do not fit")
    if precision == "bf16-true" and way.method == "full":
        choice.set("model.dtype", "bfloat16")


def _choose(choice: Choice, model: ModelSize, machine: Machine, ways: Sequence[TrainingOptions]) -> None:
    """Choose all that depends on the data, and the sizes that fit."""
    _set_data(choice)
    cli = _made(choice, {"data.max_length": "auto", "data.batch_size": 1})
    data: ChatDataModule = cli.datamodule
    with silent():
        data.setup("fit")
    corpus = _corpus(data)
    _set_training(choice, ways[0].method, model, corpus)
    ranks = machine.ranks * int(choice.get("trainer.num_nodes", 1))
    rows, total = corpus.rows, total_batch(corpus.rows)
    length = int(choice.get("data.max_length", longest_length(corpus, model)))
    if choice.get("data.packing") or corpus.is_text:
        rows, total = packed_rows(corpus, length)
    plans = hasattr(cli.trainer.strategy, "shardings")
    _set_sizes(choice, machine, ways if plans else ways[:1], length, -(-total // ranks))
    length, batch = int(choice.get("data.max_length")), int(choice.get("data.batch_size"))
    cut = f"the longest that fits; {corpus.longest:,} would cut none" if length < corpus.longest else "no row is cut"
    if not choice.has("data.max_length"):
        choice.reasons["data.max_length"] = "of a packed row" if corpus.is_text else cut
    accumulate = max(round(total / (batch * ranks)), 1)
    if accumulate > 1:
        reason = f"{batch} x {ranks} x {accumulate} rows in an optimizer step" if ranks > 1 else ""
        choice.set("trainer.accumulate_grad_batches", accumulate, reason or f"{batch} x {accumulate} rows in a step")
    steps = rows // (batch * ranks * int(choice.get("trainer.accumulate_grad_batches", 1)))
    if steps >= LONG_EPOCH and data.validates:
        choice.set("trainer.val_check_interval", 0.25, f"of {steps:,} steps")
    choice.set("trainer.log_every_n_steps", 10 if steps >= LONG_EPOCH else max(min(steps, 5), 1))
    _set_callbacks(choice, data, corpus)


def _set_data(choice: Choice) -> None:
    """Set the class of the module and its loss, which the first row tells, and the fraction for validation."""
    dataset = choice.get("data.dataset")
    sources = [Source(spec, None) for spec in (dataset if isinstance(dataset, list) else [dataset])]
    if any(source.spec.streaming for source in sources):
        raise ValueError(
            "`fit MODEL DATA` measures all rows to choose, so it reads no stream. Leave out `data.dataset.streaming`, "
            "or write a config."
        )
    first, tables = sources[0], sources[0].tables["train"]
    rows_read = read_rows(tables, first.row_format, first.spec.label, on_malformed=first.spec.on_malformed, max_rows=1)
    row: Any = rows_read[0]
    if "sides" in row:
        choice.config["model"]["class_path"] = "lightning_protrain.PreferenceModule"
        loss, rows_have = ("kto", "labels") if "label" in row else ("dpo", "pairs")
        choice.set("model.loss", loss, f"the rows have {rows_have}")
    if not all("validation" in source.tables for source in sources):
        rows = sum(len(table) for source in sources for table in source.tables["train"])
        choice.set("data.val_fraction", val_fraction(rows), f"of {rows:,} rows")


class _BareCLI(ProTrainCLI):
    """A command line that writes no copy of its config."""

    def before_instantiate_classes(self) -> None:
        """Check the settings of the Trainer."""
        super().before_instantiate_classes()
        self.save_config_callback = None


def _made(choice: Choice, settings: Mapping[str, Any]) -> ProTrainCLI:
    """Make model, data and Trainer of the config so far, with other settings of the data and without callbacks."""
    with TemporaryDirectory() as folder, silent():
        path = Path(folder, "config.yaml")
        path.write_text(yaml.safe_dump(choice.config, sort_keys=False), encoding="utf-8")
        options = (*choice.overrides, *settings.items(), *((f"trainer.{name}", value) for name, value in BARE.items()))
        return _BareCLI(["--config", str(path), *(f"--{key}={value}" for key, value in options)], run=False)


def _corpus(data: ChatDataModule) -> Corpus:
    """Return the properties of the training rows of a data module that is set up."""
    objective = getattr(data, "objective", "tokens")
    lengths = np.concatenate([part.lengths for part in data.examples["train"]])  # type: ignore[attr-defined]
    rows = len(lengths) // (1 if objective == "tokens" else 2)
    is_text = objective == "tokens" and not data.packing and getattr(data, "packs", False)
    longest = data.longest_row()
    return Corpus(rows, int(lengths.sum()), longest, objective, is_text, bool(data.rows_with_media()))


def _set_training(choice: Choice, method: Method, model: ModelSize, corpus: Corpus) -> None:
    """Set the learning rate, the number of epochs and packing."""
    count = get_human_readable_count(model.parameters).strip()
    rate = learning_rate(method, model.parameters, corpus.objective)
    choice.set("model.learning_rate", rate, f"for {method} of {count} parameters")
    choice.set("model.warmup_steps", 0.05, "of all steps")
    choice.set("trainer.max_epochs", num_epochs(corpus.rows), f"for {corpus.rows:,} rows")
    choice.set("trainer.gradient_clip_val", 1.0)
    if packs(corpus, model):
        choice.set("data.packing", True, "most rows are short")


@dataclass(frozen=True)
class _SizeRun(DryRun):
    """A dry run that makes no plan if a batch size above one was searched for and found, because that fits.

    Attributes:
        data: Data module whose batch size is searched for; None means that it is given.
    """

    data: ChatDataModule | None = None

    def answer(self, request: Any, element_bytes: int | None = None) -> None:
        """Fill in the answers, unless the batch is known to fit: a single row may not."""
        if self.data is None or self.data.batch_size == 1:
            super().answer(request, element_bytes)


def _set_sizes(choice: Choice, machine: Machine, ways: Sequence[TrainingOptions], length: int, most: int) -> None:
    """Set length and micro-batch: no row is cut in the first way to train that fits, else the longest that fits.

    The last one of `ways` takes the least memory. `length` is where no row is cut, or the user's; `most` is the most
    rows of a micro-batch.

    Raises:
        ValueError: If nothing fits.
    """
    open_length, open_batch = not choice.has("data.max_length"), not choice.has("data.batch_size")
    if machine.device_bytes is None:
        choice.set("data.max_length", length)
        choice.set("data.batch_size", unlimited_batch(length, most), "larger ones are hardly faster on a CPU")
        return
    if not (open_length or open_batch or len(ways) > 1):
        return
    tries: list[tuple[TrainingOptions, Any]] = [(way, length) for way in ways]
    if open_length:
        tries.append((ways[-1], "auto"))
    answer: object = None
    for way, limit in tries:
        _set_way(choice, way, machine)
        batch = choice.get("data.batch_size", "auto" if most > 1 else 1)
        data, answer = _sized(choice, {"data.max_length": limit, "data.batch_size": batch})
        if not isinstance(answer, ValueError):
            choice.set("data.max_length", data.max_length)
            fastest = "the fastest that fits" if data.batch_size < most else "all rows of an optimizer step"
            choice.set("data.batch_size", min(data.batch_size, most), fastest)
            return
    assert isinstance(answer, ValueError)
    raise answer


def _sized(choice: Choice, settings: Mapping[str, Any]) -> tuple[ChatDataModule, object]:
    """Return the data with its sizes chosen, and the plan, the error why none fits, or None if the sizes fit."""
    cli = _made(choice, settings)
    strategy: Any = cli.trainer.strategy
    if not hasattr(strategy, "shardings"):
        raise ValueError(
            f"`fit MODEL DATA` chooses length and batch size by a plan, and {type(strategy).__name__} makes none. Give "
            "--length and --batch-size, or leave out `trainer.strategy`."
        )
    hardware = DryRunHardware()
    dry_run = hardware.dry_run(strategy.shardings(1))
    sizes = _SizeRun(dry_run.targets, data=cli.datamodule if settings["data.batch_size"] == "auto" else None)
    with silent(), strategy.session.planning_only(sizes):
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli.datamodule, next(iter(hardware.answers(sizes).values()), None)


def _set_callbacks(choice: Choice, data: ChatDataModule, corpus: Corpus) -> None:
    """Set the callbacks that show the plan and the answers; `_set_outputs` adds those that write."""
    callbacks: list[Config] = [{"class_path": "PlanMonitor"}]
    prompts = list(islice(_prompts(data), PROMPTS))
    if prompts and not corpus.has_media:
        arguments = {"prompts": prompts, "max_new_tokens": 32, "before": True}
        callbacks.append({"class_path": "SampleCompletion", "init_args": arguments})
    if data.validates:
        callbacks.append({"class_path": "InitialValidation"})
    monitor = {"monitor": "val_loss"} if data.validates else {}
    callbacks.append({"class_path": "ProTrainCheckpoint", "init_args": {**monitor, "save_last": True}})
    callbacks.append({"class_path": "SavePretrained", "init_args": {}})
    choice.set("trainer.callbacks", callbacks)


def _prompts(data: ChatDataModule) -> Iterator[str]:
    """Yield the first message of the user, or the prefix of a text, of validation rows; else of training rows."""
    source = Source(data.specs[0], data.settings[0].options.roles)
    splits = source.with_all_splits(data.val_fraction, data.seed)
    rows = splits.get("validation", splits["train"])
    for index in range(min(len(rows), 10 * PROMPTS)):
        row: Any = rows[index]
        row = row.get("sides", [row])[0]  # of a preference
        users = (message.get("content") for message in row.get("messages", ()) if message.get("role") == "user")
        text = next(users, row.get("prompt") or row.get("text", "")[:TEXT_PREFIX].rpartition(" ")[0])
        if isinstance(text, str) and 0 < len(text) <= PROMPT_CHARACTERS:
            yield text


def _set_outputs(choice: Choice, folder: Path) -> None:
    """Set the folders that the run writes."""
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "logs"},
    }
    choice.set("trainer.logger", logger)
    names = {"ProTrainCheckpoint": "checkpoints", "SavePretrained": "model"}
    for callback in choice.config["trainer"]["callbacks"]:
        if callback["class_path"] in names:
            callback["init_args"] = {"dirpath": str(folder / names[callback["class_path"]]), **callback["init_args"]}


def main() -> None:
    """Run the command line of `fit MODEL DATA`, like `cli.main`."""
    run_cli(lambda: fit_command(sys.argv[2:]))
