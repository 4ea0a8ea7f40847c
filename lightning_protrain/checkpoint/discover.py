"""Finds checkpoints, the newest that is good and the best by score, and which of them are kept."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_protrain.checkpoint.manifest import Manifest, is_remains, parse_reserved, run_mark
from lightning_protrain.checkpoint.verification import Fault, read_manifest, verify_files

# How many letters of what is wrong a message has room for.
_ROOM = 2000


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder with a valid manifest; whether its other files are good is another question."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Listing:
    """What `find_checkpoints` found.

    Attributes:
        found: Newest first, each save once, whatever its copies are called.
        broken: Folders that were checkpoints and have no valid manifest, with the reason.
    """

    found: tuple[FoundCheckpoint, ...] = ()
    broken: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True)
class Newest:
    """What `newest_good` chose.

    Attributes:
        chosen: The checkpoint; None where there is no trace of one.
        skipped: Newer ones that are not good, with the reason, and all whose manifest is not valid.
    """

    chosen: FoundCheckpoint | None
    skipped: tuple[tuple[Path, str], ...] = field(default=())

    def message(self) -> str:
        """For the user, where something was skipped."""
        assert self.chosen is not None
        return (
            f"{self.chosen.path} (step {self.chosen.manifest.step}) is the newest good checkpoint of run "
            f"{self.chosen.manifest.run!r}. Skipped:\n{_describe(self.skipped)}"
        )


def find_checkpoints(root: Path, run: str | None = None) -> Listing:
    """All checkpoints in `root`, by their manifests; follows no link, changes nothing.

    Args:
        root: The folder that holds them; none is found if it is not there.
        run: Only those of this run; None: of all.
    """
    found: dict[str, FoundCheckpoint] = {}
    broken = []
    for path in _folders(root, run):
        try:
            manifest = read_manifest(path)
        except ValueError as error:
            broken.append((path, str(error).removeprefix(f"{path}: ")))
            continue
        if run is None or manifest.run == run:
            found.setdefault(manifest.identity, FoundCheckpoint(path, manifest))
    ordered = sorted(found.values(), key=lambda each: _order(each.manifest), reverse=True)
    return Listing(tuple(ordered), tuple(broken))


def lineage_of(listing: Listing, head: Manifest | None = None) -> list[FoundCheckpoint]:
    """Those that the latest one (or `head`) continues from, and itself, newest first; see [Note: Lines]."""
    if head is None:
        if not listing.found:
            return []
        head = listing.found[0].manifest
    return [each for each in listing.found if each.manifest.is_on_line_of(head)]


def newest_good(
    root: Path, run: str | None = None, check: Callable[[FoundCheckpoint], list[Fault]] | None = None
) -> Newest:
    """The newest checkpoint of which every byte is right, on the line of the latest one.

    Args:
        root: The folder that holds them.
        run: Name of the run; None where there is only one.
        check: What is wrong with a checkpoint; None: every file is read.

    Raises:
        ValueError: There are several runs and none is named, or there are checkpoints and none of them is good: a run
            that was meant to go on never begins anew in silence.
    """
    listing = find_checkpoints(root, run)
    runs = sorted({each.manifest.run for each in listing.found})
    if len(runs) > 1:
        raise ValueError(f"{root} has checkpoints of the runs {', '.join(runs)}: say which one, or give a path.")
    check = check or (lambda each: verify_files(each.path, each.manifest))
    skipped = list(listing.broken)
    for each in lineage_of(listing):
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


@dataclass(frozen=True)
class Ranking:
    """What makes a checkpoint better than another one. The record of its manifest says what it scored.

    Attributes:
        monitor: Name of the metric; None: nothing is better.
        mode: Whether less is better, or more.
        min_delta: By how much a score must be better than the best one so far; the earlier of two equal ones wins.
    """

    monitor: str | None
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f'mode={self.mode!r}: give "min" or "max".')
        if not (self.min_delta >= 0 and math.isfinite(self.min_delta)):
            raise ValueError(f"min_delta={self.min_delta!r}: give a finite number from 0 on.")

    def is_better(self, score: float | None, best: float | None) -> bool:
        """Whether `score` takes the place of `best`; what is missing or not finite never does."""
        if score is None or not math.isfinite(score):
            return False
        if best is None:
            return True
        return score < best - self.min_delta if self.mode == "min" else score > best + self.min_delta

    def record(self, score: float | None) -> dict[str, Any]:
        """What a manifest keeps of a score; nothing of one that is missing or not finite."""
        if self.monitor is None or score is None or not math.isfinite(score):
            return {}
        return {"monitor": self.monitor, "mode": self.mode, "score": score}

    def score_of(self, manifest: Manifest) -> float | None:
        """What the checkpoint scored by this metric; None if that is not known."""
        record: Mapping[str, Any] = manifest.record
        score = record.get("score")
        if self.monitor is None or record.get("monitor") != self.monitor or record.get("mode") != self.mode:
            return None
        if isinstance(score, bool) or not isinstance(score, int | float):
            return None
        return float(score) if math.isfinite(score) else None

    def best(self, line: Sequence[FoundCheckpoint]) -> FoundCheckpoint | None:
        """The best checkpoint of a line that is given newest first."""
        return next(reversed(self._bests(line)), None)

    def _bests(self, line: Sequence[FoundCheckpoint]) -> list[FoundCheckpoint]:
        """Those that were the best when they were made, oldest first."""
        chosen: list[FoundCheckpoint] = []
        for each in reversed(line):
            best = self.score_of(chosen[-1].manifest) if chosen else None
            if self.is_better(self.score_of(each.manifest), best):
                chosen.append(each)
        return chosen

    def surplus(
        self, line: Sequence[FoundCheckpoint], keep: int, protected: Collection[str] = ()
    ) -> list[FoundCheckpoint]:
        """What may go of a line that is given newest first.

        The best of those that stay is the best of all: by `min_delta` one that stays may be no better than another one
        that would stay before it, and then what lies between both stays, too.

        Args:
            line: The checkpoints.
            keep: How many of the highest rank stay, by score or, without a metric, the newest; -1: all.
            protected: Identities of others that stay; the best and the newest always do.
        """
        if keep < 0 or not line:
            return []
        bests = self._bests(line)
        best = bests[-1] if bests else None
        stay = {line[0].manifest.identity, *protected, *([] if best is None else [best.manifest.identity])}
        sign = 1 if self.mode == "min" else -1
        scores = [(each, self.score_of(each.manifest)) for each in line]
        if self.monitor is None:
            ranked = list(line)
        else:
            # Of equal scores the earlier one ranks higher.
            scored = [(sign * score, each.manifest.sequence, each) for each, score in scores if score is not None]
            ranked = [each for _, _, each in sorted(scored, key=lambda entry: entry[:2])]
        stay |= {each.manifest.identity for each in ranked[:keep]}
        while self.best([each for each in line if each.manifest.identity in stay]) is not best:
            stay.add(bests.pop().manifest.identity)
        return [each for each in line if each.manifest.identity not in stay]


def checkpoint_at(path: Path, which: Literal["last", "best"]) -> Path:
    """Return the checkpoint at `path`, or, where it is the folder of a run, the last or the best one in it.

    The last one is the newest of which every byte is right; newer ones that are not are named in a warning.

    Args:
        path: A checkpoint, as a folder or a stock file, or the folder of a run.
        which: Of a run's folder.

    Raises:
        ValueError: The folder has no checkpoint, none that is good, or those of several runs; or none has a score.
    """
    if not path.is_dir() or is_remains(path):
        return path
    newest = newest_good(path)
    if newest.chosen is None:
        raise ValueError(f"{path} is no checkpoint of ProTrainCheckpoint, and holds none.")
    if which == "last":
        if newest.skipped:
            warnings.warn(newest.message(), stacklevel=2)
        return newest.chosen.path
    line = lineage_of(find_checkpoints(path))
    record = next((each.manifest.record for each in line if "score" in each.manifest.record), None)
    best = None if record is None else Ranking(record["monitor"], record["mode"]).best(line)
    if best is None:
        raise ValueError(f"No checkpoint in {path} has a score: none was saved with `monitor`. Take the last one.")
    return best.path
