"""Atomic, durable writes of checkpoint folders; locks, free disk space and removal.

A power cut may lose file content that was not synced with `sync`, and names (new, renamed, removed) whose folder was
not synced with `sync_directory`. Changes that were not synced may reach the disk in part, as zeros, or out of order;
only a rename is atomic. So a save takes these steps:

1. Make a folder beside the target, with a `.staged` name ([Note: States] in manifest.py).
2. Create and write each file once. Compute its digest and start writing it to the disk at the same time.
3. Write the manifest last. Sync all files together, so that a journaling file system can commit them at once. Then sync
   the folder and its parent.
4. If a checkpoint has the target's name, rename it to its `.old` name and sync the parent.
5. Rename the new folder to the target and sync the parent. The checkpoint is published: the save has succeeded.
6. Remove the replaced checkpoint, its manifest first. An error in this step does not fail the save.

After a crash between steps 4 and 5, the old checkpoint is still found by its `.old` name, and `sweep` renames it back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import warnings
from collections.abc import Collection, Iterator
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

import psutil

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from lightning_protrain.checkpoint.discover import ASIDE, find_checkpoints, pointed
from lightning_protrain.checkpoint.manifest import (
    DEFAULT,
    MANIFEST,
    STATE,
    Digest,
    FileEntry,
    Manifest,
    Reserved,
    check_file,
    check_name,
    check_run,
    is_remains,
    parse_reserved,
    reserved_name,
    run_mark,
)
from lightning_protrain.checkpoint.verification import REGULAR
from lightning_protrain.config import format_bytes

# Errors of file systems that cannot sync a folder. They are ignored.
NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})


class Files:
    """File system calls of checkpoints; tests replace this class to count, record or fail calls."""

    def make_directory(self, path: Path) -> None:
        """Make a new, empty folder; raise FileExistsError if `path` exists."""
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Create a file and return its descriptor; raise FileExistsError if `path` exists, even as a link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | REGULAR, 0o666)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write all of `data`, repeating the system call after a partial write."""
        while data.nbytes:
            data = data[os.write(descriptor, data) :]

    def start_sync(self, descriptor: int, begin: int, size: int) -> None:
        """Advise the system to write a range of bytes to the disk now and drop it from the page cache."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # Not supported by every file system.
                os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)

    def sync(self, descriptor: int) -> None:
        """Sync the file to the disk. Do not retry after an error: the kernel may have dropped the data."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the descriptor without a sync."""
        os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Sync the names in the folder to the disk."""
        if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders.
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename within one folder. A file at `target` is replaced; a folder that is not empty is an error."""
        os.rename(source, target)

    def link(self, name: str, path: Path) -> None:
        """Make `path` a symbolic link to `name` in the same folder; raise FileExistsError if `path` exists."""
        os.symlink(name, path)

    def remove(self, path: Path) -> None:
        """Remove a file or a link."""
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)


# Bytes on disk that a checkpoint takes besides its content: folder, manifest, and metadata of the file system.
RESERVE_BYTES = 64 << 10


def check_writable(root: Path, run: str, files: Files) -> None:
    """Make `root` if it does not exist, and check that a folder can be made in it.

    Raises:
        ValueError: If the folder cannot be written to.
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
    """Raise OSError (ENOSPC) if the disk of `root` has less than `needed` bytes and a small reserve free."""
    free = free_bytes(root)
    if free < needed + RESERVE_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"Beside a reserve of {format_bytes(RESERVE_BYTES)}, the checkpoint needs {format_bytes(needed)}, but the "
            f"disk has {format_bytes(free)} free. Nothing was written, and earlier checkpoints are unchanged. Free "
            "disk space, or keep fewer checkpoints (`save_top_k`)",
            str(root),
        )


def free_bytes(root: Path) -> int:
    """Return the free bytes on the disk of `root` that this process may use."""
    return int(psutil.disk_usage(str(root)).free)


class RunLock:
    """A lock file that lets one process at a time write a run, held from `take` to `release` or in a `with` block.

    The operating system frees the lock when the process ends, also if it is killed. Forked children do not hold it. The
    file names the process that holds the lock.

    Args:
        root: Folder of the checkpoints.
        run: Name of the run.
    """

    def __init__(self, root: Path, run: str) -> None:
        self.path = root / f".{check_run(run)}.lock"
        self._run = run
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take the lock; warn if the file system has no locks.

        Raises:
            ValueError: If another process holds the run; the message names the process.
            OSError: If the disk fails.
        """
        assert self._descriptor is None
        while self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | REGULAR, 0o666)
            try:
                if self._lock(descriptor):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        register_after_fork(self, RunLock._close)  # keeps only a weak reference to this object

    def _lock(self, descriptor: int) -> bool:
        """Lock the open file; return False if its holder has removed it meanwhile."""
        if fcntl is None:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 1000).decode(errors="replace") or "another process"
            raise ValueError(
                f"Run {self._run!r} in {self.path.parent} is being written by {owner}. Give this run another name or "
                "folder, or wait until that process ends."
            ) from error
        except OSError as error:
            warnings.warn(
                f"{self.path.parent} is on a file system without locks ({error.strerror}): make sure that no other "
                f"process writes run {self._run!r}.",
                stacklevel=2,
            )
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock if this object holds it."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> RunLock:
        self.take()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def retire(path: Path, run: str, files: Files) -> None:
    """Remove a checkpoint atomically, and links to it: it is renamed to its `.removed` name first.

    Raises:
        OSError: If the disk fails; the checkpoint is unchanged, or has its `.removed` name.
    """
    _unlink(path, files)
    reserved = parse_reserved(path.name)
    removed = path.parent / reserved_name(reserved.name if reserved else path.name, run, "removed")
    files.rename(path, removed)
    files.sync_directory(path.parent)
    erase(removed, files)


def set_aside(root: Path, run: str, later: Collection[str], files: Files) -> list[str]:
    """Rename checkpoints that their run does not continue, newest first, see [Note: Order] in manifest.py.

    Args:
        root: Folder of the checkpoints; the caller holds the lock of the run.
        run: Name of the run.
        later: Identities of the checkpoints.
        files: File system to write with.

    Returns:
        The new names.

    Raises:
        OSError: If the disk fails.
    """
    names = []
    for checkpoint in find_checkpoints(root, run).found:
        if checkpoint.manifest.identity in later:
            _unlink(checkpoint.path, files)
            aside = free_path(checkpoint.path.with_name(checkpoint.path.name.removesuffix(".ckpt") + ASIDE))
            files.rename(checkpoint.path, aside)
            names.append(aside.name)
    if names:
        files.sync_directory(root)
    return names


def free_path(path: Path, joined: str = "-", version: int = 1) -> Path:
    """Return `path` if nothing exists there, or the first unused path with a version, such as `name-v1.ckpt`."""
    free = path
    while os.path.lexists(free):
        free = path.with_name(f"{path.stem}{joined}v{version}{path.suffix}")
        version += 1
    return free


# Links to checkpoints of a run; its prefix may precede these names.
LINKS = ("last", "best")


def point(path: Path, target: Path | None, run: str, files: Files) -> None:
    """Make `path` a symbolic link to a checkpoint, atomically, or a text file if the file system has no links.

    Args:
        path: The link; `pointed` reads it.
        target: A checkpoint in the same folder; None removes the link.
        run: Name of the run.
        files: File system to write with.

    Raises:
        ValueError: If `path` exists and is not such a link.
        OSError: If the disk fails.
    """
    exists = os.path.lexists(path)
    if exists and pointed(path) is None:
        raise ValueError(f"{path} is not updated, because it is not a link of a run. Rename it to get that link.")
    if target is None:
        if exists:
            files.remove(path)
        return
    if pointed(path) == target:
        return
    staged = path.with_name(reserved_name(path.name, run, "staged"))
    try:
        try:
            files.link(target.name, staged)
        except OSError:
            descriptor = files.create(staged)
            try:
                files.write(descriptor, memoryview(f"{target.name}\n".encode()))
                files.sync(descriptor)
            finally:
                files.close(descriptor)
        files.rename(staged, path)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(staged)
        raise
    files.sync_directory(path.parent)


def _unlink(checkpoint: Path, files: Files) -> None:
    for entry in sorted(os.listdir(checkpoint.parent)):
        if entry.endswith(LINKS) and pointed(checkpoint.parent / entry) == checkpoint:
            files.remove(checkpoint.parent / entry)


def erase(path: Path, files: Files) -> None:
    """Remove a file, a link, or a checkpoint folder, its manifest first; do not follow links.

    Raises:
        OSError: If the disk fails.
    """
    if path.is_dir() and not path.is_symlink():
        _remove_tree(path, files)
    else:
        files.remove(path)


def sweep(root: Path, run: str, files: Files) -> list[str]:
    """Remove files of interrupted saves and removals of `run`; the caller must hold the lock of the run.

    A checkpoint with an `.old` name is renamed back if its replacement was not published. Warn of files that cannot be
    removed; the next save tries again.

    Returns:
        Names that were removed or renamed back.

    Raises:
        OSError: If the folder cannot be read.
    """
    done, mark = [], run_mark(run)
    for entry in sorted(os.listdir(root)):
        reserved = parse_reserved(entry)
        if reserved is None or reserved.run_mark != mark:
            continue
        try:
            _clear(root, entry, reserved, run, files)
            done.append(entry)
        except OSError as error:
            warnings.warn(
                f"Could not remove {root / entry}, left by an interrupted save or removal: {error}. The next save will "
                "try again.",
                stacklevel=2,
            )
    if done:
        files.sync_directory(root)
    return done


def _clear(root: Path, entry: str, reserved: Reserved, run: str, files: Files) -> None:
    path, target = root / entry, root / reserved.name
    if reserved.state == "old" and not os.path.lexists(target):
        files.rename(path, target)
    elif reserved.state == "old":
        files.sync_directory(root)  # The replacement's name may not be durable yet.
        retire(path, run, files)
    else:
        erase(path, files)


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


# Bytes of one write. Each piece is digested just before, so that it is written from the processor's cache.
PIECE = 4 << 20


class DraftFile:
    """A writable file of a draft that buffers small writes and computes the digest.

    Args:
        files: File system to write with.
        descriptor: Descriptor of the new file.
        algorithm: Digest algorithm, see `Digest`.
    """

    def __init__(self, files: Files, descriptor: int, algorithm: str = DEFAULT) -> None:
        self._files = files
        self._descriptor = descriptor
        self._digest = Digest(algorithm)
        self._pending = bytearray()
        self._size = 0

    def write(self, data: Any) -> int:
        """Write a bytes-like object and return its size in bytes."""
        view = memoryview(data).cast("B")
        if len(self._pending) + view.nbytes < PIECE:
            self._pending += view
            return view.nbytes
        self.flush()
        for start in range(0, view.nbytes, PIECE):
            self._put(view[start : start + PIECE])
        return view.nbytes

    def flush(self) -> None:
        """Write the buffered bytes to the file."""
        if self._pending:
            self._put(memoryview(self._pending))
            self._pending = bytearray()

    def end(self) -> FileEntry:
        """Finish the file without a sync."""
        self.flush()
        return FileEntry(self._size, str(self._digest))

    def _put(self, piece: memoryview) -> None:
        self._digest.update(piece)
        self._files.write(self._descriptor, piece)
        self._files.start_sync(self._descriptor, self._size, piece.nbytes)
        self._size += piece.nbytes


class Draft:
    """A checkpoint that is being written, in the steps that the module's docstring lists.

    Args:
        folder: Existing folder with a `.staged` name.
        target: Final path of the checkpoint, in the same parent folder.
        run: Name of the run that writes the checkpoint.
        files: File system to write with.
        digest: Digest algorithm, see `Digest`.
    """

    def __init__(self, folder: Path, target: Path, run: str, files: Files, digest: str = DEFAULT) -> None:
        Digest(digest)
        self.folder = folder
        self.target = target
        self.run = run
        self.identity = secrets.token_hex(8)
        self.entries: dict[str, FileEntry] = {}
        self._files = files
        self._digest = digest
        # Descriptors of files that are not synced yet.
        self._open: list[int] = []

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[DraftFile]:
        """Create a file of the checkpoint; add it to `entries` when the `with` block ends."""
        assert name not in {MANIFEST, *self.entries}
        file = self._create(check_file(name))
        yield file
        self.entries[name] = file.end()

    def publish(self, manifest: Manifest) -> None:
        """Publish the draft as `target`. On an error, a checkpoint that had this name before is kept.

        Raises:
            ValueError: If `target` exists and is not a checkpoint.
            OSError: If the disk fails.
        """
        refuse_foreign(self.target)
        parent = self.target.parent
        self._seal(manifest)
        self._files.sync_directory(self.folder)
        if not os.path.lexists(self.target):
            self._files.rename(self.folder, self.target)
            self._files.sync_directory(parent)
            return
        self._files.sync_directory(parent)
        old = parent / reserved_name(self.target.name, self.run, "old")
        self._files.rename(self.target, old)
        try:
            self._files.sync_directory(parent)
            self._files.rename(self.folder, self.target)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.rename(old, self.target)
                self._files.sync_directory(parent)
            raise
        self._files.sync_directory(parent)
        with contextlib.suppress(OSError):  # The save has succeeded; `sweep` removes the old checkpoint later.
            retire(old, self.run, self._files)

    def discard(self) -> None:
        """Remove the draft; `sweep` removes later what cannot be removed now."""
        self._close()
        with contextlib.suppress(OSError):
            erase(self.folder, self._files)

    def _seal(self, manifest: Manifest) -> None:
        file = self._create(MANIFEST)
        file.write(manifest.to_text().encode())
        file.end()
        for descriptor in self._open:
            self._files.sync(descriptor)
        self._close()

    def _create(self, name: str) -> DraftFile:
        descriptor = self._files.create(self.folder / name)
        self._open.append(descriptor)
        return DraftFile(self._files, descriptor, self._digest)

    def _close(self) -> None:
        while self._open:
            self._files.close(self._open.pop())


@contextlib.contextmanager
def open_draft(target: Path, run: str, files: Files, digest: str = DEFAULT) -> Iterator[Draft]:
    """Open a draft for `target`; remove the draft if the `with` block raises.

    Args:
        target: Path of the new checkpoint; its parent folder exists.
        run: Name of the run.
        files: File system to write with.
        digest: Digest algorithm, see `Digest`.

    Raises:
        ValueError: If a name is not allowed, or `target` exists and is not a checkpoint.
        OSError: If the disk fails.
    """
    check_name(target.name)
    check_run(run)
    refuse_foreign(target)
    folder = target.parent / reserved_name(target.name, run, "staged")
    draft = Draft(folder, target, run, files, digest)
    files.make_directory(folder)
    try:
        yield draft
    except BaseException:
        draft.discard()
        raise
    finally:
        draft._close()


def refuse_foreign(target: Path) -> None:
    """Raise ValueError if `target` is a folder with files that is not a checkpoint: it must not be replaced."""
    if target.is_symlink() or not target.is_dir() or not any(target.iterdir()) or is_remains(target):
        return
    raise ValueError(
        f"{target} is a folder with files, but not a checkpoint: it has no {MANIFEST} and no {STATE}. Save to another "
        "name, or remove the folder."
    )
