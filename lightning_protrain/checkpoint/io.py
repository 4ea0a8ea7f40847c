"""ProTrainCheckpointIO: checkpoints of any strategy as crash-safe folders, or as files of `torch.save`.

A save may copy the content and write it in the background while training continues. Every later read or change of the
folder waits for that save, or is queued behind it on the same thread. So at most one save runs at a time, and an old
checkpoint is only removed after the new one is durable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_protrain.checkpoint.atomic import (
    Files,
    RunLock,
    check_space,
    erase,
    point,
    refuse_foreign,
    retire,
    sweep,
)
from lightning_protrain.checkpoint.consolidation import load_folder, load_stock, write_stock
from lightning_protrain.checkpoint.discover import pointed, resolve
from lightning_protrain.checkpoint.manifest import DEFAULT, Digest, Manifest, check_name, check_run
from lightning_protrain.checkpoint.references import fill
from lightning_protrain.checkpoint.save import NewCheckpoint, Snapshot, Writer, save_payload
from lightning_protrain.checkpoint.serialize import Payload, join, split
from lightning_protrain.checkpoint.verification import read_manifest
from lightning_protrain.config import format_bytes

Layout = Literal["folder", "file"]
# File name with which Lightning returns weights from a spawned process. The parent may use another CheckpointIO.
_MESSAGE = ".temp.ckpt"
# Free host memory that a background copy requires, as a multiple of its size.
_SPARE = 1.1


class ProTrainCheckpointIO(CheckpointIO):
    """Saves, loads and removes checkpoints on local and shared file systems: `Trainer(plugins=ProTrainCheckpointIO())`.

    A checkpoint is a folder (docs/checkpoints.md) or a file of `torch.save`; either can be loaded with any `layout`. A
    checkpoint is durable when the save returns. A crash during a save does not affect earlier checkpoints. Loading
    verifies every byte and uses `weights_only=True`.

    Args:
        run: Name of the run. Two processes cannot write the same run in one folder at the same time.
        layout: Form in which to save: `"folder"`, or `"file"` for a file of `torch.save`, which every Trainer reads.
        digest: `"xxh3_128"`, `"crc32"`, or `"sha256"`, which takes longer than writing the file.

    Raises:
        ValueError: If `run`, `layout` or `digest` is not allowed.
    """

    def __init__(self, run: str = "run", layout: Layout = "folder", digest: str = DEFAULT) -> None:
        if layout not in ("folder", "file"):
            raise ValueError(f'layout={layout!r}: give "folder" or "file".')
        Digest(digest)
        self.run = check_run(run)
        self.layout = layout
        self.digest = digest
        self.files = Files()
        # The last checkpoint that was saved or loaded.
        self.parent: Manifest | None = None
        # Context manager that raises on all ranks if loading fails on one. Its argument describes the load in messages.
        self.together: Callable[[str], AbstractContextManager[object]] = nullcontext
        # Called with the requested path; returns the path to load (another one if the checkpoint is damaged), and True
        # if its files have been verified already.
        self.choose: Callable[[Path], tuple[Path, bool]] = _this_one
        # Rank whose files are read; None means all files.
        self.rank: int | None = None
        # Called with the loaded content, which it may change, and the checkpoint's name. The default reads frozen
        # weights that the checkpoint does not store.
        self.accept: Callable[[dict[str, Any], str], None] = fill
        # Writes checkpoints in the background.
        self.writer = Writer()
        self._snapshot: Snapshot | None = None
        self._locks: dict[Path, RunLock] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_snapshot": None, "_locks": {}}  # A copy holds no lock.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save `checkpoint` at `path`; an existing checkpoint is replaced after the new one is durable.

        Within `copying`, this may return after copying the content, before the checkpoint is durable.

        Args:
            checkpoint: Checkpoint dict of Lightning, or a state dict.
            path: Path on a mounted file system; its folder is made if needed.
            storage_options: Further entries for the manifest's `record`, a dict that JSON can hold; or None.

        Raises:
            ValueError: If the path or the content cannot be saved, or another process is writing this run.
            OSError: If the disk fails.
        """
        if storage_options is not None and not isinstance(storage_options, dict):
            raise ValueError(f"storage_options={storage_options!r}: give a dict for the manifest, or nothing.")
        target = _local(path)
        check_name(target.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.writer.join()
        with nullcontext() if target.parent in self._locks else RunLock(target.parent, self.run):
            cleared = sweep(target.parent, self.run, self.files)
            if cleared:
                rank_zero_info(f"Removed files of an interrupted save in {target.parent}: {', '.join(cleared)}")
            if self.layout == "file" or target.name == _MESSAGE:
                write_stock(checkpoint, target, self.files, self.run)
                return
            record = {**(storage_options or {}), "epoch": checkpoint.get("epoch"), "versions": _versions()}
            new = NewCheckpoint(self.run, checkpoint.get("global_step", 0), record, self.digest)
            payload = split(checkpoint)

            def save() -> None:
                self.parent = save_payload(payload, target, new, self.files)

            if self._snapshot is None or not self._has_room(self._snapshot, payload):
                save()
                return
            assert target.parent in self._locks
            check_space(target.parent, payload.nbytes)
            payload = self._snapshot.take(payload)
            self.writer.submit(save)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the content of the checkpoint at `path`.

        Args:
            path: A checkpoint folder or a file of `torch.save`.
            map_location: As in `torch.load`; None means the host.
            weights_only: False allows a file to execute code; folders are always loaded with `weights_only=True`.

        Raises:
            ValueError: If the checkpoint is damaged; the message names the faults.
            FileNotFoundError: If there is no checkpoint.
        """
        self.writer.join()
        self.parent = None
        path, verified = self.choose(_local(path))
        with self.together(f"Loading {path}"):
            place = resolve(path)
            if not place.is_dir():
                content = load_stock(place, map_location or "cpu", weights_only)
            else:
                load = join if verified else load_folder
                content = load(place, map_location, keep=True, rank=self.rank)
            self.accept(content, str(place))
            self.parent = read_manifest(place) if place.is_dir() else None
            return content

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path` atomically; do nothing if `path` does not exist.

        Raises:
            ValueError: If `path` is a folder that is not a checkpoint.
            OSError: If the disk fails.
        """
        self.writer.join()
        self.remove_now(path)

    def remove_now(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path` without waiting for a running save; for jobs on the writer's own thread."""
        target = _local(path)
        if not os.path.lexists(target):
            return
        refuse_foreign(target)
        if target.is_dir() and not target.is_symlink():
            retire(target, self.run, self.files)
        else:
            erase(target, self.files)

    def point(self, path: Path, target: Path | None) -> None:
        """Make a link to a checkpoint as in `atomic.point`, or warn that it cannot be made."""
        try:
            point(path, target, self.run, self.files)
        except (ValueError, OSError) as error:
            rank_zero_warn(f"{path} is not updated: {error}." if isinstance(error, OSError) else str(error))

    @contextmanager
    def copying(self, snapshot: Snapshot | None) -> Iterator[None]:
        """Let saves within the context copy the content and write it in the background.

        A save waits for the disk if the host has too little memory for the copy.

        Args:
            snapshot: Memory for the copy, reused by each save; None saves without a copy.
        """
        self._snapshot = snapshot
        try:
            yield
        finally:
            self._snapshot = None

    def hold(self, root: str | os.PathLike[str]) -> None:
        """Take the lock of this run in `root` and keep it until `teardown`.

        Raises:
            ValueError: If another process holds the lock; the message names the process.
        """
        folder = _local(root)
        if folder not in self._locks:
            lock = RunLock(folder, self.run)
            lock.take()
            self._locks[folder] = lock

    def teardown(self) -> None:
        """Wait for the background save, release the locks that `hold` took, and restore the default callbacks."""
        error = self.writer.close()
        if error is not None:
            rank_zero_warn(f"A checkpoint could not be saved: {type(error).__name__}: {error}")
        self.together = nullcontext
        self.choose, self.accept = _this_one, fill
        while self._locks:
            self._locks.popitem()[1].release()

    def _has_room(self, snapshot: Snapshot, payload: Payload) -> bool:
        needed, free = snapshot.needed(payload), snapshot.free_bytes()
        if needed * _SPARE > free:
            rank_zero_warn(
                f"A copy of the checkpoint needs {format_bytes(needed)} of host memory, but only {format_bytes(free)} "
                "are free. Training waits until the checkpoint is written."
            )
            return False
        return True


def folder_reader(path: Path, own: CheckpointIO) -> CheckpointIO | None:
    """Return a `ProTrainCheckpointIO` if `own` is Lightning's default plugin and `path` names a folder; else None."""
    if type(own) is TorchCheckpointIO and (pointed(path) or path).is_dir():
        return ProTrainCheckpointIO()
    return None


def _local(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(
            f"{text} is not a path on a mounted file system, which atomic saves require. Save to a local or shared "
            "folder, and copy finished checkpoints from there."
        )
    return Path(os.path.abspath(text))


def _this_one(place: Path) -> tuple[Path, bool]:
    return place, False


def _versions() -> Mapping[str, str]:
    return {"torch": str(torch.__version__), "lightning": str(lightning.__version__)}
