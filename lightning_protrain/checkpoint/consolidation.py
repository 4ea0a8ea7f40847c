"""Conversion of a checkpoint folder to one file of `torch.save`, and safe reads and writes of such files."""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from lightning_protrain.checkpoint.atomic import DraftFile, Files
from lightning_protrain.checkpoint.discover import pointed
from lightning_protrain.checkpoint.manifest import MANIFEST, check_name, check_run, is_remains, reserved_name
from lightning_protrain.checkpoint.references import fill
from lightning_protrain.checkpoint.serialize import files_for, join
from lightning_protrain.checkpoint.verification import Fault, read_manifest, verify
from lightning_protrain.config import format_bytes
from lightning_protrain.progress import waiting


@waiting("Reading a checkpoint")
def load_folder(folder: Path, map_location: Any = None, keep: bool = False, rank: int | None = None) -> dict[str, Any]:
    """Verify a checkpoint and return its content; the arguments are those of `join`.

    Raises:
        ValueError: If the folder is not a checkpoint, or a damaged one; the message names a checkpoint in it, or the
            damaged files.
    """
    checkpoint_path(folder)
    faults = verify(folder) if rank is None else verify_rank(folder, rank)
    if faults:
        raise ValueError(
            f"{folder} is a damaged checkpoint: {'; '.join(map(str, faults))}. Give another one; "
            f'ckpt_path="last" takes the newest undamaged one of a run.'
        )
    return join(folder, map_location, keep, rank)


# Files that make a folder something else than a checkpoint, with the remedy.
_OTHER_FOLDERS = {
    "adapter_config.json": "has adapters in PEFT's format, which no run resumes from: give a checkpoint of the run "
    "that has trained them",
    "config.json": "is a model, not a checkpoint of a run: give it as the `model` of CausalLMModule, and leave "
    "`ckpt_path` out",
}
# Files of checkpoints that FSDP has written in shards.
_SHARDED = (".metadata", "meta.pt")


def checkpoint_path(path: Path, sharded: bool = False) -> Path:
    """Return the path of a checkpoint; raise an error if something else is there, without reading weights.

    Args:
        path: Path of the checkpoint, or of a link to it.
        sharded: True accepts the folders of FSDP, too.

    Raises:
        FileNotFoundError: If nothing is there; the message names a similar path.
        ValueError: If a folder is something else; the message names checkpoints in it.
    """
    path = pointed(path) or path
    if not os.path.lexists(path):
        raise FileNotFoundError(f"Checkpoint file not found: {path}{_similar(path)}")
    if not path.is_dir() or is_remains(path) or (sharded and any((path / name).exists() for name in _SHARDED)):
        return path
    for name, remedy in _OTHER_FOLDERS.items():
        if (path / name).is_file():
            raise ValueError(f"{path} {remedy}.")
    patterns = ("*.ckpt", f"*/{MANIFEST}", "*/*.ckpt", f"*/*/{MANIFEST}")
    inside = [file for pattern in patterns for file in path.glob(pattern) if file.is_file()]
    newest = max((file for file in inside if not file.parent.is_symlink()), key=os.path.getmtime, default=None)
    if newest is not None and newest.name == MANIFEST:
        newest = newest.parent
    hint = " Give the folder of a run, or one of its checkpoints."
    hint = hint if newest is None else f" Give one of the checkpoints in it, such as {newest}."
    raise ValueError(f"{path} is a folder without {MANIFEST}: not a checkpoint of lightning_protrain.{hint}")


def _similar(path: Path) -> str:
    """Return the end of a sentence that suggests a path like `path`, which does not exist."""
    missing = next((parent for parent in reversed(path.parents) if not parent.exists()), path)
    beside = os.listdir(missing.parent) if missing.parent.is_dir() else []
    similar = [missing.with_name(name) / path.relative_to(missing) for name in get_close_matches(missing.name, beside)]
    return next((f"; did you mean {parent}?" for parent in similar if parent.exists()), ".")


def verify_rank(folder: Path, rank: int) -> list[Fault]:
    """Verify the files that a rank reads (see `files_for`), and return their faults."""
    try:
        names = read_manifest(folder).files
    except ValueError:
        return verify(folder)
    return verify(folder, files_for(names, rank))


@waiting("Writing one file")
def consolidate(
    folder: Path,
    target: Path,
    files: Files | None = None,
    source: Path | None = None,
    convert: Callable[[dict[str, Any], str], None] | None = None,
) -> None:
    """Write a checkpoint as one file of `torch.save` that any Trainer can resume from.

    Args:
        folder: The checkpoint; it is verified before anything is written.
        target: Path of the file, by convention with the suffix `.ckpt`; an existing file is replaced atomically.
        files: File system to write with.
        source: Folder with the frozen weights that the checkpoint refers to; None means the recorded folder.
        convert: Called with the content, which it may change, and the checkpoint's name; None: change nothing.

    Raises:
        ValueError: If the checkpoint is damaged, the target is a folder, or the source is missing or has other
            weights.
        OSError: If there is no checkpoint, or the disk fails.
    """
    folder.stat()  # Raises FileNotFoundError.
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    content = load_folder(folder)
    fill(content, str(folder), source)
    if convert is not None:
        convert(content, str(folder))
    write_stock(content, target, files or Files())


def write_stock(content: dict[str, Any], target: Path, files: Files, run: str = "stock") -> None:
    """Write a file with `torch.save`, atomically and durably.

    Raises:
        ValueError: If the target is a folder, or its name is not allowed.
        OSError: If the disk fails. `target` is unchanged, unless only the sync of its folder failed.
    """
    check_name(target.name)
    check_run(run)
    if target.is_dir():
        raise ValueError(f"{target} is a folder: give the name of a file.")
    staged = target.parent / reserved_name(target.name, run, "staged")
    descriptor = files.create(staged)
    try:
        try:
            file = DraftFile(files, descriptor)
            torch.save(content, file)  # type: ignore[arg-type]  # it only calls write and flush
            file.end()
            files.sync(descriptor)
        finally:
            files.close(descriptor)
        files.rename(staged, target)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(staged)
        raise
    files.sync_directory(target.parent)


def _is_pickled(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) in (b"P", b"\x80")  # A zip archive, or a pickle.


def load_stock(path: Path, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """Load a file of `torch.save` after verifying the checksums of its zip archive.

    Args:
        path: The file.
        map_location: As in `torch.load`.
        weights_only: False executes code that the file contains; None means True.

    Raises:
        ValueError: If the file is truncated or changed, or has content that `weights_only=True` refuses.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
            if broken is not None:
                raise ValueError(f"{path} was changed after it was written: the checksum of {broken} does not match.")
        return torch.load(path, map_location=map_location, weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        if not _is_pickled(path):
            raise ValueError(
                f"{path} is not a checkpoint. Give the folder of a checkpoint, or a .ckpt file of a Trainer."
            ) from error
        reason = " ".join(str(error).rpartition("WeightsUnpickler error:")[2].split()).partition(". ")[0]
        raise ValueError(
            f"{path} holds more than weights and plain values, or is not a checkpoint. If you trust it, load it with "
            f"weights_only=False, which executes its code. ({reason})"
        ) from error
    except (RuntimeError, EOFError, KeyError, zipfile.BadZipFile, OSError) as error:
        if not os.path.lexists(path):
            raise
        size = f" ({format_bytes(path.stat().st_size)})" if path.is_file() else ""
        raise ValueError(
            f"{path}{size} is truncated, or not a checkpoint. Use an earlier checkpoint, or copy the file again."
        ) from error
