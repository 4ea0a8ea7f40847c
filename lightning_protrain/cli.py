"""The command line, such as `lightning-protrain fit --config configs/quickstart.yaml`."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from runpy import run_module
from textwrap import fill
from typing import Any, NoReturn
from zipfile import is_zipfile

from huggingface_hub.utils import enable_progress_bars
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import BasePredictionWriter, ModelSummary, RichModelSummary, RichProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from rich import get_console
from torch.utils.serialization import config as load_settings
from transformers.utils.logging import disable_progress_bar

# Callbacks are imported so that a config can use their short names.
from lightning_protrain.callbacks import evaluator, samples, save_pretrained  # noqa: F401
from lightning_protrain.callbacks.checkpoint import callback  # noqa: F401
from lightning_protrain.checkpoint.consolidation import checkpoint_path, load_stock
from lightning_protrain.commands.file_commands import FILE_COMMANDS, file_command
from lightning_protrain.commands.mistakes import (
    COMMAND_LINE,
    REFUSALS,
    explain,
    is_refusal,
    key_in,
    mistake_in,
    nearest,
    read_text,
    refusal_in,
    refuse_absent_gpu,
    sentence,
    source_of,
)
from lightning_protrain.config import hide_noise
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.distributed.failures import FirstRankRefused
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.trainer import PlanningTrainer

# Exit status after Ctrl-C, as in shells.
INTERRUPTED = 130


class ParameterCount(ModelSummary):
    """A model summary of one line: the number of parameters."""

    @staticmethod
    def summarize(summary_data: Any, total_parameters: int, trainable_parameters: int, *_: Any, **__: Any) -> None:
        """Print the number of all parameters and of trained parameters."""
        total, trained = (
            get_human_readable_count(int(count)).strip() for count in (total_parameters, trainable_parameters)
        )
        share = "all" if total_parameters == trainable_parameters else trained
        rank_zero_info(f"Parameters of the model: {total}, {share} of them trained.")


# Columns of a terminal whose lines have room for predictions beside what was measured.
WIDE = 130


class ShortProgress(RichProgressBar):
    """A progress bar on one line of 80 columns, with the training loss and the metrics of PlanMonitor."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the metrics to show beside the bar."""
        shown = super().get_metrics(trainer, pl_module)
        metrics = {name: value for name, value in shown.items() if name != "v_num" and not name.startswith("val_")}
        return {name.removeprefix("train_"): value for name, value in metrics.items()}

    def _update_metrics(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # PlanMonitor adds predictions to what `get_metrics` returns.
        shown = self.get_metrics(trainer, pl_module)
        if get_console().width < WIDE:
            texts = {name: value for name, value in shown.items() if isinstance(value, str)}
            shown |= {name: text.partition(" (predicted")[0] for name, text in texts.items()}
        if self.is_enabled and self._metric_component is not None:
            self._metric_component.update(shown)

    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning would show the last of endless epochs as -2.
        endless = self.trainer.max_epochs in (None, -1)
        return f"Epoch {current_epoch} " if endless else str(super()._get_train_description(current_epoch))

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Return the columns with a short bar, and without batches per second."""
        columns: list[Any] = super().configure_columns(trainer)[:-1]
        columns[1].bar_width = min(max(get_console().width - 74, 6), 20)
        return columns


class ConfigCopy(SaveConfigCallback):
    """A copy of the run's config beside its logs, which never replaces a file that a user has written."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the copy, unless its folder is read-only, or it would replace a file that no run has written."""
        if not self.already_saved:
            path = Path(trainer.log_dir or "", self.config_filename)
            why = ""
            if trainer.is_global_zero and path.parent.is_dir() and not os.access(path.parent, os.W_OK):
                why = f"this process may not write to {path.parent.absolute()}"
            elif trainer.is_global_zero and self._is_of_the_user(path):
                why = f"{path} is your own file"
            why = trainer.strategy.broadcast(why)
            if why:
                rank_zero_info(f"The config of this run is not written, because {why}.")
            self.already_saved = bool(why)
        super().setup(trainer, pl_module, stage)

    def _is_of_the_user(self, path: Path) -> bool:
        if not path.is_file():
            return False
        configs = [Path(str(config)) for config in self.config.get("config") or ()]
        written = path.read_bytes().startswith(b"# lightning.pytorch==")
        return not written or any(config.is_file() and path.samefile(config) for config in configs)


class ProTrainCLI(LightningCLI):
    """LightningCLI with CausalLMModule, ChatDataModule and `strategy="protrain"` as defaults.

    The module must make its own optimizer, because an optimizer in a config would be made before `configure_model`.

    Args:
        args: Arguments to parse instead of the command line.
        run: True to run a subcommand; False to make only model, data and Trainer.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        # Errors of constructors, because jsonargparse keeps only their text if it tries a union of types.
        self._refused: list[BaseException] = []
        try:
            super().__init__(
                trainer_class=PlanningTrainer,
                trainer_defaults={"strategy": "protrain"},
                parser_kwargs={
                    "description": "Train, plan or preview a run that a config describes.",
                    "exit_on_error": False,
                    **{name: {"exit_on_error": False} for name in self.subcommands()},
                },
                seed_everything_default=0,
                save_config_callback=ConfigCopy,
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
        """Parse the command line and its config files.

        Raises:
            ValueError: If a config is wrong; the message names the key.
        """
        arguments = sys.argv[1:] if args is None else args
        if not isinstance(arguments, list):
            self._arguments: list[str] = []
            super().parse_arguments(parser, args)
            return
        self._arguments = _joined(arguments)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "LightningCLI's args parameter")
                super().parse_arguments(parser, self._arguments)
            # jsonargparse takes a mapping in an option as text if a class refuses it and text is allowed.
            taken = any(isinstance(read_text(value), dict) for value in self.config.values() if isinstance(value, str))
            mistake = mistake_in(*self._parser_and_options(parser)) if taken else None
            if mistake is None:
                return
        except (ArgumentError, UnicodeDecodeError) as error:
            name = self._arguments[0] if self._arguments else ""
            subparsers = getattr(self, "_subcommand_parsers", {})
            if subparsers and name not in subparsers:
                commands = (*subparsers, "fits", *FILE_COMMANDS)
                mistake = f"lightning-protrain needs a command, one of {', '.join(commands)}" + nearest(name, commands)
            else:
                mistake = explain(*self._parser_and_options(parser), error)
        raise ValueError(mistake)

    def _parser_and_options(self, parser: LightningArgumentParser) -> tuple[LightningArgumentParser, list[str]]:
        """Return the parser of the subcommand and its options, or the whole parser and all options without one."""
        subparsers = getattr(self, "_subcommand_parsers", {})
        return (subparsers[self._arguments[0]], self._arguments[1:]) if subparsers else (parser, self._arguments)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands: Lightning's, `plan` and `preview`."""
        return {
            **LightningCLI.subcommands(),
            "plan": {"model", "datamodule", "gpu"},
            "preview": {"model", "datamodule"},
        }

    def instantiate_classes(self) -> None:
        """Make the model, the data and the Trainer.

        Raises:
            ValueError: If one of them refuses its arguments.
        """
        try:
            super().instantiate_classes()
            if self.subcommand in LightningCLI.subcommands() and isinstance(self.model, CausalLMModule):
                self.model.check_model()  # Before there are several processes, which would all say it.
            return
        except REFUSALS as error:
            refused = [it for it in self._refused if is_refusal(it) and str(it).partition("\n")[0] in str(error)]
            refusal = refusal_in(error) or next(reversed(refused), None)
            if refusal is None and "NoneType" in str(error):
                _, *options = self._arguments if self.subcommand else ["", *self._arguments]
                null = mistake_in(self._parser(self.subcommand), options)
                refusal = ValueError(null) if null else None
            if refusal is None:
                raise
        raise refusal

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer; replace Lightning's default summary and progress bar by shorter ones."""
        trainer: Trainer = super().instantiate_trainer(**kwargs)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        given = _as_list((self.config[self.subcommand] if self.subcommand else self.config)["trainer"].get("callbacks"))
        if not any("Summary" in str(entry) for entry in given):
            summaries = (ModelSummary, RichModelSummary)
            callbacks[:] = [ParameterCount() if type(entry) in summaries else entry for entry in callbacks]
        if not any("ProgressBar" in str(entry) for entry in given):
            callbacks[:] = [ShortProgress() if type(entry) is RichProgressBar else entry for entry in callbacks]
        return trainer

    def before_predict(self) -> None:
        """Warn if the predictions will be lost."""
        callbacks: list[Any] = getattr(self.trainer, "callbacks", [])
        if not any(isinstance(entry, BasePredictionWriter) for entry in callbacks):
            rank_zero_warn(
                "The predictions will be lost: give the trainer a callback that writes them, of a class derived from "
                "BasePredictionWriter, or call Trainer.predict in Python, which returns them."
            )

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        self.parser.add_instantiator(self._make, object)  # For all classes but model and data, which come first.

    def _make(self, kind: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return kind(*args, **kwargs)
        except REFUSALS as error:
            self._refused.append(error)
            raise

    def _key_in(self, refusal: BaseException) -> str | None:
        if not hasattr(self, "config"):  # The config could not be parsed; the message names the key itself.
            return None
        config = self.config.as_dict()
        subcommand = config.get("subcommand")
        return key_in(config[subcommand] if subcommand else config, refusal)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set the default classes of model and data."""
        for key, default in (("model", CausalLMModule), ("data", ChatDataModule)):
            parser.set_defaults({key: {"class_path": f"{default.__module__}.{default.__qualname__}"}})

    def before_instantiate_classes(self) -> None:
        """Check the Trainer's settings; for `plan` and `preview`, use one device and no logger.

        Raises:
            ValueError: If the accelerator or the strategy is unknown, or the number of devices is not allowed.
        """
        arguments = self.config[self.subcommand] if self.subcommand else self.config
        _check_trainer(arguments["trainer"], arguments.get("ckpt_path"))
        if self.subcommand != "fit" or arguments.get("ckpt_path"):
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        if self.subcommand not in ("plan", "preview"):
            refuse_absent_gpu(arguments["trainer"])
            return
        self.save_config_callback = None
        config = self.config[self.subcommand]
        settings: dict[str, Any] = {"logger": False, "devices": 1, "num_nodes": 1, "enable_progress_bar": False}
        if self.subcommand == "preview":
            settings |= {"accelerator": "cpu", "strategy": "auto"}
        elif config["gpu"]:
            settings["accelerator"] = "cpu"
            # Lightning would replace 16-mixed by bfloat16 on a CPU.
            if config["trainer"]["precision"] in ("16", 16, "16-mixed"):
                float16 = Namespace(precision="16-mixed")
                plugin = Namespace(class_path="lightning_protrain.ProTrainPrecision", init_args=float16)
                settings["precision"] = None
                settings["plugins"] = [*_as_list(config["trainer"].get("plugins")), plugin]
        if "accelerator" in settings:  # Lightning would warn that the GPU is not used.
            warnings.filterwarnings("ignore", "GPU available but not used")
            logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
                lambda record: not record.getMessage().startswith("GPU available")
            )
        for name, value in settings.items():
            config["trainer"][name] = value
        refuse_absent_gpu(config["trainer"])
        callbacks = config["trainer"].get("callbacks")
        if isinstance(callbacks, list):  # Checkpoint callbacks would make folders.
            config["trainer"]["callbacks"] = [
                entry for entry in callbacks if not entry.class_path.endswith("Checkpoint")
            ]

    def _parse_ckpt_path(self) -> None:
        """Take the model's arguments from the checkpoint, and warn if the user has given other arguments.

        Raises:
            ValueError: If the file is damaged, or not a checkpoint.
        """
        arguments = self._model_arguments()
        path = self.config[self.config["subcommand"]].get("ckpt_path") if self.config.get("subcommand") else None
        if path not in (None, "best", "last", "hpc") and "://" not in path and not path.startswith("registry:"):
            path = str(checkpoint_path(Path(path), sharded=True))  # It may be the link `last` or `best`.
            self.config[self.config["subcommand"]]["ckpt_path"] = path
        # Memory-map the file to avoid reading weights, which are not needed here. Only zip archives can be mapped.
        mapped = path is not None and is_zipfile(path)
        try:
            with load_settings.patch("load.mmap", mapped):  # type: ignore[attr-defined]  # made when torch is imported
                super()._parse_ckpt_path()
        except (RuntimeError, EOFError, KeyError, OSError, AttributeError, UnpicklingError):
            if path is None:
                raise
            load_stock(Path(path))  # Raises ValueError for a damaged file.
            raise ValueError(f"{path} is not a checkpoint of Lightning.") from None
        replaced = {
            name: f"model.{name}={value!r} instead of {arguments[name]!r}"
            for name, value in self._model_arguments().items()
            if arguments.get(name) not in (None, value)
        }
        if replaced:
            rank_zero_warn(
                "The model is made with the arguments in its checkpoint, which replace those of the config and the "
                f"command line: {', '.join(replaced.values())}."
            )

    def _model_arguments(self) -> dict[str, Any]:
        """Return the parsed arguments of the model; empty without a subcommand."""
        subcommand = self.config.get("subcommand")
        model = self.config[subcommand].get("model") if subcommand else None
        arguments = model.get("init_args") if model is not None else None
        return {} if arguments is None else dict(arguments.as_dict())

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":
            parser.description = (
                "Train what a config describes. For a model and data by their names, without a config: "
                "lightning-protrain fit MODEL DATA; its options: lightning-protrain fit MODEL DATA --help."
            )
        if subcommand == "plan":
            parser.description = (
                "Print the plan that `fit` would make with a config. For a model by its name, without a config: "
                "lightning-protrain plan NAME; its options: lightning-protrain plan NAME --help."
            )
            # A list option from the signature could not be given by repeating the option.
            parser.add_argument("--gpu", action="append", help="Name of a GPU, e.g. 'RTX 3090'; may be given again.")
            self._subcommand_method_arguments[subcommand].append("gpu")
        return parser


def _joined(arguments: Sequence[str]) -> list[str]:
    """Return a command line that argparse understands.

    A negative value is joined to its option, because argparse takes `-5GiB` for an option. Dashes in options, as in
    `--host-memory`, are replaced by underscores.
    """
    joined: list[str] = []
    for argument in arguments:
        if re.match(r"--[a-z]+-[a-z-]+(=|$)", argument):
            name, equals, value = argument.partition("=")
            argument = f"--{name[2:].replace('-', '_')}{equals}{value}"
        if re.match(r"-\.?\d", argument) and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _as_list(entries: Any) -> list[Any]:
    """Return the entries of a key that may have a list, a single entry or none."""
    return entries if isinstance(entries, list) else [entries] if entries else []


def _check_trainer(settings: Mapping[str, Any], ckpt_path: str | None) -> None:
    """Raise ValueError for wrong settings of the Trainer; `ckpt_path="best"` requires a callback with `monitor`."""
    known = {
        "accelerator": {"auto", "gpu", *AcceleratorRegistry.available_accelerators()},
        "strategy": {"auto", *StrategyRegistry.available_strategies()},
    }
    for key, names in known.items():
        value = settings.get(key)
        if isinstance(value, str) and value not in names:
            listed = f": there are {', '.join(sorted(names))}" if key == "accelerator" else ""
            other = f"; give a class as `trainer.{key}.class_path`" if "." in value else nearest(value, names)
            raise ValueError(f"`trainer.{key}: {value}` is not known{listed}{other}")
    devices = settings.get("devices")
    if (isinstance(devices, int) and (devices == 0 or devices < -1)) or (
        isinstance(devices, str) and not re.fullmatch(r"auto|-1|[\d, ]+", devices)
    ):
        raise ValueError(f"`trainer.devices: {devices}` must be a positive number, a list of numbers, -1 or auto.")
    arguments = [entry.get("init_args") or {} for entry in _as_list(settings.get("callbacks"))]
    if ckpt_path == "best" and not any(entry.get("monitor") for entry in arguments):
        raise ValueError(
            "`ckpt_path: best` requires a callback with a `monitor`, such as val_loss: set it for ProTrainCheckpoint "
            "or ModelCheckpoint, or give the path of the checkpoint."
        )


def quieten() -> None:
    """Hide the noise of libraries, and format what is left for a terminal of 80 columns."""
    hide_noise()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers = [_Lines()]
    # ParameterCount shows no size.
    warnings.filterwarnings("ignore", r"Precision .* is not supported by the model summary")
    warnings.formatwarning = _format_warning
    disable_progress_bar()  # Those of transformers stay on the screen.
    if sys.stderr.isatty():
        enable_progress_bars()  # Those of downloads.


def folded(text: str) -> str:
    """Wrap text at 80 columns."""
    return "\n".join(fill(line, 80, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())


class _Lines(logging.Handler):
    """A handler that wraps messages at 80 columns; a progress bar may have replaced `sys.stderr` since its start."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message to stderr."""
        print(folded(self.format(record)), file=sys.stderr, flush=True)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning at 80 columns, with file and line only if it is about the user's own code."""
    ours = "site-packages" in filename or Path(filename).is_relative_to(Path(__file__).parent)
    return folded(f"Warning: {message}" if ours else f"{filename}:{lineno}: {category.__name__}: {message}") + "\n"


def main(command: Callable[[], object] | None = None) -> None:
    """Run the command line; `lightning_protrain_command.py` has the console script, which calls this function.

    Args:
        command: What to run; None means the command of the command line.
    """
    try:
        quieten()
        # Excluding objects made by imports from garbage collection saves a tenth of the start-up time.
        gc.freeze()
        if command is not None:
            command()
            return
        if sys.argv[1:2] and sys.argv[1] in FILE_COMMANDS:
            sys.exit(file_command(sys.argv[1:]))
        ProTrainCLI()
    except BaseException as error:
        if _is_interrupt(error):
            sys.exit(INTERRUPTED)
        if isinstance(error, REFUSALS):
            end(error)
        if not re.match(r"Setting up ends on rank \d+: rank \d+ failed ", str(error)):
            raise
        sys.exit(f"lightning-protrain: {error}")  # The rank that failed has shown the traceback, if there is one.


def _is_interrupt(error: BaseException | None) -> bool:
    """Return True if Ctrl-C has caused an error: Lightning exits with status 1, or its teardown fails."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def end(error: BaseException) -> NoReturn:
    """Exit without a traceback if the error is a refusal, silently if rank 0 shows it; raise any other error."""
    if isinstance(error.__cause__, FirstRankRefused):
        sys.exit(1)
    if not is_refusal(error):
        raise error
    text = "\n".join([f"lightning-protrain: {sentence(error)}", *getattr(error, "__notes__", ())])
    sys.exit(folded(text) if sys.stderr.isatty() else text)


if __name__ == "__main__":  # as by `torchrun -m lightning_protrain.cli`
    run_module("lightning_protrain_command", run_name="__main__")
