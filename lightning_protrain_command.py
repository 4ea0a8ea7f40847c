"""The console script `lightning-protrain`: what needs no library is answered before any is imported.

It stands outside the package because importing that registers the strategies with Lightning, which takes seconds.
"""

from __future__ import annotations

import gc
import os
import platform
import signal
import sys
import warnings
from argparse import ArgumentParser
from contextlib import suppress
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from runpy import run_path

# The status after Ctrl-C, as shells have it.
INTERRUPTED = 130
# Errors of a package that was built for other versions, or whose files are damaged.
LOADING_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
COMMANDS = {
    "fit": "train a model on data by their names, `fit MODEL DATA`, or what a config describes",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "run the model on data",
    "plan": "print the plan for a model by its name, or the one that `fit` would make; needs no weights and no GPU",
    "fits": "list the published models that can be trained on a GPU",
    "preview": "show which tokens of the training data are trained",
    "inspect": "describe a checkpoint, or all of a folder, newest first",
    "consolidate": "write a checkpoint as a stock .ckpt file that any Trainer resumes from",
    "export": "write the model in a checkpoint as transformers reads it, or its adapters as PEFT reads them",
    "merge": "add the adapters in a checkpoint to the model that they adapt, and write it as transformers reads it",
    "chat": "answer a prompt with a saved model or adapters, or with the model in a checkpoint",
    "env": "print versions, machine, limits and settings, for a report of a bug",
}


def print_help() -> None:
    """Print what the commands are."""
    parser = ArgumentParser(
        prog="lightning-protrain",
        description="Train, plan or preview what a config describes; work on the checkpoints of a run.",
        epilog="Examples: lightning-protrain fit Qwen/Qwen3-0.6B chats.jsonl; "
        "lightning-protrain plan Qwen/Qwen3-8B --gpu 'RTX 4090'; "
        "lightning-protrain fit --config quickstart.yaml. "
        "Options of a command: lightning-protrain fit --help.",
    )
    parser.add_argument("--version", action="version", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, does in COMMANDS.items():
        commands.add_parser(name, help=does)
    parser.print_help()


def names_models(arguments: list[str]) -> bool:
    """Return True if a command line is about models by name; put `--config` before the name of a config.

    Args:
        arguments: The command line; changed in place.
    """
    if arguments[:1] != ["plan"]:
        return arguments[:1] == ["fits"]
    for at, (before, each) in enumerate(pairwise(arguments), start=1):
        if not each.startswith("-") and (at == 1 or not before.startswith("-") or "=" in before):
            if not each.endswith((".yaml", ".yml")):
                return True
            arguments.insert(at, "--config")
            return False
    return False


def fits_by_name(arguments: list[str]) -> bool:
    """Return True if a command line is `fit MODEL DATA`, without a config."""
    return (
        arguments[:1] == ["fit"]
        and not "".join(arguments[1:2] or "-").startswith("-")
        and not arguments[1].endswith((".yaml", ".yml"))
    )


def report_environment() -> None:
    """Print the report for a bug; where a library does not load, the versions and the reason."""
    try:
        with warnings.catch_warnings(action="ignore"):  # The report has what they say.
            from lightning_protrain.commands.environment import describe

            print(describe())
    except LOADING_ERRORS as error:
        names = ("lightning-protrain", "torch", "torchvision", "lightning", "transformers", "peft", "datasets", "numpy")
        versions = []
        for name in names:
            with suppress(metadata.PackageNotFoundError):
                versions.append(f"{name} {metadata.version(name)}")
        print(f"Python {platform.python_version()}, {platform.platform()}\npackages: {', '.join(versions)}")
        print(f"a package does not load: {type(error).__name__}: {error}")


def main() -> None:
    """Print the help, or import a command and run it; Ctrl-C ends all of it with one status and no traceback."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print_help()
        return
    if sys.argv[1:] == ["--version"]:
        file = Path(__file__).with_name("lightning_protrain") / "config.py"
        print(f"lightning-protrain {run_path(str(file))['__version__']}")
        return
    if sys.argv[1:] == ["env"]:
        report_environment()
        return
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    gc.disable()  # nothing that an import makes is garbage; looking for some takes a quarter of the time to start
    arguments = sys.argv[1:]
    by_name = names_models(arguments)
    sys.argv[1:] = arguments
    if by_name:
        # Such a plan compiles nothing. PEFT would import the compiler by way of bitsandbytes, which takes a second.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        from lightning_protrain.commands.plan_command import plan_command  # without what only training needs
    elif fits_by_name(arguments):
        from lightning_protrain.commands.fit_command import main as run
    else:
        from lightning_protrain.cli import main as run

    gc.enable()
    try:
        signal.signal(signal.SIGINT, handler)
        if not by_name:
            run()
            return
        gc.freeze()
        sys.exit(plan_command(arguments))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (ValueError, OSError) as error:
        from lightning_protrain.cli import end

        end(error)


if __name__ == "__main__":
    main()
