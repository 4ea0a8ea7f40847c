"""Writes a checkpoint beside its name and publishes it as a whole; locks, free space and removal.

[Note: Durability]
What a program has written is in the page cache until `sync`, and a new, renamed or removed name is nowhere but there
until `sync_directory` of the folder that holds it. After a power cut the disk has what was synced; of the rest it has
anything: all, nothing, zeros, a later change without an earlier one. A rename by itself is all or nothing. A killed
process loses nothing of what it has done. So a folder is published by: every file synced, then the folder, then the
rename, then the folder that holds the name.

[Note: Lock]
The lock is a file that is created, never opened: who has created it has the run, and its text says who that is. It is
stale if its process is gone, or if the machine has been started anew since; of a process on another machine nobody can
tell, so that lock is never taken away. The folder itself is locked for the moment in which a stale lock is replaced,
where the file system can do that.

[Note: Commit]
1. A folder with a name of [Note: States] is made in the folder of the target. TMPDIR, links and locks play no part.
2. Each file is created, never opened, written once, and digested while it is written; the disk begins on what is
   written at once.
3. The manifest is the last file. When it is written, all are synced, so that a journal may take them together; then the
   folder is, then the folder's own name.
4. What has the target's name is renamed to its `.old` name, and that is synced. Both are whole now.
5. The folder is renamed to the target, and that is synced. The checkpoint is published: the save has succeeded.
6. What was replaced is removed, its manifest first. Nothing that fails from 5 on is an error of the save.
A crash between 4 and 5 leaves the old one under its `.old` name, where it is found, and put back by `sweep`.
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

# A file system answers so to a sync of a folder if it has no such thing; there is nothing else that could be done.
NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})


class Files:
    """The file system, as checkpoints use it; tests put in one that counts, fails or records."""

    def make_directory(self, path: Path) -> None:
        """A new, empty folder; FileExistsError if there is anything of that name."""
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """A new, empty file, open for writing; FileExistsError if there is anything of that name, a link included."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> None:
        """All of `data`, a view of bytes, however many calls the system makes of it."""
        while data.nbytes:
            data = data[os.write(descriptor, data) :]

    def start_sync(self, descriptor: int, begin: int, size: int) -> None:
        """The system may begin to bring these bytes to the disk, beside what is done next; it promises nothing.

        They are not wanted again, and need not push anything else out of the page cache.
        """
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # A file system that takes no advice.
                os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)

    def sync(self, descriptor: int) -> None:
        """What was written is on the disk when it returns; an error is final, the data may be gone, never try again."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Gives the descriptor back; says nothing about the disk."""
        os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """The names in the folder are on the disk when it returns."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Within one folder. A file at `target` is replaced, a folder that is not empty is an error."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """A file or a link."""
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """An empty folder."""
        os.rmdir(path)


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


_MOST_OWNER_BYTES = 4096
# Seconds to wait for another process that is replacing a lock at this moment.
_PATIENCE = 5.0


class RunLock:
    """Holds a run from `take` to `release`, or within a `with` block; see [Note: Lock].

    Args:
        root: The folder of the checkpoints.
        run: Name of the run.
        files: What writes.
    """

    def __init__(self, root: Path, run: str, files: Files) -> None:
        self.path = root / f".{check_run(run)}.lock"
        self._run = run
        self._files = files
        self._text: bytes | None = None

    def take(self) -> None:
        """Takes the run.

        Raises:
            ValueError: Another process has it; the message says which one.
            OSError: The disk.
        """
        assert self._text is None
        text = json.dumps({**_owner(), "token": secrets.token_hex(8)}).encode()
        with _alone(self.path.parent) as alone:
            held = _read(self.path)
            if held is not None:
                owner = _parse(held)
                # Where nobody can be kept out, a text without an owner may be one that is being written.
                if not is_stale(owner) or (owner is None and not alone):
                    raise ValueError(
                        f"Run {self._run!r} in {self.path.parent} is being written by {_name(owner)}. Give this run "
                        f"another name or folder; if that process is gone, remove {self.path}."
                    )
                self._files.remove(self.path)
            try:
                descriptor = self._files.create(self.path)
            except FileExistsError as error:
                raise ValueError(f"Run {self._run!r} in {self.path.parent} was taken at this moment.") from error
            try:
                self._files.write(descriptor, memoryview(text))
            finally:
                self._files.close(descriptor)
        self._text = text

    def release(self) -> None:
        """Gives the run back; nothing happens if it is not held, or is another one's by now."""
        text, self._text = self._text, None
        if text is not None and _read(self.path) == text:
            self._files.remove(self.path)

    @property
    def is_held(self) -> bool:
        """Whether this object has the run."""
        return self._text is not None

    def __enter__(self) -> RunLock:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_stale(owner: dict[str, Any] | None) -> bool:
    """Whether the process that wrote a lock is gone for certain."""
    if owner is None:  # A text that was never finished: its writer was killed, or the power was cut.
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
    # In clock ticks since the machine was started: setting the clock changes nothing.
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
            except OSError:  # This file system has no such locks.
                alone = False
                break
        yield alone
    finally:
        os.close(descriptor)


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


# Bytes that are handed to the system at once, right after they are digested: then they are in the processor's cache.
PIECE = 4 << 20


class DraftFile:
    """One file of a draft, for whoever writes: small pieces are gathered, all are digested.

    Args:
        files: What writes.
        descriptor: Of the new file.
        algorithm: Of its digest.
    """

    def __init__(self, files: Files, descriptor: int, algorithm: str = DEFAULT) -> None:
        self._files = files
        self._descriptor = descriptor
        self._digest = Digest(algorithm)
        self._pending = bytearray()
        self._size = 0

    def write(self, data: Any) -> int:
        """Takes any object with bytes, as a file does; how many they are."""
        view = memoryview(data).cast("B")
        if len(self._pending) + view.nbytes < PIECE:
            self._pending += view
            return view.nbytes
        self.flush()
        for start in range(0, view.nbytes, PIECE):
            self._put(view[start : start + PIECE])
        return view.nbytes

    def flush(self) -> None:
        """Hands what was gathered to the system."""
        if self._pending:
            self._put(memoryview(self._pending))
            self._pending = bytearray()

    def finish(self) -> FileEntry:
        """Nothing more will be written, and everything is on the disk when it returns."""
        entry = self.end()
        self._files.sync(self._descriptor)
        return entry

    def end(self) -> FileEntry:
        """Nothing more will be written; whether it is on the disk is another question."""
        self.flush()
        return FileEntry(self._size, str(self._digest))

    def _put(self, piece: memoryview) -> None:
        self._digest.update(piece)
        self._files.write(self._descriptor, piece)
        self._files.start_sync(self._descriptor, self._size, piece.nbytes)
        self._size += piece.nbytes


class Draft:
    """A checkpoint that is being written, see [Note: Commit].

    Args:
        folder: The staged folder, which is there.
        target: What it will be called, in the same folder.
        run: The run that writes it.
        files: What writes.
        digest: Algorithm, see `Digest`.
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
        # Of files that are written and not synced.
        self._open: list[int] = []

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[DraftFile]:
        """A new file of the checkpoint, in `entries` when the block ends, and durable with all others."""
        assert name not in {MANIFEST, *self.entries}
        file = self._create(check_file(name))
        yield file
        self.entries[name] = file.end()

    def publish(self, manifest: Manifest) -> None:
        """Makes it the checkpoint of its target's name; on an error everything is as it was, but for the draft.

        Raises:
            ValueError: Something that is no checkpoint has that name.
            OSError: The disk.
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
        with contextlib.suppress(OSError):  # Published is published; `sweep` tries again.
            retire(old, self.run, self._files)

    def discard(self) -> None:
        """Removes what was written, as far as the disk lets it; `sweep` does the rest later."""
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
    """A draft for `target`, removed again if the block raises.

    Args:
        target: What the checkpoint will be called; its folder is there.
        run: Name of the run.
        files: What writes.
        digest: Algorithm, see `Digest`.

    Raises:
        ValueError: A name that cannot be one, or something that is no checkpoint has it.
        OSError: The disk.
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
    """Nothing but a checkpoint, a file, a link or an empty folder may be replaced.

    Raises:
        ValueError: `target` is something else.
    """
    if target.is_symlink() or not target.is_dir() or not any(target.iterdir()) or is_remains(target):
        return
    raise ValueError(
        f"{target} is a folder and no checkpoint: it has files, but no {MANIFEST} and no {STATE}. It is left alone; "
        "save to another name, or remove it."
    )
