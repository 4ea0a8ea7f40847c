"""Finds checkpoints by what they are, and the newest one that is good."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lightning_protrain.checkpoint.manifest import Manifest, is_remains
from lightning_protrain.checkpoint.names import parse_reserved, run_mark
from lightning_protrain.checkpoint.verifying import Fault, read_manifest, verify_files

# How many letters of what is wrong a message has room for.
_ROOM = 2000


@dataclass(frozen=True)
class Found:
    """A folder with a valid manifest; whether its other files are good is another question."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Listing:
    """What `find` found.

    Attributes:
        found: Newest first, each save once, whatever its copies are called.
        broken: Folders that were checkpoints and have no valid manifest, with the reason.
    """

    found: tuple[Found, ...] = ()
    broken: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True)
class Newest:
    """What `newest_good` chose.

    Attributes:
        chosen: The checkpoint; None where there is no trace of one.
        skipped: Newer ones that are not good, with the reason, and all whose manifest is not valid.
    """

    chosen: Found | None
    skipped: tuple[tuple[Path, str], ...] = field(default=())

    def message(self) -> str:
        """For the user, where something was skipped."""
        assert self.chosen is not None
        return (
            f"{self.chosen.path} (step {self.chosen.manifest.step}) is the newest good checkpoint of run "
            f"{self.chosen.manifest.run!r}. Skipped:\n{_describe(self.skipped)}"
        )


def find(root: Path, run: str | None = None) -> Listing:
    """All checkpoints in `root`, by their manifests; follows no link, changes nothing.

    Args:
        root: The folder that holds them; none is found if it is not there.
        run: Only those of this run; None: of all.
    """
    found: dict[str, Found] = {}
    broken = []
    for path in _folders(root, run):
        try:
            manifest = read_manifest(path)
        except ValueError as error:
            broken.append((path, str(error).removeprefix(f"{path}: ")))
            continue
        if run is None or manifest.run == run:
            found.setdefault(manifest.identity, Found(path, manifest))
    ordered = sorted(found.values(), key=lambda each: _order(each.manifest), reverse=True)
    return Listing(tuple(ordered), tuple(broken))


def line_of(listing: Listing, head: Manifest | None = None) -> list[Found]:
    """Those that the latest one (or `head`) continues from, and itself, newest first; see [Note: Lines]."""
    if head is None:
        if not listing.found:
            return []
        head = listing.found[0].manifest
    return [each for each in listing.found if each.manifest.is_on_line_of(head)]


def newest_good(root: Path, run: str | None = None, check: Callable[[Found], list[Fault]] | None = None) -> Newest:
    """The newest checkpoint of which every byte is right, on the line of the latest one.

    Args:
        root: The folder that holds them.
        run: Name of the run; None where there is only one.
        check: What is wrong with a checkpoint; None: every file is read.

    Raises:
        ValueError: There are several runs and none is named, or there are checkpoints and none of them is good: a run
            that was meant to go on never begins anew in silence.
    """
    listing = find(root, run)
    runs = sorted({each.manifest.run for each in listing.found})
    if len(runs) > 1:
        raise ValueError(f"{root} has checkpoints of the runs {', '.join(runs)}: say which one, or give a path.")
    check = check or (lambda each: verify_files(each.path, each.manifest))
    skipped = list(listing.broken)
    for each in line_of(listing):
        faults = check(each)
        if not faults:
            return Newest(each, tuple(skipped))
        skipped.append((each.path, "; ".join(map(str, faults))))
    if skipped:
        raise ValueError(
            f"{root} has no good checkpoint{'' if run is None else f' of run {run!r}'}, but it had some:\n"
            f"{_describe(skipped)}\nRestore one of them, give another path, or begin anew in another folder."
        )
    return Newest(None)


def resolve(target: Path) -> Path:
    """Where the checkpoint of this name is: under it, or under its `.old` name if a save was interrupted.

    Raises:
        FileNotFoundError: Under neither.
    """
    if os.path.lexists(target):
        return target
    if target.parent.is_dir():
        for entry in sorted(os.listdir(target.parent)):
            reserved = parse_reserved(entry)
            if reserved is not None and reserved.state == "old" and reserved.name == target.name:
                return target.parent / entry
    raise FileNotFoundError(f"There is no checkpoint {target}.")


def _order(manifest: Manifest) -> tuple[int, int, str]:
    return manifest.sequence, manifest.step, manifest.identity


def _folders(root: Path, run: str | None) -> Iterator[Path]:
    if not root.is_dir():
        return
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in sorted(names, key=lambda name: name.startswith(".")):  # Published ones stand for their copies.
        reserved = parse_reserved(name)
        if reserved is None:
            skip = name.startswith(".")
        else:
            skip = reserved.state != "old" or (run is not None and reserved.run_mark != run_mark(run))
        if not skip and is_remains(root / name):
            yield root / name


def _describe(skipped: list[tuple[Path, str]] | tuple[tuple[Path, str], ...]) -> str:
    lines = "\n".join(f"  {path.name}: {what}" for path, what in skipped)
    return lines if len(lines) <= _ROOM else lines[:_ROOM] + " ..."
