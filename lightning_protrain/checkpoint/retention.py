"""Remove what is no longer wanted, and what an interrupted save has left."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from lightning_protrain.checkpoint.discovery import Listing, find, line_of
from lightning_protrain.checkpoint.files import Files
from lightning_protrain.checkpoint.locks import RunLock
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
    """Clear away what interrupted saves and removals of `run` have left; only who holds the lock of the run may.

    A checkpoint under its `.old` name whose successor was never published gets its name back. What the disk does not
    let go is named in a warning, and tried again next time.

    Returns:
        Names of what was cleared away or put back.

    Raises:
        OSError: The folder cannot be read.
    """
    done = []
    for entry, reserved in sorted(_remains(root, run)):
        try:
            _clear(root, entry, reserved, run, files)
            done.append(entry)
        except OSError as error:
            warnings.warn(
                f"What an interrupted save or removal left in {root / entry} could not be removed: {error}. The next "
                "save tries again.",
                stacklevel=2,
            )
    if done:
        files.sync_directory(root)
    return done


def leftovers(root: Path) -> list[tuple[Path, str, int]]:
    """Return what interrupted saves and removals have left in `root`: path, mark of its run, size in bytes.

    A save that goes on at this moment looks the same. A checkpoint under its `.old` name whose successor was never
    published is a checkpoint, and not among them.
    """
    found = []
    for entry in sorted(os.listdir(root)):
        reserved = parse_reserved(entry)
        if reserved is not None and (reserved.state != "old" or os.path.lexists(root / reserved.name)):
            found.append((root / entry, reserved.run_mark, _nbytes(root / entry)))
    return found


def prune(root: Path, files: Files, dry_run: bool = False) -> tuple[list[str], bool]:
    """Remove the checkpoints that no run continues from, and what interrupted saves and removals have left.

    Args:
        root: The folder of the checkpoints.
        files: What writes.
        dry_run: Whether it is only said what would be removed.

    Returns:
        One line for each, and whether all of them could be removed.

    Raises:
        ValueError: There is no checkpoint, or a process is writing one of the runs.
        OSError: The folder cannot be read.
    """
    listing = find(root)
    if not listing.found:
        raise ValueError(f"{root} holds no checkpoint of ProTrainCheckpoint: there is nothing to prune.")
    lines, good = [], True
    for run in sorted({each.manifest.run for each in listing.found}):
        of_run = [each for each in listing.found if each.manifest.run == run]
        line = line_of(Listing(tuple(of_run)))
        gone = [
            (each.path, "the newest checkpoint of its run does not continue from it", _nbytes(each.path))
            for each in of_run
            if each not in line
        ]
        gone += [
            (path, "left by an interrupted save or removal", nbytes)
            for path, mark, nbytes in leftovers(root)
            if mark == run_mark(run)
        ]
        with nullcontext() if dry_run else RunLock(root, run, files):
            files.sync_directory(root)  # What has taken the place of an `.old` one may not be on the disk yet.
            for path, why, nbytes in gone:
                try:
                    if not dry_run:
                        retire(path, run, files)
                except OSError as error:
                    lines.append(f"{path.name}: could not be removed: {error}")
                    good = False
                else:
                    done = "would be removed" if dry_run else "removed"
                    lines.append(f"{path.name}: {done}, {nbytes / 1e9:.3f} GB; {why}")
    return lines, good


def _clear(root: Path, entry: str, reserved: Reserved, run: str, files: Files) -> None:
    path, target = root / entry, root / reserved.name
    if reserved.state == "old" and not os.path.lexists(target):
        files.rename(path, target)
    elif reserved.state == "old":
        files.sync_directory(root)  # The successor's name may not be on the disk yet.
        retire(path, run, files)
    else:
        erase(path, files)


def _nbytes(path: Path) -> int:
    return sum(each.lstat().st_size for each in [path, *path.rglob("*")] if not each.is_dir())


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
