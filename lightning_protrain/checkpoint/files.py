"""The only operations that change a disk: everything that a checkpoint writes, renames or removes passes through here.

[Note: Durability]
What a program has written is in the page cache until `sync`, and a new, renamed or removed name is nowhere but there
until `sync_directory` of the folder that holds it. After a power cut the disk has what was synced; of the rest it has
anything: all, nothing, zeros, a later change without an earlier one. A rename by itself is all or nothing. A killed
process loses nothing of what it has done. So a folder is published by: every file synced, then the folder, then the
rename, then the folder that holds the name.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

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
