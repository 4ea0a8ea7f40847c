"""Verification of checkpoints: reads the manifest and compares files with it; links are not followed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import reduce
from io import FileIO
from operator import or_
from pathlib import Path
from typing import NamedTuple

from lightning_protrain.checkpoint.manifest import MANIFEST, MOST_MANIFEST_BYTES, Digest, FileEntry, Manifest
from lightning_protrain.config import format_bytes
from lightning_protrain.progress import bar

# Bytes of one read. Small pieces are still in the processor's cache when they are digested.
PIECE = 1 << 20


class Fault(NamedTuple):
    """A defect of one file of a checkpoint.

    Attributes:
        file: Name of the file.
        what: Description of the defect, to follow "FILE: ".
    """

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


# Flags to open a file itself, not what a link points to, as bytes, and not in child processes.
REGULAR = reduce(or_, (getattr(os, f"O_{name}", 0) for name in ("NOFOLLOW", "CLOEXEC", "BINARY", "NOINHERIT")))


@contextmanager
def open_regular(path: Path) -> Iterator[FileIO]:
    """Open a file for reading; raise OSError if it is not a regular file (a link, a pipe or a device)."""
    descriptor = os.open(path, os.O_RDONLY | REGULAR | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield file


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint without checking other files.

    Raises:
        ValueError: If the folder has no valid manifest.
    """
    try:
        with open_regular(folder / MANIFEST) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_MANIFEST_BYTES:
                raise ValueError(
                    f"it has {format_bytes(size)}, but a manifest has at most {format_bytes(MOST_MANIFEST_BYTES)}"
                )
            return Manifest.from_text(file.read())
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: {MANIFEST}: it is missing") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: {MANIFEST}: {_reason(error)}") from error


def verify(folder: Path, only: Collection[str] | None = None) -> list[Fault]:
    """Return the faults of a checkpoint: truncated, changed, missing and unlisted files; empty if it is undamaged.

    Args:
        folder: The checkpoint.
        only: Names of the files to check; None means all.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [Fault(MANIFEST, str(error).removeprefix(f"{folder}: {MANIFEST}: "))]
    return verify_files(folder, manifest, only)


def verify_files(folder: Path, manifest: Manifest, only: Collection[str] | None = None) -> list[Fault]:
    """Return the faults of a checkpoint with this manifest; see `verify`."""
    faults = []
    checked = {name: entry for name, entry in sorted(manifest.files.items()) if only is None or name in only}
    with bar(None, "Verifying a checkpoint", sum(entry.size for entry in checked.values()), "B") as progress:
        for name, entry in checked.items():
            what = _compare(folder / name, entry, progress.update)
            if what is not None:
                faults.append(Fault(name, what))
    names = set(os.listdir(folder)) - {MANIFEST} if only is None else set(only)
    return faults + [Fault(name, "the manifest does not list it") for name in sorted(names - manifest.files.keys())]


def _compare(path: Path, entry: FileEntry, tell: Callable[[int], object] = lambda _: None) -> str | None:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.size:
                return f"it has {format_bytes(size)}, but {format_bytes(entry.size)} according to the manifest"
            digest = Digest(entry.algorithm)
            piece = memoryview(bytearray(max(min(size, PIECE), 1)))
            while count := file.readinto(piece):
                digest.update(piece[:count])
                tell(count)
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return _reason(error)
    if str(digest) != entry.digest:
        return f"its content was changed: the digest is {digest}, but {entry.digest} in the manifest"
    return None


def _reason(error: OSError | ValueError) -> str:
    if not isinstance(error, OSError):
        return str(error)
    if error.errno == errno.ELOOP:
        return "it is a link, which is not followed"
    return error.strerror or str(error)
