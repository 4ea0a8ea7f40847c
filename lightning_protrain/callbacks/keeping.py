"""Which checkpoints of a run are kept, which are gone on from, and what a new one is called."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

from lightning_protrain.checkpoint.discover import Found, Ranking, find, line_of
from lightning_protrain.checkpoint.manifest import MANIFEST, Manifest
from lightning_protrain.checkpoint.verifying import Fault, verify_files

# In the record of a checkpoint that was made between two steps.
ACCUMULATING = "accumulating"


def prune(
    root: Path,
    head: Manifest,
    callback: str,
    ranking: Ranking,
    save_top_k: int,
    protected: Collection[str],
    remove: Callable[[Path], None],
) -> list[Found]:
    """Remove what nobody wants any more; what cannot be removed is named in a warning, and tried again next time.

    Args:
        root: The folder of the checkpoints.
        head: The latest one of the run.
        callback: Only what this one has saved is removed.
        ranking: Says what is surplus.
        save_top_k: As in `ModelCheckpoint`.
        protected: Identities of those that stay.
        remove: Removes one.

    Returns:
        What is left of the line of `head`, newest first.
    """
    line = line_of(find(root, head.run), head)
    mine = [each for each in line if each.manifest.record.get("callback") == callback]
    gone = ranking.surplus(mine, save_top_k, protected)
    left = []
    for each in gone:
        try:
            remove(each.path)
        except OSError as error:
            left += [each] if os.path.lexists(each.path) else []
            warnings.warn(
                f"The old checkpoint {each.path} could not be removed: {error}. The next save tries again.",
                stacklevel=2,
            )
    return [each for each in line if each not in gone or each in left]


def free_path(path: Path, joined: str, version: int) -> Path:
    """`path`, or the first one with a version, such as `name-v1.ckpt`, that nothing has."""
    stem, extension = path.name.removesuffix(path.suffix), path.suffix
    free = path
    while os.path.lexists(free):
        free = path.with_name(f"{stem}{joined}v{version}{extension}")
        version += 1
    return free


def usable(each: Found) -> list[Fault]:
    """What keeps a run from going on from it."""
    if each.manifest.record.get(ACCUMULATING):
        return [Fault(MANIFEST, "it was saved between two steps, while gradients were being accumulated")]
    return verify_files(each.path, each.manifest)
