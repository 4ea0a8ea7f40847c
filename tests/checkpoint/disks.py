"""A recording of what was done to a disk, and what a crash at any point of it could leave there.

[Note: Images]
`Journal` does everything for real and writes it down. A `Disk` plays the record back in memory, up to any operation,
and knows what has been synced. What a crash leaves is one of its images: "killed" has all that was done (the system
lives on); after a power cut the disk has what was synced and, of the rest, "lost" nothing, "early" the names without
the data, "zeros" the names with zeros for data, or ("random") any choice of both, a later change without an earlier one
included. A rename is one change. What the images cannot show, since every file system in use rules it out: a change of
what was synced.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_protrain.checkpoint.atomic import Files

MODES = ("killed", "lost", "early", "zeros", "random-1", "random-2", "random-3")


Image = Any  # bytes, or a dict of images by name


class Operation(NamedTuple):
    """`kind` is the name of the method of `Files`, or "returned" for a mark that a test makes."""

    kind: str
    path: str = ""
    argument: Any = None


class Stuck(Files):
    """A disk that does not rename or remove published files whose path contains a word.

    Args:
        word: Text in the paths that cannot be renamed or removed.
        error: Value of `errno`.
        kinds: Operations that fail.
    """

    def __init__(self, word: str, error: int = errno.EBUSY, kinds: tuple[str, ...] = ("rename", "remove")) -> None:
        self.word, self.error, self.kinds = word, error, kinds

    def rename(self, source: Path, target: Path) -> None:
        self._refuse("rename", source)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._refuse("remove", path)
        super().remove(path)

    def _refuse(self, kind: str, path: Path) -> None:
        if kind in self.kinds and self.word in str(path) and path.suffix != ".staged":
            raise OSError(self.error, os.strerror(self.error), str(path))


class Journal(Files):
    """Records what is done below `root`, with paths relative to it."""

    # Nobody promises that a write is one.
    pieces = 2

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self._names: dict[int, str] = {}

    def mark(self, value: Any) -> None:
        self.operations.append(Operation("returned", "", value))

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self._note("make_directory", path)

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._names[descriptor] = self._relative(path)
        self._note("create", path)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> None:
        super().write(descriptor, data)
        ends = [data.nbytes * (number + 1) // self.pieces for number in range(self.pieces)]
        for begin, end in zip([0, *ends], ends, strict=False):
            self.operations.append(Operation("write", self._names[descriptor], bytes(data[begin:end])))

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.operations.append(Operation("sync", self._names[descriptor]))

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        del self._names[descriptor]

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._note("sync_directory", path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._note("rename", source, self._relative(target))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._note("remove", path)

    def remove_directory(self, path: Path) -> None:
        super().remove_directory(path)
        self._note("remove_directory", path)

    def _note(self, kind: str, path: Path, argument: Any = None) -> None:
        self.operations.append(Operation(kind, self._relative(path), argument))

    def _relative(self, path: Path) -> str:
        return "" if path == self.root else path.relative_to(self.root).as_posix()


@dataclass
class _File:
    data: bytes = b""
    synced: bytes = b""

    def image(self, mode: str, chance: random.Random) -> bytes:
        if mode == "killed" or self.data == self.synced:
            return self.data
        zeros = bytes(len(self.data))
        if mode == "zeros":
            return zeros
        if mode != "random":
            return self.synced
        return chance.choice([self.synced, self.data, zeros, self.data[: chance.randrange(len(self.data) + 1)]])


@dataclass
class _Folder:
    names: dict[str, Any] = field(default_factory=dict)
    synced: dict[str, Any] = field(default_factory=dict)
    # Of each change since then: the name that goes, the name that comes, and what it stands for.
    changes: list[tuple[str | None, str | None, Any]] = field(default_factory=list)

    def change(self, gone: str | None, come: str | None, node: Any = None) -> None:
        _change(self.names, gone, come, node)
        self.changes.append((gone, come, node))

    def sync(self) -> None:
        self.synced = dict(self.names)
        self.changes = []

    def image(self, mode: str, chance: random.Random) -> dict[str, Any]:
        if mode == "lost":
            return self.synced
        if mode != "random":
            return self.names
        names = dict(self.synced)
        for change in self.changes:
            if chance.random() < 0.5:
                _change(names, *change)
        return names


def _change(names: dict[str, Any], gone: str | None, come: str | None, node: Any) -> None:
    if gone is not None:
        names.pop(gone, None)
    if come is not None:
        names[come] = node


class Disk:
    """A simulated disk that begins with the synced content of `root`; see [Note: Images]."""

    def __init__(self, root: Path) -> None:
        self._top = _read(root)

    def apply(self, operation: Operation) -> None:
        if operation.kind == "returned":
            return
        if operation.kind == "sync_directory":
            self._node(operation.path).sync()
            return
        parent, _, name = operation.path.rpartition("/")
        folder = self._node(parent)
        match operation.kind:
            case "make_directory":
                folder.change(None, name, _Folder())
            case "create":
                folder.change(None, name, _File())
            case "write":
                folder.names[name].data += operation.argument
            case "sync":
                folder.names[name].synced = folder.names[name].data
            case "rename":
                target = operation.argument.rpartition("/")
                assert target[0] == parent
                folder.change(name, target[2], folder.names[name])
            case "remove" | "remove_directory":
                folder.change(name, None)
            case _:
                raise AssertionError(operation.kind)

    def image(self, mode: str, seed: int = 0) -> Image:
        """Return the content of the disk after a crash at this point: bytes for a file, a dict for a folder."""
        kind, _, number = mode.partition("-")
        return _image(self._top, kind, random.Random(f"{number}.{seed}"))

    def unsynced_names(self, path: str) -> list[str]:
        """Names that came into a folder and are not on the disk."""
        return [come for _, come, _ in self._node(path).changes if come is not None]

    def unsynced_files(self, path: str) -> list[str]:
        """Files below a folder (or the file itself) whose data are not on the disk."""
        node = self._node(path)
        if isinstance(node, _File):
            return [path] if node.data != node.synced else []
        return [name for name, each in node.names.items() if isinstance(each, _File) and each.data != each.synced]

    def _node(self, path: str) -> Any:
        node = self._top
        for name in path.split("/") if path else ():
            node = node.names[name]
        return node


def crash_images(
    before: Path, operations: list[Operation], target: Path, modes: tuple[str, ...] = MODES
) -> Iterator[tuple[str, Path, Any]]:
    """Every different image after every operation: its operation and mode, its folder, and the latest mark.

    Args:
        before: Folder with the disk's content when the recording began, unchanged since.
        operations: The recorded operations.
        target: A new folder, to which the images are written.
        modes: See [Note: Images].
    """
    disk = Disk(before)
    mark, seen = None, set()
    for number in range(len(operations) + 1):
        for mode in modes:
            image = disk.image(mode, seed=number)
            key = (mark, repr(image))
            if key not in seen:
                seen.add(key)
                folder = target / f"{number}-{mode}"
                write_image(image, folder)
                after = operations[number - 1] if number else None
                yield f"{mode} after {number}: {after and (after.kind, after.path)}", folder, mark
        if number < len(operations):
            disk.apply(operations[number])
            if operations[number].kind == "returned":
                mark = operations[number].argument


def write_image(image: Image, path: Path) -> None:
    """Makes `path` what the image says."""
    if isinstance(image, bytes):
        path.write_bytes(image)
        return
    path.mkdir(parents=True)
    for name, each in image.items():
        write_image(each, path / name)


def order_violations(before: Path, operations: list[Operation]) -> list[str]:
    """Return each rename of data that was not yet synced, and each save that returned before its name was synced."""
    disk = Disk(before)
    found = []
    for number, operation in enumerate(operations):
        if operation.kind == "rename" and not operation.argument.endswith(".removed"):
            for name in disk.unsynced_files(operation.path):
                found.append(f"{number}: {operation.path}/{name} is renamed before it is synced")
            if isinstance(disk._node(operation.path), _Folder) and disk.unsynced_names(operation.path):
                found.append(f"{number}: {operation.path} is renamed before its names are synced")
        if operation.kind == "returned" and not all(name.startswith(".") for name in disk.unsynced_names("")):
            found.append(f"{number}: the save returns before its name is synced")
        disk.apply(operation)
    return found


def _read(path: Path) -> Any:
    if path.is_file():
        return _File(path.read_bytes(), path.read_bytes())
    names = {each.name: _read(each) for each in path.iterdir()}
    return _Folder(names, dict(names))


def _image(node: Any, mode: str, chance: random.Random) -> Image:
    if isinstance(node, _File):
        return node.image(mode, chance)
    return {name: _image(each, mode, chance) for name, each in node.image(mode, chance).items()}
