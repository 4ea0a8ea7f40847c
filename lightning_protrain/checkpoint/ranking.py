"""Which checkpoint is the best, and which are kept: by the scores that the manifests have."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_protrain.checkpoint.discovery import Found, find, line_of, newest_good
from lightning_protrain.checkpoint.manifest import Manifest, is_remains


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

    def best(self, line: Sequence[Found]) -> Found | None:
        """The best checkpoint of a line that is given newest first."""
        return next(reversed(self._bests(line)), None)

    def _bests(self, line: Sequence[Found]) -> list[Found]:
        """Those that were the best when they were made, oldest first."""
        chosen: list[Found] = []
        for each in reversed(line):
            best = self.score_of(chosen[-1].manifest) if chosen else None
            if self.is_better(self.score_of(each.manifest), best):
                chosen.append(each)
        return chosen

    def surplus(self, line: Sequence[Found], keep: int, protected: Collection[str] = ()) -> list[Found]:
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


def take(path: Path, which: Literal["last", "best"]) -> Path:
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
    line = line_of(find(path))
    record = next((each.manifest.record for each in line if "score" in each.manifest.record), None)
    best = None if record is None else Ranking(record["monitor"], record["mode"]).best(line)
    if best is None:
        raise ValueError(f"No checkpoint in {path} has a score: none was saved with `monitor`. Take the last one.")
    return best.path
