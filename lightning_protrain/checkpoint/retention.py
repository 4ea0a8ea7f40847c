"""Removes what is no longer wanted, and what an interrupted save has left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lightning_protrain.checkpoint.files import Files
from lightning_protrain.checkpoint.manifest import MANIFEST
from lightning_protrain.checkpoint.names import Reserved, parse_reserved, reserved_name, run_mark


def retire(path: Path, run: str, files: Files) -> None:
    """Removes a checkpoint: it is under its name and whole, or not there at all, whenever the power is cut.

    Raises:
        OSError: The disk; what is left has no name of a checkpoint any more, or all is as it was.
    """
    reserved = parse_reserved(path.name)
    removed = path.parent / reserved_name(reserved.name if reserved else path.name, run, "removed")
    files.rename(path, removed)
    files.sync_directory(path.parent)
    erase(removed, files)


def erase(path: Path, files: Files) -> None:
    """Removes a file, a link, or the folder of a checkpoint, its manifest first; follows no link.

    Raises:
        OSError: The disk.
    """
    if path.is_dir() and not path.is_symlink():
        _remove_tree(path, files)
    else:
        files.remove(path)


def sweep(root: Path, run: str, files: Files) -> list[str]:
    """Clears away what interrupted saves and removals of `run` have left; only who holds the lock of the run may.

    A checkpoint under its `.old` name whose successor was never published gets its name back.

    Returns:
        Names of what was cleared away or put back.

    Raises:
        OSError: The disk.
    """
    done = []
    for entry, reserved in sorted(_remains(root, run)):
        path, target = root / entry, root / reserved.name
        if reserved.state == "old" and not os.path.lexists(target):
            files.rename(path, target)
        elif reserved.state == "old":
            files.sync_directory(root)  # The successor's name may not be on the disk yet.
            retire(path, run, files)
        else:
            erase(path, files)
        done.append(entry)
    if done:
        files.sync_directory(root)
    return done


def _remains(root: Path, run: str) -> Iterator[tuple[str, Reserved]]:
    mark = run_mark(run)
    for entry in os.listdir(root):
        reserved = parse_reserved(entry)
        if reserved is not None and reserved.run_mark == mark:
            yield entry, reserved


def _remove_tree(folder: Path, files: Files) -> None:
    names = sorted(os.listdir(folder), key=lambda name: (name != MANIFEST, name))
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            _remove_tree(path, files)
            continue
        files.remove(path)
        if name == MANIFEST:
            files.sync_directory(folder)
    files.remove_directory(folder)
