"""Saves on a recorded disk, and the judgement of what a crash leaves of them."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

from lightning_protrain.checkpoint.atomic import Files, retire, sweep
from lightning_protrain.checkpoint.discover import find_checkpoints, newest_good
from lightning_protrain.checkpoint.manifest import parse_reserved
from lightning_protrain.checkpoint.verification import verify
from tests.checkpoint.contents import RUN, content, load, same, save
from tests.checkpoint.disks import Journal

Mark = Callable[[int], None]


class Quick(Files):
    """File operations without syncs, for work outside the recordings."""

    def sync(self, descriptor: int) -> None: ...

    def sync_directory(self, path: Path) -> None: ...


def _run(root: Path, files: Files, mark: Mark, *steps: int, keep: int = 99, name: str | None = None) -> None:
    """Saves as a run does that goes on: after each save all but the newest `keep` are removed."""
    sweep(root, RUN, files)
    for step in steps:
        mark(save(root, step, files, name=name or f"step={step}").sequence)
        for each in find_checkpoints(root, RUN).found[keep:]:
            retire(each.path, RUN, files)


def _prepare(*steps: int, name: str | None = None) -> Callable[[Path], None]:
    return lambda root: _run(root, Quick(), lambda _: None, *steps, name=name)


def _judge(root: Path, durable: int) -> list[str]:
    """Return the faults of a disk after a crash, if the save with sequence number `durable` had returned before it."""
    findings = []
    listing = find_checkpoints(root, RUN)
    findings += [f"{path.name}: {what}" for path, what in listing.broken]
    findings += [f"{each.path.name} {fault}" for each in listing.found for fault in verify(each.path)]
    try:
        chosen = newest_good(root, RUN).chosen
    except ValueError as error:
        return [*findings, str(error)]
    if chosen is None:
        return [*findings, *(["nothing is left"] if durable >= 0 else [])]
    if chosen.manifest.sequence < durable:
        findings.append(f"save {durable} had returned, {chosen.manifest.sequence} is the newest")
    if not same(load(chosen.path), content(chosen.manifest.step)):
        findings.append(f"{chosen.path.name} has other content")
    sweep(root, RUN, Quick())
    save(root, 77, Quick())
    if [entry for entry in os.listdir(root) if parse_reserved(entry)] or load(root / "step=77")["global_step"] != 77:
        findings.append(f"the next save leaves {sorted(os.listdir(root))}")
    return findings


class UnsyncedNames(Journal):
    def sync_directory(self, path: Path) -> None: ...


class UnsyncedData(Journal):
    def sync(self, descriptor: int) -> None: ...


class _Failing(Files):
    """File operations of which a given one kills this process or fails; a write is half done before."""

    def __init__(self, number: int, error: int | None) -> None:
        self._left = number
        self._error = error

    def write(self, descriptor: int, data: memoryview) -> None:
        super().write(descriptor, data[: data.nbytes // 2])
        self._count()
        super().write(descriptor, data[data.nbytes // 2 :])

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0 and self._error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left == 0 and self._error is not None:
            raise OSError(self._error, os.strerror(self._error))


def _counted(name: str) -> Callable[..., object]:
    def operation(self: _Failing, *args: object) -> object:
        self._count()
        return getattr(Files, name)(self, *args)

    return operation


for _name in ("make_directory", "create", "sync", "sync_directory", "rename", "remove", "remove_directory"):
    setattr(_Failing, _name, _counted(_name))


class _Full(Files):
    """A disk with so many bytes left."""

    def __init__(self, left: int) -> None:
        self.left = left

    def write(self, descriptor: int, data: memoryview) -> None:
        super().write(descriptor, data[: self.left])
        if data.nbytes > self.left:
            self.left = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= data.nbytes
