"""Search for checkpoints: all of them, the newest undamaged one, the best by score, and those to remove."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from lightning_protrain.checkpoint.manifest import MOST_NAME_BYTES, Manifest, is_remains, parse_reserved, run_mark
from lightning_protrain.checkpoint.verification import Fault, open_regular, read_manifest, verify_files
from lightning_protrain.config import is_valid

# End of the names of checkpoints that are set aside, see [Note: Order] in manifest.py.
ASIDE = ".aside"
# Maximum characters of the list of damaged checkpoints in a message.
_ROOM = 2000


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder with a valid manifest; its other files may still be damaged."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Listing:
    """The result of `find_checkpoints`.

    Attributes:
        found: Checkpoints, newest first. Copies of one save are listed once.
        broken: Folders of checkpoints without a valid manifest, each with the reason.
    """

    found: tuple[FoundCheckpoint, ...] = ()
    broken: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True)
class Newest:
    """The result of `newest_good`.

    Attributes:
        chosen: The checkpoint; None if the folder has no checkpoint.
        skipped: Damaged newer checkpoints and all folders without a valid manifest, each with the reason.
    """

    chosen: FoundCheckpoint | None
    skipped: tuple[tuple[Path, str], ...] = ()

    def message(self) -> str:
        """Return a message that names the chosen checkpoint and the skipped ones."""
        assert self.chosen is not None
        return (
            f"{self.chosen.path} (step {self.chosen.manifest.step}) is the newest undamaged checkpoint of run "
            f"{self.chosen.manifest.run!r}. Skipped:\n{_describe(self.skipped)}"
        )


def find_checkpoints(root: Path, run: str | None = None) -> Listing:
    """Return all checkpoints in `root`; read only their manifests and do not follow links.

    Args:
        root: Folder of the checkpoints; the result is empty if it does not exist.
        run: Name of the run; None means all runs.
    """
    by_identity: dict[str, FoundCheckpoint] = {}
    broken = []
    for path in _folders(root, run):
        try:
            manifest = read_manifest(path)
        except ValueError as error:
            broken.append((path, str(error).removeprefix(f"{path}: ")))
            continue
        if run is None or manifest.run == run:
            by_identity.setdefault(manifest.identity, FoundCheckpoint(path, manifest))
    order = attrgetter("manifest.sequence", "manifest.step", "manifest.identity")
    ordered = sorted(by_identity.values(), key=order, reverse=True)
    return Listing(tuple(ordered), tuple(broken))


def newest_good(
    root: Path, run: str | None = None, check: Callable[[FoundCheckpoint], list[Fault]] | None = None
) -> Newest:
    """Return the newest undamaged checkpoint.

    Args:
        root: Folder of the checkpoints.
        run: Name of the run; None is allowed if the folder has only one run.
        check: Returns the faults of a checkpoint; None verifies every file.

    Raises:
        ValueError: If `run` is None and the folder has several runs, or if all checkpoints are damaged.
    """
    listing = find_checkpoints(root, run)
    runs = sorted({checkpoint.manifest.run for checkpoint in listing.found})
    if len(runs) > 1:
        raise ValueError(f"{root} has checkpoints of the runs {', '.join(runs)}. Name one run, or give a path.")
    check = check or (lambda checkpoint: verify_files(checkpoint.path, checkpoint.manifest))
    skipped = list(listing.broken)
    for checkpoint in listing.found:
        faults = check(checkpoint)
        if not faults:
            return Newest(checkpoint, tuple(skipped))
        skipped.append((checkpoint.path, "; ".join(map(str, faults))))
    if skipped:
        raise ValueError(
            f"All checkpoints{'' if run is None else f' of run {run!r}'} in {root} are damaged:\n"
            f"{_describe(skipped)}\nRestore one of them, give another path, or start a new run in another folder."
        )
    return Newest(None)


def pointed(path: Path) -> Path | None:
    """Return the checkpoint that a link such as `last` names, even if it is gone; None if `path` is no such link.

    On a file system without symbolic links, the link is a text file with the name of the checkpoint.
    """
    try:
        if path.is_symlink():
            name = os.readlink(path)
        else:
            with open_regular(path) as file:
                text = file.read(MOST_NAME_BYTES + 2).decode()
            name = text.removesuffix("\n")
            if name == text or not name.endswith(".ckpt"):
                return None
    except (OSError, UnicodeDecodeError):
        return None
    return path.with_name(name) if name.isprintable() and Path(name).name == name else None


def resolve(target: Path) -> Path:
    """Return the checkpoint at `target`, or the one that a link there names, see `pointed`.

    If an interrupted save has renamed the checkpoint, return its `.old` path.

    Raises:
        FileNotFoundError: If there is no checkpoint.
    """
    target = pointed(target) or target
    if os.path.lexists(target):
        return target
    if target.parent.is_dir():
        for entry in sorted(os.listdir(target.parent)):
            reserved = parse_reserved(entry)
            if reserved is not None and reserved.state == "old" and reserved.name == target.name:
                return target.parent / entry
    raise FileNotFoundError(f"There is no checkpoint {target}.")


def _folders(root: Path, run: str | None) -> Iterator[Path]:
    if not root.is_dir():
        return
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in sorted(names, key=lambda name: name.startswith(".")):  # Published names before `.old` ones.
        reserved = parse_reserved(name)
        if reserved is None:
            skip = name.startswith(".") or name.endswith(ASIDE)
        else:
            skip = reserved.state != "old" or (run is not None and reserved.run_mark != run_mark(run))
        if not skip and is_remains(root / name):
            yield root / name


def _describe(skipped: Sequence[tuple[Path, str]]) -> str:
    lines = "\n".join(f"  {path.name}: {what}" for path, what in skipped)
    return lines if len(lines) <= _ROOM else lines[:_ROOM] + " ..."


@dataclass(frozen=True)
class Ranking:
    """Order of checkpoints by the score in the `record` of their manifests.

    Attributes:
        monitor: Name of the metric; None ranks checkpoints by age.
        mode: `"min"` if lower is better, `"max"` if higher is better.
        min_delta: Minimum improvement over the best score so far. Of two equal scores, the earlier one is better.
    """

    monitor: str | None
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f'mode={self.mode!r}: give "min" or "max".')
        if not is_valid(lambda delta: delta >= 0 and math.isfinite(delta), self.min_delta):
            raise ValueError(f"min_delta={self.min_delta!r}: give a finite number, at least 0.")

    def is_better(self, score: float | None, best: float | None) -> bool:
        """Return True if `score` replaces `best`; a missing or non-finite score never does."""
        if score is None or not math.isfinite(score):
            return False
        if best is None:
            return True
        return score < best - self.min_delta if self.mode == "min" else score > best + self.min_delta

    def record(self, score: float | None) -> dict[str, Any]:
        """Return the entries for a manifest's record; empty for a missing or non-finite score."""
        if self.monitor is None or score is None or not math.isfinite(score):
            return {}
        return {"monitor": self.monitor, "mode": self.mode, "score": score}

    def score_of(self, manifest: Manifest) -> float | None:
        """Return the score of a checkpoint by this metric, or None if the manifest has no such score."""
        record: Mapping[str, Any] = manifest.record
        score = record.get("score")
        if self.monitor is None or record.get("monitor") != self.monitor or record.get("mode") != self.mode:
            return None
        if isinstance(score, bool) or not isinstance(score, int | float):
            return None
        return float(score) if math.isfinite(score) else None

    def best(self, line: Sequence[FoundCheckpoint]) -> FoundCheckpoint | None:
        """Return the best of the checkpoints, newest first; None if no checkpoint has a score."""
        return next(reversed(self._bests(line)), None)

    def _bests(self, line: Sequence[FoundCheckpoint]) -> list[FoundCheckpoint]:
        """Return the checkpoints whose score was the best so far when they were saved, oldest first."""
        chosen: list[FoundCheckpoint] = []
        for checkpoint in reversed(line):
            best = self.score_of(chosen[-1].manifest) if chosen else None
            if self.is_better(self.score_of(checkpoint.manifest), best):
                chosen.append(checkpoint)
        return chosen

    def surplus(
        self, line: Sequence[FoundCheckpoint], keep: int, protected: Collection[str] = ()
    ) -> list[FoundCheckpoint]:
        """Return the checkpoints that may be removed. The best and the newest one are always kept.

        `best` must return the same checkpoint before and after the removal. Because of `min_delta`, this may require
        keeping earlier checkpoints that were the best when they were saved.

        Args:
            line: Checkpoints of a run, newest first.
            keep: Number of checkpoints to keep, ranked by score, or by age if `monitor` is None; -1 keeps all.
            protected: Identities of further checkpoints to keep.
        """
        if keep < 0 or not line:
            return []
        bests = self._bests(line)
        best = bests[-1] if bests else None
        stay = {line[0].manifest.identity, *protected, *([] if best is None else [best.manifest.identity])}
        ranked = list(line)
        if self.monitor is not None:
            sign = 1 if self.mode == "min" else -1
            scores = ((self.score_of(checkpoint.manifest), checkpoint) for checkpoint in line)
            scored = [(sign * score, at.manifest.sequence, at) for score, at in scores if score is not None]
            ranked = [checkpoint for _, _, checkpoint in sorted(scored, key=lambda entry: entry[:2])]
        stay |= {checkpoint.manifest.identity for checkpoint in ranked[:keep]}
        while self.best([checkpoint for checkpoint in line if checkpoint.manifest.identity in stay]) is not best:
            stay.add(bests.pop().manifest.identity)
        return [checkpoint for checkpoint in line if checkpoint.manifest.identity not in stay]


def checkpoint_at(path: Path, which: Literal["last", "best"]) -> Path:
    """Return the checkpoint at `path`, or the last or best one if `path` is the folder of a run.

    Args:
        path: A checkpoint (a folder, a file of `torch.save`, or a link to a folder), or the folder of a run.
        which: `"last"` takes the newest undamaged checkpoint and warns of damaged newer ones; `"best"` takes the one
            with the best score.

    Raises:
        ValueError: If the folder has no undamaged checkpoint, or checkpoints of several runs, or if `which="best"` and
            no checkpoint has a score.
    """
    path = pointed(path) or path
    if not path.is_dir() or is_remains(path):
        return path
    newest = newest_good(path)
    if newest.chosen is None:
        raise ValueError(f"{path} is not a checkpoint of ProTrainCheckpoint, and contains none.")
    if which == "last":
        if newest.skipped:
            warnings.warn(newest.message(), stacklevel=2)
        return newest.chosen.path
    line = find_checkpoints(path).found
    record = next((checkpoint.manifest.record for checkpoint in line if "score" in checkpoint.manifest.record), None)
    best = None if record is None else Ranking(record["monitor"], record["mode"]).best(line)
    if best is None:
        raise ValueError(
            f"No checkpoint in {path} has a score: none was saved with `monitor`. Use the last checkpoint instead."
        )
    return best.path
