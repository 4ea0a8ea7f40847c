"""Writes a checkpoint beside its name and publishes it as a whole; locks, free space and removal.

Writes become durable in two steps. Written bytes are in the page cache until `sync`. A new, renamed or removed name is
only there until `sync_directory` of its folder. After a power cut the disk has everything that was synced. All other
changes may be there whole, in part, as zeros, or out of order; only a rename is atomic by itself. A killed process
loses nothing that it has written. So a folder is published in this order: sync every file, sync the folder, rename the
folder, sync its parent.

A save takes these steps:

1. A folder with a name of [Note: States] is made beside the target. TMPDIR, links and locks play no part.
2. Each file is created, never opened, and written once. Each file is digested while it is written, and the system
   starts to write it to the disk at once.
3. The manifest is the last file. When it is written, all files are synced, so that a journal may commit them together.
   Then the folder and the folder's own name are synced.
4. If the target's name is in use, its folder is renamed to its `.old` name, and that is synced. Both are whole now.
5. The new folder is renamed to the target, and that is synced. The checkpoint is published: the save has succeeded.
6. The replaced checkpoint is removed, its manifest first. A failure after step 5 is no error of the save.

A crash between steps 4 and 5 leaves the old checkpoint under its `.old` name, where it is found and where `sweep` puts
it back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from lightning_protrain.checkpoint.discover import Listing, find_checkpoints, lineage_of
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
from lightning_protrain.checkpoint.verification import open_regular
from lightning_protrain.config import format_bytes

# Errors with which a file system answers that it cannot sync a folder; then there is nothing else to do.
NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})


class Files:
    """The file system as checkpoints use it; tests replace it by one that counts, fails or records."""

    def make_directory(self, path: Path) -> None:
        """Make a new, empty folder; raise FileExistsError if there is anything of that name."""
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Create an empty file and open it for writing.

        Raise FileExistsError if there is anything of that name, even a link.
        """
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write all of `data`, a view of bytes, in as many system calls as it takes."""
        while data.nbytes:
            data = data[os.write(descriptor, data) :]

    def start_sync(self, descriptor: int, begin: int, size: int) -> None:
        """Advise the system to start writing these bytes to the disk and to drop them from the page cache.

        The system promises nothing.
        """
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # The file system takes no advice.
                os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)

    def sync(self, descriptor: int) -> None:
        """Bring everything written to the disk. An error is final: the data may be gone, so never try again."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the descriptor; this says nothing about the disk."""
        os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Bring the names in the folder to the disk."""
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

    def remove(self, path: Path) -> None:
        """Remove a file or a link."""
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)


# Disk space of a checkpoint besides its content: folder, manifest, and the file system's own metadata.
RESERVE_BYTES = 64 << 10


def check_writable(root: Path, run: str, files: Files) -> None:
    """Make the folder if it does not exist, and prove that a checkpoint can be staged in it.

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
    """Raise OSError if `needed` more bytes do not fit on the disk of `root`.

    Raises:
        OSError: With ENOSPC and the numbers.
    """
    free = free_bytes(root)
    if free < needed + RESERVE_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"The checkpoint needs {format_bytes(needed)}, but the disk has {format_bytes(free)} "
            f"free. Nothing was written, and "
            "earlier checkpoints are unchanged. Free disk space, or keep fewer checkpoints (`save_top_k`)",
            str(root),
        )


def free_bytes(root: Path) -> int:
    """Return the bytes that this process may still write to the disk of `root`."""
    disk = os.statvfs(root)
    return disk.f_bavail * disk.f_frsize


_MOST_OWNER_BYTES = 4096
# Seconds to wait for another process that is replacing a lock right now.
_PATIENCE = 5.0


class RunLock:
    """The lock of a run, held from `take` to `release` or within a `with` block.

    The lock is a file that is created, never opened: the process that created it holds the run, and the file's text
    names that process. The lock is stale if the process is gone or the host was rebooted since. A process on another
    host cannot be checked, so its lock is never removed. While a stale lock is replaced, the folder itself is locked,
    if the file system can do that.

    Args:
        root: Folder of the checkpoints.
        run: Name of the run.
        files: File system to write with.
    """

    def __init__(self, root: Path, run: str, files: Files) -> None:
        self.path = root / f".{check_run(run)}.lock"
        self._run = run
        self._files = files
        self._text: bytes | None = None

    def take(self) -> None:
        """Take the run.

        Raises:
            ValueError: If another process holds the run; the message names the process.
            OSError: If the disk fails.
        """
        assert self._text is None
        text = json.dumps({**_owner(), "token": secrets.token_hex(8)}).encode()
        with _alone(self.path.parent) as alone:
            held = _read(self.path)
            if held is not None:
                owner = _parse(held)
                # If the folder cannot be locked, a text without an owner may still be being written.
                if not is_stale(owner) or (owner is None and not alone):
                    raise ValueError(
                        f"Run {self._run!r} in {self.path.parent} is being written by {_name(owner)}. Give this run "
                        f"another name or folder; if that process is gone, remove {self.path}."
                    )
                self._files.remove(self.path)
            try:
                descriptor = self._files.create(self.path)
            except FileExistsError as error:
                raise ValueError(
                    f"Another process has just taken run {self._run!r} in {self.path.parent}. Try again."
                ) from error
            try:
                self._files.write(descriptor, memoryview(text))
            finally:
                self._files.close(descriptor)
        self._text = text

    def release(self) -> None:
        """Release the run; do nothing if it is not held, or if another process holds it by now."""
        text, self._text = self._text, None
        if text is not None and _read(self.path) == text:
            self._files.remove(self.path)

    @property
    def is_held(self) -> bool:
        """True if this object holds the run."""
        return self._text is not None

    def __enter__(self) -> RunLock:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_stale(owner: dict[str, Any] | None) -> bool:
    """Return True if the process that wrote a lock is certainly gone."""
    if owner is None:  # The text was never finished: its writer was killed, or the power was cut.
        return True
    mine = _owner()
    if owner["host"] != mine["host"]:
        return False
    return owner["boot"] != mine["boot"] or _birth(owner["process"]) != owner["birth"]


def _owner() -> dict[str, Any]:
    process = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "process": process, "birth": _birth(process)}


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _birth(process: int) -> str | None:
    # In clock ticks since the host was booted, so setting the clock changes nothing.
    try:
        after_name = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        fields = after_name.split()
        return None if fields[0] == "Z" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        return str(int(psutil.Process(process).create_time()))
    except psutil.NoSuchProcess:
        return None


def _read(path: Path) -> bytes | None:
    try:
        with open_regular(path) as file:
            return file.read(_MOST_OWNER_BYTES)
    except FileNotFoundError:
        return None


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        owner = json.loads(text)
    except (ValueError, RecursionError):
        return None
    kinds = {"host": str, "boot": str, "process": int, "birth": str}
    if not isinstance(owner, dict) or any(type(owner.get(name)) is not kind for name, kind in kinds.items()):
        return None
    return owner


def _name(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "a process that has not said who it is"
    return f"process {owner['process']} on {owner['host']}"


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[bool]:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end, alone = time.monotonic() + _PATIENCE, True
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise ValueError(f"{root} is being locked by another process; try again.") from error
                time.sleep(0.02)
            except OSError:  # The file system cannot lock folders.
                alone = False
                break
        yield alone
    finally:
        os.close(descriptor)


def retire(path: Path, run: str, files: Files) -> None:
    """Remove a checkpoint. Whenever the power is cut, it is either whole under its name or gone.

    Raises:
        OSError: If the disk fails; either nothing has changed, or the remains no longer have a checkpoint's name.
    """
    reserved = parse_reserved(path.name)
    removed = path.parent / reserved_name(reserved.name if reserved else path.name, run, "removed")
    files.rename(path, removed)
    files.sync_directory(path.parent)
    erase(removed, files)


def erase(path: Path, files: Files) -> None:
    """Remove a file, a link, or the folder of a checkpoint, its manifest first; follow no link.

    Raises:
        OSError: If the disk fails.
    """
    if path.is_dir() and not path.is_symlink():
        _remove_tree(path, files)
    else:
        files.remove(path)


def sweep(root: Path, run: str, files: Files) -> list[str]:
    """Clear away what interrupted saves and removals of `run` have left; the caller must hold the lock of the run.

    A checkpoint under its `.old` name whose successor was never published gets its name back. Remains that cannot be
    removed are named in a warning, and the next save tries again.

    Returns:
        Names that were cleared away or put back.

    Raises:
        OSError: If the folder cannot be read.
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

    A save that is under way looks the same. A checkpoint under its `.old` name whose successor was never published
    counts as a checkpoint, and is not returned.
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
        root: Folder of the checkpoints.
        files: File system to write with.
        dry_run: True only reports what would be removed.

    Returns:
        One line for each removal, and True if all of them succeeded.

    Raises:
        ValueError: If there is no checkpoint, or a process is writing one of the runs.
        OSError: If the folder cannot be read.
    """
    listing = find_checkpoints(root)
    if not listing.found:
        raise ValueError(f"{root} holds no checkpoint of ProTrainCheckpoint: there is nothing to prune.")
    lines, good = [], True
    for run in sorted({each.manifest.run for each in listing.found}):
        of_run = [each for each in listing.found if each.manifest.run == run]
        line = lineage_of(Listing(tuple(of_run)))
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
            files.sync_directory(root)  # The successor of an `.old` checkpoint may not be on the disk yet.
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


# Bytes that are written in one call, right after they are digested, while they are in the processor's cache.
PIECE = 4 << 20


class DraftFile:
    """One file of a draft, with the interface of a writable file: gathers small pieces and digests all of them.

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
        """Write any object with bytes, as a file does, and return their number."""
        view = memoryview(data).cast("B")
        if len(self._pending) + view.nbytes < PIECE:
            self._pending += view
            return view.nbytes
        self.flush()
        for start in range(0, view.nbytes, PIECE):
            self._put(view[start : start + PIECE])
        return view.nbytes

    def flush(self) -> None:
        """Write the gathered pieces to the file."""
        if self._pending:
            self._put(memoryview(self._pending))
            self._pending = bytearray()

    def finish(self) -> FileEntry:
        """Finish the file and bring it to the disk."""
        entry = self.end()
        self._files.sync(self._descriptor)
        return entry

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
    """A checkpoint that is being written, by the steps at the top of this file.

    Args:
        folder: Staged folder, which exists.
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
        # Descriptors of files that are written but not synced.
        self._open: list[int] = []

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[DraftFile]:
        """Create a file of the checkpoint.

        It is in `entries` when the block ends, and durable when the draft is published.
        """
        assert name not in {MANIFEST, *self.entries}
        file = self._create(check_file(name))
        yield file
        self.entries[name] = file.end()

    def publish(self, manifest: Manifest) -> None:
        """Publish the draft under its target's name. On an error the folder is as it was before.

        Raises:
            ValueError: If something that is no checkpoint has that name.
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
        with contextlib.suppress(OSError):  # The save has succeeded; `sweep` removes the old one later.
            retire(old, self.run, self._files)

    def discard(self) -> None:
        """Remove the draft as far as the disk allows; `sweep` removes the rest later."""
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
    """Open a draft for `target`, and remove it again if the block raises.

    Args:
        target: Path of the checkpoint to be; its parent folder exists.
        run: Name of the run.
        files: File system to write with.
        digest: Digest algorithm, see `Digest`.

    Raises:
        ValueError: If a name is not allowed, or something that is no checkpoint has it.
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
    """Raise ValueError if `target` is a folder with files that is no checkpoint: it must not be replaced.

    Raises:
        ValueError: If `target` is neither absent, a checkpoint, a file, a link, nor an empty folder.
    """
    if target.is_symlink() or not target.is_dir() or not any(target.iterdir()) or is_remains(target):
        return
    raise ValueError(
        f"{target} is a folder and no checkpoint: it has files, but no {MANIFEST} and no {STATE}. It is left alone; "
        "save to another name, or remove it."
    )
