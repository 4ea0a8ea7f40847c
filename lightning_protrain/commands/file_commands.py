"""Commands on files, which need no config, such as `lightning-protrain inspect`, `export` and `chat`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from lightning_protrain.checkpoint import consolidation, discover, inspection
from lightning_protrain.commands import environment
from lightning_protrain.commands.chat_command import add_chat_options, chat
from lightning_protrain.commands.mistakes import sentence
from lightning_protrain.config import DTYPES, RaisingParser
from lightning_protrain.models import export
from lightning_protrain.models.float32_masters import to_float32

FILE_COMMANDS = ("inspect", "consolidate", "export", "merge", "chat", "env")


def file_command(arguments: Sequence[str]) -> int:
    """Run one of FILE_COMMANDS.

    Args:
        arguments: Command line, beginning with the name of the command.

    Returns:
        The exit status: 1 if an inspected checkpoint is damaged.
    """
    parser = RaisingParser(prog="lightning-protrain")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect")
    inspect.add_argument("path", type=Path, help="a checkpoint, or a folder of checkpoints")
    inspect.add_argument("--verify", action="store_true", help="read every byte and compare it with the manifest")
    consolidate = commands.add_parser("consolidate")
    consolidate.add_argument("checkpoint", type=Path, help="a checkpoint, or the folder of a run; it is verified first")
    take = "checkpoint to choose from the folder of a run; default: last"
    consolidate.add_argument("--take", choices=("last", "best"), default="last", help=take)
    consolidate.add_argument("file", type=Path, help="path of the new file")
    consolidate.add_argument("--source", type=Path, help="folder of the model with the frozen weights, if it has moved")
    float32 = "float32 weights and states of AdamW, for bf16-mixed; default: as trained"
    consolidate.add_argument("--dtype", choices=("float32",), help=float32)
    for name in ("export", "merge"):
        command = commands.add_parser(name)
        command.add_argument("checkpoint", type=Path, help="a checkpoint, a .ckpt file, or the folder of a run")
        command.add_argument("--take", choices=("last", "best"), default="last", help=take)
        command.add_argument("folder", type=Path, help="path of the new folder, which must not exist")
        command.add_argument(
            "--tokenizer", help="folder or name; default: tokenizer of the run, with its chat template"
        )
        command.add_argument(
            "--dtype", choices=DTYPES, help="dtype to cast to; float32: the masters; default: as trained"
        )
    command.add_argument("--adapter", type=Path, help="a second new folder, for the adapters alone in PEFT's format")
    talk = commands.add_parser("chat")
    add_chat_options(talk)
    talk.add_argument("--take", choices=("last", "best"), default="last", help=take)
    commands.add_parser("env")
    options = parser.parse_args(arguments)
    if options.command == "env":
        sys.stdout.write(f"{environment.describe()}\n")
        return 0
    if options.command == "chat":
        chat(options)
        return 0
    name = "path" if options.command == "inspect" else "checkpoint"
    folder: Path = discover.pointed(getattr(options, name)) or getattr(options, name)
    setattr(options, name, folder)
    if options.command not in ("export", "merge") and folder.is_file():
        parser.error(
            f"{folder} is a file, but `{options.command}` reads folders of ProTrainCheckpoint. Any Trainer can resume "
            "from a .ckpt file, and `export` and `merge` can read it."
        )
    try:
        if hasattr(options, "take"):
            options.checkpoint = discover.checkpoint_at(options.checkpoint, options.take)
        if options.command == "consolidate":
            convert = None if options.dtype is None else to_float32
            consolidation.consolidate(options.checkpoint, options.file, source=options.source, convert=convert)
            _say_written(options.checkpoint, options.file)
            return 0
        if options.command == "export":
            export.export(options.checkpoint, options.folder, options.tokenizer, options.dtype)
            _say_written(options.checkpoint, options.folder)
            return 0
        if options.command == "merge":
            export.merge(options.checkpoint, options.folder, options.tokenizer, options.dtype, options.adapter)
            _say_written(options.checkpoint, options.folder, options.adapter)
            return 0
        text, good = inspection.inspect(options.path, options.verify)
    except (ValueError, OSError, SafetensorError) as error:
        parser.error(sentence(error))
    sys.stdout.write(f"{text}\n")
    return 0 if good else 1


def _say_written(source: Path, *targets: Path | None) -> None:
    for target in targets:
        if target is not None:
            files = sorted(target.iterdir()) if target.is_dir() else [target]
            size = sum(file.stat().st_size for file in files) / 1e9
            names = f": {', '.join(file.name for file in files)}" if target.is_dir() else ""
            sys.stdout.write(f"Wrote {target}, {size:.3f} GB, from {source}{names}\n")
