"""Commands on files alone, which need no model and no config: `lightning-protrain inspect`, `export`, and more."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from lightning_protrain.checkpoint import atomic, consolidation, discover, inspection, rank_state
from lightning_protrain.checkpoint.atomic import Files
from lightning_protrain.commands import environment
from lightning_protrain.commands.mistakes import sentence
from lightning_protrain.config import RaisingParser
from lightning_protrain.models import export
from lightning_protrain_command import COMMANDS

FILE_COMMANDS = ("inspect", "prune", "consolidate", "reshard", "export", "merge", "env")


def file_command(arguments: Sequence[str]) -> int:
    """Run a command that reads files only, without a model and a config.

    Args:
        arguments: Command line of one of FILE_COMMANDS, beginning with its name.

    Returns:
        The exit status: 1 if an inspected checkpoint is damaged.
    """
    parser = RaisingParser(prog="lightning-protrain")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help=COMMANDS["inspect"])
    inspect.add_argument("path", type=Path, help="a checkpoint, or the folder they are in")
    inspect.add_argument("--verify", action="store_true", help="read every byte and hold it against the manifest")
    prune = commands.add_parser("prune", help=COMMANDS["prune"])
    prune.add_argument("path", type=Path, help="the folder that the checkpoints are in")
    prune.add_argument("--dry_run", action="store_true", help="only say what would be removed")
    consolidate = commands.add_parser("consolidate", help=COMMANDS["consolidate"])
    consolidate.add_argument("checkpoint", type=Path, help="a checkpoint, or the folder of a run; it is verified first")
    consolidate.add_argument("--take", choices=("last", "best"), default="last", help="of a run's folder; the last one")
    consolidate.add_argument("file", type=Path, help="its new name, as one file")
    consolidate.add_argument("--source", type=Path, help="the model whose frozen weights it only refers to")
    reshard = commands.add_parser("reshard", help=COMMANDS["reshard"])
    reshard.add_argument("checkpoint", type=Path, help="it is verified first")
    reshard.add_argument("folder", type=Path, help="the new one, not beside it")
    reshard.add_argument("--ranks", type=int, required=True, help="how many")
    for name in ("export", "merge"):
        command = commands.add_parser(name, help=COMMANDS[name])
        command.add_argument("checkpoint", type=Path, help="a checkpoint, a stock .ckpt file, or the folder of a run")
        command.add_argument("--take", choices=("last", "best"), default="last", help="of a run's folder; the last one")
        command.add_argument("folder", type=Path, help="to be made; it must not exist")
        command.add_argument("--tokenizer", help="folder or name; that of the pretrained model, if there is one")
        command.add_argument("--dtype", choices=export.DTYPES, help="to cast to; as trained if it is not given")
    command.add_argument("--adapter", type=Path, help="a second folder, for the adapters alone as PEFT reads them")
    commands.add_parser("env", help=COMMANDS["env"])
    given = parser.parse_args(arguments)
    if given.command == "env":
        sys.stdout.write(f"{environment.describe()}\n")
        return 0
    folder = given.path if given.command in ("inspect", "prune") else given.checkpoint
    if given.command not in ("export", "merge") and folder.is_file():
        parser.error(
            f"{folder} is one file, `{given.command}` reads folders of ProTrainCheckpoint. A stock .ckpt file needs "
            "nothing done to it: any Trainer resumes from it, and `export` and `merge` read it."
        )
    try:
        if hasattr(given, "take"):
            given.checkpoint = discover.checkpoint_at(given.checkpoint, given.take)
        if given.command == "consolidate":
            consolidation.consolidate(given.checkpoint, given.file, source=given.source)
            _say_written(given.checkpoint, given.file)
            return 0
        if given.command == "reshard":
            rank_state.reshard_folder(given.checkpoint, given.folder, given.ranks)
            return 0
        if given.command == "export":
            export.export(given.checkpoint, given.folder, given.tokenizer, given.dtype)
            _say_written(given.checkpoint, given.folder)
            return 0
        if given.command == "merge":
            export.merge(given.checkpoint, given.folder, given.tokenizer, given.dtype, given.adapter)
            _say_written(given.checkpoint, given.folder, given.adapter)
            return 0
        if given.command == "prune":
            lines, good = atomic.prune(given.path, Files(), given.dry_run)
            sys.stdout.write("\n".join(lines or [f"There is nothing to prune in {given.path}."]) + "\n")
            return 0 if good else 1
        text, good = inspection.inspect(given.path, given.verify)
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
