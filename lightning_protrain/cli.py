"""The command line: `lightning-protrain fit --config configs/quickstart.yaml`, and more."""

from __future__ import annotations

import gc
import logging
import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from textwrap import fill
from typing import Any, NoReturn
from zipfile import is_zipfile

from huggingface_hub.utils import enable_progress_bars
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from rich import get_console
from torch.utils.serialization import config as load_settings
from transformers.utils.logging import disable_progress_bar

# The callbacks are imported so that a config can call them by their short names.
from lightning_protrain.callbacks import evaluator, plan_monitor, samples, save_pretrained  # noqa: F401
from lightning_protrain.callbacks.checkpoint import callback  # noqa: F401
from lightning_protrain.checkpoint.consolidation import load_stock
from lightning_protrain.commands.file_commands import FILE_COMMANDS, file_command
from lightning_protrain.commands.mistakes import (
    COMMAND_LINE,
    REFUSALS,
    explain,
    is_refusal,
    key_in,
    nearest,
    refusal_in,
    sentence,
    source_of,
)
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.distributed import failures  # noqa: F401
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.trainer import PlanningTrainer

# Exit status after Ctrl-C, as in shells.
INTERRUPTED = 130


class ParameterCount(ModelSummary):
    """Shows the number of parameters on one line, instead of Lightning's table."""

    @staticmethod
    def summarize(summary_data: Any, total_parameters: int, trainable_parameters: int, *_: Any, **__: Any) -> None:
        """Print the number of parameters, and how many of these are trained."""
        total, trained = (
            get_human_readable_count(int(each)).strip() for each in (total_parameters, trainable_parameters)
        )
        share = "all" if total_parameters == trainable_parameters else trained
        rank_zero_info(f"Parameters of the model: {total}, {share} of them trained.")


class ShortProgress(RichProgressBar):
    """The progress bar on one line of 80 columns: the loss and what PlanMonitor measures; the logs have the rest."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the metrics to show beside the bar."""
        shown = super().get_metrics(trainer, pl_module)
        kept = {name: value for name, value in shown.items() if name != "v_num" and not name.startswith("val_")}
        return {name.removeprefix("train_"): value for name, value in kept.items()}

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Return the columns without batches per second (the step time tells this), and with a short bar."""
        columns: list[Any] = super().configure_columns(trainer)[:-1]
        columns[1].bar_width = min(max(get_console().width - 74, 6), 20)
        return columns


class ProTrainCLI(LightningCLI):
    """LightningCLI with the defaults of this package; any other LightningModule and LightningDataModule can be given.

    The module must make its own optimizer, because one from a config would be made before `configure_model`.

    Args:
        args: Arguments to parse instead of the command line.
        run: True to run a subcommand; False to make only model, data and Trainer.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        # Errors of constructors: for a union of types, jsonargparse keeps only their text.
        self._refused: list[BaseException] = []
        try:
            super().__init__(
                trainer_class=PlanningTrainer,
                trainer_defaults={"strategy": "protrain"},
                parser_kwargs={
                    "description": "Train, plan or preview what a config describes.",
                    "exit_on_error": False,
                    **{name: {"exit_on_error": False} for name in self.subcommands()},
                },
                seed_everything_default=0,
                save_config_kwargs={"overwrite": True},
                auto_configure_optimizers=False,
                args=args,
                run=run,
            )
        except REFUSALS as error:
            key = self._key_in(error) if is_refusal(error) else None
            if key is not None:
                source = source_of(self._arguments, key) or "the config"
                error.add_note(f"{'On the' if source == COMMAND_LINE else 'In'} {source}: {key}")
            raise

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line and the configs that it names.

        Raises:
            ValueError: A config is wrong; one sentence names the key.
        """
        given = sys.argv[1:] if args is None else args
        if not isinstance(given, list):
            self._arguments: list[str] = []
            super().parse_arguments(parser, args)
            return
        self._arguments = _joined(given)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "LightningCLI's args parameter")
                super().parse_arguments(parser, self._arguments)
            return
        except ArgumentError as error:
            name, *options = self._arguments or [""]
            subparsers = getattr(self, "_subcommand_parsers", {})
            if subparsers and name not in subparsers:
                commands = (*subparsers, "fits", *FILE_COMMANDS)
                said = f"lightning-protrain needs a command, one of {', '.join(commands)}" + nearest(name, commands)
            elif subparsers:
                said = explain(subparsers[name], options, error)
            else:
                said = explain(parser, self._arguments, error)
        raise ValueError(said)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands of Lightning, and `plan` and `preview`."""
        return {
            **LightningCLI.subcommands(),
            "plan": {"model", "datamodule", "gpu"},
            "preview": {"model", "datamodule"},
        }

    def instantiate_classes(self) -> None:
        """Make the model, the data and the Trainer.

        Raises:
            ValueError: One of them refuses its arguments; the message is that of the refusal.
        """
        try:
            super().instantiate_classes()
            return
        except REFUSALS as error:
            said = [each for each in self._refused if is_refusal(each) and str(each).partition("\n")[0] in str(error)]
            refusal = refusal_in(error) or next(reversed(said), None)
            if refusal is None:
                raise
        raise refusal

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer, with a shorter default summary and progress bar than Lightning's."""
        trainer: Any = super().instantiate_trainer(**kwargs)
        given = (self.config[self.subcommand] if self.subcommand else self.config)["trainer"].get("callbacks") or []
        if not any("Summary" in str(each) for each in (given if isinstance(given, list) else [given])):
            summaries = (ModelSummary, RichModelSummary)
            trainer.callbacks = [ParameterCount() if type(each) in summaries else each for each in trainer.callbacks]
        if not any("ProgressBar" in str(each) for each in (given if isinstance(given, list) else [given])):
            trainer.callbacks = [
                ShortProgress() if type(each) is RichProgressBar else each for each in trainer.callbacks
            ]
        made: Trainer = trainer
        return made

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        self.parser.add_instantiator(self._make, object)  # what model and data, which come first, are not

    def _make(self, kind: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return kind(*args, **kwargs)
        except REFUSALS as error:
            self._refused.append(error)
            raise

    def _key_in(self, refusal: BaseException) -> str | None:
        if not hasattr(self, "config"):  # the config did not parse, and the refusal names the key
            return None
        config = self.config.as_dict()
        subcommand = config.get("subcommand")
        return key_in(config[subcommand] if subcommand else config, refusal)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set the default classes, so that a config need not name them."""
        for key, default in (("model", CausalLMModule), ("data", ChatDataModule)):
            parser.set_defaults({key: {"class_path": f"{default.__module__}.{default.__qualname__}"}})

    def before_instantiate_classes(self) -> None:
        """Check the Trainer's settings; for `plan` and `preview`, remove the GPU, loggers and ranks.

        Raises:
            ValueError: The accelerator, the strategy or the number of devices is impossible.
        """
        given = self.config[self.subcommand] if self.subcommand else self.config
        _check_trainer(given["trainer"], given.get("ckpt_path"))
        if self.subcommand != "fit" or given.get("ckpt_path"):
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        if self.subcommand not in ("plan", "preview"):
            return
        self.save_config_callback = None
        config = self.config[self.subcommand]
        settings: dict[str, Any] = {"logger": False, "devices": 1, "num_nodes": 1, "enable_progress_bar": False}
        if self.subcommand == "preview":
            settings |= {"accelerator": "cpu", "strategy": "auto"}
        elif config["gpu"]:
            settings["accelerator"] = "cpu"
            if config["trainer"]["precision"] in ("16", 16, "16-mixed"):  # else Lightning takes bfloat16 on a CPU
                plugins = config["trainer"].get("plugins") or []
                float16 = Namespace(precision="16-mixed")
                plugin = Namespace(class_path="lightning_protrain.ProTrainPrecision", init_args=float16)
                settings["precision"] = None
                settings["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), plugin]
        if "accelerator" in settings:  # plans and previews use no GPU, and Lightning need not mention it
            warnings.filterwarnings("ignore", "GPU available but not used")
            logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
                lambda record: not record.getMessage().startswith("GPU available")
            )
        for name, value in settings.items():
            config["trainer"][name] = value
        callbacks = config["trainer"].get("callbacks")
        if isinstance(callbacks, list):  # Callbacks that save would make their folders.
            config["trainer"]["callbacks"] = [each for each in callbacks if not each.class_path.endswith("Checkpoint")]

    def _parse_ckpt_path(self) -> None:
        """Take the model's arguments from the checkpoint, and warn of given arguments that differ.

        Raises:
            ValueError: The file is damaged, or is no checkpoint.
        """
        given = self._model_arguments()
        path = self.config[self.config["subcommand"]].get("ckpt_path") if self.config.get("subcommand") else None
        # A mapped file is not read as a whole, since weights and states are not needed here. Only an archive can be
        # mapped.
        mapped = path is not None and is_zipfile(path)
        try:
            with load_settings.patch("load.mmap", mapped):  # type: ignore[attr-defined]  # made when torch is imported
                super()._parse_ckpt_path()
        except (RuntimeError, EOFError, KeyError, OSError, AttributeError, UnpicklingError):
            if path is None:
                raise
            load_stock(Path(path))  # raises an error for a damaged file
            raise ValueError(f"{path} is no checkpoint of Lightning.") from None
        replaced = {
            name: f"model.{name}={value!r} instead of {given[name]!r}"
            for name, value in self._model_arguments().items()
            if given.get(name) not in (None, value)
        }
        if replaced:
            rank_zero_warn(
                "The model is made with the arguments that its checkpoint was saved with, whatever the config and the "
                f"command line say: {', '.join(replaced.values())}."
            )

    def _model_arguments(self) -> dict[str, Any]:
        """Return the arguments of the subcommand's model, as parsed so far; empty if no subcommand runs."""
        subcommand = self.config.get("subcommand")
        model = self.config[subcommand].get("model") if subcommand else None
        arguments = model.get("init_args") if model is not None else None
        return {} if arguments is None else dict(arguments.as_dict())

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "plan":
            # Not from the signature: there a list could not be given by repeating the option.
            parser.add_argument("--gpu", action="append", help="Name of a GPU, e.g. 'RTX 3090'; may be given again.")
            self._subcommand_method_arguments[subcommand].append("gpu")
        return parser


def _joined(arguments: Sequence[str]) -> list[str]:
    """Return arguments with negative values joined to their options: argparse takes `-5GiB` for an option.

    Options of a command may have dashes in place of underscores, as in `--host-memory`.
    """
    joined: list[str] = []
    for each in arguments:
        if re.match(r"--[a-z]+-[a-z-]+(=|$)", each):
            name, equals, value = each.partition("=")
            each = f"--{name[2:].replace('-', '_')}{equals}{value}"
        if re.match(r"-\.?\d", each) and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={each}"
        else:
            joined.append(each)
    return joined


def _check_trainer(settings: Mapping[str, Any], ckpt_path: str | None) -> None:
    """Refuse unknown registered names, impossible devices, and `ckpt_path="best"` without a monitored score.

    Args:
        settings: Settings of the Trainer.
        ckpt_path: The checkpoint to start from.

    Raises:
        ValueError: A setting is wrong; the message has the key and its value.
    """
    known = {
        "accelerator": {"auto", "gpu", *AcceleratorRegistry.available_accelerators()},
        "strategy": {"auto", *StrategyRegistry.available_strategies()},
    }
    for key, names in known.items():
        value = settings.get(key)
        if isinstance(value, str) and value not in names:
            listed = f": there are {', '.join(sorted(names))}" if key == "accelerator" else ""
            raise ValueError(f"`trainer.{key}: {value}` is not known{listed}{nearest(value, names)}")
    devices = settings.get("devices")
    if (isinstance(devices, int) and (devices == 0 or devices < -1)) or (
        isinstance(devices, str) and not re.fullmatch(r"auto|-1|[\d, ]+", devices)
    ):
        raise ValueError(f"`trainer.devices: {devices}` must be a positive number, a list of numbers, -1 or auto.")
    callbacks = settings.get("callbacks") or []
    arguments = [each.get("init_args") or {} for each in (callbacks if isinstance(callbacks, list) else [callbacks])]
    if ckpt_path == "best" and not any(each.get("monitor") for each in arguments):
        raise ValueError(
            "`ckpt_path: best` needs a callback that knows the best checkpoint: give ProTrainCheckpoint or "
            "ModelCheckpoint a `monitor`, such as val_loss, or name the checkpoint."
        )


def quieten() -> None:
    """Drop messages of libraries that appear in every run and that the user cannot act on."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # kernels that are not installed
    for name in ("pytorch.utilities.rank_zero", "fabric.utilities.seed", "fabric.utilities.distributed"):
        logging.getLogger(f"lightning.{name}").addFilter(_can_be_acted_on)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers = [_Lines()]
    for message in (
        r".*isinstance\(treespec, LeafSpec\)",
        r".*Your `IterableDataset` has `__len__` defined",
        r"`is_gradient_checkpointing` is deprecated",  # PEFT asks for it
        r"Precision .* is not supported by the model summary",  # which shows no size
    ):
        warnings.filterwarnings("ignore", message)
    warnings.formatwarning = _format_warning
    disable_progress_bar()  # ours are gone when they end
    if sys.stderr.isatty():
        enable_progress_bars()  # of downloads


# What Lightning says of every run: the config has the seed, and a run that ends as it should needs no sentence.
_NOISE = (
    "Tip: ",
    "Seed set to ",
    "Initializing distributed: ",
    "All distributed processes registered",
    "TPU available: False",
    "Loading `train_dataloader` to ",
    "`Trainer.fit` stopped: ",
    "Using bfloat16 Automatic",
    "Restoring states from",  # it says again where it has restored them from
)


def folded(text: str) -> str:
    """Return text with line breaks between words, in lines of 80 columns, as plans have them."""
    return "\n".join(fill(line, 80, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())


class _Lines(logging.Handler):
    """Writes messages in lines of 80 columns to stderr as it is now: above a progress bar, if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        print(folded(self.format(record)), file=sys.stderr, flush=True)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning in lines of 80 columns; only warnings about the user's own code name a file."""
    ours = "site-packages" in filename or Path(filename).is_relative_to(Path(__file__).parent)
    return folded(f"Warning: {message}" if ours else f"{filename}:{lineno}: {category.__name__}: {message}") + "\n"


def _can_be_acted_on(record: logging.LogRecord) -> bool:
    # In front of the sentence may be a rank, a lamp, or a line and the name of the backend.
    said = re.sub(r"^(\[rank: \d+\] |\U0001f4a1 |-+\ndistributed_backend=\w+\n)", "", record.getMessage())
    return not said.startswith(_NOISE)


def main() -> None:
    """Run the command line; the console script `lightning-protrain` is in `lightning_protrain_command.py`."""
    quieten()
    # Objects of the imports stay: excluding them from garbage collection saves a tenth of the start-up time.
    gc.freeze()
    try:
        if sys.argv[1:2] and sys.argv[1] in FILE_COMMANDS:
            sys.exit(file_command(sys.argv[1:]))
        ProTrainCLI()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as stop:
        # Lightning tears an interrupted run down and then ends with 1.
        if isinstance(stop.__context__, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        raise
    except REFUSALS as error:
        end(error)


def end(error: BaseException) -> NoReturn:
    """End the command with the sentence of a refusal; raise any other error."""
    if not is_refusal(error):
        raise error
    # An answer to the user and no failure of the program, so its traceback does not help.
    said = "\n".join([f"lightning-protrain: {sentence(error)}", *getattr(error, "__notes__", ())])
    sys.exit(folded(said) if sys.stderr.isatty() else said)


if __name__ == "__main__":
    main()
