"""Writes a checkpoint beside its name and publishes it as a whole, or leaves everything as it was.

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
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_protrain.checkpoint.digests import DEFAULT, Digest
from lightning_protrain.checkpoint.files import Files
from lightning_protrain.checkpoint.manifest import MANIFEST, STATE, FileEntry, Manifest, is_remains
from lightning_protrain.checkpoint.names import check_file, check_name, check_run, reserved_name
from lightning_protrain.checkpoint.retention import erase, retire

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
