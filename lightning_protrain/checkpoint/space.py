"""Refuses a folder that cannot be written to, and a disk that is too full, before anything is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from lightning_protrain.checkpoint.files import Files
from lightning_protrain.checkpoint.names import reserved_name

# What a checkpoint takes besides its content: folder, manifest, and the file system's own books.
RESERVE_BYTES = 64 << 10


def check_writable(root: Path, run: str, files: Files) -> None:
    """Makes the folder if it is not there, and proves that a checkpoint can be staged in it.

    Raises:
        ValueError: It cannot.
    """
    probe = root / reserved_name("probe", run, "staged")
    try:
        root.mkdir(parents=True, exist_ok=True)
        files.make_directory(probe)
        files.remove_directory(probe)
    except OSError as error:
        raise ValueError(
            f"Checkpoints cannot be written to {root}: {error.strerror}. Give a folder that this process may write to."
        ) from error


def check_space(root: Path, needed: int) -> None:
    """Whether `needed` bytes more fit on the disk of `root`.

    Raises:
        OSError: They do not (ENOSPC), with the numbers.
    """
    free = free_bytes(root)
    if free < needed + RESERVE_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"A checkpoint of {in_gib(needed)} is to be written, the disk has {in_gib(free)} free. Nothing was "
            "written, the checkpoints that are there are untouched. Make room, or keep fewer (`save_top_k`)",
            str(root),
        )


def free_bytes(root: Path) -> int:
    """What this process may still write to the disk of `root`."""
    disk = os.statvfs(root)
    return disk.f_bavail * disk.f_frsize


def in_gib(size: int) -> str:
    """For messages."""
    return f"{size / (1 << 30):.3f} GiB ({size} bytes)"
