"""Writes a checkpoint as one stock file, and writes and loads stock files as safely as checkpoints."""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_protrain.checkpoint.atomic import DraftFile, Files
from lightning_protrain.checkpoint.manifest import check_name, check_run, reserved_name
from lightning_protrain.checkpoint.references import fill
from lightning_protrain.checkpoint.serialize import files_for, join
from lightning_protrain.checkpoint.verification import Fault, read_manifest, verify
from lightning_protrain.config import format_bytes
from lightning_protrain.progress import waiting


@waiting("Reading a checkpoint")
def load_folder(folder: Path, map_location: Any = None, keep: bool = False, rank: int | None = None) -> dict[str, Any]:
    """Return the content of a checkpoint after checking every byte of it; the arguments are those of `join`.

    Raises:
        ValueError: If the checkpoint is not good; the message names the files.
    """
    faults = verify(folder) if rank is None else verify_rank(folder, rank)
    if faults:
        raise ValueError(f"{folder} is not a good checkpoint: {'; '.join(map(str, faults))}")
    return join(folder, map_location, keep, rank)


def verify_rank(folder: Path, rank: int) -> list[Fault]:
    """Return the faults of the files that a rank reads (see `files_for`); every byte of them is checked."""
    try:
        names = read_manifest(folder).files
    except ValueError:
        return verify(folder)
    return verify(folder, files_for(names, rank))


@waiting("Writing one file")
def consolidate(folder: Path, target: Path, files: Files | None = None, source: Path | None = None) -> None:
    """Write a checkpoint as a stock file that any Trainer can resume from.

    Args:
        folder: The checkpoint; it is verified before anything is written.
        target: The file, by convention with the suffix `.ckpt`; an existing file is replaced as a whole.
        files: File system to write with.
        source: Folder of the model whose frozen weights the checkpoint refers to; None means where they were loaded
            from.

    Raises:
        ValueError: If the checkpoint is not good, the target is a folder, or the source is gone or has other weights.
        OSError: If the disk fails.
    """
    content = load_folder(folder)
    fill(content, str(folder), source)
    write_stock(content, target, files or Files())


def write_stock(content: dict[str, Any], target: Path, files: Files, run: str = "stock") -> None:
    """Write with `torch.save` to a new file that takes the target's name once it is on the disk.

    Raises:
        ValueError: If the target is a folder, or its name is not allowed.
        OSError: If the disk fails; then `target` is as it was.
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
            torch.save(content, file)  # type: ignore[arg-type]  # it asks for no more than write and flush
            file.finish()
        finally:
            files.close(descriptor)
        files.rename(staged, target)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(staged)
        raise
    files.sync_directory(target.parent)


def load_stock(path: Path, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """Load a file of `torch.save`, after checking the checksums in its archive.

    Args:
        path: The file.
        map_location: As in `torch.load`.
        weights_only: False executes code that the file contains; None means True.

    Raises:
        ValueError: If the file is torn or changed, or holds more than weights and plain values.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
            if broken is not None:
                raise ValueError(f"{path} was changed after it was written: the checksum of {broken} does not fit.")
        return torch.load(path, map_location=map_location, weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than weights and plain values, or is no checkpoint. If you trust who made it, load it "
            f"with weights_only=False, which executes its code. ({str(error).partition(chr(10))[0][:300]})"
        ) from error
    except (RuntimeError, EOFError, KeyError, zipfile.BadZipFile, OSError) as error:
        if not os.path.lexists(path):
            raise
        size = f" ({format_bytes(path.stat().st_size)})" if path.is_file() else ""
        raise ValueError(
            f"{path} is cut short, or no checkpoint{size}. Take an earlier one, or copy it again."
        ) from error
