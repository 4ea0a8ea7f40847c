"""One writer for each run in a folder.

[Note: Lock]
The lock is a file that is created, never opened: who has created it has the run, and its text says who that is. It is
stale if its process is gone, or if the machine has been started anew since; of a process on another machine nobody can
tell, so that lock is never taken away. The folder itself is locked for the moment in which a stale lock is replaced,
where the file system can do that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from lightning_protrain.checkpoint.files import Files
from lightning_protrain.checkpoint.names import check_run
from lightning_protrain.checkpoint.verifying import open_regular

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
