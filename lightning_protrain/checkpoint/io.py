"""ProTrainCheckpointIO: checkpoints of any strategy as folders that survive a crash, or as stock files.

[Note: Behind]
A save may be made of copies, and be written behind the training. Everything that changes or reads the folder waits for
it, and what is removed after it is removed by the same thread, in order: so there is never more than one under way, and
nothing is removed for one that is not durable.
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
    in_gib,
    refuse_foreign,
    retire,
    sweep,
)
from lightning_protrain.checkpoint.consolidation import load_folder, load_stock, write_stock
from lightning_protrain.checkpoint.discover import resolve
from lightning_protrain.checkpoint.manifest import (
    DEFAULT,
    MANIFEST,
    Digest,
    Manifest,
    check_name,
    check_run,
    is_remains,
)
from lightning_protrain.checkpoint.references import fill
from lightning_protrain.checkpoint.save import Snapshot, Writer, save_payload
from lightning_protrain.checkpoint.serialize import Payload, join, split
from lightning_protrain.checkpoint.verification import read_manifest

Layout = Literal["folder", "file"]
# What a spawned process leaves for its parent, whose CheckpointIO may be another one: Lightning's name for it.
_MESSAGE = ".temp.ckpt"
# Of free host memory, how much more than a copy has to be there: the training goes on beside it.
_SPARE = 1.1


class ProTrainCheckpointIO(CheckpointIO):
    """Saves, loads and removes checkpoints on local and shared file systems: `Trainer(plugins=ProTrainCheckpointIO())`.

    A checkpoint is a folder (docs/checkpoints.md), or a stock file; both are loaded, whatever `layout` says. A save is
    durable when it returns, and a crash at any point of it leaves what was there. What is loaded was checked byte for
    byte, and is loaded with `weights_only=True`.

    Args:
        run: Name of the run. Two runs of one name in one folder refuse to save at the same time.
        layout: `"folder"`, or `"file"` for what `torch.save` writes, which every Trainer reads.
        digest: `"xxh3_128"`, `"crc32"`, or `"sha256"`, which takes longer than the writing.

    Raises:
        ValueError: A name or an algorithm that there cannot be.
    """

    def __init__(self, run: str = "run", layout: Layout = "folder", digest: str = DEFAULT) -> None:
        if layout not in ("folder", "file"):
            raise ValueError(f'layout={layout!r}: give "folder" or "file".')
        Digest(digest)
        self.run = check_run(run)
        self.layout = layout
        self.digest = digest
        self.files = Files()
        # What was saved or resumed from last, see [Note: Lines] in checkpoint/manifest.py.
        self.parent: Manifest | None = None
        # Who loads on several ranks at once puts in what makes them fail together; the argument is for the message.
        self.together: Callable[[str], AbstractContextManager[object]] = nullcontext
        # Who takes another one if that is not good; says whether all that is read of it has been verified.
        self.choose: Callable[[Path], tuple[Path, bool]] = _this_one
        # Only what this rank needs is read; None: all.
        self.rank: int | None = None
        # Who has more to say about what is loaded: gets the content, which it may change, and the place for messages.
        # By default frozen weights are read from where they came from.
        self.accept: Callable[[dict[str, Any], str], None] = fill
        # What is written behind the training, see [Note: Behind].
        self.writer = Writer()
        self._snapshot: Snapshot | None = None
        self._locks: dict[Path, RunLock] = {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves `checkpoint` at `path`; what is there is replaced when the new one is durable.

        Within `copying` it is copied when this returns, and durable when the writer has done it.

        Args:
            checkpoint: What Lightning makes of a run, or a state dict.
            path: In a local folder, which is made.
            storage_options: What JSON can hold; it is kept in the manifest, and in no file.

        Raises:
            ValueError: A path, or content, that cannot be saved, or another process is writing this run.
            OSError: The disk.
        """
        if storage_options is not None and not isinstance(storage_options, dict):
            raise ValueError(f"storage_options={storage_options!r}: give a dict for the manifest, or nothing.")
        target = _local(path)
        check_name(target.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.writer.join()
        with self._lock(target.parent):
            cleared = sweep(target.parent, self.run, self.files)
            if cleared:
                rank_zero_info(f"Cleared away what an interrupted save left in {target.parent}: {', '.join(cleared)}")
            if self.layout == "file" or target.name == _MESSAGE:
                write_stock(checkpoint, target, self.files, self.run)
                return
            step = checkpoint.get("global_step", 0)
            record = {**(storage_options or {}), "epoch": checkpoint.get("epoch"), "versions": _versions()}
            payload = split(checkpoint)

            def save() -> None:
                self.parent = save_payload(
                    payload, target, self.run, step, self.files, self.parent, digest=self.digest, record=record
                )

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
        """What was saved at `path`, as a folder or as a stock file.

        Args:
            path: The folder or file.
            map_location: As in `torch.load`; None: the host.
            weights_only: False lets a stock file execute what it says; a folder never does.

        Raises:
            ValueError: It is not good, and what is wrong with it.
            FileNotFoundError: There is nothing.
        """
        self.writer.join()
        self.parent = None
        path, verified = self.choose(_local(path))
        with self.together(f"Loading {path}"):
            place = resolve(path)
            if not place.is_dir():
                content = load_stock(place, map_location or "cpu", weights_only)
            elif not is_remains(place):
                raise ValueError(f"{place} is a folder without {MANIFEST}: lightning_protrain has not saved it.")
            else:
                load = join if verified else load_folder
                content = load(place, map_location, keep=True, rank=self.rank)
            self.accept(content, str(place))
            self.parent = read_manifest(place) if place.is_dir() else None
            return content

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes what is at `path`, if there is anything; a crash leaves it whole or gone.

        Raises:
            ValueError: It is a folder and no checkpoint.
            OSError: The disk.
        """
        self.writer.join()
        self.remove_now(path)

    def remove_now(self, path: str | os.PathLike[str]) -> None:
        """The same, but that it does not wait for what is under way: for what is done after it, on its thread."""
        target = _local(path)
        if not os.path.lexists(target):
            return
        refuse_foreign(target)
        if target.is_dir() and not target.is_symlink():
            retire(target, self.run, self.files)
        else:
            erase(target, self.files)

    @contextmanager
    def copying(self, snapshot: Snapshot | None) -> Iterator[None]:
        """Within it a save only copies, and is written by `writer`, if the host has room; see [Note: Behind].

        Args:
            snapshot: Where the copies go; the one before is written when it is overwritten. None: nothing is changed.
        """
        self._snapshot = snapshot
        try:
            yield
        finally:
            self._snapshot = None

    def hold(self, root: str | os.PathLike[str]) -> None:
        """Keeps other processes from writing this run to `root`, until `teardown`.

        Raises:
            ValueError: One has it; the message says which one.
        """
        folder = _local(root)
        if folder not in self._locks:
            lock = RunLock(folder, self.run, self.files)
            lock.take()
            self._locks[folder] = lock

    def teardown(self) -> None:
        """Lets go of what `hold` has taken, of other ranks, and of who has more to say, once everything is written."""
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
                f"A copy of the checkpoint takes {in_gib(needed)} of host memory, which has {in_gib(free)} free: it is "
                "written before the training goes on."
            )
            return False
        return True

    def _lock(self, root: Path) -> AbstractContextManager[object]:
        return nullcontext() if root in self._locks else RunLock(root, self.run, self.files)


def reader_of(path: str | os.PathLike[str], checkpoints: CheckpointIO) -> CheckpointIO:
    """Return what reads the checkpoint at `path`: `checkpoints`, but for a folder that Lightning's own cannot read."""
    if type(checkpoints) is TorchCheckpointIO and is_remains(Path(path)):
        return ProTrainCheckpointIO()
    return checkpoints


def _local(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(
            f"{text} is no path of a file system: a commit needs renames and syncs. Save to a local or shared folder, "
            "and copy finished checkpoints from there."
        )
    return Path(os.path.abspath(text))


def _this_one(place: Path) -> tuple[Path, bool]:
    return place, False


def _versions() -> Mapping[str, str]:
    return {"torch": str(torch.__version__), "lightning": str(lightning.__version__)}
